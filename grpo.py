"""GRPO around a neural reward: sample groups, normalise their rewards (1), and take the clipped step (7).

Holds the `Rollout` that everything else reads (ids and masks are made once, at sampling, and never inferred again), the
policy's hidden states and token log-probs, and the loss. Left out: rewards (reward_grad.py), credit (credit.py), the loop
(train.py). Equation numbers are the README's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

STRIP = 8192  # vocabulary rows that are upcast and multiplied at a time
Messages = list[dict[str, str]]  # a conversation: [{"role": "user", "content": "..."}, ...]


# ---------------------------------------------------------------------------------------------------------------------
# The advantage of a response.


def group_advantages(rewards: Tensor, group_size: int, std_floor: float = 0.0) -> Tensor:
    """A of (1): rewards standardised within each prompt's group, population std, calculated in float64.

    Args:
        rewards: (B,), groups contiguous.
        group_size: G >= 2 responses a prompt.
        std_floor: smallest std to divide by; 0 = none.
    Returns:
        (B,) in the dtype of the rewards. A group that ties to 1e-5 relative gets exactly 0: its spread is rounding, and
        dividing by it would turn rounding into an update.
    """
    if group_size < 2:
        raise ValueError(f"--group_size is {group_size}: one response has no group to be compared with; use 2 or more.")
    groups = rewards.double().view(-1, group_size)  # (B/G, G)
    spread = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)  # (B/G, 1)
    ties = spread <= rounding(groups)
    std = groups.std(-1, correction=0, keepdim=True).clamp(min=std_floor)
    advantages = (groups - groups.mean(-1, keepdim=True)) / std.masked_fill(ties, 1.0)
    return advantages.masked_fill(ties, 0.0).flatten().to(rewards.dtype)


def rounding(groups: Tensor) -> Tensor:
    """The difference of rewards up to which a group's responses tie, (B/G, G) -> (B/G, 1): 1e-5 relative."""
    return 1e-5 * groups.abs().amax(-1, keepdim=True).clamp(min=1.0)


def response_advantages(
    estimator: str, rewards: Tensor, lengths: Tensor, group_size: int, max_length: int, std_floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A by `--advantage`, and the sharpness that the allocation (6) reads in place of A; both (B,).

    grpo: (1), R standardised in its group.
    rank_normal: Φ⁻¹((rank - ½) / G), ties averaged (TACE, S1): blind to the reward's scale.
    rloo: R minus the mean of the others.
    dr_grpo: R minus the mean, times T_i / T_max, which turns the per-response token mean of (7) into a sum over one fixed
    length; `entropy`, which has a length of its own, then counts T_i twice.

    (6) reads |A| as sharpness. grpo's has a root mean square of 1 in every group, rank_normal's of 0.67, 0.84 and 0.92 at
    G = 2, 4 and 8: both stand as they are. The other two are in the reward's unit, so the sharpness, and nothing else, is
    R minus the mean over its root mean square in the batch: how good a response was, not how long.

    Args:
        lengths: (B,) tokens of each response; read by dr_grpo.
        max_length: T_max.
    Raises:
        ValueError: an unknown estimator, or group_size < 2.
    """
    standard = group_advantages(rewards, group_size, std_floor)
    if estimator == "grpo":
        return standard, standard
    groups = rewards.double().view(-1, group_size)  # (B/G, G)
    ties = (standard.view_as(groups) == 0).all(-1, keepdim=True)
    centred = (groups - groups.mean(-1, keepdim=True)).masked_fill(ties, 0.0)
    if estimator == "rank_normal":
        ahead = groups[..., None] - groups[:, None]  # (B/G, G, G)
        near = ahead.abs() <= rounding(groups)[..., None]
        below = ((ahead > 0) & ~near).sum(-1) + 0.5 * near.sum(-1)  # rank - 1/2, with ties at their average rank
        normal = torch.special.ndtri(below / group_size).masked_fill(ties, 0.0).flatten().to(rewards.dtype)
        return normal, normal
    centred = centred.flatten()  # (B,)
    sharpness = centred / centred.square().mean().sqrt().clamp(min=torch.finfo(centred.dtype).tiny)
    if estimator == "rloo":
        advantages = centred * group_size / (group_size - 1)
    elif estimator == "dr_grpo":
        advantages = centred * lengths / max_length
    else:
        raise ValueError(f"--advantage {estimator!r} is unknown. Known: {', '.join(ADVANTAGES)}.")
    return advantages.to(rewards.dtype), sharpness.to(rewards.dtype)


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "rank_normal")


def length_window(lengths: Tensor, sigma: float) -> Tensor:
    """Soft penalty on answers under 8 and over 1,024 tokens, in the reward's units; `sigma` is σ0. (B,) -> (B,). [dev]"""
    short, long = ((8 - lengths) / 8).clamp(0, 1), ((lengths - 1024) / 1024).clamp(0, 1)
    return sigma * (0.5 * short + 2.0 * long)


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary that policy and reward model share, and the rollout.


@dataclass(frozen=True)
class Vocabulary:
    """Which ids may be sampled, which of them stop a response, and which take no part in credit."""

    size: int  # V: ids at and above it are padding rows of either model and are never sampled
    pad_id: int  # the policy's
    stop_ids: list[int]
    frozen: Tensor  # (V,) bool: weight one always


def bare(policy: PreTrainedModel) -> PreTrainedModel:
    """The model inside a LoRA wrapper, its layers adapted in place; or the model itself."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def no_dropout(model: PreTrainedModel) -> None:
    """Dropout off for good: the log-probs of the loss must be those of the sampler, and credit is about one fixed reward."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def shared_vocabulary(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reward_rows: int | None = None
) -> Vocabulary:
    """V = min(policy rows, reward-model rows, tokens), the union of all stop ids, and the table of frozen tokens.

    Stop ids come from the tokenizer, the generation config and the token with which the chat template ends a turn, and these
    disagree in released checkpoints. Frozen are the stop tokens (they have no embedding in the reward model's input) and tokens
    of pure structure: text that strips to "", or that holds a newline and strips to ".".
    """
    rows = policy.get_output_embeddings().weight.shape[0]
    size = min(rows, len(tokenizer), reward_rows or rows)
    stops = {tokenizer.eos_token_id, turn_end_id(tokenizer)}
    listed = bare(policy).generation_config.eos_token_id
    stops |= set(listed if isinstance(listed, list) else [listed])
    stop_ids = sorted(i for i in stops if i is not None and i < size)
    if not stop_ids:
        raise ValueError("The policy has no stop token: neither its tokenizer nor its generation config names one.")
    pad_id = tokenizer.pad_token_id
    pad_id = pad_id if pad_id is not None and pad_id < size else stop_ids[0]  # masks decide, any known id will do
    texts = tokenizer.batch_decode([[i] for i in range(size)], clean_up_tokenization_spaces=False)
    frozen = torch.tensor([not t.strip() or ("\n" in t and t.strip() == ".") for t in texts])  # (V,)
    frozen[stop_ids] = True
    return Vocabulary(size, pad_id, stop_ids, frozen)


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's turn, if it writes one."""
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}]
    tail = tokenizer.apply_chat_template(turn, tokenize=False).rpartition("ANSWER")[2]
    ids = tokenizer(tail, add_special_tokens=False).input_ids
    added = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None  # all_special_ids lists only named ones
    return ids[0] if ids and (ids[0] in tokenizer.all_special_ids or (added and added.special)) else None


@dataclass(frozen=True)
class Rollout:
    """B responses, the G of one prompt contiguous. Prompts are padded on the left, responses on the right."""

    messages: list[Messages]  # B conversations, the response not among them
    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P) bool
    response_ids: Tensor  # (B, T) stop token included
    response_mask: Tensor  # (B, T) bool
    free_mask: Tensor  # (B, T) bool: response tokens that compete for credit
    stopped: Tensor  # (B,) bool: ended with a stop token (the last one of its mask), not by the limit
    group_size: int
    sampler_logp: Tensor | None = None  # (B, T) what the sampler itself thought, only when asked for

    def __len__(self) -> int:
        return len(self.messages)

    def split(self, n: int) -> Iterator["Rollout"]:
        """Micro-batches of at most n whole responses, in order; widths stay, so T means the same everywhere."""
        for start in range(0, len(self), n):
            rows = {f.name: getattr(self, f.name) for f in fields(self)}
            cut = {k: v[start : start + n] for k, v in rows.items() if isinstance(v, (Tensor, list))}
            yield replace(self, **cut)

    def to(self, device: torch.device) -> "Rollout":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})

    @property
    def content_mask(self) -> Tensor:
        """(B, T) the tokens that the reward model sees: the response without its stop token."""
        lengths = self.response_mask.sum(-1) - self.stopped.long()  # (B,)
        return torch.arange(self.response_ids.shape[1], device=lengths.device) < lengths[:, None]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, **template: object) -> list[int]:
    """The policy's ids for a conversation up to where the assistant starts to answer, by its chat template."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template)


def pad(rows: list[list[int]], value: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of ids as one (B, L) tensor, and its (B, L) bool mask made from the lengths, never from the values."""
    width = max(map(len, rows))
    fill = [[value] * (width - len(r)) for r in rows]
    ids = torch.tensor([f + r if left else r + f for r, f in zip(rows, fill, strict=True)])
    lengths, place = torch.tensor([[len(r)] for r in rows]), torch.arange(width)
    return ids, place >= width - lengths if left else place < lengths


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
    """Sample `group_size` responses to each prompt from the policy's own distribution over the shared vocabulary.

    Nothing but the temperature shapes the distribution: every generation default of the checkpoint (top-k, repetition penalty,
    ...) is put aside, since the loss takes log-probs of logits / temperature. `sample_batch` responses are generated at a time.
    """
    rows = [encode_prompt(tokenizer, m, **template) for m in prompts for _ in range(group_size)]
    prompt_ids, prompt_mask = (t.to(policy.device) for t in pad(rows, vocabulary.pad_id, left=True))  # (B, P)
    inner, training = bare(policy), policy.training
    inherited, inner.generation_config = inner.generation_config, GenerationConfig()
    policy.eval()  # in train() gradient checkpointing would switch the KV cache off
    n, slices = sample_batch or len(rows), []
    try:
        for ids, mask in zip(prompt_ids.split(n), prompt_mask.split(n), strict=True):
            slices.append(_generate(inner, ids, mask, vocabulary, max_response_tokens, temperature, keep_logp))
    finally:
        inner.generation_config = inherited
        policy.train(training)

    width = max(ids.shape[1] for ids, _ in slices)  # a narrower slice has stopped everywhere, so its padding is masked
    response_ids = torch.cat([F.pad(i, (0, width - i.shape[1]), value=vocabulary.pad_id) for i, _ in slices])  # (B, T)
    is_stop = torch.isin(response_ids, torch.tensor(vocabulary.stop_ids, device=response_ids.device))
    response_mask = is_stop.cumsum(-1) - is_stop.long() == 0  # (B, T) through the first stop token, inclusive
    return Rollout(
        messages=[m for m in prompts for _ in range(group_size)],
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        free_mask=response_mask & ~vocabulary.frozen.to(response_ids.device)[response_ids],
        stopped=(is_stop & response_mask).any(-1),
        group_size=group_size,
        sampler_logp=torch.cat([F.pad(p, (0, width - p.shape[1])) for _, p in slices]) if keep_logp else None,
    )


def _generate(policy, ids, mask, vocabulary, max_response_tokens, temperature, keep_logp) -> tuple[Tensor, Tensor | None]:
    """One slice of `sample`: response ids (b, t), and their log-probs in float32 or None."""

    def hide_padding_rows(_: Tensor, scores: Tensor) -> Tensor:  # (b, rows) -> (b, rows)
        return scores.index_fill(1, torch.arange(vocabulary.size, scores.shape[1], device=scores.device), -torch.inf)

    out = policy.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        logits_processor=LogitsProcessorList([hide_padding_rows]),
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
    steps = [s.float().log_softmax(-1).gather(1, a[:, None]) for s, a in zip(out.scores, response_ids.T, strict=True)]
    return response_ids, torch.cat(steps, 1)


# ---------------------------------------------------------------------------------------------------------------------
# What the policy thinks of a rollout.


def response_hidden(policy: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Final-normed backbone states that predict each response token, at positions P-1 ... P+T-2: (B, T, H).

    One forward serves credit and loss. Goes through a LoRA wrapper to the bare backbone, so that (B, T, V) logits are never
    made; position ids count the mask, so left padding changes nothing.
    """
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)[:, :-1]  # (B, P+T-1)
    mask = torch.cat([rollout.prompt_mask, rollout.response_mask], 1)[:, :-1].long()
    states = (
        bare(policy)
        .base_model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False)
        .last_hidden_state
    )  # (B, P+T-1, H)
    return states[:, rollout.prompt_ids.shape[1] - 1 :]


def token_logprobs(hidden: Tensor, lm_head: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p(a) and the entropy of softmax(hidden @ lm_headᵀ / temperature), without ever holding (N, V).

    The vocabulary is walked in strips, each recomputed in backward, in at least float32.

    Args:
        hidden: (N, H); gradients flow into it.
        lm_head: (V, H), rows of the shared vocabulary only; gradients flow into it where it is trained.
        token_ids: (N,)
        temperature: the sampling temperature: the loss is about the distribution that was sampled from.
    Returns:
        logp (N,) with a graph, entropy (N,) in nats without one.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden.to(dtype)

    def strip(hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:  # (N, H), (S, H) -> (N,), (N,)
        logits = hidden @ rows.to(dtype).T / temperature  # (N, S)
        with torch.no_grad():
            mean_logit = (logits.softmax(-1) * logits).sum(-1)
        return logits.logsumexp(-1), mean_logit

    strips = [checkpoint(strip, hidden, rows, use_reentrant=False) for rows in lm_head.split(STRIP)]
    lse, mean_logit = (torch.stack(part, -1) for part in zip(*strips, strict=True))  # (N, strips) each
    log_z = lse.logsumexp(-1)  # (N,)
    entropy = log_z - ((lse - log_z[:, None]).exp() * mean_logit).sum(-1)
    own_row = F.embedding(token_ids, lm_head).to(dtype)  # (N, H); indexing would add up its gradient in no fixed order
    own_logit = (hidden * own_row).sum(-1) / temperature
    return own_logit - log_z, entropy.detach()


# ---------------------------------------------------------------------------------------------------------------------
# The loss.


def response_mean(values: Tensor, mask: Tensor, num_responses: int) -> Tensor:
    """(1/B) Σ_i (1/T_i) Σ_t over the responses given, B = `num_responses` of the whole step, (B, T) -> scalar.

    B and T_i are known before the first micro-batch, so micro-batches of any size add up to the same number.
    """
    lengths = mask.sum(-1).clamp(min=1)  # (B,)
    return (values.masked_fill(~mask, 0.0).sum(-1) / lengths).sum() / num_responses


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, token_advantages: Tensor, mask: Tensor, epsilon: float, num_responses: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J of (7): the clipped policy-gradient loss with one advantage a token.

    With one optimizer step a rollout old_logp = logp, so the ratio is exactly 1, nothing clips, and the loss is near 0
    (GRPO's advantages sum to 0 in a group) while its gradient is not.

    Args:
        logp, old_logp, token_advantages: (B, T); only logp has a graph.
        mask: (B, T) bool response_mask.
        epsilon: clip range.
        num_responses: B of the whole step.
    Returns:
        loss, and stats as shares of the step that add up over micro-batches: "clip_ratio/region_mean".
    """
    ratio = (logp - old_logp).exp()  # (B, T)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    gain = torch.minimum(ratio * token_advantages, clipped * token_advantages)
    with torch.no_grad():
        region = ((ratio < 1 - epsilon) & (token_advantages < 0)) | ((ratio > 1 + epsilon) & (token_advantages > 0))
        stats = {"clip_ratio/region_mean": response_mean(region.to(logp.dtype), mask, num_responses)}
    return -response_mean(gain, mask, num_responses), stats


def k3_kl(logp: Tensor, reference_logp: Tensor, mask: Tensor, num_responses: int) -> Tensor:
    """KL to the reference policy by the k3 estimate exp(r - l) - (r - l) - 1, averaged like J, (7)."""
    log_ratio = (reference_logp - logp).masked_fill(~mask, 0.0)  # padding must not overflow exp
    return response_mean(log_ratio.exp() - log_ratio - 1, mask, num_responses)
