"""DATC's derivation, (2) to (5): how much reward does a token's own update gain?

First as printed, on the whole vocabulary; then the same sums over strips of the vocabulary, which
is what the loop calls: a (N, V) matrix of 152k columns is never held. Positions are flat here: N
tokens of any responses. Left out: where the reward gradient comes from (reward_grad.py) and how
work becomes weights (credit.py). Equation numbers are the README's.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

STRIP = 8192  # vocabulary rows that are upcast and multiplied at a time: 128 MiB at width 4,096


# ----------------------------------------------------------------------------------------------
# As printed.


def token_value(reward_grad: Tensor, embedding: Tensor) -> Tensor:
    """(2): v = W f, the first-order reward of placing each token here, up to a constant.

    Args:
        reward_grad: (..., D) f_t, the reward's gradient at the sampled token's embedding.
        embedding: (V, D) W, the reward model's input embeddings.
    Returns:
        (..., V) v_t. The relaxed embedding is Wᵀ p_t, so v_t is also ∂R/∂p_t.
    """
    return reward_grad @ embedding.T


def reward_direction(probs: Tensor, token_value: Tensor) -> Tensor:
    """(3): g = (diag(p) - p pᵀ) v = p ⊙ (v - <p, v>), the reward's gradient in the logits.

    Args:
        probs: (..., V) policy probabilities p_t.
        token_value: (..., V) v_t.
    Returns:
        (..., V) g_t. It sums to 0: adding a constant to all logits changes no probability.
    """
    expected_value = (probs * token_value).sum(-1, keepdim=True)  # (..., 1)  μ = <p, v>
    return probs * (token_value - expected_value)


def update_direction(probs: Tensor, token_ids: Tensor) -> Tensor:
    """(4): k = onehot(a) - p, where GRPO moves the logits, up to the factor A.

    Args:
        probs: (..., V) policy probabilities p_t.
        token_ids: (...) the sampled tokens a_t.
    Returns:
        (..., V) k_t, the gradient of log p_t(a_t).
    """
    return F.one_hot(token_ids, probs.shape[-1]).to(probs.dtype) - probs


def work_dense(logits: Tensor, token_ids: Tensor, reward_grad: Tensor, embedding: Tensor) -> Tensor:
    """(5): d = <g, k>, force along displacement. A·d is the predicted gain of GRPO's update here.

    Args:
        logits: (N, V), already divided by the sampling temperature.
        token_ids: (N,) the sampled tokens a_t.
        reward_grad: (N, D) f_t.
        embedding: (V, D) W.
    Returns:
        (N,) d_t, in at least float32.
    """
    dtype = at_least_float32(logits, reward_grad)
    value = token_value(reward_grad.to(dtype), embedding.to(dtype))  # (N, V)
    return work_on_support(logits.to(dtype), token_ids, value)


def work_on_support(logits: Tensor, sampled: Tensor, value: Tensor) -> Tensor:
    """(5) on S tokens with given values, p renormalised over them.

    The values may come from W f, from substituting the tokens one by one (then d is exact), or
    from anything else that says what a token would be worth here.

    Args:
        logits: (N, S) of the tokens in the set, divided by the temperature; -inf = not in it.
        sampled: (N,) where the sampled token stands in the set.
        value: (N, S) v of each.
    Returns:
        (N,) d_t in the dtype of the values.
    """
    probs = logits.to(value.dtype).softmax(-1)  # (N, S)
    g = reward_direction(probs, value)  # (N, S)
    k = update_direction(probs, sampled)  # (N, S)
    return (g * k).sum(-1)


# ----------------------------------------------------------------------------------------------
# The same sums over strips of the vocabulary. With k written out, (5) is
#
#     d = <g, k> = p_a (v_a - μ) - Σ p² v + μ Σ p²,      μ = Σ p v,
#
# so three sums over the vocabulary are enough. The loss has just computed log p(a) = ℓ_a - log Z;
# from it log Z is known, and p = exp(ℓ - log Z) in every strip. d does not change when a constant
# is added to v, so v is counted from the sampled token's own value: v_a = 0. As p_a nears 1 all
# sums then go to 0 together, where v_a - μ would lose its digits.


@torch.no_grad()
def work(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor,
    embedding: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    logp: Tensor | None = None,
) -> Tensor:
    """(5) as `work_dense` has it, without ever holding (N, V).

    Args:
        hidden: (N, H) final-normed policy states that predict the tokens.
        lm_head: (V, H) the policy's output matrix; logits are hidden @ lm_headᵀ / temperature.
        token_ids: (N,) the sampled tokens.
        reward_grad: (N, D) f_t.
        embedding: (V, D) W, the reward model's input embeddings.
        temperature: the sampling temperature.
        chunk: positions at a time.
        logp: (N,) log p(a) where it is known already; it saves a pass over the vocabulary.
    Returns:
        (N,) d_t, in at least float32, without a graph.
    """
    chunks = _chunks(hidden, lm_head, token_ids, reward_grad, embedding, temperature, chunk, logp)
    found = []
    for lp, strips in chunks:
        mean = collision = weighted = 0.0
        for p, v in strips:  # (n, S) each, v counted from the sampled token's: v_a = 0
            mean = mean + (p * v).sum(-1)  # (n,)  μ = Σ p v
            weighted = weighted + (p * p * v).sum(-1)  # (n,)  Σ p² v
            collision = collision + (p * p).sum(-1)  # (n,)  Σ p²
        found.append(lp.exp() * (0 - mean) - weighted + mean * collision)  # (n,)  (5), v_a = 0
    return torch.cat(found)


@torch.no_grad()
def work_magnitude(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor,
    embedding: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    logp: Tensor | None = None,
) -> Tensor:
    """‖g_t‖ ‖k_t‖, (N,): what is at stake at a token, whatever the direction. As `work`."""
    chunks = _chunks(hidden, lm_head, token_ids, reward_grad, embedding, temperature, chunk, logp)
    found = []
    for lp, strips in chunks:
        mean = collision = weighted = squared = 0.0
        for p, v in strips:  # (n, S) each
            mean = mean + (p * v).sum(-1)
            weighted = weighted + (p * p * v).sum(-1)
            squared = squared + (p * v).square().sum(-1)  # (n,)  Σ p² v²
            collision = collision + (p * p).sum(-1)
        force = squared - 2 * mean * weighted + mean**2 * collision  # (n,)  ‖g‖²
        displacement = 1 - 2 * lp.exp() + collision  # (n,)  ‖k‖²
        found.append((force.clamp(min=0) * displacement.clamp(min=0)).sqrt())
    return torch.cat(found)


@torch.no_grad()
def expected_embedding(
    hidden: Tensor,
    lm_head: Tensor,
    embedding: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """(2): ē = Wᵀ p, the policy's expected reward-model embedding, (N, D); arguments as `work`."""
    size = min(len(lm_head), len(embedding))
    found = []
    for h in hidden.to(at_least_float32(hidden)).split(chunk):
        log_z = log_normaliser(h, lm_head[:size], temperature)  # (n,)
        expected = 0.0
        for rows, logits in _logit_strips(h, lm_head[:size], temperature):
            p = (logits - log_z[:, None]).exp()  # (n, S)
            expected = expected + p @ embedding[rows].to(p.dtype)  # (n, D)
        found.append(expected)
    return torch.cat(found)


def log_prob(hidden: Tensor, lm_head: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """log p(a) of the sampled tokens, (N,), where the loss has not computed it."""
    hidden = hidden.to(at_least_float32(hidden))
    log_z = log_normaliser(hidden, lm_head, temperature)
    return _sampled_logit(hidden, lm_head, token_ids, temperature) - log_z


def log_normaliser(hidden: Tensor, lm_head: Tensor, temperature: float) -> Tensor:
    """log Z = logsumexp of the logits, (N, H) and (V, H) -> (N,), over strips."""
    strips = [logits.logsumexp(-1) for _, logits in _logit_strips(hidden, lm_head, temperature)]
    return torch.stack(strips).logsumexp(0)


def _sampled_logit(
    hidden: Tensor, lm_head: Tensor, token_ids: Tensor, temperature: float
) -> Tensor:
    return (hidden * lm_head[token_ids].to(hidden.dtype)).sum(-1) / temperature  # (N,)


def _logit_strips(
    hidden: Tensor, lm_head: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Walk over the vocabulary: the rows of a strip, and the logits (N, S) there."""
    for start in range(0, len(lm_head), STRIP):
        rows = slice(start, min(start + STRIP, len(lm_head)))
        yield rows, hidden @ lm_head[rows].to(hidden.dtype).T / temperature


def _strips(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor,
    embedding: Tensor,
    temperature: float,
    logp: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over the vocabulary: p and v - v_a, (n, S) each, of the tokens of a strip."""
    dtype = at_least_float32(hidden, reward_grad)
    hidden = hidden.to(dtype)
    reward_grad = reward_grad.to(dtype)
    log_z = _sampled_logit(hidden, lm_head, token_ids, temperature) - logp  # (n,)
    sampled_value = (reward_grad * embedding[token_ids].to(dtype)).sum(-1)  # (n,)  v_a
    for rows, logits in _logit_strips(hidden, lm_head, temperature):
        value = token_value(reward_grad, embedding[rows].to(dtype))  # (n, S)
        yield (logits - log_z[:, None]).exp(), value - sampled_value[:, None]


def _chunks(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor,
    embedding: Tensor,
    temperature: float,
    chunk: int,
    logp: Tensor | None,
) -> Iterator[tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]]:
    """For at most `chunk` positions at a time: log p(a), (n,), and the strips of p and v - v_a."""
    size = min(len(lm_head), len(embedding))  # rows behind the shared support are padding
    lm_head = lm_head[:size]
    embedding = embedding[:size]
    if logp is None:
        logp = log_prob(hidden, lm_head, token_ids, temperature)
    split = [t.split(chunk) for t in (hidden, token_ids, reward_grad, logp)]
    for h, a, f, lp in zip(*split, strict=True):
        yield lp, _strips(h, lm_head, a, f, embedding, temperature, lp)


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The dtype to calculate in: float32, or float64 where a tensor already is."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


# ----------------------------------------------------------------------------------------------
# Which tokens to try, where the whole vocabulary is too much.


def candidates(logits: Tensor, token_ids: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's top k other tokens and the sampled one, last; all tokens where top_k is 0.

    Args:
        logits: (N, V), token_ids: (N,).
    Returns:
        ids (N, S) of the tokens, where the sampled one stands among them (N,), logits (N, S).
    """
    size = logits.shape[-1]
    if not top_k or top_k >= size - 1:
        everything = torch.arange(size, device=logits.device).expand(len(logits), -1)
        return everything, token_ids, logits
    others = logits.scatter(1, token_ids[:, None], -torch.inf)
    ids = torch.cat([others.topk(top_k).indices, token_ids[:, None]], 1)
    return ids, torch.full_like(token_ids, top_k), logits.gather(1, ids)
