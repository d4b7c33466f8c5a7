"""DATC's derivation, (2) to (5): how much reward does a token's own update gain?

First as printed, on the whole vocabulary (`reward_direction`, `update_direction`, `work_dense`); then the same number
streamed over strips of the vocabulary (`work`), so that 152k-row matrices are neither held as (N, V) nor upcast whole.
Positions are flat here: N tokens of any responses. Left out: where the reward gradient comes from (reward_grad.py) and how
work becomes weights (credit.py). Equation numbers are the README's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

STRIP = 8192  # vocabulary rows that are upcast and multiplied at a time: 128 MiB in float32 at width 4,096


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The dtype to calculate in: float32, or float64 where a tensor already is."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


# ---------------------------------------------------------------------------------------------------------------------
# As printed.


def reward_direction(probs: Tensor, reward_grad: Tensor, embedding: Tensor) -> Tensor:
    """Reward gradient in policy-logit space, (3): g = (diag(p) - p pᵀ) W f.

    Args:
        probs: (..., V) policy probabilities p_t.
        reward_grad: (..., D) f_t, the reward's gradient at the token's embedding.
        embedding: (V, D) W, the reward model's input embeddings.
    Returns:
        (..., V) g_t. It sums to 0: adding a constant to all logits changes no probability.
    """
    token_value = reward_grad @ embedding.T  # (..., V)  v: first-order reward of each token here, up to a constant
    expected_value = (probs * token_value).sum(-1, keepdim=True)  # (..., 1)  <p, v>
    return probs * (token_value - expected_value)  # (..., V)  p ⊙ C


def update_direction(probs: Tensor, token_ids: Tensor) -> Tensor:
    """Where GRPO moves the logits, up to the factor A, (4): k = onehot(a) - p. (..., V) and (...) -> (..., V)."""
    return torch.nn.functional.one_hot(token_ids, probs.shape[-1]).to(probs.dtype) - probs


def work_dense(logits: Tensor, token_ids: Tensor, reward_grad: Tensor, embedding: Tensor) -> Tensor:
    """Work = force along displacement, (5): d = <g, k>. A·d is the predicted reward gain of GRPO's update here.

    Args:
        logits: (N, V), already divided by the sampling temperature.
        token_ids: (N,) the sampled tokens a_t.
        reward_grad: (N, D) f_t.
        embedding: (V, D) W.
    Returns:
        (N,) d_t, in at least float32.
    """
    dtype = at_least_float32(logits, reward_grad)
    probs = logits.to(dtype).softmax(-1)  # (N, V)
    g = reward_direction(probs, reward_grad.to(dtype), embedding.to(dtype))  # (N, V)
    k = update_direction(probs, token_ids)  # (N, V)
    return (g * k).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Streamed. (5) needs only sums over the vocabulary, and a softmax's sums can be kept relative to a running maximum.


class VocabularySums(NamedTuple):
    """What (5) needs, each (N,). v is counted from the sampled token's own value: v_b - v_a."""

    sampled_prob: Tensor  # p_a
    mean: Tensor  # Σ p v
    weighted: Tensor  # Σ p² v
    weighted_square: Tensor  # Σ p² v²
    collision: Tensor  # Σ p²


def _strips(hidden: Tensor, lm_head: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Walk over the vocabulary: (rows, exp(logits - maximum so far), that maximum, decay of the sums before)."""
    maximum = hidden.new_full((len(hidden),), -torch.inf)  # (N,)
    for start in range(0, len(lm_head), STRIP):
        rows = slice(start, min(start + STRIP, len(lm_head)))
        logits = hidden @ lm_head[rows].to(hidden.dtype).T / temperature  # (N, S)
        before, maximum = maximum, torch.maximum(maximum, logits.amax(-1))
        yield rows, (logits - maximum[:, None]).exp_(), maximum, (before - maximum).exp()


@torch.no_grad()
def vocabulary_sums(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor,
    embedding: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> VocabularySums:
    """One pass over the vocabulary for every `chunk` positions; shapes as in `work`.

    d does not change when a constant is added to v, so v is taken relative to the sampled token: as p_a nears 1 all sums
    then go to 0 together, where v_a - μ would lose its digits.
    """
    size = min(len(lm_head), len(embedding))  # rows behind the shared support are padding
    lm_head, embedding = lm_head[:size], embedding[:size]
    dtype = at_least_float32(hidden, reward_grad)
    parts = []
    for h, a, f in zip(hidden.split(chunk), token_ids.split(chunk), reward_grad.split(chunk), strict=True):
        h, f = h.to(dtype), f.to(dtype)
        own_logit = (h * lm_head[a].to(dtype)).sum(-1) / temperature  # (n,)
        own_value = (f * embedding[a].to(dtype)).sum(-1)  # (n,)  v_a
        z = pv = ppv = ppvv = pp = maximum = h.new_zeros(len(h))
        for rows, e, maximum, decay in _strips(h, lm_head, temperature):
            v = f @ embedding[rows].to(dtype).T - own_value[:, None]  # (n, S)
            z, pp = z * decay + e.sum(-1), pp * decay**2 + e.square().sum(-1)
            pv = pv * decay + v.mul_(e).sum(-1)  # v becomes e v in place: (n, S) buffers are what memory goes to
            ppvv = ppvv * decay**2 + v.square().sum(-1)
            ppv = ppv * decay**2 + v.mul_(e).sum(-1)
        parts.append(((own_logit - maximum).exp() / z, pv / z, ppv / z**2, ppvv / z**2, pp / z**2))
    return VocabularySums(*map(torch.cat, zip(*parts, strict=True)))


def work(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor,
    embedding: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """The same work as `work_dense`, streamed: d = p_a (v_a - μ) - Σ p² v + μ Σ p², with v_a = 0 (see above).

    Args:
        hidden: (N, H) final-normed policy states that predict the tokens.
        lm_head: (V, H) the policy's output matrix; logits are hidden @ lm_headᵀ / temperature.
        token_ids: (N,) the sampled tokens.
        reward_grad: (N, D) f_t.
        embedding: (V, D) W, the reward model's input embeddings.
        temperature: the sampling temperature.
        chunk: positions at a time.
    Returns:
        (N,) d_t, in at least float32, without a graph.
    """
    return work_from(vocabulary_sums(hidden, lm_head, token_ids, reward_grad, embedding, temperature, chunk))


def work_from(s: VocabularySums) -> Tensor:
    """d_t of (5) from its sums, (N,)."""
    return s.mean * (s.collision - s.sampled_prob) - s.weighted


def magnitude_from(s: VocabularySums) -> Tensor:
    """‖g_t‖ ‖k_t‖, (N,): the work if force and displacement were parallel, so how much is at stake without the direction."""
    g = s.weighted_square - 2 * s.mean * s.weighted + s.mean**2 * s.collision
    k = 1 - 2 * s.sampled_prob + s.collision
    return (g.clamp(min=0) * k.clamp(min=0)).sqrt()


def work_on_support(logits: Tensor, own: Tensor, value: Tensor) -> Tensor:
    """(5) with the tokens' values given, on a restricted set of S tokens over which p is renormalised.

    Args:
        logits: (N, S) of the tokens in the set, divided by the temperature.
        own: (N,) where the sampled token stands in the set.
        value: (N, S) v of each; from substituting the tokens one by one it makes the EXACT work, from W f the first-order one.
    Returns:
        (N,) d_t.
    """
    probs = logits.to(value.dtype).softmax(-1)
    g = reward_direction(probs, value, torch.eye(value.shape[-1], dtype=value.dtype, device=value.device))  # v = I v
    return (g * update_direction(probs, own)).sum(-1)


def candidates(logits: Tensor, token_ids: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens to substitute: the policy's top k and the sampled one, last; the whole vocabulary where top_k is 0.

    Args: logits (N, V), token_ids (N,).  Returns: their ids (N, S), where the sampled one stands (N,), their logits (N, S).
    """
    if not top_k or top_k >= logits.shape[-1] - 1:
        return torch.arange(logits.shape[-1], device=logits.device).expand(len(logits), -1), token_ids, logits
    others = logits.scatter(1, token_ids[:, None], -torch.inf)
    ids = torch.cat([others.topk(top_k).indices, token_ids[:, None]], 1)
    return ids, torch.full_like(token_ids, top_k), logits.gather(1, ids)


@torch.no_grad()
def expected_embedding(
    hidden: Tensor, lm_head: Tensor, embedding: Tensor, temperature: float = 1.0, chunk: int = 1024
) -> Tensor:
    """The policy's expected reward-model embedding, (2): ē = Wᵀ p, (N, D) in at least float32; arguments as in `work`."""
    size = min(len(lm_head), len(embedding))
    dtype = at_least_float32(hidden)
    parts = []
    for h in hidden.to(dtype).split(chunk):
        z, total = h.new_zeros(len(h), 1), h.new_zeros(len(h), embedding.shape[1])
        for rows, e, _, decay in _strips(h, lm_head[:size], temperature):
            z = z * decay[:, None] + e.sum(-1, keepdim=True)
            total = total * decay[:, None] + e @ embedding[rows].to(dtype)  # (n, D)
        parts.append(total / z)
    return torch.cat(parts)
