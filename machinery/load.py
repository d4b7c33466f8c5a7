"""From names to things in memory: prompts, tokenizers, a policy (with LoRA), a reward model.

And what is refused before anything is trained. Left out: what is done with them (train.py).
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import transformers
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
from credit import get_credit_method
from grpo import response_hidden, token_logprobs
from machinery import tiny
from machinery.config import Config
from machinery.rollout import Messages, Rollout, Vocabulary, encode_prompt, no_dropout, sample
from reward_grad import RewardModel

# ----------------------------------------------------------------------------------------------
# From flags to what `train` takes.


def settle(config: Config) -> Config:
    """Fill in what the flags left open: device, dtype, the tiny world's models and prompts.

    Raises ValueError for a method, a device or a model that is not there.
    """
    get_credit_method(config.credit)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {config.device}: torch sees no GPU here. "
            "Use --device cpu, or a CUDA build of torch."
        )
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    config = replace(config, device=device, dtype=dtype)
    if config.preset in tiny.WORLDS and config.reward_model is None:
        # Loading and saving take no time there, and their bars would hide ours.
        transformers.utils.logging.disable_progress_bar()
        world = tiny.build(config.preset)
        config = replace(
            config,
            policy=config.policy or str(world / "policy"),
            reward_model=str(world / "reward_model"),
            prompts=config.prompts or str(world / "prompts.jsonl"),
        )
    for name in ("policy", "reward_model", "prompts"):
        if getattr(config, name) is None:
            raise ValueError(f"--{name} is missing: give a hub id or a path.")
    if config.credit == "oracle" and not in_world(config):
        raise ValueError(
            "--credit oracle scores a text for every alternative of every token: "
            "it is for the tiny worlds only."
        )
    return config


def in_world(config: Config) -> bool:
    """Whether the reward model is a tiny world's, so that the true reward is known."""
    return tiny.is_world(Path(config.reward_model).parent)


def prepare(config: Config, trainable: bool = True) -> dict[str, object]:
    """What `train` takes: policy, reward model, tokenizer, prompts, gold and examples.

    Cheap refusals come first. Not `trainable`: the policy is only looked at, without adapters or
    gradients, and training's memory is not asked for.
    """
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    prompts = load_prompts(config, tokenizer)
    examples = load_examples(config) if config.sft_examples else None
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
        torch.cuda.reset_peak_memory_stats()
        if config.dtype == "bfloat16" and (config.lora_rank or not trainable):
            # TF32 holds bf16 factors exactly and sums in float32.
            torch.set_float32_matmul_precision("high")
    if trainable:
        check_memory(config)
    return {
        "policy": load_policy(config, trainable),
        "reward_model": load_reward_model(config, tokenizer),
        "tokenizer": tokenizer,
        "prompts": prompts,
        "gold": tiny.gold_rewards if in_world(config) else None,
        "examples": examples,
    }


# ----------------------------------------------------------------------------------------------
# Prompts.


def load_rows(source: str) -> list[dict]:
    """Rows of a JSONL file, or of a hub data set given as `name:split`."""
    if source.endswith((".json", ".jsonl")) or Path(source).exists():
        rows = read_rows(source)
    else:
        rows = download_rows(source)
    if not rows:
        raise ValueError(f"--prompts {source} is empty.")
    return rows


def read_rows(source: str) -> list[dict]:
    if not Path(source).is_file():
        raise ValueError(f"--prompts {source}: there is no such file.")
    lines = Path(source).read_text().split("\n")
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"--prompts {source} must hold one JSON object a line: {error}") from error


def download_rows(source: str) -> list[dict]:
    from datasets import load_dataset

    name, _, split = source.partition(":")
    try:
        return list(load_dataset(name, split=split or "train"))
    except Exception as error:  # datasets raises many kinds; all mean the same to the user
        raise ValueError(
            f"--prompts {source}: neither a file here nor a data set that loads ({error}). "
            "Use FILE.jsonl or NAME:SPLIT."
        ) from error


def as_messages(row: dict, column: str, source: str) -> Messages:
    """One row as a conversation that ends with the user.

    The column holds a string, or a list of messages whose final answer, if any, is left out.
    """
    if column not in row:
        raise ValueError(
            f"--prompts {source} has no column {column!r} (it has: {', '.join(row)}). "
            "Name it with --prompt_column."
        )
    value = row[column]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not (messages[-1].get("content") or "").strip():
        raise ValueError(
            f"--prompts {source} holds an empty prompt in column {column!r}: "
            f"{json.dumps(row)[:200]}"
        )
    return messages


def prompt_column(rows: list[dict], config: Config) -> str:
    if config.prompt_column:
        return config.prompt_column
    return "messages" if "messages" in rows[0] and "prompt" not in rows[0] else "prompt"


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Messages]:
    """All prompts as conversations, none longer than --max_prompt_tokens.

    In a file of yours a prompt that is too long is an error, since you can mend it; from a hub
    data set it is left out and counted.
    """
    rows = load_rows(config.prompts)
    column = prompt_column(rows, config)
    prompts = [as_messages(row, column, config.prompts) for row in rows]
    lengths = [len(encode_prompt(tokenizer, m, **config.template)) for m in prompts]
    fits = [length <= config.max_prompt_tokens for length in lengths]
    short = [messages for messages, fit in zip(prompts, fits, strict=True) if fit]
    too_long = f"{len(prompts) - len(short)} of {len(prompts)} prompts"
    if len(short) < len(prompts) and (Path(config.prompts).exists() or not short):
        worst = max(range(len(prompts)), key=lengths.__getitem__)
        raise ValueError(
            f"{too_long} in {config.prompts} are longer than --max_prompt_tokens "
            f"{config.max_prompt_tokens}; the longest is number {worst + 1} with {lengths[worst]} "
            "tokens. Raise the limit or shorten them."
        )
    if len(short) < len(prompts):
        print(f"Left out {too_long}: longer than --max_prompt_tokens.")
    return short


def load_examples(config: Config) -> list[tuple[Messages, str]]:
    """--sft_examples rows of --prompts, shuffled: each conversation and its "chosen" answer.

    The answer is a text, or chat messages that end with it.
    """
    rows = load_rows(config.prompts)
    if any("chosen" not in row for row in rows):
        raise ValueError(
            f'--sft_examples needs a column "chosen" in --prompts {config.prompts}; '
            "or give --sft_examples 0."
        )
    rows = random.Random(config.seed).sample(rows, min(config.sft_examples, len(rows)))
    column = prompt_column(rows, config)
    examples = []
    for row in rows:
        chosen = row["chosen"]
        answer = chosen if isinstance(chosen, str) else chosen[-1]["content"]
        examples.append((as_messages(row, column, config.prompts), answer))
    return examples


# ----------------------------------------------------------------------------------------------
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
            f"--policy {name} has no chat template (a base model?). "
            "Give one with --chat_template FILE."
        )
    return tokenizer


def load_policy(config: Config, trainable: bool = True) -> PreTrainedModel:
    """The policy on its device: float32, or frozen in --dtype with float32 LoRA adapters.

    Not `trainable`: as it is in --dtype, without adapters, to sample from only.
    """
    full = trainable and config.lora_rank == 0
    policy = AutoModelForCausalLM.from_pretrained(
        config.policy,
        dtype=torch.float32 if full else getattr(torch, config.dtype),
        attn_implementation=config.attn_implementation,
        use_kernels=False,  # code from the hub that nobody chose, on a GPU only
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
        use_kernels=False,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"--reward_model {config.reward_model} lacks {', '.join(missing[:3])}: its score head "
            "would be random. Give a trained reward model (a sequence classifier with one label)."
        )
    model = model.to(config.device).eval()
    if config.gradient_checkpointing:
        # It does nothing in eval(); with dropout off, train() changes nothing else.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    tokenizer = AutoTokenizer.from_pretrained(config.reward_model)
    return RewardModel(model, tokenizer, policy_tokenizer, reward_batch=config.reward_batch)


# ----------------------------------------------------------------------------------------------
# Will it fit?


def shape_of(config: PretrainedConfig, auto: type) -> tuple[int, int]:
    """The size of a model that is never allocated, from its config.

    Returns:
        its parameters, and the sum of in + out features of the linear layers that LoRA adapts.
    """
    with torch.device("meta"):
        model = auto.from_config(config)
    left_alone = (model.get_output_embeddings(), getattr(model, "score", None))
    features = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module not in left_alone:
            features += module.in_features + module.out_features
    return sum(p.numel() for p in model.parameters()), features


def memory_estimate(
    config: Config, policy: PretrainedConfig, reward: PretrainedConfig
) -> dict[str, float]:
    """Bytes by purpose. What is named "phase: ..." takes turns, so only the largest counts.

    Counted from the two model configs alone: weights exactly, activations as one checkpoint per
    layer plus the widest layer's own (or every layer's own without --gradient_checkpointing). The
    allocator's slack is not in it; allow a tenth.
    """
    bytes_of = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
    frozen_size = bytes_of[config.dtype]
    full = config.lora_rank == 0
    policy_size = 4 if full else frozen_size
    count, features = shape_of(policy, AutoModelForCausalLM)
    reward_count, _ = shape_of(reward, AutoModelForSequenceClassification)
    trained = count if full else config.lora_rank * features
    # A gradient, two moments of Adam, the KL's reference; adapters stand beside their base.
    copies = 3 + bool(config.beta) + (not full)
    length = config.max_prompt_tokens + config.max_response_tokens
    responses = config.prompts_per_rollout * config.group_size
    sampled = min(config.sample_batch, responses)
    scored = min(config.reward_batch, responses)
    updated = min(config.micro_batch, responses)
    credit = config.credit != "grpo"
    cached = 2 * policy.num_hidden_layers * key_width(policy) * policy_size  # per token

    # Logits, their softmax and gradients; rows of W and of the output matrix.
    strip_width = 5 * updated * config.max_response_tokens + 2 * policy.hidden_size
    strips = 4 * grpo.STRIP * strip_width
    update = activations(config, policy, updated * length, policy_size, adapters=not full)
    scoring = activations(config, reward, scored * length, frozen_size, adapters=False)
    gradient = responses * config.max_response_tokens * reward.hidden_size * 4
    return {
        "policy weights": count * policy_size,
        "reward model weights": reward_count * frozen_size,
        "adapters, gradients, optimizer": trained * 4 * copies,
        "sampling: KV cache": cached * length * sampled,
        "scoring: activations": scoring * credit,
        "update: activations and vocabulary strip": update + strips,
        "reward gradient": gradient * credit,
    }


def key_width(model: PretrainedConfig) -> int:
    """Numbers that a layer's keys have per token."""
    heads = getattr(model, "num_key_value_heads", model.num_attention_heads)
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return heads * head


def activations(
    config: Config, model: PretrainedConfig, tokens: int, bytes_each: int, adapters: bool
) -> float:
    """Bytes that a forward of so many tokens keeps for its backward."""
    inner = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    layer = tokens * (14 * model.hidden_size + (4 + 2 * adapters) * inner) * bytes_each
    if not config.gradient_checkpointing:
        return layer * model.num_hidden_layers
    return layer + tokens * model.hidden_size * bytes_each * model.num_hidden_layers


def total_estimate(parts: dict[str, float]) -> float:
    """Peak bytes: what is held, and the largest of the phases."""
    held = sum(amount for name, amount in parts.items() if ":" not in name)
    return held + max(amount for name, amount in parts.items() if ":" in name)


def check_memory(config: Config) -> float:
    """Peak bytes as estimated; on a GPU raise ValueError, with the flag to change, if too many.

    Reads the models' configs only.
    """
    policy = AutoConfig.from_pretrained(config.policy)
    reward = AutoConfig.from_pretrained(config.reward_model)
    parts = memory_estimate(config, policy, reward)
    need = 1.1 * total_estimate(parts)
    if not config.device.startswith("cuda"):
        return need
    free = torch.cuda.mem_get_info(config.device)[0]
    if need > free:
        table = "".join(f"\n  {v / 2**30:6.1f} GiB  {name}" for name, v in parts.items())
        raise ValueError(
            f"This run needs about {need / 2**30:.1f} GiB and the GPU has {free / 2**30:.1f} GiB "
            f"free. Try: {remedy(config, parts, need - free)}, "
            f"or --gradient_checkpointing if it is off.{table}"
        )
    return need


def remedy(config: Config, parts: dict[str, float], lacking: float) -> str:
    """The flag that would make room for so many bytes."""
    phases = {name: amount for name, amount in parts.items() if ":" in name}
    worst = max(phases, key=phases.get)
    if phases[worst] < lacking:  # no batch size would be small enough
        if config.lora_rank == 0:
            return "--lora_rank 64"
        return "--max_response_tokens, or take a smaller model"
    flags = {"sampling": "sample_batch", "scoring": "reward_batch", "update": "micro_batch"}
    return f"--{flags[worst.partition(':')[0]]} (smaller)"


# ----------------------------------------------------------------------------------------------
# Is it sound?


@torch.no_grad()
def self_check(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    prompts: list[Messages],
    config: Config,
) -> dict[str, float]:
    """Is lm_head(hidden) all there is to the logits, and does training see what was sampled?

    Returns the mean absolute gaps in nats, for the log. Raises ValueError where one is beyond what
    the dtype explains.
    """
    dtype = next(policy.parameters()).dtype
    limit = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    few = sorted(prompts[:16], key=lambda m: len(encode_prompt(tokenizer, m, **config.template)))
    rollout = sample(
        policy,
        tokenizer,
        [few[0], few[-1]],  # the shorter one is padded, so wrong position ids would show
        vocabulary,
        1,
        min(16, config.max_response_tokens),
        config.temperature,
        keep_logp=True,
        **config.template,
    )
    mask = rollout.response_mask
    head = policy.get_output_embeddings().weight[: vocabulary.size]
    hidden = response_hidden(policy, rollout)[mask]  # (N, H)
    logp, _ = token_logprobs(hidden, head, rollout.response_ids[mask], config.temperature)  # (N,)
    from_logits = model_logprobs(policy, rollout, vocabulary.size, config.temperature)  # (N,)
    gaps = {
        "check/logits_gap": (from_logits - logp).abs().mean().item(),
        "check/sampler_gap": (rollout.sampler_logp[mask] - logp).abs().mean().item(),
    }
    if not gaps["check/logits_gap"] <= limit:
        raise ValueError(
            "--policy does more than lm_head(hidden) on the way to its logits (mean gap "
            f"{gaps['check/logits_gap']:.2g} nats): soft-capped or scaled logits are not supported."
        )
    if not gaps["check/sampler_gap"] <= limit:
        raise ValueError(
            "The sampler's log-probs differ from the training forward's by "
            f"{gaps['check/sampler_gap']:.2g} nats on average (limit {limit}): the loss would be "
            "about another distribution. Try --attn_implementation eager."
        )
    return gaps


def model_logprobs(
    policy: PreTrainedModel, rollout: Rollout, size: int, temperature: float
) -> Tensor:
    """log p(a) of a small rollout's N tokens from the model's own logits, dense: (N,)."""
    mask = rollout.response_mask
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)  # (B, P+T)
    seen = torch.cat([rollout.prompt_mask, mask], 1).long()  # (B, P+T)
    places = (seen.cumsum(-1) - 1).clamp(min=0)
    out = policy(input_ids=ids, attention_mask=seen, position_ids=places, use_cache=False)
    start = rollout.prompt_ids.shape[1] - 1
    logits = out.logits[:, start:-1, :size][mask].float() / temperature  # (N, V)
    return logits.log_softmax(-1).gather(1, rollout.response_ids[mask][:, None])[:, 0]
