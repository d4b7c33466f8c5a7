"""How one response's advantage is spread over its tokens.

Holds the allocation (6), what a credit method may read and returns, and the methods of the paper:
GRPO, DATC and DATC's controls. A method is a pure function from `CreditInputs` to `Credit`.
Evidence is found when a method first reads it, so a method that reads none costs nothing. Left
out: the derivation of the work (datc.py), the reward's gradient (reward_grad.py), other people's
methods (baselines.py), what is done with the credit (grpo.py). Equation numbers are the README's.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import branch as branching
import datc as derivation
from machinery.rollout import Rollout, to_padded

# ----------------------------------------------------------------------------------------------
# (6) The allocation.


class Allocation(NamedTuple):
    weights: Tensor  # (B, T) float64: mean one over each response, 0 outside it
    tau: Tensor  # (B,) float64: the temperature that the band asked for, >= 1


def allocate(
    work: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    free_mask: Tensor,
    band: float = 4.0,
) -> Allocation:
    """(6): spend each response's update budget where it gains most, within [1/band, band].

    The band is met by raising τ, never by clipping weights: clipping would break the mean, and
    with it "Ã keeps A's mean".

    Args:
        work: (B, T) predicted gain d_t of pushing up the sampled token; any unit.
        advantages: (B,) A without a unit. The larger |A|, the sharper; A = 0 gives ones.
        response_mask: (B, T) bool, the response's tokens, stop token included.
        free_mask: (B, T) bool, those that compete for credit; the others keep weight one.
        band: λ >= 1, the largest weight, and one over the smallest. 1 gives GRPO.
    Raises:
        ValueError: band < 1, shapes that differ, or a number that is not finite.
    """
    free_mask = free_mask & response_mask
    check_allocation(work, advantages, response_mask, free_mask, band)
    if band == 1:
        return Allocation(response_mask.double(), torch.ones_like(advantages.double()))
    u = advantages.double()[:, None] * standardise(work, free_mask)  # (B, T)
    tau = smallest_tau(u, free_mask, band)  # (B,)
    return Allocation(weights_at(tau, u, response_mask, free_mask), tau)


def standardise(work: Tensor, free_mask: Tensor) -> Tensor:
    """z_t of (6): each response's work as a z-score over its free tokens, (B, T), 0 elsewhere.

    Work is first divided by its largest magnitude, so a reward model whose gradients are 1e-12 or
    1e12 gives the same z. Without this step raw work (about 1e-3) would make every weight 1, and
    DATC would silently be GRPO. The small floor keeps work that hardly varies from steering much.
    """
    count = free_mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
    d = work.double().masked_fill(~free_mask, 0.0)  # (B, T)
    tiny = torch.finfo(d.dtype).tiny  # 0 / tiny = 0, so "nothing varies" needs no branch
    d = d / d.abs().amax(-1, keepdim=True).clamp(min=tiny)
    mean = d.sum(-1, keepdim=True) / count  # (B, 1)
    deviation = (d - mean).masked_fill(~free_mask, 0.0)  # (B, T)
    std = (deviation.square().sum(-1, keepdim=True) / count).sqrt()  # (B, 1)
    floor = 1e-3 * d.abs().sum(-1, keepdim=True) / count  # (B, 1)
    return deviation / (std + floor).clamp(min=tiny)


def weights_at(tau: Tensor, u: Tensor, response_mask: Tensor, free_mask: Tensor) -> Tensor:
    """w = N softmax(u / τ) on the N free tokens, 1 on frozen ones, 0 on padding: (B, T)."""
    count = free_mask.sum(-1, keepdim=True)  # (B, 1)
    share = torch.softmax((u / tau[:, None]).masked_fill(~free_mask, -torch.inf), -1)  # (B, T)
    return torch.where(free_mask, count * share, response_mask.double())


def smallest_tau(u: Tensor, free_mask: Tensor, band: float) -> Tensor:
    """The smallest τ >= 1 that keeps every free token's weight within [1/band, band], (B,).

    τ = (max u - min u) / ln band always does: then max w / min w = band, and since the weights'
    mean is 1, min w <= 1 <= max w, so max w <= band · 1 and min w >= 1 / band. Both extreme
    weights move towards 1 as τ grows, so bisection between 1 and it finds the smallest.
    """
    highest = u.masked_fill(~free_mask, -torch.inf).amax(-1)  # (B,)
    lowest = u.masked_fill(~free_mask, torch.inf).amin(-1)  # (B,)

    def fits(tau: Tensor) -> Tensor:  # (B,) -> (B,) bool
        w = weights_at(tau, u, free_mask, free_mask)
        return (((w <= band) & (w >= 1 / band)) | ~free_mask).all(-1)

    low = torch.ones_like(highest)
    high = ((highest - lowest) / math.log(band)).clamp(min=1.0)
    high = torch.where(fits(low), low, high)
    for _ in range(50):
        middle = (low + high) / 2
        fit = fits(middle)
        low = torch.where(fit, low, middle)
        high = torch.where(fit, middle, high)
    return high


def check_allocation(
    work: Tensor, advantages: Tensor, response_mask: Tensor, free_mask: Tensor, band: float
) -> None:
    """Raise ValueError for what would break the allocation without a word."""
    if not band >= 1:
        raise ValueError(
            f"--band is {band}: it is the largest weight and must be at least 1 (1 is plain GRPO)."
        )
    expected = (len(advantages), work.shape[-1])
    if not work.shape == response_mask.shape == free_mask.shape == expected:
        raise ValueError(
            f"work {tuple(work.shape)}, response_mask {tuple(response_mask.shape)} and free_mask "
            f"{tuple(free_mask.shape)} must all be (B, T) for advantages "
            f"{tuple(advantages.shape)} = (B,)."
        )
    if not (work[free_mask].isfinite().all() and advantages.isfinite().all()):
        raise ValueError(
            "work or an advantage is NaN or infinite: "
            "the reward, its gradient or the logits are broken."
        )


# ----------------------------------------------------------------------------------------------
# What a method may read.


@dataclass(frozen=True)
class Source:
    """Where evidence comes from: the policy's forward that the loss needs anyway, and the models.

    `hidden` and the rows that follow are without a graph.
    """

    rollout: Rollout
    hidden: Tensor  # (N, H) policy states that predict the N response tokens
    logp: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    lm_head: Tensor  # (V, H) the policy's output matrix, rows of the shared vocabulary
    reward_model: object  # reward_grad.RewardModel
    temperature: float
    grad_at: list[float]
    lookahead: int = 2  # of (9), as are the two that follow
    branches: int = 2
    branch_prob: float = 0.02


class CreditInputs:
    """All that a credit method may read. B responses of T token positions, V shared tokens.

    NEW EVIDENCE is one cached property more: it is computed when a method first reads it.
    """

    def __init__(
        self,
        response_ids: Tensor,  # (B, T)
        response_mask: Tensor,  # (B, T) bool: the response, stop token included
        free_mask: Tensor,  # (B, T) bool: without stop and whitespace tokens
        advantages: Tensor,  # (B,) A of (1)
        rewards: Tensor,  # (B,) raw score R of the reward model
        band: float,  # λ of (6)
        step: int,  # rollout number, from 0
        generator: torch.Generator,  # on the CPU: the only randomness a method may use
        sharpness: Tensor | None = None,  # (B,) A without a unit, for (6); by default A itself
        source: Source | None = None,
        **known: Tensor,  # evidence given instead of computed, by name: for tests
    ):
        self.response_ids = response_ids
        self.response_mask = response_mask
        self.free_mask = free_mask
        self.advantages = advantages
        self.rewards = rewards
        self.band = band
        self.step = step
        self.generator = generator
        self.sharpness = advantages if sharpness is None else sharpness
        self.source = source
        for name, value in known.items():
            if name not in evidence_names():
                raise TypeError(f"{name!r} is not evidence; there is: {evidence_names()}")
            if value is not None:
                vars(self)[name] = value  # where a cached property keeps what it has computed

    def computed(self, name: str) -> Tensor | None:
        """Evidence that a method has read already, or None; asking costs nothing."""
        return vars(self).get(name)

    def shown_work(self) -> Tensor | None:
        """The d that the method read, for the log: its own kind of work, or None."""
        work = self.computed("work")
        return self.computed("branch_work") if work is None else work

    def branch_count(self) -> Tensor | None:
        """How many alternatives the method tried at each token, (B, T), or None."""
        found = self.computed("branch_tokens")
        return None if found is None else (found[0] >= 0).sum(-1)

    @cached_property
    def reward_grad(self) -> Tensor:
        """f_t at the points of --grad_at, (B, T, D): from the scoring pass where that kept it."""
        s = self.source
        at_sample = set(s.grad_at) == {1.0}
        if at_sample and s.rollout.reward_grad is not None:
            return s.rollout.reward_grad
        expected = derivation.expected_embedding(
            s.hidden, s.lm_head, self._embedding, s.temperature
        )  # (N, D)
        expected = to_padded(expected, self.response_mask)  # (B, T, D)
        return s.reward_model.grad(s.rollout, expected, s.grad_at)

    @cached_property
    def work(self) -> Tensor:
        """d_t of (5), (B, T)."""
        return self._over_the_vocabulary(derivation.work)

    @cached_property
    def work_magnitude(self) -> Tensor:
        """‖g_t‖ ‖k_t‖, (B, T)."""
        return self._over_the_vocabulary(derivation.work_magnitude)

    @cached_property
    def branch_tokens(self) -> tuple[Tensor, Tensor]:
        """Alternatives at each token: ids (B, T, S), -1 = none, and their log-probs (B, T, S)."""
        s = self.source
        mask = self.response_mask
        ids, logp = branching.alternatives(
            s.hidden,
            s.lm_head,
            self.response_ids[mask],
            s.temperature,
            s.branches,
            s.branch_prob,
        )  # (N, S)
        # A place without alternatives reads -1 and -inf, as padding does.
        return to_padded(ids + 1, mask) - 1, to_padded(logp.exp(), mask).log()

    @cached_property
    def branch_values(self) -> Tensor:
        """v of the alternatives, less the sampled token's, by branching (9): (B, T, S)."""
        s = self.source
        ids, _ = self.branch_tokens
        return branching.token_values(s.reward_model, s.rollout, ids, s.lookahead)

    @cached_property
    def branch_work(self) -> Tensor:
        """d_t of (5) on the sampled token and its alternatives, their values by branching, (B, T).

        0 where a token has no alternative.
        """
        _, logp = self.branch_tokens
        mask = self.response_mask
        # The sampled token stands last, and values are counted from its own.
        logits = torch.cat([logp[mask], self.source.logp[mask][:, None]], -1)  # (N, S+1)
        values = torch.nn.functional.pad(self.branch_values[mask], (0, 1))  # (N, S+1)
        sampled = torch.full_like(logits[:, 0], logits.shape[1] - 1, dtype=torch.long)
        return to_padded(derivation.work_on_support(logits, sampled, values), mask)

    @cached_property
    def exact_work(self) -> Tensor:
        """d_t from substituting the policy's top 8 tokens one by one, (B, T); very slow."""
        s = self.source
        found = []
        hidden = to_padded(s.hidden, self.response_mask)  # (B, T, H)
        for one, states in zip(s.rollout.split(1), hidden, strict=True):
            found.append(substituted_work(one, states, s.lm_head, s.reward_model, s.temperature))
        return torch.cat(found)

    @cached_property
    def prefix_scores(self) -> Tensor:
        """R(x, y_<=t) for t = 0 .. T, (B, T+1); the last one is R(x, y)."""
        return self.source.reward_model.prefix_scores(self.source.rollout)

    @cached_property
    def entropy(self) -> Tensor:
        """The policy's entropy at each token in nats, (B, T)."""
        return self.source.entropy

    @cached_property
    def sampled_prob(self) -> Tensor:
        """p_t(a_t), (B, T), 0 on padding."""
        return self.source.logp.exp() * self.response_mask

    @cached_property
    def hidden(self) -> Tensor:
        """The policy states that predict each token, (B, T, H)."""
        return to_padded(self.source.hidden, self.response_mask)

    @cached_property
    def token_embedding(self) -> Tensor:
        """e_t = W[a_t], the reward model's embeddings of the response, (B, T, D)."""
        return self._embedding[self.response_ids] * self.response_mask[..., None]

    @cached_property
    def null_embedding(self) -> Tensor:
        """The reward model's embedding of its pad token, (D,)."""
        return self.source.reward_model.embedding[self.source.reward_model.pad_id]

    @property
    def _embedding(self) -> Tensor:  # (V, D)
        return self.source.reward_model.embedding[: len(self.source.lm_head)]

    def _over_the_vocabulary(self, streamed: Callable[..., Tensor]) -> Tensor:
        """`work` or `work_magnitude` of datc.py at every response token, (B, T)."""
        s = self.source
        mask = self.response_mask
        flat = streamed(
            s.hidden,
            s.lm_head,
            self.response_ids[mask],
            self.reward_grad[mask],
            self._embedding,
            s.temperature,
            logp=s.logp[mask],
        )  # (N,)
        return to_padded(flat, mask)


def evidence_names() -> list[str]:
    """The cached properties of CreditInputs."""
    return [name for name, p in vars(CreditInputs).items() if isinstance(p, cached_property)]


def substituted_work(
    one: Rollout,
    hidden: Tensor,
    lm_head: Tensor,
    reward_model: object,
    temperature: float,
    top_k: int = 8,
) -> Tensor:
    """d_t of one response with v_t(b) = R(y with a_t := b), (1, T), 0 at frozen tokens.

    Args:
        one: a rollout of a single response.
        hidden: (T, H) policy states that predict its tokens.
        top_k: alternatives per token: the policy's likeliest; 0 = the whole vocabulary.
    """
    places = one.free_mask[0].nonzero()[:, 0]  # (N,)
    work = torch.zeros(one.free_mask.shape, dtype=torch.float64, device=hidden.device)  # (1, T)
    if len(places):
        logits = hidden[places] @ lm_head.T / temperature  # (N, V)
        ids, sampled, logits = derivation.candidates(logits, one.response_ids[0, places], top_k)
        value = reward_model.substituted(one, places, ids)  # (N, S)
        work[0, places] = derivation.work_on_support(logits, sampled, value)
    return work


# ----------------------------------------------------------------------------------------------
# What a method returns, and how it is found by name.


@dataclass(frozen=True)
class Credit:
    """Ã_t, and, where it is A times a weight, those weights (logged and saved with samples)."""

    token_advantages: Tensor  # (B, T)
    weights: Tensor | None = None  # (B, T)
    tau: Tensor | None = None  # (B,)


CreditMethod = Callable[[CreditInputs], Credit]
CREDIT: dict[str, CreditMethod] = {}
FROM_THE_GRADIENT = {"reward_grad", "work", "work_magnitude"}


def credit_method(name: str, needs: tuple[str, ...] = ()) -> Callable[[CreditMethod], CreditMethod]:
    """Register a credit method under `--credit name`.

    Evidence is found when it is read, so `needs` names only what must be known beforehand:
    "reward_grad" (or "work", which comes from it), so that the scoring pass keeps its gradient and
    need not be repeated; "whole_batch" for one call per rollout in place of one per micro-batch.

    Raises ValueError for evidence that does not exist or a name that is taken.
    """
    known = {*evidence_names(), "whole_batch"}
    unknown = sorted(set(needs) - known)
    if unknown:
        raise ValueError(f"credit method {name!r} needs {unknown}; known: {sorted(known)}")
    if name in CREDIT:
        raise ValueError(f"credit method {name!r} is registered twice")

    def register(method: CreditMethod) -> CreditMethod:
        method.needs = frozenset(needs)
        CREDIT[name] = method
        return method

    return register


def get_credit_method(name: str) -> CreditMethod:
    """The method behind `--credit NAME`, or `--credit FILE.py:NAME` for one in your own file.

    Raises ValueError for an unknown name, listing the known ones, and for a file without it.
    """
    importlib.import_module("baselines")  # registers its methods
    file, _, short = name.rpartition(":")
    if file:
        load_methods(Path(file))
    if short not in CREDIT:
        known = ", ".join(sorted(CREDIT))
        raise ValueError(
            f"--credit {name!r} is unknown. Known methods: {known}; or FILE.py:NAME for your own."
        )
    return CREDIT[short]


def load_methods(file: Path) -> None:
    """Run a file that registers credit methods, once."""
    if not file.is_file():
        raise ValueError(f"--credit {file}: there is no such file.")
    if str(file.resolve()) not in LOADED_FILES:
        LOADED_FILES.add(str(file.resolve()))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


LOADED_FILES: set[str] = set()


def multiplicative(x: CreditInputs, weights: Tensor, tau: Tensor | None = None) -> Credit:
    """Ã_t = A w_t, in the dtype of A, so that weights of exactly one give GRPO bit for bit."""
    token_advantages = x.advantages[:, None] * weights  # (B, T)
    return Credit(token_advantages.to(x.advantages.dtype), weights, tau)


def banded(x: CreditInputs, d: Tensor) -> Credit:
    """The allocation (6) of any evidence d (B, T): sign and mean of A kept, weights in the band."""
    weights, tau = allocate(d, x.sharpness, x.response_mask, x.free_mask, x.band)
    return multiplicative(x, weights, tau)


# ----------------------------------------------------------------------------------------------
# GRPO, DATC, and what would show that DATC is wrong. All keep sign and mean of A and the band.


@credit_method("grpo")
def grpo(x: CreditInputs) -> Credit:
    """GRPO: every token of a response gets the response's advantage."""
    return multiplicative(x, x.response_mask.double())


@credit_method("datc", needs=("reward_grad",))
def datc(x: CreditInputs) -> Credit:
    """DATC: tokens whose own update gains more reward get a larger share, (2) to (6)."""
    return banded(x, x.work)


@credit_method("branch", needs=("branch_work",))
def branch(x: CreditInputs) -> Credit:
    """DATC with token values by branching (9) in place of (2): faithful on real models. [ours]"""
    return banded(x, x.branch_work)


@credit_method("branch_shuffle", needs=("branch_work",))
def branch_shuffle(x: CreditInputs) -> Credit:
    """Control: the weights of `branch` in random places of the same response. [ours]"""
    return in_random_places(x, banded(x, x.branch_work))


@credit_method("oracle")
def oracle(x: CreditInputs) -> Credit:
    """What a perfect gradient would give: (6) on the exact work; tiny worlds only. [ours]"""
    return banded(x, x.exact_work)


@credit_method("inverted", needs=("reward_grad",))
def inverted(x: CreditInputs) -> Credit:
    """Control: the work with its sign flipped. If it does not lose to GRPO, the work says nothing.

    [ours]
    """
    return banded(x, -x.work)


@credit_method("shuffle", needs=("reward_grad",))
def shuffle(x: CreditInputs) -> Credit:
    """Control: DATC's own weights in random places of the same response. [dev]

    What it gains over GRPO is not credit.
    """
    return in_random_places(x, banded(x, x.work))


def in_random_places(x: CreditInputs, allocated: Credit) -> Credit:
    """The same weights, shuffled within each response.

    One draw per response, so micro-batches change nothing.
    """
    weights = allocated.weights.clone()
    for row, mask in zip(weights, x.response_mask, strict=True):
        noise = torch.rand(len(mask), generator=x.generator).to(mask.device)
        row[mask] = row[mask][noise[mask].argsort()]
    return multiplicative(x, weights, allocated.tau)


@credit_method("norm_product", needs=("reward_grad",))
def norm_product(x: CreditInputs) -> Credit:
    """Control: ‖g_t‖ ‖k_t‖ in place of <g_t, k_t>, the magnitude without the direction. [dev]"""
    return banded(x, x.work_magnitude)


@credit_method("random_direction")
def random_direction(x: CreditInputs) -> Credit:
    """Control: d_t ~ N(0, 1) through the same allocation. [dev]"""
    width = x.response_mask.shape[1]
    noise = [torch.randn(width, generator=x.generator) for _ in x.response_mask]
    return banded(x, torch.stack(noise).to(x.response_mask.device))
