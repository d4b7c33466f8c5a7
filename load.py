"""From names to things in memory: prompts, tokenizers, a policy (with LoRA) and a reward model, each refused early when it cannot work.

Left out: what is done with them (train.py).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo import Messages, encode_prompt
from reward_grad import RewardModel

if TYPE_CHECKING:
    from train import Config


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
            raise ValueError(f"--prompts {source} must hold one JSON object a line: {error}") from error
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
    if not messages or not messages[-1].get("content", "").strip():
        raise ValueError(f"--prompts {source} holds an empty prompt in column {column!r}: {json.dumps(row)[:200]}")
    return messages


def load_prompts(config: "Config", tokenizer: PreTrainedTokenizerBase) -> list[Messages]:
    """All prompts as conversations, none longer than --max_prompt_tokens.

    In a file of yours a prompt that is too long is an error, since you can mend it; from a hub data set it is left out and counted.
    """
    rows = load_rows(config.prompts)
    column = config.prompt_column or next((c for c in ("prompt", "messages") if c in rows[0]), "prompt")
    prompts = [as_messages(row, column, config.prompts) for row in rows]
    lengths = [len(encode_prompt(tokenizer, m, **config.template)) for m in prompts]
    short = [m for m, length in zip(prompts, lengths, strict=True) if length <= config.max_prompt_tokens]
    if len(short) < len(prompts) and (Path(config.prompts).exists() or not short):
        worst = max(range(len(prompts)), key=lengths.__getitem__)
        raise ValueError(
            f"{len(prompts) - len(short)} of {len(prompts)} prompts in {config.prompts} are longer than --max_prompt_tokens "
            f"{config.max_prompt_tokens}; the longest is number {worst + 1} with {lengths[worst]} tokens. Raise the limit or shorten them."
        )
    if len(short) < len(prompts):
        print(f"Left out {len(prompts) - len(short)} of {len(prompts)} prompts: longer than --max_prompt_tokens.")
    return short


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
        raise ValueError(f"--policy {name} has no chat template (a base model?). Give one with --chat_template FILE.")
    return tokenizer


def no_dropout(model: PreTrainedModel) -> None:
    """Dropout off for good: the log-probs of the loss must be those of the sampler, and credit is about one fixed reward."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def load_policy(config: "Config") -> PreTrainedModel:
    """The policy on its device: full weights in float32, or frozen in --dtype with float32 LoRA adapters."""
    dtype = getattr(torch, config.dtype) if config.lora_rank else torch.float32
    policy = AutoModelForCausalLM.from_pretrained(
        config.policy, dtype=dtype, attn_implementation=config.attn_implementation
    ).to(config.device)
    no_dropout(policy)
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
        raise ValueError("--lora_rank needs peft: pip install peft (or --lora_rank 0 for full fine-tuning).") from error
    torch.manual_seed(seed)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(policy, lora)


def load_reward_model(config: "Config", policy_tokenizer: PreTrainedTokenizerBase) -> RewardModel:
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
    no_dropout(model)
    if config.gradient_checkpointing:  # does nothing in eval(); with dropout off, train() changes nothing else
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    tokenizer = AutoTokenizer.from_pretrained(config.reward_model)
    return RewardModel(model, tokenizer, policy_tokenizer, reward_batch=config.reward_batch)
