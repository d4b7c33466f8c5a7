"""Other people's credit methods, through the same loop: only the function behind --credit differs.

The additive ones can turn A's sign: RED keeps its mean, P2T not even that. What is exact and what
is reconstructed, each docstring says. Importing this module registers its methods.
"""

import torch
from torch import Tensor

from credit import Credit, CreditInputs, banded, credit_method, multiplicative


@credit_method("p2t", needs=("reward_grad",))
def p2t(x: CreditInputs, omega: float = 0.6, alpha: float = 0.1) -> Credit:
    """P2T (Wu et al., CVPR 2026) as DATC's comparison runs it, reconstructed.

    r_t = R + ω R softmax_t(<f_t, e_t - e_null>) and Ã_t = A + α r_t, with e_null the reward model's
    pad embedding and α = 0.1 for short answers. R is raw, so a negative R pulls every token of the
    response down, and turns A > 0 where A < α |R| (1 + ω share). P2T's own optimiser is left out.
    """
    evidence = (x.reward_grad * (x.token_embedding - x.null_embedding)).sum(-1)  # (B, T)
    share = evidence.masked_fill(~x.response_mask, -torch.inf).softmax(-1)  # (B, T)
    amount = alpha * (x.rewards[:, None] * (1 + omega * share))  # (B, T)
    token_advantages = (x.advantages[:, None] + amount) * x.response_mask
    return Credit(token_advantages.to(x.advantages.dtype))


@credit_method("p2t_long", needs=("reward_grad",))
def p2t_long(x: CreditInputs) -> Credit:
    """P2T with the α of the comparison's long answers, 1.0."""
    return p2t(x, alpha=1.0)


def reward_differences(x: CreditInputs) -> Tensor:
    """r̃_t = R(x, y_<=t) - R(x, y_<t), (B, T), 0 on padding: R read after every token."""
    return x.prefix_scores.diff(dim=-1)


@credit_method("red")
def red(x: CreditInputs) -> Credit:
    """RED (Li et al., EMNLP 2025, arXiv 2411.08302) as DATC's comparison runs it. [dev]

    Ã_t = A + r̃_t - mean r̃, unclipped; the comparison's arm takes A from `--advantage rloo`. RED's
    own paper uses r̃_t as the token reward of PPO, with a value model.
    """
    r = reward_differences(x)  # (B, T)
    mean = r.sum(-1, keepdim=True) / x.response_mask.sum(-1, keepdim=True)  # (B, 1)
    token_advantages = (x.advantages[:, None] + r - mean) * x.response_mask
    return Credit(token_advantages.to(x.advantages.dtype))


@credit_method("red_band")
def red_band(x: CreditInputs) -> Credit:
    """RED's evidence in DATC's allocation: what DATC gains over it, the gradient earns. [ours]"""
    return banded(x, reward_differences(x))


@credit_method("entropy", needs=("whole_batch",))
def entropy(x: CreditInputs, share: float = 0.2) -> Credit:
    """Only the batch's 20% of tokens with the highest entropy learn (Wang et al., 2506.01939).

    The loss becomes Σ over the chosen / their number; (7) divides by B T_i, so A is multiplied by
    B T_i / number. Signs hold on the chosen; the mean over a response does not. Exact.
    """
    values = x.entropy[x.response_mask]  # (N,)
    count = max(1, round(share * len(values)))
    lowest = values.topk(count).values.min()
    chosen = x.response_mask & (x.entropy >= lowest)  # (B, T)
    lengths = x.response_mask.sum(-1, keepdim=True)  # (B, 1)
    return multiplicative(x, chosen * (len(lengths) * lengths / chosen.sum()).double())


@credit_method("delta", needs=("whole_batch",))
def delta(x: CreditInputs) -> Credit:
    """DelTA (arXiv 2605.21467): tokens whose gradient is typical of their own side weigh more.

    v_t = (1 - p_t(a)) h_t is the gradient of log p_t(a) in the sampled token's row of lm_head;
    μ± = Σ max(±A, 0) v / Σ max(±A, 0); margin = ‖v - μ∓‖² - ‖v - μ±‖²;
    w = 0.8 + 0.4 sigmoid(margin / γ), γ the standard deviation of the side's margins; then mean
    one over the batch's tokens. Signs hold and w stays within [2/3, 3/2]; a response's mean does
    not hold. Reconstructed from these formulas.
    """
    mask = x.response_mask
    v = ((1 - x.sampled_prob)[..., None] * x.hidden)[mask]  # (N, H)
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    a = x.advantages[:, None].expand_as(mask)[mask].to(v.dtype)  # (N,)
    plus = weighted_mean(v, a.clamp(min=0))  # (H,)  μ+
    minus = weighted_mean(v, (-a).clamp(min=0))  # (H,)  μ-
    # ‖v - μ-‖² - ‖v - μ+‖², without the (N, H) differences.
    margin = 2 * v @ (plus - minus) + minus.square().sum() - plus.square().sum()  # (N,)
    margin = margin.double()
    w = torch.ones_like(margin)  # A = 0 belongs to no side
    for side in (a > 0, a < 0):
        if side.any():
            towards = margin[side] * a[side].sign()
            gamma = towards.std(correction=0).clamp(min=torch.finfo(a.dtype).tiny)
            w[side] = 0.8 + 0.4 * torch.sigmoid(towards / gamma)
    weights = torch.zeros(mask.shape, dtype=w.dtype, device=w.device)
    return multiplicative(x, weights.masked_scatter(mask, w / w.mean()))


def weighted_mean(vectors: Tensor, weights: Tensor) -> Tensor:
    """(N, H) and (N,) -> (H,); 0 where all weights are."""
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return (weights[:, None] * vectors).sum(0) / total
