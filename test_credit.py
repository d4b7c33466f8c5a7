"""What must hold: the allocation, the credit methods, the derivation, finite differences.

Everything runs on tiny random models, offline. What the loop, the samplers and the commands must
hold stands in tests/.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import credit
import datc
import grpo
import train
from conftest import (
    TOKENIZER,
    V,
    arguments,
    close,
    make_policy,
    make_reward_model,
    make_rollout,
    random_case,
    random_position,
    read_metrics,
)
from credit import CreditInputs, allocate, get_credit_method
from grpo import response_hidden
from machinery.config import CHOICES, Config


@pytest.mark.parametrize("band", [1.5, 4.0, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_positive_within_the_band_and_average_one(seed, band):
    work, advantages, response, free = random_case(seed)
    w, tau = allocate(work, advantages, response, free, band)
    assert (
        (w[response] > 0).all() and (w[~response] == 0).all() and (w[response & ~free] == 1).all()
    )
    assert (w[response] <= band).all() and (w[response] >= 1 / band).all()
    close(w.sum(-1) / response.sum(-1), torch.ones(len(w)), 1e-12)
    assert (tau >= 1).all()


def test_credit_keeps_the_sign_and_the_mean_of_the_advantage():
    work, advantages, response, free = random_case(0)
    out = run_method("datc", work, advantages, response, free).token_advantages
    assert (out[response].sign() == advantages[:, None].expand_as(out)[response].sign()).all()
    close(out.sum(-1) / response.sum(-1), advantages, 1e-5)


def test_a_band_of_one_is_grpo_bit_for_bit():
    work, advantages, response, free = random_case(1)
    a = run_method("datc", work, advantages, response, free, band=1.0).token_advantages
    assert torch.equal(a, run_method("grpo", work, advantages, response, free).token_advantages)


def test_no_advantage_gives_no_credit():
    work, advantages, response, free = random_case(2)
    out = run_method("datc", work, advantages * 0, response, free)
    assert (out.token_advantages == 0).all() and torch.equal(out.weights, response.double())


@pytest.mark.parametrize("count", [0, 1])
def test_one_free_token_or_none_gives_weights_of_one(count):
    work, advantages, response, free = random_case(3)
    free = free & (free.cumsum(-1) <= count)
    assert torch.equal(allocate(work, advantages, response, free).weights, response.double())


@pytest.mark.parametrize("value", [0.0, 0.1, -3e-13, 1e12])
def test_equal_work_gives_weights_of_one(value):
    _, advantages, response, free = random_case(4)
    work = torch.full(response.shape, value)
    close(allocate(work, advantages, response, free).weights, response, 1e-12)


def test_weights_grow_with_the_advantage_times_the_work_and_equal_work_gets_equal_weight():
    work, advantages, response, free = random_case(5)
    work = (work * 2e3).round()  # with ties
    w = allocate(work, advantages, response, free).weights
    for i in range(len(w)):
        d, x = (advantages[i] * work[i])[free[i]], w[i][free[i]]
        order = d.argsort()
        assert (x[order].diff() >= -1e-15).all()
        same = d[:, None] == d
        assert torch.equal(x[:, None].expand_as(same)[same], x.expand_as(same)[same])


@pytest.mark.parametrize("seed", range(5))
def test_the_predicted_gain_is_never_below_that_of_grpo(seed):
    work, advantages, response, free = random_case(seed)
    w = allocate(work, advantages, response, free).weights
    gain = (advantages[:, None] * (w - 1) * work * free).sum(-1)
    assert (gain >= -1e-15).all() and gain.max() > 0


@pytest.mark.parametrize("scale", [1e-170, 1e-12, 1e-6, 1e6, 1e12, 1e170])
def test_the_scale_of_the_reward_model_does_not_matter(scale):
    work, advantages, response, free = random_case(6)
    work = work.double()
    close(
        allocate(work * scale, advantages, response, free).weights,
        allocate(work, advantages, response, free).weights,
        1e-9,
    )


def test_the_band_is_met_by_the_smallest_tau_that_fits_and_not_by_clipping():
    work, advantages, response, free = random_case(7)
    w, tau = allocate(work, advantages, response, free, band=2.0)
    raised = tau > 1
    top = torch.where(free, torch.maximum(w, 1 / w), 1).amax(-1)
    assert raised.any() and (top[raised] > 2 - 1e-9).all()
    u = advantages.double()[:, None] * credit.standardise(work, free)
    for i in range(len(w)):
        x = u[i][free[i]] / tau[i]
        close(w[i][free[i]], x.softmax(-1) * len(x), 1e-12)


@pytest.mark.parametrize("outlier", [1e6, -1e6, 1e30])
def test_one_outlier_leaves_all_guarantees_in_place(outlier):
    work, advantages, response, free = random_case(8, tokens=200)
    work[:, 1] = outlier
    w, _ = allocate(work, advantages, response, free)
    assert (w[response] <= 4).all() and (w[response] >= 0.25).all()
    close(w.sum(-1) / response.sum(-1), torch.ones(len(w)), 1e-12)


def test_a_token_outside_the_response_is_never_free():
    work, advantages, response, free = random_case(6)
    wide = allocate(work, advantages, response, free | ~response).weights
    assert torch.equal(wide, allocate(work, advantages, response, free).weights)


def test_allocate_refuses_what_would_break_it_silently():
    work, advantages, response, free = random_case(9)
    with pytest.raises(ValueError, match="--band"):
        allocate(work, advantages, response, free, band=0.5)
    with pytest.raises(ValueError, match=r"must all be \(B, T\)"):
        allocate(work[:, :-1], advantages, response, free)
    work[0][free[0]] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        allocate(work, advantages, response, free)
    work[~free] = torch.nan  # where nobody looks it does not matter
    allocate(work[1:], advantages[1:], response[1:], free[1:])


def run_method(name, work, advantages, response, free, band=4.0, seed=0):
    inputs = CreditInputs(
        response_ids=torch.zeros_like(response, dtype=torch.long),
        response_mask=response,
        free_mask=free,
        advantages=advantages,
        rewards=advantages,
        band=band,
        step=0,
        generator=torch.Generator().manual_seed(seed),
        work=work,
    )
    return get_credit_method(name)(inputs)


def test_shuffle_uses_the_weights_of_datc_in_other_places():
    case = random_case(10)
    a, b = run_method("datc", *case).weights, run_method("shuffle", *case).weights
    assert not torch.equal(a, b)
    close(a.sort(-1).values, b.sort(-1).values, 0)
    assert (b[~case[2]] == 0).all()


def test_shuffle_puts_the_weights_in_any_order():
    case = random_case(10)
    drawn = [run_method("shuffle", *case, seed=seed).weights for seed in range(4)]
    for i in range(4):
        for j in range(i):
            assert not torch.equal(drawn[i], drawn[j])


def test_shuffle_does_not_depend_on_the_micro_batch():
    work, advantages, response, free = case = random_case(11)
    whole = run_method("shuffle", *case).weights
    generator = torch.Generator().manual_seed(0)
    parts = []
    for i in range(0, 6, 2):
        two = slice(i, i + 2)
        inputs = CreditInputs(
            response_ids=response[two].long(),
            response_mask=response[two],
            free_mask=free[two],
            advantages=advantages[two],
            rewards=advantages[two],
            band=4.0,
            step=0,
            generator=generator,
            work=work[two],
        )
        parts.append(get_credit_method("shuffle")(inputs).weights)
    assert torch.equal(whole, torch.cat(parts))


def test_inverted_is_datc_of_the_negated_work():
    work, *rest = random_case(12)
    assert torch.equal(
        run_method("inverted", work, *rest).weights, run_method("datc", -work, *rest).weights
    )


def test_a_method_in_a_file_of_ones_own_trains_without_touching_ours(pair, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from credit import banded, credit_method\n"
        "@credit_method('mine_for_tests')\n"
        "def mine(x):\n"
        "    return banded(x, x.work - x.sampled_prob)\n"
    )
    name = f"{file}:mine_for_tests"
    try:
        train.main(arguments(pair, tmp_path / "run", "--credit", name, rollouts=1))
        train.main(["--resume", str(tmp_path / "run"), "--rollouts", "2"])
        assert len(read_metrics(tmp_path / "run")) == 2
        with pytest.raises(ValueError, match="no such file"):
            get_credit_method("nowhere.py:mine")
        with pytest.raises(ValueError, match="unknown"):
            get_credit_method(f"{file}:other")
    finally:
        credit.CREDIT.pop("mine_for_tests", None)


def test_evidence_is_computed_once_and_only_when_it_is_read():
    policy, model = make_policy(), make_reward_model()
    learner = train.Learner(policy, model, TOKENIZER, Config(device="cpu", dtype="float32"))
    rollout = make_rollout(policy)
    rewards, grad = model.score(rollout, with_grad=True)
    rollout = replace(rollout, rewards=rewards, advantages=rewards)
    found = {}
    for kept in (None, grad):  # where the scoring pass kept no gradient, it is taken when read
        scored = replace(rollout, reward_grad=kept)
        x = learner.evidence(scored, *learner.forward(rollout))
        assert not any(x.computed(name) is not None for name in credit.evidence_names())
        assert x.work is x.work and x.computed("work") is x.work
        found[kept is None] = x.work
    close(found[True], found[False], 1e-4, 1e-5 * found[True].abs().max().item())
    with pytest.raises(TypeError, match="colour"):
        run_with("grpo", rewards, rollout.response_mask, colour=rewards)


def test_the_band_is_always_met_at_the_range_of_u_over_the_bands_logarithm():
    """The proof in `smallest_tau`, on numbers: the bound fits, and bisection stays below it."""
    work, advantages, response, free = random_case(21)
    u = advantages.double()[:, None] * credit.standardise(work, free)
    lowest = u.masked_fill(~free, torch.inf).amin(-1)
    highest = u.masked_fill(~free, -torch.inf).amax(-1)
    bound = (highest - lowest) / torch.tensor(1.2).log()
    w = credit.weights_at(bound, u, response, free)[free]
    assert w.max() <= 1.2 and w.min() >= 1 / 1.2
    assert (credit.smallest_tau(u, free, 1.2) <= bound.clamp(min=1)).all()


def test_an_unknown_credit_method_lists_the_known_ones_and_unknown_evidence_is_refused():
    with pytest.raises(ValueError, match="datc.*grpo.*inverted.*shuffle"):
        get_credit_method("nonsense")
    with pytest.raises(ValueError, match="no_such_thing"):
        credit.credit_method("new", needs=("no_such_thing",))
    with pytest.raises(ValueError, match="twice"):
        credit.credit_method("datc")


def run_with(name, advantages, response, free=None, **evidence):
    b = len(advantages)
    rewards = evidence.pop("rewards", torch.linspace(-2, 1, b))
    inputs = CreditInputs(
        response_ids=torch.zeros_like(response, dtype=torch.long),
        response_mask=response,
        free_mask=response if free is None else free,
        advantages=advantages,
        rewards=rewards,
        band=4.0,
        step=0,
        generator=torch.Generator().manual_seed(0),
        **evidence,
    )
    return get_credit_method(name)(inputs)


@pytest.mark.parametrize(
    "name",
    ["datc", "inverted", "shuffle", "norm_product", "random_direction", "red_band", "oracle"]
    + ["branch", "branch_shuffle"],
)
def test_every_banded_method_keeps_sign_mean_and_band(name):
    work, advantages, response, free = random_case(13)
    prefix = torch.cat([torch.zeros(len(work), 1), (work * response).cumsum(-1)], 1)
    evidence = {
        "work": work,
        "work_magnitude": work.abs(),
        "prefix_scores": prefix,
        "exact_work": work,
        "branch_work": work,
    }
    out = run_with(name, advantages, response, free, **evidence)
    a, w = out.token_advantages, out.weights
    assert (a[response].sign() == advantages[:, None].expand_as(a)[response].sign()).all()
    close(a.sum(-1) / response.sum(-1), advantages, 1e-5)
    assert (w[response] <= 4).all() and (w[response] >= 0.25).all() and (a[~response] == 0).all()
    assert not torch.equal(a, run_with("grpo", advantages, response).token_advantages)


def test_red_band_and_the_oracle_are_datc_with_other_evidence():
    work, advantages, response, free = random_case(19)
    datc_weights = run_with("datc", advantages, response, free, work=work * response).weights
    prefix = 5 + torch.cat([torch.zeros(len(work), 1), (work * response).cumsum(-1)], 1)
    close(
        run_with("red_band", advantages, response, free, prefix_scores=prefix).weights,
        datc_weights,
        1e-2,
    )
    assert torch.equal(
        run_with("oracle", advantages, response, free, exact_work=work).weights, datc_weights
    )


def test_p2t_is_its_formula_and_is_seen_to_flip_signs():
    _, advantages, response, _ = random_case(14)
    g = torch.Generator().manual_seed(1)
    f, e = (
        torch.randn(*response.shape, 5, generator=g),
        torch.randn(*response.shape, 5, generator=g),
    )
    evidence = {"reward_grad": f, "token_embedding": e, "null_embedding": e[0, 0]}
    rewards = torch.full((len(f),), -20.0)
    a = run_with("p2t", advantages, response, rewards=rewards, **evidence).token_advantages
    n = response[0].sum()
    share = (f[0, :n] * (e[0, :n] - e[0, 0])).sum(-1).softmax(-1)
    close(a[0, :n], advantages[0] - 2.0 * (1 + 0.6 * share), 1e-5)
    long = run_with("p2t_long", advantages, response, rewards=rewards, **evidence).token_advantages
    close(long - advantages[:, None] * response, 10 * (a - advantages[:, None] * response), 1e-5)
    up = (advantages[:, None] > 0) & response
    assert (a[up] < 0).any(), "a good response under a negative reward model is pushed down"
    assert (a.sum(-1) / response.sum(-1) - advantages).abs().min() > 1
    assert (a[~response] == 0).all()


def test_red_adds_centred_reward_differences_and_keeps_the_mean_but_not_the_sign():
    work, advantages, response, _ = random_case(15)
    scores = torch.cat([torch.zeros(len(work), 1), (work * 1e3 * response).cumsum(-1)], 1)
    a = run_with("red", advantages, response, prefix_scores=scores).token_advantages
    r = work * 1e3 * response
    close(
        a,
        (advantages[:, None] + r - r.sum(-1, keepdim=True) / response.sum(-1, keepdim=True))
        * response,
        1e-3,
        1e-4,
    )
    close(a.sum(-1) / response.sum(-1), advantages, 1e-3, 1e-5)
    assert (a[response].sign() != advantages[:, None].expand_as(a)[response].sign()).any()


def test_entropy_lets_only_the_most_uncertain_fifth_learn_as_one_mean_over_them():
    _, advantages, response, _ = random_case(16)
    entropy = torch.rand(response.shape, generator=torch.Generator().manual_seed(2))
    a = run_with("entropy", advantages, response, entropy=entropy).token_advantages
    chosen = a != 0
    assert chosen.sum() == round(0.2 * response.sum().item()) and not (chosen & ~response).any()
    assert entropy[chosen].min() > entropy[response & ~chosen].max()
    ratio = torch.rand(response.shape) + 0.5
    folded = grpo.response_mean(ratio * a, response, len(a))
    close(folded, (ratio * advantages[:, None])[chosen].mean(), 1e-5)
    assert (a[chosen].sign() == advantages[:, None].expand_as(a)[chosen].sign()).all()
    assert (a.sum(-1) / response.sum(-1) - advantages).abs().max() > 0.1, (
        "a response's mean does not hold"
    )


def test_delta_weighs_tokens_typical_of_their_side_more_and_averages_one_over_the_batch():
    advantages, response = torch.tensor([1.0, -1.0]), torch.ones(2, 4).bool()
    common, good, bad = torch.eye(3)
    hidden = torch.stack(
        [torch.stack([common, common, good, good]), torch.stack([common, common, bad, bad])]
    )
    out = run_with("delta", advantages, response, hidden=hidden, sampled_prob=torch.zeros(2, 4))
    w = out.weights
    close(w.mean(), 1.0, 1e-12)
    assert (w[:, 2:].min() > w[:, :2].max()) and w.min() > 0.75 and w.max() < 1.25
    assert (out.token_advantages.sign() == advantages[:, None]).all()


def test_delta_is_its_formula_token_by_token_and_keeps_sign_and_bounds_but_not_a_responses_mean():
    _, advantages, response, _ = random_case(20)
    g = torch.Generator().manual_seed(4)
    hidden, p = (
        torch.randn(*response.shape, 6, generator=g).double(),
        torch.rand(response.shape, generator=g).double(),
    )
    out = run_with("delta", advantages.double(), response, hidden=hidden, sampled_prob=p)
    tokens = [
        (a, (1 - p[i, t]) * hidden[i, t])
        for i, a in enumerate(advantages)
        for t in range(response[i].sum())
    ]
    mean = {
        s: sum(max(s * a, 0) * v for a, v in tokens) / sum(max(s * a, 0) for a, _ in tokens)
        for s in (1, -1)
    }
    sides = [1 if a > 0 else -1 for a, _ in tokens]
    margin = torch.stack(
        [
            ((v - mean[-s]) ** 2).sum() - ((v - mean[s]) ** 2).sum()
            for s, (_, v) in zip(sides, tokens, strict=True)
        ]
    )
    sides = torch.tensor(sides)
    gamma = torch.where(
        sides > 0, margin[sides > 0].std(correction=0), margin[sides < 0].std(correction=0)
    )
    w = 0.8 + 0.4 * torch.sigmoid(margin / gamma)
    w = w / w.mean()
    close(out.weights[response], w, 1e-6)
    assert w.min() >= 2 / 3 and w.max() <= 3 / 2
    assert (out.weights.sum(-1) / response.sum(-1) - 1).abs().max() > 0.01, (
        "a response's mean does not hold"
    )


def test_the_readmes_own_credit_method_runs(monkeypatch):
    text = Path("README.md").read_text()
    code = text.split("<!-- tested -->\n```python\n")[1].split("```")[0]
    name = code.split('@credit_method("')[1].split('"')[0]
    monkeypatch.setattr(
        credit, "CREDIT", {k: v for k, v in credit.CREDIT.items() if k != name}
    )  # a fork may have kept it
    exec(code, {})  # noqa: S102
    work, advantages, response, free = random_case(18)
    a = run_with(
        name, advantages, response, free, entropy=work.abs(), sampled_prob=work.abs(), work=work
    )
    close(a.token_advantages.sum(-1) / response.sum(-1), advantages, 1e-4)


def test_the_worked_example_gives_minus_0_38():
    probs, value = torch.tensor([[[0.2, 0.5, 0.3]], [[1.0, -1.0, 1.0]]], dtype=torch.float64)
    d = datc.work_dense(probs.log(), torch.tensor([1]), value, torch.eye(3).double())
    close(d[0], -0.38, 1e-6)


def test_the_update_direction_is_the_gradient_of_the_log_probability():
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 3, 8, 3])
    logp = logits.log_softmax(-1)[torch.arange(4), ids].sum()
    close(
        torch.autograd.grad(logp, logits)[0],
        datc.update_direction(logits.detach().softmax(-1), ids),
        1e-12,
    )


def test_the_reward_direction_is_the_gradient_of_the_expected_value_through_the_softmax():
    _, _, _, grad, embedding = random_position()
    logits = torch.randn(5, 37, dtype=torch.float64, requires_grad=True)
    value = (logits.softmax(-1) * (grad @ embedding.T)).sum()
    g = datc.reward_direction(logits.detach().softmax(-1), datc.token_value(grad, embedding))
    close(torch.autograd.grad(value, logits)[0], g, 1e-10, 1e-14)
    close(g.sum(-1), torch.zeros(5), 0, 1e-12)


def test_the_expected_work_over_the_policys_own_tokens_is_zero():
    hidden, head, _, grad, embedding = random_position()
    logits = (hidden @ head.T)[:1].expand(37, -1)
    d = datc.work_dense(logits, torch.arange(37), grad[:1].expand(37, -1), embedding)
    close((logits.softmax(-1)[0] * d).sum(), 0.0, 0, 1e-12)
    assert d.abs().max() > 1e-3


def test_a_constant_added_to_every_tokens_value_changes_nothing():
    hidden, head, ids, grad, embedding = random_position()
    a = datc.work(hidden, head, ids, grad, embedding)
    close(datc.work(hidden, head, ids, grad, embedding + 100.0), a, 1e-9, 1e-12)


def test_work_goes_to_zero_as_the_policy_becomes_certain():
    _, _, ids, grad, embedding = random_position()
    sizes = []
    for sharpness in (5.0, 10.0, 15.0, 20.0):
        logits = sharpness * torch.nn.functional.one_hot(ids, 37).double()
        sizes.append(datc.work_dense(logits, ids, grad, embedding).abs().max().item())
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("sizes", [(1, 5, 3, 2, 0), (17, 131, 9, 7, 20), (5, 64, 8, 8, 1)])
def test_streamed_work_is_dense_work(sizes, temperature, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(datc, "STRIP", 10)
    n, v, d, h, extra = sizes
    hidden, head, ids, grad, embedding = random_position(1, n, v, d, h, extra, dtype)
    dense = datc.work_dense(hidden @ head.T / temperature, ids, grad, embedding[:v])
    streamed = datc.work(hidden, head, ids, grad, embedding, temperature, chunk=3)
    assert streamed.dtype == dtype
    close(streamed, dense, tolerance, tolerance * dense.abs().max().item())


def test_the_streamed_magnitude_is_the_product_of_the_norms(monkeypatch):
    monkeypatch.setattr(datc, "STRIP", 10)
    hidden, head, ids, grad, embedding = random_position(4)
    probs = (hidden @ head.T).softmax(-1)
    g, k = datc.reward_direction(probs, grad @ embedding.T), datc.update_direction(probs, ids)
    magnitude = datc.work_magnitude(hidden, head, ids, grad, embedding, chunk=2)
    close(magnitude, g.norm(dim=-1) * k.norm(dim=-1), 1e-9)
    work = datc.work(hidden, head, ids, grad, embedding, chunk=2)
    assert (magnitude >= work.abs()).all()


def test_work_on_the_whole_vocabulary_as_support_is_the_work():
    hidden, head, ids, grad, embedding = random_position(5)
    logits = hidden @ head.T
    d = datc.work_on_support(logits, ids, grad @ embedding.T)
    close(d, datc.work_dense(logits, ids, grad, embedding), 1e-10)
    ids[0] = logits[0].argmax()  # the likeliest token may be the sampled one
    few, own, support = datc.candidates(logits, ids, 3)
    assert few.shape == (5, 4)
    assert torch.equal(few[:, -1], ids)
    for row in few.tolist():
        assert len(set(row)) == 4
    assert torch.equal(few.gather(1, own[:, None])[:, 0], ids)
    assert torch.equal(support, logits.gather(1, few))
    everything, own, support = datc.candidates(logits, ids, 0)
    assert everything.shape == (5, 37) and torch.equal(own, ids) and torch.equal(support, logits)


def test_the_streamed_expected_embedding_is_the_dense_one(monkeypatch):
    monkeypatch.setattr(datc, "STRIP", 10)
    hidden, head, _, _, embedding = random_position(2, extra_rows=4)
    dense = (hidden @ head.T / 0.7).softmax(-1) @ embedding[:37]
    close(datc.expected_embedding(hidden, head, embedding, 0.7, chunk=2), dense, 1e-10, 1e-12)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_streamed_work_never_holds_the_vocabulary_for_all_positions(monkeypatch):
    monkeypatch.setattr(datc, "STRIP", 16)
    hidden, head, ids, grad, embedding = random_position(n=64, v=400, d=2, h=2)
    with LargestTensor() as seen:
        datc.work(hidden, head, ids, grad, embedding, chunk=8)
    assert seen.numel <= 64 * 25 < 64 * 400, "no more than one number per position and strip"


@pytest.fixture(scope="module")
def relaxed():
    """A float64 LayerNorm pair, a rollout, and R̃(ℓ).

    R̃ is the reward around the hard sample as the logits move away from ℓ⁰.
    """
    policy, model = make_policy("gpt2").double(), make_reward_model("gpt2", double=True)
    rollout = make_rollout(policy, temperature=0.8)
    with torch.no_grad():
        hidden, head = response_hidden(policy, rollout), policy.get_output_embeddings().weight[:V]
    base = hidden @ head.T / 0.8  # (B, T, V)
    inputs = model.inputs(rollout)
    sampled, table = model.embedding[inputs.ids].detach(), model.embedding[:V].detach()

    def reward(logits):  # (B, T, V) -> (B,)
        moved = (
            (logits.softmax(-1) - base.softmax(-1)) @ table * inputs.content[..., None]
        )  # (B, T, D)
        index = inputs.places[..., None].expand_as(moved)
        with torch.no_grad():
            return model._reward(sampled.scatter_add(1, index, moved), inputs.mask)

    _, grad = model.score(rollout, with_grad=True)
    mask = rollout.response_mask
    work = torch.zeros_like(mask, dtype=torch.float64)
    work[mask] = datc.work(hidden[mask], head, rollout.response_ids[mask], grad[mask], table, 0.8)
    k = datc.update_direction(base.softmax(-1), rollout.response_ids)  # (B, T, V)
    return rollout, base, reward, work, k


def test_work_is_the_derivative_of_the_relaxed_reward_along_grpos_update_at_each_token(relaxed):
    rollout, base, reward, work, k = relaxed
    h, seen = 1e-4, 0
    for t in range(base.shape[1]):
        step = torch.zeros_like(base)
        step[:, t] = h * k[:, t]
        slope = (reward(base + step) - reward(base - step)) / (2 * h)  # (B,)
        here = rollout.content_mask[:, t]
        close(work[here, t], slope[here], 1e-6, 1e-9)
        seen += here.sum().item()
    assert seen > 20 and work.abs().max() > 1e-3


def test_the_whole_updates_predicted_gain_is_the_derivative_along_it(relaxed):
    rollout, base, reward, work, k = relaxed
    advantages = torch.tensor([1.5, -0.5, 0.3, -1.3]).double()
    w = allocate(work, advantages, rollout.response_mask, rollout.free_mask).weights
    along = (advantages[:, None] * w * rollout.content_mask)[..., None] * k
    slope = (reward(base + 1e-4 * along) - reward(base - 1e-4 * along)) / 2e-4
    close(advantages * (w * work).sum(-1), slope, 1e-6)
    assert not torch.allclose((w * work).sum(-1), work.sum(-1), rtol=1e-2)  # and that is not GRPO's


def test_work_on_the_stop_token_is_zero(relaxed):
    rollout, _, _, work, _ = relaxed
    assert (work[rollout.response_mask & ~rollout.content_mask] == 0).all()


def test_with_the_logits_as_parameters_the_two_predicted_gains_agree_exactly():
    hidden, head, ids, grad, embedding = random_position(6)
    logits = (hidden @ head.T).requires_grad_()
    a, w = (
        torch.tensor([1.0, -1, 0.5, 2, -0.3]).double(),
        torch.tensor([0.5, 1.5, 1, 0.7, 1.3]).double(),
    )
    (move,) = torch.autograd.grad(
        (a * (w - 1) * logits.log_softmax(-1)[torch.arange(5), ids]).sum() / 5, logits
    )
    (slope,) = torch.autograd.grad((logits.softmax(-1) * (grad @ embedding.T)).sum(), logits)
    d = datc.work_dense(logits.detach(), ids, grad, embedding)
    close((move * slope).sum(), (a * (w - 1) * d).mean(), 1e-10)


def test_the_sharpness_of_the_allocation_does_not_depend_on_the_rewards_unit():
    work, _, response, free = random_case(17)
    rewards, lengths = torch.randn(6, generator=torch.Generator().manual_seed(3)), response.sum(-1)
    for name in CHOICES["advantage"]:
        weights = []
        for unit in (1.0, 100.0):
            a, sharp = grpo.response_advantages(name, unit * rewards, lengths, 3, 40)
            weights.append(run_with("datc", a, response, free, work=work, sharpness=sharp).weights)
        close(weights[0], weights[1], 1e-3, 1e-4)
