"""From names to things in memory: prompts, tokenizers, a policy (with LoRA), a reward model; and early refusals.

Left out: what is done with them (train.py).
"""

import json
import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import grpo
from grpo import response_hidden, token_logprobs
from machinery.config import Config
from machinery.rollout import Messages, Vocabulary, encode_prompt, no_dropout, sample
from reward_grad import RewardModel

# ---------------------------------------------------------------------------------------------------------------------
# Prompts.


def load_rows(source: str) -> list[dict]:
    """Rows of a JSONL file, or of a hub data set given as `name:split`."""
    if source.endswith((".json", ".jsonl")) or Path(source).exists():
        if not Path(source).is_file():
            raise ValueError(f"--prompts {source}: there is no such file.")
        lines = [line for line in Path(source).read_text().splitlines() if line.strip()]
        try:
            rows = [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--prompts {source} must hold one JSON object a line: {error}"
            ) from error
    else:
        from datasets import load_dataset

        name, _, split = source.partition(":")
        try:
            rows = list(load_dataset(name, split=split or "train"))
        except Exception as error:  # datasets raises many kinds; all mean the same to the user
            raise ValueError(
                f"--prompts {source}: neither a file here nor a data set that loads ({error}). Use FILE.jsonl or NAME:SPLIT."
            ) from error
    if not rows:
        raise ValueError(f"--prompts {source} is empty.")
    return rows


def as_messages(row: dict, column: str, source: str) -> Messages:
    """One row as a conversation that ends with the user: a string, a list of messages, or "messages" less the final answer."""
    if column not in row:
        raise ValueError(
            f"--prompts {source} has no column {column!r} (it has: {', '.join(row)}). Name it with --prompt_column."
        )
    value = row[column]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not (messages[-1].get("content") or "").strip():
        raise ValueError(
            f"--prompts {source} holds an empty prompt in column {column!r}: {json.dumps(row)[:200]}"
        )
    return messages


def prompt_column(rows: list[dict], config: Config) -> str:
    return config.prompt_column or next(
        (c for c in ("prompt", "messages") if c in rows[0]), "prompt"
    )


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Messages]:
    """All prompts as conversations, none longer than --max_prompt_tokens.

    In a file of yours a prompt that is too long is an error, since you can mend it; from a hub data set it is left out and
    counted.
    """
    rows = load_rows(config.prompts)
    column = prompt_column(rows, config)
    prompts = [as_messages(row, column, config.prompts) for row in rows]
    lengths = [len(encode_prompt(tokenizer, m, **config.template)) for m in prompts]
    short = [
        m for m, length in zip(prompts, lengths, strict=True) if length <= config.max_prompt_tokens
    ]
    if len(short) < len(prompts) and (Path(config.prompts).exists() or not short):
        worst = max(range(len(prompts)), key=lengths.__getitem__)
        raise ValueError(
            f"{len(prompts) - len(short)} of {len(prompts)} prompts in {config.prompts} are longer than --max_prompt_tokens "
            f"{config.max_prompt_tokens}; the longest is number {worst + 1} with {lengths[worst]} tokens."
            " Raise the limit or shorten them."
        )
    if len(short) < len(prompts):
        print(
            f"Left out {len(prompts) - len(short)} of {len(prompts)} prompts: longer than --max_prompt_tokens."
        )
    return short


def load_examples(config: Config) -> list[tuple[Messages, str]]:
    """--sft_examples rows of --prompts, shuffled: each conversation and its "chosen" answer (text, or chat messages)."""
    rows = load_rows(config.prompts)
    if any("chosen" not in r for r in rows):
        raise ValueError(
            f'--sft_examples needs a column "chosen" in --prompts {config.prompts}; or give --sft_examples 0.'
        )
    rows = random.Random(config.seed).sample(rows, min(config.sft_examples, len(rows)))
    column = prompt_column(rows, config)
    answers = [
        r["chosen"] if isinstance(r["chosen"], str) else r["chosen"][-1]["content"] for r in rows
    ]
    return [(as_messages(r, column, config.prompts), a) for r, a in zip(rows, answers, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Models.


def load_tokenizer(name: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with a chat template: its own, or the file given."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if chat_template:
        if not Path(chat_template).is_file():
            raise ValueError(f"--chat_template {chat_template}: there is no such file.")
        tokenizer.chat_template = Path(chat_template).read_text()
    if not tokenizer.chat_template:
        raise ValueError(
            f"--policy {name} has no chat template (a base model?). Give one with --chat_template FILE."
        )
    return tokenizer


def load_policy(config: Config, trainable: bool = True) -> PreTrainedModel:
    """The policy on its device: full weights in float32, or frozen in --dtype with float32 LoRA adapters.

    Not `trainable`: as it is in --dtype, without adapters, to sample from only.
    """
    full = trainable and config.lora_rank == 0
    policy = AutoModelForCausalLM.from_pretrained(
        config.policy,
        dtype=torch.float32 if full else getattr(torch, config.dtype),
        attn_implementation=config.attn_implementation,
    ).to(config.device)
    no_dropout(policy)
    if not trainable:
        return policy.requires_grad_(False).eval()
    if config.lora_rank:
        policy = add_lora(policy, config.lora_rank, config.seed)
    if config.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.lora_rank:
            policy.enable_input_require_grads()
    return policy


def add_lora(policy: PreTrainedModel, rank: int, seed: int = 0) -> PreTrainedModel:
    """Float32 adapters on all linear layers but the output head, alpha = 2 rank, no dropout."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(
            "--lora_rank needs peft: pip install peft (or --lora_rank 0 for full fine-tuning)."
        ) from error
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(policy, lora)


def load_reward_model(config: Config, policy_tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    """The frozen reward model in --dtype. Refuses a checkpoint without a trained one-label head."""
    model, report = AutoModelForSequenceClassification.from_pretrained(
        config.reward_model,
        dtype=getattr(torch, config.dtype),
        attn_implementation=config.attn_implementation,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"--reward_model {config.reward_model} lacks {', '.join(missing[:3])}: its score head would be random. "
            "Give a trained reward model (a sequence classifier with one label)."
        )
    model = model.to(config.device).eval()
    if (
        config.gradient_checkpointing
    ):  # does nothing in eval(); with dropout off, train() changes nothing else
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    tokenizer = AutoTokenizer.from_pretrained(config.reward_model)
    return RewardModel(model, tokenizer, policy_tokenizer, reward_batch=config.reward_batch)


# ---------------------------------------------------------------------------------------------------------------------
# Will it fit? Is it sound? Both are asked before the first rollout.


def shape_of(config: PretrainedConfig, auto: type) -> tuple[int, int]:
    """(parameters, sum of in + out features of the linear layers that LoRA adapts) of a model that is never allocated."""
    with torch.device("meta"):
        model = auto.from_config(config)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    adapted = [
        m
        for m in linear
        if m is not model.get_output_embeddings() and m is not getattr(model, "score", None)
    ]
    return sum(p.numel() for p in model.parameters()), sum(
        m.in_features + m.out_features for m in adapted
    )


def memory_estimate(
    config: Config, policy: PretrainedConfig, reward: PretrainedConfig
) -> dict[str, float]:
    """Bytes by purpose. The first three are held throughout; of the next three only the largest counts, since they take turns.

    Counted from the two model configs alone: weights exactly, activations as one checkpoint a layer plus the widest layer's own
    (or every layer's own without --gradient_checkpointing). The allocator's slack is not in it; allow a tenth.
    """
    size = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[config.dtype]
    full = config.lora_rank == 0
    work_size = 4 if full else size  # bytes per activation of the policy
    count, features = shape_of(policy, AutoModelForCausalLM)
    reward_count, _ = shape_of(reward, AutoModelForSequenceClassification)
    trained = count if full else config.lora_rank * features
    copies = (
        3 + bool(config.beta) + (not full)
    )  # gradient, two Adam moments; KL reference; adapters beside the base
    length = config.max_prompt_tokens + config.max_response_tokens
    responses = config.prompts_per_rollout * config.group_size
    heads = getattr(policy, "num_key_value_heads", policy.num_attention_heads)
    head = getattr(policy, "head_dim", None) or policy.hidden_size // policy.num_attention_heads

    def activations(model: PretrainedConfig, rows: int, bytes_each: int, adapters: bool) -> float:
        inner = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
        layer = rows * length * (14 * model.hidden_size + (4 + 2 * adapters) * inner) * bytes_each
        kept = rows * length * model.hidden_size * bytes_each * model.num_hidden_layers
        return kept + layer if config.gradient_checkpointing else layer * model.num_hidden_layers

    tokens = min(config.micro_batch, responses) * config.max_response_tokens
    strips = (
        4 * grpo.STRIP * (5 * tokens + 2 * policy.hidden_size)
    )  # logits, their softmax and gradients; rows of W and U
    credit = config.credit != "grpo"
    return {
        "policy weights": count * work_size,
        "reward model weights": reward_count * size,
        "adapters, gradients, optimizer": trained * 4 * copies,
        "sampling: KV cache": (
            2
            * policy.num_hidden_layers
            * heads
            * head
            * work_size
            * length
            * min(config.sample_batch, responses)
        ),
        "scoring: activations": activations(
            reward, min(config.reward_batch, responses), size, False
        )
        * credit,
        "update: activations and vocabulary strip": (
            activations(policy, min(config.micro_batch, responses), work_size, not full) + strips
        ),
        "reward gradient": responses * config.max_response_tokens * reward.hidden_size * 4 * credit,
    }


def total_estimate(parts: dict[str, float]) -> float:
    """Peak bytes: what is held, and the largest of the phases."""
    phases = [v for k, v in parts.items() if ":" in k]
    return sum(v for k, v in parts.items() if ":" not in k) + max(phases)


def check_memory(config: Config) -> float:
    """Peak bytes as estimated; on a GPU raise ValueError with the flag to change if they are not free. Reads configs only."""
    parts = memory_estimate(
        config, *(AutoConfig.from_pretrained(n) for n in (config.policy, config.reward_model))
    )
    need = 1.1 * total_estimate(parts)
    if config.device.startswith("cuda") and need > (
        free := torch.cuda.mem_get_info(config.device)[0]
    ):
        worst = max((k for k in parts if ":" in k), key=parts.__getitem__)
        flag = {
            "sampling": "--sample_batch",
            "scoring": "--reward_batch",
            "update": "--micro_batch",
        }[worst.split(":")[0]]
        if parts[worst] < need - free:  # no batch size would be small enough
            flag = (
                "--lora_rank 64"
                if config.lora_rank == 0
                else "--max_response_tokens, or take a smaller model"
            )
        table = "".join(f"\n  {v / 2**30:6.1f} GiB  {k}" for k, v in parts.items())
        raise ValueError(
            f"This run needs about {need / 2**30:.1f} GiB and the GPU has {free / 2**30:.1f} GiB free. Try: {flag}"
            f"{'' if ' ' in flag else ' (smaller)'}, or --gradient_checkpointing if it is off.{table}"
        )
    return need


@torch.no_grad()
def self_check(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    prompts: list[Messages],
    config: Config,
) -> dict[str, float]:
    """Two refusals that cost a second: is lm_head(hidden) all there is to the logits, and does training see what was sampled?

    Returns the mean absolute gaps in nats, for the log. Raises ValueError where one is beyond what the dtype explains.
    """
    limit = 0.1 if next(policy.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-3
    few = sorted(prompts[:16], key=lambda m: len(encode_prompt(tokenizer, m, **config.template)))
    rollout = sample(  # the shorter of the two prompts is padded, so wrong position ids would show
        policy, tokenizer, [few[0], few[-1]], vocabulary, 1, min(16, config.max_response_tokens), config.temperature,
        keep_logp=True, **config.template,
    )  # fmt: skip
    mask, ids = rollout.response_mask, rollout.response_ids
    head = policy.get_output_embeddings().weight[: vocabulary.size]
    hidden = response_hidden(policy, rollout)[mask]  # (N, H)
    logp, _ = token_logprobs(hidden, head, ids[mask], config.temperature)  # (N,)

    whole, seen = (
        torch.cat([rollout.prompt_ids, ids], 1),
        torch.cat([rollout.prompt_mask, mask], 1).long(),
    )
    places = (seen.cumsum(-1) - 1).clamp(min=0)
    logits = policy(
        input_ids=whole, attention_mask=seen, position_ids=places, use_cache=False
    ).logits  # (2, P+T, rows)
    own: Tensor = (
        logits[:, rollout.prompt_ids.shape[1] - 1 : -1, : vocabulary.size][mask].float()
        / config.temperature
    )
    gaps = {
        "check/logits_gap": (own.log_softmax(-1).gather(1, ids[mask][:, None])[:, 0] - logp)
        .abs()
        .mean()
        .item(),
        "check/sampler_gap": (rollout.sampler_logp[mask] - logp).abs().mean().item(),
    }
    if not gaps["check/logits_gap"] <= limit:
        raise ValueError(
            f"--policy does more than lm_head(hidden) on the way to its logits (mean gap {gaps['check/logits_gap']:.2g} nats): "
            "soft-capped or scaled logits are not supported."
        )
    if not gaps["check/sampler_gap"] <= limit:
        raise ValueError(
            f"The sampler's log-probs differ from the training forward's by {gaps['check/sampler_gap']:.2g} nats on average "
            f"(limit {limit}): the loss would be about another distribution. Try --attn_implementation eager."
        )
    return gaps
