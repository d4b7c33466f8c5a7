"""What was sampled: the vocabulary that policy and reward model share, the `Rollout`, and sampling.

Ids and masks are made once, at sampling, and never inferred again.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

Messages = list[dict[str, str]]  # a conversation: [{"role": "user", "content": "..."}, ...]
Batch = TypeVar("Batch")


# ----------------------------------------------------------------------------------------------
# The rollout.


@dataclass(frozen=True)
class Rollout:
    """B responses, the G of one prompt contiguous. Prompts are padded left, responses right."""

    messages: list[Messages]  # B conversations, the response not among them
    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P) bool
    response_ids: Tensor  # (B, T) stop token included
    response_mask: Tensor  # (B, T) bool
    free_mask: Tensor  # (B, T) bool: response tokens that compete for credit
    stopped: Tensor  # (B,) bool: ended with a stop token (the last of its mask), not by the limit
    group_size: int

    # What the loop learns about the responses, step by step; None until then.
    sampler_logp: Tensor | None = None  # (B, T) what the sampler itself thought, if asked for
    rewards: Tensor | None = None  # (B,) R, raw
    reward_grad: Tensor | None = None  # (B, T, D) f_t, where the scoring pass gave it
    advantages: Tensor | None = None  # (B,) A of (1)
    sharpness: Tensor | None = None  # (B,) what (6) reads in place of A
    reference_logp: Tensor | None = None  # (B, T) log-probs under the policy RL started from
    old_logp: Tensor | None = None  # (B, T) log-probs before the update
    token_advantages: Tensor | None = None  # (B, T) Ã
    weights: Tensor | None = None  # (B, T) w, where the method works by weights
    tau: Tensor | None = None  # (B,) the allocation's temperature, where there is one
    work: Tensor | None = None  # (B, T) d, where the method read it
    branches: Tensor | None = None  # (B, T) alternatives tried at each token, where it branched

    def __len__(self) -> int:
        return len(self.messages)

    def split(self, n: int) -> Iterator["Rollout"]:
        """Micro-batches of at most n whole responses, in order; widths stay as they are."""
        for start in range(0, len(self), n):
            yield take(self, slice(start, start + n))

    def to(self, device: torch.device) -> "Rollout":
        tensors = {k: v.to(device) for k, v in batched(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    @property
    def content_mask(self) -> Tensor:
        """(B, T) the tokens that the reward model sees: the response without its stop token."""
        lengths = self.response_mask.sum(-1) - self.stopped.long()  # (B,)
        return torch.arange(self.response_ids.shape[1], device=lengths.device) < lengths[:, None]


def batched(batch: object) -> dict[str, Tensor | list]:
    """The fields of a dataclass that have one row per response: its tensors and lists."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: v for name, v in values.items() if isinstance(v, (Tensor, list))}


def take(batch: Batch, rows: slice) -> Batch:
    """Some responses of a batch, as a batch of the same kind."""
    return replace(batch, **{name: value[rows] for name, value in batched(batch).items()})


def join(parts: list[Batch]) -> Batch:
    """Batches of one kind, put together in order; the inverse of `take`."""
    joined = {}
    for name, first in batched(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        joined[name] = torch.cat(values) if isinstance(first, Tensor) else sum(values, [])
    return replace(parts[0], **joined)


def to_padded(values: Tensor, mask: Tensor) -> Tensor:
    """(N, ...) values of the N tokens of a (B, T) mask, in their places: (B, T, ...), 0 elsewhere.

    The inverse of `padded[mask]`.
    """
    padded = values.new_zeros(*mask.shape, *values.shape[1:])
    wide_mask = mask.view(*mask.shape, *[1] * (values.dim() - 1))
    return padded.masked_scatter(wide_mask, values)


def pad(rows: list[list[int]], value: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of ids as one (B, L) tensor, and its (B, L) bool mask, made from the lengths."""
    width = max(len(row) for row in rows)
    filled = []
    for row in rows:
        fill = [value] * (width - len(row))
        filled.append(fill + row if left else row + fill)
    lengths = torch.tensor([[len(row)] for row in rows])  # (B, 1)
    place = torch.arange(width)
    mask = place >= width - lengths if left else place < lengths
    return torch.tensor(filled), mask


# ----------------------------------------------------------------------------------------------
# The models, for anyone who samples.


def unwrap(policy: PreTrainedModel) -> PreTrainedModel:
    """The model inside a LoRA wrapper, its layers adapted in place; or the model itself."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def no_dropout(model: PreTrainedModel) -> None:
    """Dropout off for good: the loss must be about the policy that sampled, and R must be fixed."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


# ----------------------------------------------------------------------------------------------
# The vocabulary.


@dataclass(frozen=True)
class Vocabulary:
    """Which ids may be sampled, which of them stop a response, and which take no part in credit."""

    size: int  # V: ids at and above it are padding rows of either model and are never sampled
    pad_id: int  # the policy's
    stop_ids: list[int]
    frozen: Tensor  # (V,) bool: weight one always


def shared_vocabulary(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reward_rows: int | None = None
) -> Vocabulary:
    """V = min(policy rows, reward-model rows, ids in use), all stop ids, and the frozen tokens.

    Stop ids come from the tokenizer, the generation config and the token with which the chat
    template ends a turn; these disagree in released checkpoints. Frozen are the stop tokens (they
    have no embedding in the reward model's input) and tokens of pure structure: text that strips
    to "", or that holds a newline and strips to ".".

    Raises ValueError where there is no stop token, or one that V leaves out.
    """
    rows = policy.get_output_embeddings().weight.shape[0]
    size = min(rows, ids_in_use(tokenizer), reward_rows or rows)
    listed = unwrap(policy).generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, turn_end_id(tokenizer)}
    stops |= set(listed if isinstance(listed, list) else [listed])
    stop_ids = sorted(i for i in stops if i is not None)
    lost = [i for i in stop_ids if i >= size]
    if lost:
        raise ValueError(
            f"Stop token {lost[0]} lies outside the {size} ids that the policy's {rows} rows, "
            "its tokenizer and the reward model share: no response could end."
        )
    if not stop_ids:
        raise ValueError(
            "The policy has no stop token: neither its tokenizer nor its generation config "
            "names one."
        )
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id >= size:
        pad_id = stop_ids[0]  # masks decide, so any known id will do
    frozen = []
    single = [[i] for i in range(size)]
    for text in tokenizer.batch_decode(single, clean_up_tokenization_spaces=False):
        stripped = text.strip()
        frozen.append(not stripped or ("\n" in text and stripped == "."))
    frozen = torch.tensor(frozen)  # (V,)
    frozen[stop_ids] = True
    return Vocabulary(size, pad_id, stop_ids, frozen)


def ids_in_use(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id in use + 1. Ids may have gaps, so that len(tokenizer) can be less."""
    return max(tokenizer.get_vocab().values()) + 1


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's turn, if any."""
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}]
    tail = tokenizer.apply_chat_template(turn, tokenize=False).rpartition("ANSWER")[2]
    ids = tokenizer(tail, add_special_tokens=False).input_ids
    if not ids:
        return None
    added = tokenizer.added_tokens_decoder.get(ids[0])  # all_special_ids has only the named ones
    is_special = ids[0] in tokenizer.all_special_ids or (added is not None and added.special)
    return ids[0] if is_special else None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, **template: object
) -> list[int]:
    """The policy's ids for a conversation up to where the assistant starts to answer."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template
    )


# ----------------------------------------------------------------------------------------------
# Sampling.


def step_seed(seed: int, step: int) -> int:
    """All randomness of rollout `step` comes from it, so a resumed run needs no random states."""
    return seed * 1_000_003 + step


def choose_prompts(prompts: list[Messages], step: int, seed: int, count: int) -> list[Messages]:
    """The `count` prompts of a rollout: a fresh shuffle per epoch, a function of seed and step.

    So the rollout's number is also the prompt cursor.
    """
    chosen = []
    for i in range(step * count, (step + 1) * count):
        epoch, place = divmod(i, len(prompts))
        chosen.append(prompts[shuffled(len(prompts), seed, epoch)[place]])
    return chosen


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Messages],
    vocabulary: Vocabulary,
    group_size: int,
    max_response_tokens: int,
    temperature: float = 1.0,
    sample_batch: int | None = None,
    keep_logp: bool = False,
    **template: object,
) -> Rollout:
    """Sample `group_size` responses per prompt from the policy's own distribution over V tokens.

    Nothing but the temperature shapes the distribution: every generation default of the checkpoint
    (top-k, repetition penalty, ...) is put aside, since the loss takes log-probs of
    logits / temperature. `sample_batch` responses are generated at a time.
    """
    messages = [m for m in prompts for _ in range(group_size)]  # B
    rows = [encode_prompt(tokenizer, m, **template) for m in messages]
    prompt_ids, prompt_mask = pad(rows, vocabulary.pad_id, left=True)  # (B, P)
    prompt_ids = prompt_ids.to(policy.device)
    prompt_mask = prompt_mask.to(policy.device)
    model = unwrap(policy)
    training = policy.training
    inherited = model.generation_config
    model.generation_config = GenerationConfig()
    policy.eval()  # in train() gradient checkpointing would switch the KV cache off
    n = sample_batch or len(rows)
    slices = []
    try:
        for ids, mask in zip(prompt_ids.split(n), prompt_mask.split(n), strict=True):
            slices.append(
                _generate(model, ids, mask, vocabulary, max_response_tokens, temperature, keep_logp)
            )
    finally:
        model.generation_config = inherited
        policy.train(training)

    return _as_rollout(messages, prompt_ids, prompt_mask, slices, vocabulary, group_size)


def _as_rollout(
    messages: list[Messages],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    slices: list[tuple[Tensor, Tensor | None]],
    vocabulary: Vocabulary,
    group_size: int,
) -> Rollout:
    """Put slices of generated ids together, and mask each response through its first stop token."""
    # A narrower slice has stopped everywhere, so what is added to its right is masked below.
    width = max(ids.shape[1] for ids, _ in slices)
    response_ids = torch.cat([_widen(ids, width, vocabulary.pad_id) for ids, _ in slices])  # (B, T)
    stops = torch.tensor(vocabulary.stop_ids, device=response_ids.device)
    is_stop = torch.isin(response_ids, stops)  # (B, T)
    stops_before = is_stop.cumsum(-1) - is_stop.long()  # (B, T)
    response_mask = stops_before == 0  # (B, T) through the first stop token, inclusive
    frozen = vocabulary.frozen.to(response_ids.device)[response_ids]  # (B, T)
    sampler_logp = None
    if slices[0][1] is not None:
        sampler_logp = torch.cat([_widen(logp, width, 0.0) for _, logp in slices])  # (B, T)
    return Rollout(
        messages=messages,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        free_mask=response_mask & ~frozen,
        stopped=(is_stop & response_mask).any(-1),
        group_size=group_size,
        sampler_logp=sampler_logp,
    )


class HideRowsBehind(LogitsProcessor):
    """No probability for the rows at and above `size`: (b, rows) -> (b, rows)."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.size :] = -torch.inf
        return scores


def _widen(values: Tensor, width: int, fill: float) -> Tensor:  # (b, t) -> (b, width)
    return F.pad(values, (0, width - values.shape[1]), value=fill)


def _generate(
    policy: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    vocabulary: Vocabulary,
    max_response_tokens: int,
    temperature: float,
    keep_logp: bool,
) -> tuple[Tensor, Tensor | None]:
    """One slice of `sample`: response ids (b, t), and their log-probs in float32 or None."""
    processors = LogitsProcessorList()
    rows = policy.get_output_embeddings().weight.shape[0]
    if rows > vocabulary.size:
        processors.append(HideRowsBehind(vocabulary.size))
    out = policy.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        logits_processor=processors,
        generation_config=GenerationConfig(
            do_sample=True,
            temperature=temperature,
            top_p=1.0,
            top_k=0,  # unset it would be 50
            repetition_penalty=1.0,
            max_new_tokens=max_response_tokens,
            eos_token_id=vocabulary.stop_ids,
            pad_token_id=vocabulary.pad_id,
            output_scores=keep_logp,
            return_dict_in_generate=True,
        ),
    )
    response_ids = out.sequences[:, ids.shape[1] :]  # (b, t)
    if not keep_logp:
        return response_ids, None
    logp = []
    for scores, tokens in zip(out.scores, response_ids.T, strict=True):  # (b, rows), (b,)
        logp.append(scores.float().log_softmax(-1).gather(1, tokens[:, None]))
    return response_ids, torch.cat(logp, 1)
