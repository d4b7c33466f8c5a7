"""GRPO around a neural reward: normalise each group's rewards (1), and take the clipped step (7).

Holds the advantages, the policy's hidden states and token log-probs, and the loss. Left out:
sampling (machinery/rollout.py), rewards (reward_grad.py), credit (credit.py), the loop (train.py).
Equation numbers are the README's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from datc import STRIP, at_least_float32
from machinery.rollout import Rollout, unwrap

# ----------------------------------------------------------------------------------------------
# The advantage of a response.


def group_advantages(rewards: Tensor, group_size: int, std_floor: float = 0.0) -> Tensor:
    """A of (1): rewards standardised within each prompt's group, calculated in float64.

    Args:
        rewards: (B,), groups contiguous.
        group_size: G >= 2 responses per prompt.
        std_floor: smallest population standard deviation to divide by; 0 = none.
    Returns:
        (B,) in the dtype of the rewards. A group that ties to 1e-5 relative gets exactly 0: its
        spread is rounding, and dividing by it would turn rounding into an update.
    """
    if group_size < 2:
        raise ValueError(
            f"--group_size is {group_size}: one response has no group to be compared with; "
            "use 2 or more."
        )
    groups = rewards.double().view(-1, group_size)  # (B/G, G)
    spread = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)  # (B/G, 1)
    ties = spread <= tolerance(groups)
    std = groups.std(-1, correction=0, keepdim=True).clamp(min=std_floor)
    advantages = (groups - groups.mean(-1, keepdim=True)) / std.masked_fill(ties, 1.0)
    return advantages.masked_fill(ties, 0.0).flatten().to(rewards.dtype)


def tolerance(groups: Tensor) -> Tensor:
    """The difference up to which rewards of a group tie: 1e-5 relative, (B/G, G) -> (B/G, 1)."""
    return 1e-5 * groups.abs().amax(-1, keepdim=True).clamp(min=1.0)


def response_advantages(
    estimator: str,
    rewards: Tensor,
    lengths: Tensor,
    group_size: int,
    max_length: int,
    std_floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A by `--advantage`, and the sharpness that the allocation (6) reads in place of A; both (B,).

    grpo: (1), R standardised in its group.
    rank_normal: Φ⁻¹((rank - ½) / G), ties averaged: blind to the reward's scale.
    rloo: R minus the mean of the others.
    dr_grpo: R minus the mean, times T_i / T_max, which turns the per-response token mean of (7)
    into a sum over one fixed length.

    The sharpness is A itself, except for rloo and dr_grpo, whose A has the reward's unit: there it
    is R minus the group's mean, over its root mean square in the batch.

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
    ties = (standard.view_as(groups) == 0).all(-1, keepdim=True)  # (B/G, 1)
    if estimator == "rank_normal":
        normal = rank_normal(groups).masked_fill(ties, 0.0).flatten().to(rewards.dtype)
        return normal, normal
    centred = groups - groups.mean(-1, keepdim=True)
    centred = centred.masked_fill(ties, 0.0).flatten()  # (B,)
    tiny = torch.finfo(centred.dtype).tiny
    sharpness = centred / centred.square().mean().sqrt().clamp(min=tiny)
    if estimator == "rloo":
        advantages = centred * group_size / (group_size - 1)
    elif estimator == "dr_grpo":
        advantages = centred * lengths / max_length
    else:
        raise ValueError(f"--advantage {estimator!r} is unknown.")
    return advantages.to(rewards.dtype), sharpness.to(rewards.dtype)


def rank_normal(groups: Tensor) -> Tensor:
    """The normal score of each reward's rank in its group, (B/G, G) -> (B/G, G)."""
    ahead = groups[..., None] - groups[:, None]  # (B/G, G, G)
    near = ahead.abs() <= tolerance(groups)[..., None]
    below = ((ahead > 0) & ~near).sum(-1)
    middle_rank = below + 0.5 * near.sum(-1)  # rank - 1/2, with ties at their average rank
    return torch.special.ndtri(middle_rank / groups.shape[-1])


def length_window(lengths: Tensor, sigma: float) -> Tensor:
    """Soft penalty on answers under 8 and over 1,024 tokens, (B,) -> (B,). [dev]

    In the reward's units: `sigma` is σ0, the spread of rewards that the run started with.
    """
    short = ((8 - lengths) / 8).clamp(0, 1)
    long = ((lengths - 1024) / 1024).clamp(0, 1)
    return sigma * (0.5 * short + 2.0 * long)


# ----------------------------------------------------------------------------------------------
# What the policy thinks of a rollout.


def response_hidden(policy: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Final-normed states that predict each response token, positions P-1 ... P+T-2: (B, T, H).

    One forward serves credit and loss. It goes through a LoRA wrapper to the bare backbone, so
    that (B, T, V) logits are never made. Position ids count the mask, so left padding changes
    nothing.
    """
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)[:, :-1]  # (B, P+T-1)
    mask = torch.cat([rollout.prompt_mask, rollout.response_mask], 1)[:, :-1].long()
    out = unwrap(policy).base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
    )
    return out.last_hidden_state[:, rollout.prompt_ids.shape[1] - 1 :]


def token_logprobs(
    hidden: Tensor, lm_head: Tensor, token_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(a) and the entropy of softmax(hidden @ lm_headᵀ / temperature), never holding (N, V).

    The vocabulary is walked in strips, each recomputed in backward, in at least float32.

    Args:
        hidden: (N, H); gradients flow into it.
        lm_head: (V, H), rows of the shared vocabulary only; gradients flow where it is trained.
        token_ids: (N,)
        temperature: the sampling temperature: the loss is about what was sampled from.
    Returns:
        logp (N,) with a graph, entropy (N,) in nats without one.
    """
    dtype = at_least_float32(hidden)
    hidden = hidden.to(dtype)

    def strip(hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(N, H), (S, H) -> logsumexp of the strip's logits (N,), and their mean under softmax."""
        logits = hidden @ rows.to(dtype).T / temperature  # (N, S)
        with torch.no_grad():
            mean_logit = (logits.softmax(-1) * logits).sum(-1)
        return logits.logsumexp(-1), mean_logit

    logsumexps = []
    mean_logits = []
    for rows in lm_head.split(STRIP):
        logsumexp, mean_logit = checkpoint(strip, hidden, rows, use_reentrant=False)
        logsumexps.append(logsumexp)
        mean_logits.append(mean_logit)
    logsumexps = torch.stack(logsumexps, -1)  # (N, strips)
    mean_logits = torch.stack(mean_logits, -1)  # (N, strips)
    log_z = logsumexps.logsumexp(-1)  # (N,)
    entropy = log_z - ((logsumexps - log_z[:, None]).exp() * mean_logits).sum(-1)
    # Indexing lm_head would add up its gradient in no fixed order; F.embedding has one.
    sampled_row = F.embedding(token_ids, lm_head).to(dtype)  # (N, H)
    sampled_logit = (hidden * sampled_row).sum(-1) / temperature
    return sampled_logit - log_z, entropy.detach()


# ----------------------------------------------------------------------------------------------
# The loss.


def response_mean(values: Tensor, mask: Tensor, num_responses: int) -> Tensor:
    """(1/B) Σ_i (1/T_i) Σ_t over the responses given, (B, T) -> scalar.

    B is `num_responses` of the whole step. It and T_i are known before the first micro-batch, so
    micro-batches of any size add up to the same number.
    """
    lengths = mask.sum(-1).clamp(min=1)  # (B,)
    return (values.masked_fill(~mask, 0.0).sum(-1) / lengths).sum() / num_responses


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    token_advantages: Tensor,
    mask: Tensor,
    epsilon: float,
    num_responses: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J of (7): the clipped policy-gradient loss with one advantage per token, without the KL.

    With one optimizer step per rollout old_logp = logp, so the ratio is exactly 1, nothing clips,
    and the loss is near 0 (GRPO's advantages sum to 0 in a group) while its gradient is not.

    Args:
        logp, old_logp, token_advantages: (B, T); only logp has a graph.
        mask: (B, T) bool response_mask.
        epsilon: clip range.
        num_responses: B of the whole step.
    Returns:
        loss, and stats as shares of the step that add up over micro-batches:
        "clip_ratio/region_mean".
    """
    ratio = (logp - old_logp).exp()  # (B, T)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    gain = torch.minimum(ratio * token_advantages, clipped * token_advantages)
    with torch.no_grad():
        too_low = (ratio < 1 - epsilon) & (token_advantages < 0)
        too_high = (ratio > 1 + epsilon) & (token_advantages > 0)
        share = response_mean((too_low | too_high).to(logp.dtype), mask, num_responses)
    return -response_mean(gain, mask, num_responses), {"clip_ratio/region_mean": share}


def k3_kl(logp: Tensor, reference_logp: Tensor, mask: Tensor, num_responses: int) -> Tensor:
    """KL to the reference policy by the k3 estimate exp(r - l) - (r - l) - 1, averaged like J."""
    log_ratio = (reference_logp - logp).masked_fill(~mask, 0.0)  # padding must not overflow exp
    return response_mean(log_ratio.exp() - log_ratio - 1, mask, num_responses)
