"""How one response's advantage is spread over its tokens.

Holds the allocation (6) and the registry of credit methods. A method is a pure function from `CreditInputs` to `Credit`;
the loop gathers just the evidence that the method names in `needs`, so a method without needs costs nothing.
Left out: where the evidence comes from (datc.py, reward_grad.py) and what is done with the credit (grpo.py).
Equation numbers are the README's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor


class Allocation(NamedTuple):
    weights: Tensor  # (B, T) float64: mean one over each response, 0 outside it
    tau: Tensor  # (B,) float64: the temperature that the band asked for, >= 1


def standardise(work: Tensor, free_mask: Tensor) -> Tensor:
    """Each response's work as a z-score over its free tokens: z_t of (6), (B, T) float64, 0 elsewhere.

    Work is first divided by its largest magnitude, so a reward model whose gradients are 1e-12 or 1e12 gives the same z.
    Without this step raw work (about 1e-3) would make every weight 1 and DATC would silently be GRPO.
    """
    count = free_mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
    d = work.double().masked_fill(~free_mask, 0.0)  # (B, T)
    tiny = torch.finfo(d.dtype).tiny  # 0 / tiny = 0: "no spread" needs no branch
    d = d / d.abs().amax(-1, keepdim=True).clamp(min=tiny)
    deviation = (d - d.sum(-1, keepdim=True) / count).masked_fill(~free_mask, 0.0)
    std = (deviation.square().sum(-1, keepdim=True) / count).sqrt()  # (B, 1)
    floor = 1e-3 * d.abs().sum(-1, keepdim=True) / count  # work that hardly varies should hardly steer
    return deviation / (std + floor).clamp(min=tiny)


def allocate(work: Tensor, advantages: Tensor, response_mask: Tensor, free_mask: Tensor, band: float = 4.0) -> Allocation:
    """Spend each response's update budget where it gains most, (6): softmax(A z / tau), within [1/band, band].

    The band is met by raising tau, never by clipping weights: clipping would break the mean, and with it "Ã keeps A's mean".

    Args:
        work: (B, T) predicted gain d_t of pushing up the sampled token; any unit.
        advantages: (B,) A, standardised within its group. |A| is sharpness: A = 0 gives weights of one.
        response_mask: (B, T) bool, the response's tokens, stop token included.
        free_mask: (B, T) bool, those that compete for credit; the rest of the response keeps weight one.
        band: λ >= 1, the largest weight, and one over the smallest. 1 gives GRPO.
    Raises:
        ValueError: band < 1, shapes that differ, or a number that is not finite.
    """
    if not band >= 1:
        raise ValueError(f"--band is {band}: it is the largest weight and must be at least 1 (1 is plain GRPO).")
    if not work.shape == response_mask.shape == free_mask.shape == (len(advantages), work.shape[-1]):
        raise ValueError(
            f"work {tuple(work.shape)}, response_mask {tuple(response_mask.shape)} and free_mask "
            f"{tuple(free_mask.shape)} must all be (B, T) for advantages {tuple(advantages.shape)} = (B,)."
        )
    free_mask = free_mask & response_mask
    if not (work[free_mask].isfinite().all() and advantages.isfinite().all()):
        raise ValueError("work or an advantage is NaN or infinite: the reward, its gradient or the logits are broken.")
    u = advantages.double()[:, None] * standardise(work, free_mask)  # (B, T)
    count = free_mask.sum(-1, keepdim=True)  # (B, 1)

    def weights_at(tau: Tensor) -> Tensor:  # (B,) -> (B, T); frozen tokens 1, padding 0
        share = torch.softmax((u / tau[:, None]).masked_fill(~free_mask, -torch.inf), -1)
        return torch.where(free_mask, count * share, response_mask.double())  # a row without free tokens is all "where"

    def in_band(tau: Tensor) -> Tensor:  # (B,) bool
        w = weights_at(tau)
        return (((w <= band) & (w >= 1 / band)) | ~free_mask).all(-1)

    high = torch.ones_like(u[:, 0])  # (B,)
    if band == 1:
        return Allocation(response_mask.double(), high)
    while not (done := in_band(high)).all():  # ends for every band > 1: as tau grows all weights tend to 1
        high = torch.where(done, high, 2 * high)
    low = (high / 2).clamp(min=1)
    for _ in range(50):  # both extreme weights are monotone in tau, so bisection finds the smallest tau that fits
        middle = (low + high) / 2
        fits = in_band(middle)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return Allocation(weights_at(high), high)


# ---------------------------------------------------------------------------------------------------------------------
# The registry: what a method may read, what it returns, and how it is found by name.


@dataclass(frozen=True)
class CreditInputs:
    """All that a credit method may read. B responses of T token positions, V shared tokens, D and H wide models.

    The fields after `generator` are None unless the method names them in `needs`.
    """

    response_ids: Tensor  # (B, T)
    response_mask: Tensor  # (B, T) bool: the response, stop token included
    free_mask: Tensor  # (B, T) bool: without stop and whitespace tokens
    advantages: Tensor  # (B,) A of (1)
    rewards: Tensor  # (B,) raw score R of the reward model
    band: float  # λ of (6)
    step: int  # rollout number, from 0
    generator: torch.Generator  # on the CPU, seeded from run seed and step: the only randomness a method may use
    work: Tensor | None = None  # (B, T) d_t of (5)
    work_magnitude: Tensor | None = None  # (B, T) ‖g_t‖ ‖k_t‖
    reward_grad: Tensor | None = None  # (B, T, D) f_t
    token_embedding: Tensor | None = None  # (B, T, D) e_t, in the reward model
    null_embedding: Tensor | None = None  # (D,) the reward model's pad embedding
    prefix_scores: Tensor | None = None  # (B, T+1) R(x, y_<=t), the last one R(x, y)
    entropy: Tensor | None = None  # (B, T) of the policy, in nats
    hidden: Tensor | None = None  # (B, T, H) policy states that predict each token
    sampled_prob: Tensor | None = None  # (B, T) p_t(a_t)
    exact_work: Tensor | None = None  # (B, T) d_t from substituting tokens one by one; very slow
    sharpness: Tensor | None = None  # (B,) what (6) reads in place of A where A has a unit; always given by the loop


@dataclass(frozen=True)
class Credit:
    """What a method returns: Ã_t, and, where it is A times a weight, those weights (logged and saved with samples)."""

    token_advantages: Tensor  # (B, T)
    weights: Tensor | None = None  # (B, T)
    tau: Tensor | None = None  # (B,)


CreditMethod = Callable[[CreditInputs], Credit]
CREDIT: dict[str, CreditMethod] = {}
EVIDENCE = {f.name for f in fields(CreditInputs) if f.default is None} - {"sharpness"} | {"whole_batch"}


def credit_method(name: str, needs: tuple[str, ...] = ()) -> Callable[[CreditMethod], CreditMethod]:
    """Register a credit method under `--credit name`; `needs` names the evidence it reads (fields of CreditInputs).

    "whole_batch" among them asks for one call over all responses of the rollout in place of one per micro-batch.
    Raises ValueError for evidence that does not exist or a name that is taken.
    """
    if unknown := set(needs) - EVIDENCE:
        raise ValueError(f"credit method {name!r} needs {sorted(unknown)}; known evidence: {sorted(EVIDENCE)}")
    if name in CREDIT:
        raise ValueError(f"credit method {name!r} is registered twice")

    def register(method: CreditMethod) -> CreditMethod:
        method.needs = frozenset(needs)
        CREDIT[name] = method
        return method

    return register


def get_credit_method(name: str) -> CreditMethod:
    """The method behind `--credit name`; an unknown name raises ValueError listing the known ones."""
    if name not in CREDIT:
        raise ValueError(f"--credit {name!r} is unknown. Known methods: {', '.join(sorted(CREDIT))}.")
    return CREDIT[name]


def multiplicative(x: CreditInputs, weights: Tensor, tau: Tensor | None = None) -> Credit:
    """Ã_t = A w_t (7). In the dtype of A, so that weights of exactly one give GRPO bit for bit."""
    return Credit((x.advantages[:, None] * weights).to(x.advantages.dtype), weights, tau)


def banded(x: CreditInputs, d: Tensor) -> Credit:
    """DATC's allocation (6) of any evidence d (B, T): sign and mean of A kept, weights within the band."""
    sharpness = x.advantages if x.sharpness is None else x.sharpness
    return multiplicative(x, *allocate(d, sharpness, x.response_mask, x.free_mask, x.band))


def per_response(x: CreditInputs, draw: Callable[[int], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """(mask (T,), draw(T)) of each response in turn: one draw a response, so micro-batches change nothing."""
    for mask in x.response_mask:
        yield mask, draw(len(mask)).to(mask.device)


# ---------------------------------------------------------------------------------------------------------------------
# GRPO, DATC, and DATC's falsifiers. All keep sign and mean of A and the band.


@credit_method("grpo")
def grpo(x: CreditInputs) -> Credit:
    """GRPO: every token of a response gets the response's advantage."""
    return multiplicative(x, x.response_mask.double())


@credit_method("datc", needs=("work",))
def datc(x: CreditInputs) -> Credit:
    """DATC: tokens whose own update gains more reward get a larger share of the advantage, (2)-(6)."""
    return banded(x, x.work)


@credit_method("oracle", needs=("exact_work",))
def oracle(x: CreditInputs) -> Credit:
    """What a perfect gradient would give: DATC with the exact work, one text scored for each of 9 candidates a token. [ours]"""
    return banded(x, x.exact_work)


@credit_method("inverted", needs=("work",))
def inverted(x: CreditInputs) -> Credit:
    """Control: DATC with the sign of the work flipped. If it does not lose to GRPO, the work carries no information."""
    return banded(x, -x.work)


@credit_method("shuffle", needs=("work",))
def shuffle(x: CreditInputs) -> Credit:
    """Control: DATC's own weights in random places of the same response. What it gains over GRPO is not credit."""
    out = banded(x, x.work)
    for row, (mask, noise) in zip(out.weights, per_response(x, lambda n: torch.rand(n, generator=x.generator)), strict=True):
        kept = row[mask]
        row[mask] = kept[noise[mask].argsort()]
    return multiplicative(x, out.weights, out.tau)


@credit_method("norm_product", needs=("work_magnitude",))
def norm_product(x: CreditInputs) -> Credit:
    """Control: ‖g_t‖ ‖k_t‖ in place of <g_t, k_t>, the magnitude without the direction. [dev]"""
    return banded(x, x.work_magnitude)


@credit_method("random_direction")
def random_direction(x: CreditInputs) -> Credit:
    """Control: d_t ~ N(0, 1) through the same allocation. [dev]"""
    noise = [n for _, n in per_response(x, lambda n: torch.randn(n, generator=x.generator))]
    return banded(x, torch.stack(noise))


# ---------------------------------------------------------------------------------------------------------------------
# What the paper compares with. The additive ones can turn A's sign: RED keeps its mean, P2T not even that.


@credit_method("p2t", needs=("reward_grad", "token_embedding", "null_embedding"))
def p2t(x: CreditInputs, omega: float = 0.6, alpha: float = 0.1) -> Credit:
    """P2T (Wu et al., CVPR 2026) as DATC's comparison runs it: r_t = R + ω R softmax_t(<f_t, e_t - e_null>), Ã_t = A + α r_t.

    e_null is the reward model's pad embedding; α is 0.1 for short answers. R is raw, so a negative R pulls every token of
    the response down, and turns A > 0 where A < α |R| (1 + ω share). P2T's own optimiser is not reproduced.
    """
    evidence = (x.reward_grad * (x.token_embedding - x.null_embedding)).sum(-1)  # (B, T)
    share = evidence.masked_fill(~x.response_mask, -torch.inf).softmax(-1)
    reward = x.rewards[:, None] * (1 + omega * share)
    return Credit(((x.advantages[:, None] + alpha * reward) * x.response_mask).to(x.advantages.dtype))


@credit_method("p2t_long", needs=tuple(p2t.needs))
def p2t_long(x: CreditInputs) -> Credit:
    """P2T with the α of the comparison's long answers, 1.0."""
    return p2t(x, alpha=1.0)


def reward_differences(x: CreditInputs) -> Tensor:
    """r̃_t = R(x, y_<=t) - R(x, y_<t), (B, T): the reward model read after every token, in one forward; 0 on padding."""
    return x.prefix_scores.diff(dim=-1)


@credit_method("red", needs=("prefix_scores",))
def red(x: CreditInputs) -> Credit:
    """RED (Li et al., EMNLP 2025, arXiv 2411.08302) as DATC's comparison runs it: Ã_t = A + r̃_t - mean r̃, r̃ unclipped. [dev]

    Its arm takes A from `--advantage rloo`. RED's own paper uses r̃_t as the token reward of PPO, with a value model.
    """
    r = reward_differences(x)
    mean = r.sum(-1, keepdim=True) / x.response_mask.sum(-1, keepdim=True)
    return Credit(((x.advantages[:, None] + r - mean) * x.response_mask).to(x.advantages.dtype))


@credit_method("red_band", needs=("prefix_scores",))
def red_band(x: CreditInputs) -> Credit:
    """RED's evidence in DATC's allocation, d_t := r̃_t: what DATC gains over it, the gradient has earned. [ours]"""
    return banded(x, reward_differences(x))


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours that look at the policy alone.


@credit_method("entropy", needs=("entropy", "whole_batch"))
def entropy(x: CreditInputs, share: float = 0.2) -> Credit:
    """Only the 20% of the batch's tokens with the highest entropy learn (Wang et al. 2025, arXiv 2506.01939).

    The loss becomes Σ over the chosen / their number; (7) divides by B T_i, so A is multiplied by B T_i / number. Signs
    hold on the chosen; the mean over a response does not.
    """
    values = x.entropy[x.response_mask]
    chosen = x.response_mask & (x.entropy >= values.topk(max(1, round(share * len(values)))).values.min())
    lengths = x.response_mask.sum(-1, keepdim=True)
    return multiplicative(x, chosen * (len(lengths) * lengths / chosen.sum()).double())


@credit_method("delta", needs=("hidden", "sampled_prob", "whole_batch"))
def delta(x: CreditInputs) -> Credit:
    """DelTA (arXiv 2605.21467): tokens whose gradient is typical of their side, and not of the other, weigh a little more.

    v_t = (1 - p_t(a)) h_t, the gradient of log p_t(a) in the sampled token's own row of lm_head;
    μ± = Σ max(±A, 0) v / Σ max(±A, 0); margin = ‖v - μ∓‖² - ‖v - μ±‖²; w = 0.8 + 0.4 sigmoid(margin / γ), γ the std of the
    side's margins; then mean one over the batch's tokens. Signs hold, w stays within [2/3, 3/2], a response's mean does not
    hold. Reconstructed from these formulas.
    """
    mask = x.response_mask
    v = ((1 - x.sampled_prob)[..., None] * x.hidden)[mask]  # (N, H)
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    a = x.advantages[:, None].expand_as(mask)[mask].to(v.dtype)  # (N,)
    tiny = torch.finfo(a.dtype).tiny
    plus, minus = ((side[:, None] * v).sum(0) / side.sum().clamp(min=tiny) for side in (a.clamp(min=0), (-a).clamp(min=0)))
    margin = 2 * v @ (plus - minus) + minus.square().sum() - plus.square().sum()  # (N,) ‖v - μ-‖² - ‖v - μ+‖²
    margin, w = margin.double(), torch.ones_like(a, dtype=torch.double)  # A = 0 belongs to no side
    for side in (a > 0, a < 0):
        own = margin[side] * a[side].sign()
        if len(own):
            w[side] = 0.8 + 0.4 * torch.sigmoid(own / own.std(correction=0).clamp(min=tiny))
    return multiplicative(x, torch.zeros(mask.shape, dtype=w.dtype, device=w.device).masked_scatter(mask, w / w.mean()))
