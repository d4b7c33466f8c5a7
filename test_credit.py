"""What must hold, each a test named as a sentence. Tiny random models, no network, under three minutes on two cores."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

import credit
import datc
import eval as evaluate
import grpo
import reward_grad
import train
from credit import CreditInputs, allocate, get_credit_method
from grpo import group_advantages, response_hidden, token_logprobs
from machinery import load, tiny
from machinery import rollout as rollouts
from machinery.rollout import Rollout, sample, shared_vocabulary
from reward_grad import RewardModel

torch.set_num_threads(1)  # these models are too small to share

# ---------------------------------------------------------------------------------------------------------------------
# Small things to test on.

TOKENIZER = tiny.make_tokenizer()
V = len(TOKENIZER)
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE |= {"intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 128}
SHAPE |= {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.3}
SHAPE_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPE_GPT2 |= {"bos_token_id": 2, "initializer_range": 0.3}
KINDS = {
    "qwen3": (Qwen3Config, SHAPE, Qwen3ForCausalLM, Qwen3ForSequenceClassification),
    "llama": (LlamaConfig, SHAPE, LlamaForCausalLM, LlamaForSequenceClassification),
    "gpt2": (GPT2Config, SHAPE_GPT2, GPT2LMHeadModel, GPT2ForSequenceClassification),
}


def make_policy(kind="qwen3", rows=V + 20, seed=0, **extra):
    config, shape, causal, _ = KINDS[kind]
    torch.manual_seed(seed)
    model = causal(config(vocab_size=rows, **{**shape, **extra})).eval()
    load.no_dropout(model)
    return model


def make_classifier(kind="qwen3", rows=V + 1, seed=1, num_labels=1, **extra):
    config, shape, _, classifier = KINDS[kind]
    torch.manual_seed(seed)
    model = classifier(config(vocab_size=rows, num_labels=num_labels, **{**shape, **extra})).eval()
    load.no_dropout(model)
    return model


def make_reward_model(kind="qwen3", double=False, **extra):
    model = make_classifier(kind, **extra)
    return RewardModel(model.double() if double else model, TOKENIZER, TOKENIZER)


PROMPTS = [
    [{"role": "user", "content": text}]
    for text in ("describe the cat", "the dog is red and the", "a")
]


def make_rollout(policy, prompts=PROMPTS[:2], group_size=2, tokens=10, seed=3, **extra) -> Rollout:
    torch.manual_seed(seed)
    return sample(
        policy,
        TOKENIZER,
        prompts,
        shared_vocabulary(policy, TOKENIZER),
        group_size,
        tokens,
        **extra,
    )


def hand_made(responses: list[str], messages=PROMPTS[0]) -> Rollout:
    """A rollout of given texts; one that ends in <end> has stopped, the others were cut."""
    ids, mask = rollouts.pad([TOKENIZER(r).input_ids for r in responses], 0)
    prompt, prompt_mask = rollouts.pad(
        [rollouts.encode_prompt(TOKENIZER, messages)] * len(responses), 0, left=True
    )
    stopped = torch.tensor([r.endswith("<end>") for r in responses])
    return Rollout(
        [messages] * len(responses), prompt, prompt_mask, ids, mask, mask & (ids != 2), stopped, 1
    )


def rows_of(rollout: Rollout, i: int) -> Rollout:
    """Response i alone, in the smallest tensors that hold it."""
    t, p = rollout.response_mask[i].sum(), rollout.prompt_mask[i].sum()
    return Rollout(
        [rollout.messages[i]], rollout.prompt_ids[i : i + 1, -p:], rollout.prompt_mask[i : i + 1, -p:],
        rollout.response_ids[i : i + 1, :t], rollout.response_mask[i : i + 1, :t], rollout.free_mask[i : i + 1, :t],
        rollout.stopped[i : i + 1], 1,
    )  # fmt: skip


def random_case(seed: int, rows=6, tokens=40):
    """Work, advantages and masks of uneven lengths with some frozen tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, tokens + 1, (rows, 1), generator=g)
    response = torch.arange(tokens) < lengths
    free = response & (torch.rand(rows, tokens, generator=g) < 0.8)
    work = torch.randn(rows, tokens, generator=g) * torch.rand(rows, 1, generator=g).exp() * 1e-3
    return work, torch.randn(rows, generator=g) * 2, response, free


def close(a, b, rtol, atol=0.0):
    torch.testing.assert_close(a.double(), torch.as_tensor(b).double(), rtol=rtol, atol=atol)


# ---------------------------------------------------------------------------------------------------------------------
# (6) The allocation.


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


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
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


# ---------------------------------------------------------------------------------------------------------------------
# Credit methods.


def run_method(name, work, advantages, response, free, band=4.0, seed=0):
    inputs = CreditInputs(
        response_ids=torch.zeros_like(response, dtype=torch.long), response_mask=response, free_mask=free,
        advantages=advantages, rewards=advantages, band=band, step=0, generator=torch.Generator().manual_seed(seed), work=work,
    )  # fmt: skip
    return get_credit_method(name)(inputs)


def test_shuffle_uses_the_weights_of_datc_in_other_places():
    case = random_case(10)
    a, b = run_method("datc", *case).weights, run_method("shuffle", *case).weights
    assert not torch.equal(a, b)
    close(a.sort(-1).values, b.sort(-1).values, 0)
    assert (b[~case[2]] == 0).all()


def test_shuffle_does_not_depend_on_the_micro_batch():
    work, advantages, response, free = case = random_case(11)
    whole = run_method("shuffle", *case).weights
    generator = torch.Generator().manual_seed(0)
    inputs = [
        CreditInputs(response[i : i + 2].long(), response[i : i + 2], free[i : i + 2], advantages[i : i + 2],
                     advantages[i : i + 2], 4.0, 0, generator, work=work[i : i + 2])
        for i in range(0, 6, 2)
    ]  # fmt: skip
    assert torch.equal(whole, torch.cat([get_credit_method("shuffle")(x).weights for x in inputs]))


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
    learner = train.Learner(
        policy,
        model,
        shared_vocabulary(policy, TOKENIZER),
        train.Config(device="cpu", dtype="float32"),
    )
    rollout = make_rollout(policy)
    rewards, grad = model.score(rollout, with_grad=True)
    found = {}
    for kept in (None, grad):  # where the scoring pass kept no gradient, it is taken when read
        scored = train.Scored(rollout, rewards, rewards, kept, None)
        x = learner.evidence(scored, *learner.forward(rollout), 0, None)
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
        response_ids=torch.zeros_like(response, dtype=torch.long), response_mask=response,
        free_mask=response if free is None else free, advantages=advantages, rewards=rewards, band=4.0, step=0,
        generator=torch.Generator().manual_seed(0), **evidence,
    )  # fmt: skip
    return get_credit_method(name)(inputs)


@pytest.mark.parametrize(
    "name",
    ["datc", "inverted", "shuffle", "norm_product", "random_direction", "red_band", "oracle"],
)
def test_every_banded_method_keeps_sign_mean_and_band(name):
    work, advantages, response, free = random_case(13)
    prefix = torch.cat([torch.zeros(len(work), 1), (work * response).cumsum(-1)], 1)
    evidence = {
        "work": work,
        "work_magnitude": work.abs(),
        "prefix_scores": prefix,
        "exact_work": work,
    }
    needed = evidence
    out = run_with(name, advantages, response, free, **needed)
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


def test_advantage_estimators_are_their_formulas():
    rewards, lengths = (
        torch.tensor([1.0, 2.0, 2.0 + 1e-6, 7.0, 5.0, 5.0, 5.0, 5.0]),
        torch.tensor([4, 8, 2, 8] * 2),
    )

    def advantages(name):
        return grpo.response_advantages(name, rewards, lengths, 4, 16)

    assert torch.equal(advantages("grpo")[0], group_advantages(rewards, 4))
    a, sharp = advantages("rloo")
    close(a[:4], torch.tensor([1 - 11 / 3, 2 - 10 / 3, 2 - 10 / 3, 7 - 5 / 3]), 1e-5)
    close(sharp.square().mean(), 1.0, 1e-5)
    a, also_sharp = advantages("dr_grpo")
    close(a[:4], torch.tensor([-2.0, -1.0, -1.0, 4.0]) * lengths[:4] / 16, 1e-5)
    close(also_sharp, sharp, 1e-6)  # how good a response was, not how long
    a, sharp = advantages("rank_normal")
    close(
        a[:4], torch.special.ndtri(torch.tensor([0.125, 0.5, 0.5, 0.875])), 1e-5, 1e-6
    )  # ranks ignore rounding
    close(sharp, a, 0)
    for name in train.flags.CHOICES["advantage"]:
        assert (advantages(name)[0][4:] == 0).all(), "ties get nothing"
    with pytest.raises(ValueError, match="rank_normal"):
        advantages("best")


def test_the_sharpness_of_the_allocation_does_not_depend_on_the_rewards_unit():
    work, _, response, free = random_case(17)
    rewards, lengths = torch.randn(6, generator=torch.Generator().manual_seed(3)), response.sum(-1)
    for name in train.flags.CHOICES["advantage"]:
        weights = []
        for unit in (1.0, 100.0):
            a, sharp = grpo.response_advantages(name, unit * rewards, lengths, 3, 40)
            weights.append(run_with("datc", a, response, free, work=work, sharpness=sharp).weights)
        close(weights[0], weights[1], 1e-3, 1e-4)


def test_the_readme_explains_every_flag_every_metric_and_every_credit_method(pair, tmp_path):
    text = Path("README.md").read_text()
    train.main(arguments(pair, tmp_path / "run", rollouts=1))
    names = {f"`--{name}`" for name in train.Config.__dataclass_fields__}
    names |= {
        f"`{key}`"
        for key in train.read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
        if key != "step"
    }
    names |= {f"`{name}`" for name in credit.CREDIT if "for_tests" not in name}
    missing = sorted(n for n in names if n not in text)
    assert not missing, f"README.md does not explain {missing}"


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


# ---------------------------------------------------------------------------------------------------------------------
# (2) to (5) The work.


def random_position(seed=0, n=5, v=37, d=11, h=13, extra_rows=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(n, h, generator=g), torch.randn(v, h, generator=g)
    grad, embedding = torch.randn(n, d, generator=g), torch.randn(v + extra_rows, d, generator=g)
    ids = torch.randint(0, v, (n,), generator=g)
    return hidden.to(dtype), head.to(dtype), ids, grad.to(dtype), embedding.to(dtype)


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
    few, own, support = datc.candidates(logits, ids, 3)
    assert (
        few.shape == (5, 4)
        and torch.equal(few[:, -1], ids)
        and all(len(set(r)) == 4 for r in few.tolist())
    )
    assert torch.equal(few.gather(1, own[:, None])[:, 0], ids) and torch.equal(
        support, logits.gather(1, few)
    )
    everything, own, support = datc.candidates(logits, ids, 0)
    assert everything.shape == (5, 37) and torch.equal(own, ids) and torch.equal(support, logits)


def test_the_streamed_expected_embedding_is_the_dense_one(monkeypatch):
    monkeypatch.setattr(datc, "STRIP", 10)
    hidden, head, _, _, embedding = random_position(2, extra_rows=4)
    dense = (hidden @ head.T / 0.7).softmax(-1) @ embedding[:37]
    close(datc.expected_embedding(hidden, head, embedding, 0.7, chunk=2), dense, 1e-10, 1e-12)


def test_streamed_work_never_holds_the_vocabulary_for_all_positions():
    """In a process of its own, bf16: dense would need 4 bytes x 1,024 x 60,000 = 246 MB for every (N, V) tensor."""
    script = """
        import resource, torch, datc
        torch.set_num_threads(1)
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        make = lambda *s: torch.randn(*s, dtype=torch.bfloat16)
        inputs = make(1024, 32), make(60_000, 32), torch.randint(0, 60_000, (1024,)), make(1024, 32), make(60_000, 32)
        datc.work(*[x[:8] if i in (0, 2, 3) else x for i, x in enumerate(inputs)])
        before = peak()
        assert datc.work(*inputs).isfinite().all()
        print(peak() - before)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 240, f"streaming took {out.stdout.strip()} MB above its inputs"


# ---------------------------------------------------------------------------------------------------------------------
# Finite differences: is d the derivative of the reward that it claims to be?


@pytest.fixture(scope="module")
def relaxed():
    """A float64 LayerNorm pair, a rollout, and R̃(ℓ): the reward around the hard sample as the logits move away from ℓ⁰."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The reward model.

TEXTS = ["the cat is red <end>", "<end>", "a", "we saw the big lovely cat and it was a", "it <end>"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad_id", [0, 2])  # 2: pad = eos
def test_a_response_scores_alone_as_in_a_padded_batch(kind, pad_id):
    model = make_reward_model(kind)
    model.pad_id = pad_id
    rollout = hand_made(TEXTS)
    rewards, grad = model.score(rollout, with_grad=True)
    for i in range(len(TEXTS)):
        alone = rows_of(rollout, i)
        reward, g = model.score(alone, with_grad=True)
        close(reward[0], rewards[i], 1e-5, 1e-5)
        close(g[0], grad[i][rollout.response_mask[i]], 1e-4, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_models_own_on_the_whole_templates_ids(kind):
    model = make_reward_model(kind)
    text = TOKENIZER.apply_chat_template(
        [*PROMPTS[0], {"role": "assistant", "content": "the cat is red"}], tokenize=False
    )
    ids = TOKENIZER(text, return_tensors="pt", add_special_tokens=False).input_ids
    close(
        model.score(hand_made(TEXTS[:1]))[0], model.model(input_ids=ids).logits[:, 0].detach(), 1e-5
    )


def test_the_gradient_is_exactly_zero_on_stop_tokens_and_padding_and_nowhere_else():
    rollout = hand_made(TEXTS)
    _, grad = make_reward_model().score(rollout, with_grad=True)
    assert torch.equal((grad != 0).any(-1), rollout.content_mask)


def test_the_gradient_leaves_no_trace_on_the_frozen_model():
    model = make_reward_model()
    model.score(hand_made(TEXTS), with_grad=True)
    assert all(p.grad is None and not p.requires_grad for p in model.model.parameters())


def test_slices_of_the_reward_batch_change_nothing():
    model, rollout = make_reward_model(), hand_made(TEXTS)
    a = model.score(rollout, with_grad=True)
    model.reward_batch = 2
    for x, y in zip(a, model.score(rollout, with_grad=True), strict=True):
        close(x, y, 1e-5, 1e-5)


def expected_of(policy, model, rollout):
    hidden = response_hidden(policy, rollout).detach()
    flat = datc.expected_embedding(
        hidden.flatten(0, 1), policy.get_output_embeddings().weight[:V], model.embedding[:V]
    )
    return flat.view(*hidden.shape[:2], -1)


def test_the_path_gradient_at_one_is_the_gradient_at_the_sample():
    policy, model = make_policy(), make_reward_model()
    rollout = make_rollout(policy)
    close(
        model.grad(rollout, expected_of(policy, model, rollout), [1.0]),
        model.score(rollout, True)[1],
        1e-5,
        1e-6,
    )


def test_the_path_gradient_is_complete():
    """Along the whole path, <f, e - ē> adds up to the reward that the path gains: (8), 64 midpoints."""
    policy, model = make_policy("gpt2").double(), make_reward_model("gpt2", double=True)
    rollout = make_rollout(policy)
    expected = expected_of(policy, model, rollout)
    points = ((torch.arange(64) + 0.5) / 64).tolist()
    f, e = model.grad(rollout, expected, points), model.embedding[rollout.response_ids]
    free = rollout.free_mask & rollout.content_mask
    moved = ((f * (e - expected)).sum(-1) * free).sum(-1)
    inputs = model.inputs(rollout)
    shift = ((expected - e) * free[..., None]).detach()
    index = inputs.places[..., None].expand_as(shift)
    with torch.no_grad():
        start = model._reward(model.embedding[inputs.ids].scatter_add(1, index, shift), inputs.mask)
    gained = model.score(rollout)[0] - start
    close(moved.detach(), gained, 1e-2, 1e-3)
    assert gained.abs().min() > 1e-2


def test_prefix_scores_start_before_the_response_end_at_its_reward_and_stay_there():
    model, rollout = make_reward_model(), hand_made(TEXTS)
    s, rewards = model.prefix_scores(rollout), model.score(rollout)[0]
    assert s.shape == (5, rollout.response_ids.shape[1] + 1)
    for i, n in enumerate(rollout.response_mask.sum(-1).tolist()):
        close(s[i, n:], rewards[i].expand(s.shape[1] - n), 1e-4, 1e-5)
    close(s[:, 0], s[:1, 0].expand(5), 1e-4, 1e-5)
    before, _ = reward_grad.template_around_answer(TOKENIZER, PROMPTS[0])
    ids = torch.tensor([before + TOKENIZER("the cat").input_ids])
    states = model.backbone(input_ids=ids).last_hidden_state[0, -1]
    close(s[0, 2], states.detach() @ model.head.detach(), 1e-4)


def test_substituted_rewards_are_those_of_the_edited_texts():
    model, rollout = make_reward_model(), hand_made(["the cat is red <end>"])
    red, dog = TOKENIZER.convert_tokens_to_ids(["red", "dog"])
    values = model.substituted(
        rollout, torch.tensor([1, 3]), torch.tensor([[dog, red], [dog, red]])
    )
    texts = [
        "the dog is red <end>",
        "the red is red <end>",
        "the cat is dog <end>",
        "the cat is red <end>",
    ]
    close(values.flatten(), model.score(hand_made(texts))[0], 1e-5)


class Doubling(torch.nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def test_a_reward_model_that_breaks_an_assumption_is_refused():
    def refuse(model, match, tokenizer=TOKENIZER):
        with pytest.raises(ValueError, match=match):
            RewardModel(model, tokenizer, TOKENIZER)

    refuse(make_classifier(num_labels=2), "num_labels 1")
    biased = make_classifier()
    biased.score = torch.nn.Linear(32, 1, bias=True)
    refuse(biased, "bias-free")
    scaled = make_classifier()
    scaled.set_input_embeddings(Doubling(V + 1, 32))
    refuse(scaled, "look-up")
    two_way = make_classifier()
    plain = two_way.base_model.forward

    def looks_ahead(**kwargs):
        out = plain(**kwargs)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
        return out

    two_way.base_model.forward = looks_ahead
    refuse(two_way, "not causal")
    other = tiny.make_tokenizer()
    words = other.get_vocab()
    words["red"], words["blue"] = words["blue"], words["red"]
    other._tokenizer.model = models.WordLevel(words, unk_token="<unk>")
    first = min(words["red"], words["blue"])
    refuse(make_classifier(), f"id {first} is 'red' for the policy and 'blue'", other)


def test_a_conversation_too_long_for_the_reward_model_is_refused_and_never_cut():
    model, rollout = make_reward_model(), hand_made([" ".join(["the"] * 130)])
    with pytest.raises(ValueError, match="does not fit the reward model's 128 positions"):
        model.score(rollout)


def test_a_nan_reward_stops_with_the_conversation_it_came_from():
    model = make_reward_model()
    with torch.no_grad():
        model.embedding[TOKENIZER.convert_tokens_to_ids("red")] = torch.nan
    with pytest.raises(FloatingPointError, match="the cat is red"):
        model.score(hand_made(TEXTS[:1]), with_grad=True)
    with pytest.raises(FloatingPointError, match="response 0"):
        model.score(hand_made(TEXTS[:1]))


# ---------------------------------------------------------------------------------------------------------------------
# (1) and (7) GRPO.


def test_advantages_are_standardised_within_each_group():
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 10.0, 10.0, 14.0])
    a = group_advantages(rewards, 4).view(2, 4)
    close(a.mean(-1), torch.zeros(2), 0, 1e-6)
    close(a.std(-1, correction=0), torch.ones(2), 1e-6)
    close(a[0, 3], 1.5 / 1.25**0.5, 1e-6)


@pytest.mark.parametrize("value", [0.7, 0.1, 1e4, -3e-7])
def test_a_group_that_ties_gets_no_advantage(value):
    rewards = torch.full((7,), value)
    assert torch.equal(group_advantages(rewards, 7), torch.zeros(7))
    noisy = rewards * (1 + 1e-6 * torch.randn(7))  # the same response scored in other paddings
    assert torch.equal(group_advantages(noisy, 7), torch.zeros(7))


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="--group_size"):
        group_advantages(torch.ones(4), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_training_log_probs_are_those_the_sampler_drew_from(kind):
    """With generation defaults that would bend the distribution, padding rows, a temperature and padded prompts."""
    policy = make_policy(kind)
    hostile = {
        "top_k": 3,
        "top_p": 0.5,
        "repetition_penalty": 2.0,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 5,
    }
    for name, value in hostile.items():
        setattr(policy.generation_config, name, value)
    rollout = make_rollout(
        policy, PROMPTS, tokens=12, temperature=0.7, keep_logp=True, sample_batch=2
    )
    mask, head = rollout.response_mask, policy.get_output_embeddings().weight[:V]
    with torch.no_grad():
        hidden = response_hidden(policy, rollout)[mask]
        logp, _ = token_logprobs(hidden, head, rollout.response_ids[mask], 0.7)
    close(logp, rollout.sampler_logp[mask], 1e-4, 1e-4)
    assert policy.generation_config.top_k == 3, "the policy's own defaults are put back"


def test_ids_behind_the_shared_vocabulary_are_never_sampled():
    policy = make_policy()
    with torch.no_grad():
        policy.get_output_embeddings().weight[V:] = 100 * policy.get_output_embeddings().weight[:1]
    assert make_rollout(policy, tokens=30).response_ids.max() < V


def test_masks_reach_through_the_first_stop_token_of_any_source():
    policy = make_policy()
    policy.generation_config.eos_token_id = [7, 9]
    vocabulary = shared_vocabulary(policy, TOKENIZER)
    assert vocabulary.stop_ids == [
        2,
        7,
        9,
    ]  # the tokenizer's and template's, and the generation config's
    rollout = make_rollout(policy, PROMPTS, group_size=8, tokens=30)
    assert rollout.stopped.any()
    for ids, mask, free, stopped in zip(
        rollout.response_ids, rollout.response_mask, rollout.free_mask, rollout.stopped, strict=True
    ):
        stops = [t for t, i in enumerate(ids.tolist()) if i in (2, 7, 9)]
        assert mask.sum() == (stops[0] + 1 if stops else len(ids)) and bool(stopped) == bool(stops)
        assert not stops or not free[stops[0]]


def test_a_turn_end_that_is_special_only_as_an_added_token_is_a_stop_token():
    tokenizer = bpe_tokenizer(LLAMA3)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>"
    )
    plain.chat_template = LLAMA3
    end = plain.convert_tokens_to_ids("<|eot_id|>")
    assert end not in plain.all_special_ids and rollouts.turn_end_id(plain) == end


def test_stop_and_whitespace_tokens_are_frozen():
    tokenizer = bpe_tokenizer(CHATML)
    table = shared_vocabulary(make_policy(rows=len(tokenizer) + 5), tokenizer)
    frozen = {tokenizer.decode([i]) for i in table.frozen.nonzero().flatten().tolist()}
    assert {"\n", " ", "\n\n", "<|im_end|>"} <= frozen
    assert not any(t.strip() for t in frozen - {"<|im_end|>", "<|endoftext|>"} if "\n" not in t)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_batch_order_do_not_change_log_probs(kind):
    policy = make_policy(kind)
    rollout = make_rollout(policy, PROMPTS)
    with torch.no_grad():
        together = response_hidden(policy, rollout)
        for i in (0, 3, 5):
            close(
                response_hidden(policy, rows_of(rollout, i))[0],
                together[i][rollout.response_mask[i]],
                1e-4,
                1e-4,
            )


def test_token_log_probs_and_their_gradients_are_the_dense_ones(monkeypatch):
    monkeypatch.setattr(grpo, "STRIP", 10)
    hidden, head, ids, _, _ = random_position(3)
    hidden.requires_grad_(), head.requires_grad_()
    dense = (hidden @ head.T / 0.7).log_softmax(-1)
    expected = dense[torch.arange(5), ids]
    logp, entropy = token_logprobs(hidden, head, ids, 0.7)
    close(logp.detach(), expected.detach(), 1e-12)
    close(entropy, -(dense.exp() * dense).sum(-1).detach(), 1e-12)
    weights = torch.arange(5).double()
    for a, b in zip(
        torch.autograd.grad((weights * logp).sum(), (hidden, head)),
        torch.autograd.grad((weights * expected).sum(), (hidden, head)),
        strict=True,
    ):
        close(a, b, 1e-10, 1e-12)


def test_gradients_of_log_probs_are_bitwise_repeatable_with_several_threads():
    torch.manual_seed(0)
    hidden, ids = (
        torch.randn(8192, 64),
        torch.randint(0, 5, (8192,)),
    )  # many tokens add to the same rows
    grads = []
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            head = torch.linspace(-1, 1, 50 * 64).view(50, 64).requires_grad_()
            (g,) = torch.autograd.grad(token_logprobs(hidden, head, ids)[0].sum(), head)
            grads.append(g)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(g, grads[0]) for g in grads)


def test_the_surrogate_clips_only_what_would_move_further():
    logp = torch.tensor([[0.5, 0.5, -0.5, -0.5]], requires_grad=True)
    a = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, stats = grpo.clipped_surrogate(
        logp, torch.zeros(1, 4), a, torch.ones(1, 4).bool(), 0.2, 1
    )
    up, down = torch.tensor(0.5).exp(), torch.tensor(-0.5).exp()
    close(loss.detach(), -(1.2 - up + down - 0.8) / 4, 1e-6)
    assert (torch.autograd.grad(loss, logp)[0] != 0).tolist() == [[False, True, True, False]]
    close(stats["clip_ratio/region_mean"], 0.5, 1e-6)


def test_the_kl_estimate_is_zero_on_the_reference_and_positive_off_it_and_blind_to_padding():
    logp, mask = -torch.rand(3, 5), torch.arange(5) < torch.tensor([[5], [2], [0]])
    assert grpo.k3_kl(logp, logp, mask, 3) == 0
    off = grpo.k3_kl(logp, torch.where(mask, logp + 0.3, 1e6), mask, 3)
    close(off, 2 / 3 * (torch.tensor(0.3).exp() - 1.3), 1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Templates and tokenizers like the real ones.

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|begin_of_text|>",
]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def bpe_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen3 and Llama-3 have."""
    core = Tokenizer(models.BPE())
    words = Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(words, "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(
        ["the cat sat on the mat\n\n the dog  user assistant system\n"] * 20, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (QWEN3, "<|im_end|>"), (LLAMA3, "<|eot_id|>")]
)
def test_sampled_ids_spliced_into_a_template_are_the_whole_templates_ids(template, end):
    tokenizer = bpe_tokenizer(template)
    for answer in ("the cat sat", "A dog!\n\nAnd the end"):
        before, after = reward_grad.template_around_answer(tokenizer, PROMPTS[0])
        spliced = before + tokenizer(answer).input_ids + after
        text = tokenizer.apply_chat_template(
            [*PROMPTS[0], {"role": "assistant", "content": answer}], tokenize=False
        )
        assert spliced == tokenizer(text, add_special_tokens=False).input_ids
        assert spliced.count(tokenizer.convert_tokens_to_ids("<|begin_of_text|>")) <= 1
    assert rollouts.turn_end_id(tokenizer) == tokenizer.convert_tokens_to_ids(end)


@pytest.mark.parametrize("template", [QWEN3, LLAMA3])
def test_sampled_ids_survive_a_template_that_would_rewrite_their_text(template):
    tokenizer = bpe_tokenizer(template)
    model = RewardModel(make_classifier(rows=len(tokenizer)), tokenizer, tokenizer)
    ids = tokenizer("\n\n the cat </think>\n").input_ids  # would be trimmed or split
    odd = torch.tensor([ids[::-1] + ids])  # not what any text encodes to
    ones = torch.ones_like(odd).bool()
    rollout = Rollout([PROMPTS[0]], odd, ones, odd, ones, ones, torch.tensor([False]), 1)
    inputs = model.inputs(rollout)
    assert inputs.ids[0][inputs.places[0]].tolist() == odd[0].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The loop.


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random policy and reward model on disk, with prompts, as a user would have them."""
    folder = tmp_path_factory.mktemp("pair")
    for model, name in (
        (make_policy(initializer_range=0.05), "policy"),
        (make_classifier(), "reward_model"),
    ):
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    rows = [json.dumps({"prompt": p[0]["content"]}) + "\n" for p in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(rows))
    return folder


def arguments(pair, out, *extra, rollouts=4):
    flags = {
        "policy": pair / "policy",
        "reward_model": pair / "reward_model",
        "prompts": pair / "prompts.jsonl",
    }
    flags |= {"output_dir": out, "rollouts": rollouts, "max_response_tokens": 10, "save_every": 2}
    return [str(x) for name, value in flags.items() for x in (f"--{name}", value)] + [
        str(x) for x in extra
    ]


def read_metrics(out: Path, *without):
    rows = train.read_jsonl(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.startswith(("time/", *without))} for r in rows]


def weights_of(folder: Path):
    return load.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_weights(a: Path, b: Path) -> bool:
    a, b = weights_of(a), weights_of(b)
    return all(torch.equal(a[k], b[k]) for k in a)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(pair, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train.main(arguments(pair, tmp_path / name, "--seed", seed))
    assert (
        read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b") != read_metrics(tmp_path / "c")
    )
    assert same_weights(tmp_path / "a" / "final", tmp_path / "b" / "final")


def test_train_takes_models_that_are_already_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = make_policy("gpt2", resid_pdrop=0.5)
    before = [p.clone() for p in policy.parameters()]
    config = train.Config(rollouts=2, max_response_tokens=8)
    history = train.train(policy, make_reward_model("gpt2"), TOKENIZER, PROMPTS, config)
    assert len(history) == 2 and history[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert (tmp_path / "runs" / "tiny-datc-s0" / "final" / "model.safetensors").exists()


def test_datc_with_a_band_of_one_trains_like_grpo_bit_for_bit(pair, tmp_path):
    train.main(arguments(pair, tmp_path / "grpo", "--credit", "grpo"))
    train.main(arguments(pair, tmp_path / "datc", "--credit", "datc", "--band", 1))
    assert read_metrics(tmp_path / "grpo", "credit/") == read_metrics(tmp_path / "datc", "credit/")
    assert same_weights(tmp_path / "grpo" / "final", tmp_path / "datc" / "final")
    train.main(arguments(pair, tmp_path / "four", "--credit", "datc"))
    assert not same_weights(tmp_path / "grpo" / "final", tmp_path / "four" / "final")


@pytest.mark.parametrize(
    "extra", [("--credit", "shuffle", "--grad_at", "0.25", "0.75"), ("--epochs", "2")]
)
def test_four_rollouts_are_two_and_a_resume_and_two(pair, tmp_path, extra):
    train.main(arguments(pair, tmp_path / "whole", *extra))
    train.main(arguments(pair, tmp_path / "parts", *extra, rollouts=2))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 2, "reward": 99}\n{"step": 3, "rew'
        )  # a rollout after the checkpoint, and a killed write
    train.main(["--resume", str(tmp_path / "parts"), "--rollouts", "4"])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    assert same_weights(tmp_path / "whole" / "final", tmp_path / "parts" / "final")
    assert len(train.read_jsonl(tmp_path / "parts" / "samples.jsonl")) == 4 * 4


def gradient(pair, micro_batch, method="datc", **extra):
    config = train.parse(
        arguments(pair, "unused", "--credit", method, "--micro_batch", micro_batch)
    )
    config = replace(config, max_grad_norm=1e9, learning_rate=1e-9, **extra)
    policy, model = make_policy(), make_reward_model()
    learner = train.Learner(policy, model, shared_vocabulary(policy, TOKENIZER), config)
    rollout = make_rollout(policy, PROMPTS, group_size=4)
    rewards, grad = model.score(rollout, with_grad=learner.grad_at_sample)
    advantages, sharpness = learner.advantages(rollout, rewards)
    kept = {}
    learner.optimizer.step = lambda: kept.update(
        {n: p.grad.clone() for n, p in policy.named_parameters()}
    )
    reference = learner.reference_logp(rollout) - 0.1 * rollout.response_mask
    scored = train.Scored(rollout, rewards, advantages, grad, reference, sharpness)
    metrics, *_ = learner.update(scored, 0, train.Clock("cpu"))
    return kept, metrics


@credit.credit_method("whole_batch_for_tests", needs=("work", "entropy", "hidden", "whole_batch"))
def whole_batch_for_tests(x):
    assert len(x.advantages) == 12 and x.hidden.shape[:2] == x.work.shape == x.entropy.shape
    return credit.multiplicative(x, x.response_mask * x.entropy / x.entropy.max())


@pytest.mark.parametrize("method", credit.CREDIT)
def test_micro_batches_of_any_size_give_the_same_gradient(pair, method):
    extra = {"advantage": "rloo"} if method == "red" else {}
    whole, metrics = gradient(pair, 12, method, **extra)
    for size in (5,) if method == "oracle" else (3, 5):
        parts, m = gradient(pair, size, method, **extra)
        for name, g in whole.items():
            close(parts[name], g, 1e-3, 1e-5 * g.abs().max().item())
        assert m.keys() == metrics.keys() and all(
            abs(m[k] - metrics[k]) < 1e-4 * (1 + abs(metrics[k])) for k in m
        )


def test_the_loop_hands_the_sharpness_of_the_estimator_to_the_allocation(pair, monkeypatch):
    seen = []
    method = credit.CREDIT["datc"]
    spy = lambda x: seen.append(x) or method(x)  # noqa: E731
    spy.needs = method.needs
    monkeypatch.setitem(credit.CREDIT, "datc", spy)
    gradient(pair, 12, advantage="rloo")
    close(seen[0].sharpness.square().mean(), 1.0, 1e-5)
    close(seen[0].advantages / seen[0].advantages.square().mean().sqrt(), seen[0].sharpness, 1e-5)
    assert not torch.allclose(seen[0].advantages, seen[0].sharpness)


def test_every_trained_weight_gets_a_gradient_and_the_reward_rises(pair, tmp_path):
    gradients, _ = gradient(pair, 6)
    assert all(g.abs().max() > 0 for g in gradients.values()), [
        n for n, g in gradients.items() if g.abs().max() == 0
    ]
    train.main(arguments(pair, tmp_path / "run", "--learning_rate", 5e-3, "--beta", 0, rollouts=30))
    rewards = [r["reward"] for r in read_metrics(tmp_path / "run")]
    assert (
        sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5 * torch.tensor(rewards[:5]).std().item()
    ), rewards


def test_grpo_asks_the_reward_model_for_no_gradient(pair, monkeypatch):
    def refuse(*_):
        raise AssertionError("GRPO computed credit evidence")

    monkeypatch.setattr(RewardModel, "_reward_and_grad", refuse)
    monkeypatch.setattr(datc, "work", refuse)
    config = train.parse(arguments(pair, "unused", "--credit", "grpo"))
    policy, model = make_policy(), make_reward_model()
    learner = train.Learner(policy, model, shared_vocabulary(policy, TOKENIZER), config)
    rollout = make_rollout(policy)
    rewards, grad = model.score(rollout, with_grad=learner.grad_at_sample)
    assert grad is None
    learner.update(
        train.Scored(rollout, rewards, rewards, grad, learner.reference_logp(rollout)),
        0,
        train.Clock("cpu"),
    )


def test_one_policy_forward_a_micro_batch_serves_credit_and_loss(pair):
    config = train.parse(arguments(pair, "unused", "--micro_batch", "2", "--beta", 0))
    policy, model = make_policy(), make_reward_model()
    learner = train.Learner(policy, model, shared_vocabulary(policy, TOKENIZER), config)
    rollout = make_rollout(policy)
    rewards, grad = model.score(rollout, with_grad=True)
    calls, plain = [], policy.base_model.forward
    policy.base_model.forward = lambda **kw: calls.append(len(kw["input_ids"])) or plain(**kw)
    learner.update(
        train.Scored(rollout, rewards, group_advantages(rewards, 2), grad, None),
        0,
        train.Clock("cpu"),
    )
    assert calls == [2, 2]


def test_the_reference_is_the_start_however_far_the_policy_has_moved(pair):
    config = train.parse(arguments(pair, "unused"))
    policy = make_policy()
    learner = train.Learner(
        policy, make_reward_model(), shared_vocabulary(policy, TOKENIZER), config
    )
    rollout = make_rollout(policy)
    before = learner.reference_logp(rollout)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    moved = [p.clone() for p in policy.parameters()]
    assert torch.equal(learner.reference_logp(rollout), before)
    assert all(torch.equal(a, b) for a, b in zip(moved, policy.parameters(), strict=True))


def test_ctrl_c_leaves_a_run_that_can_be_resumed(pair, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "train.py", *arguments(pair, out, rollouts=100_000)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for _ in range(600):
        if (out / "metrics.jsonl").exists() and len(
            (out / "metrics.jsonl").read_text().splitlines()
        ) >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "--resume" in text, text
    done = len(read_metrics(out))
    assert (out / f"checkpoint-{done}" / "trainer.pt").exists()
    train.main(["--resume", str(out), "--rollouts", str(done + 1)])
    assert len(read_metrics(out)) == done + 1


# ---------------------------------------------------------------------------------------------------------------------
# Real checkpoints: LoRA, supervised start, memory, self-checks.


def test_lora_trains_float32_adapters_against_the_frozen_start_and_saves_them_in_peft_format(
    pair, tmp_path
):
    from peft import PeftModel

    out = tmp_path / "run"
    lora = (
        "--lora_rank",
        4,
        "--learning_rate",
        1e-2,
        "--gradient_checkpointing",
        "--dtype",
        "bfloat16",
    )
    train.main(arguments(pair, out, *lora))
    rows = read_metrics(out)
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0 and 0 < rows[0]["check/sampler_gap"] < 0.1
    base = load.AutoModelForCausalLM.from_pretrained(pair / "policy", dtype=torch.bfloat16)
    tuned = PeftModel.from_pretrained(base, out / "final")
    adapters = {n: p for n, p in tuned.named_parameters() if "lora_" in n}
    assert len(adapters) == 2 * 2 * 7 and all(p.dtype == torch.float32 for p in adapters.values())
    assert all(p.abs().max() > 0 for p in adapters.values())
    assert not any("lm_head" in n for n in adapters)
    ids = torch.tensor([[3, 5, 7, 2]])
    moved = (tuned(input_ids=ids).logits - make_policy_logits(pair, ids)).abs().max()
    assert moved > 1e-3


def make_policy_logits(pair, ids):
    return load.AutoModelForCausalLM.from_pretrained(pair / "policy", dtype=torch.bfloat16)(
        input_ids=ids
    ).logits


@pytest.mark.parametrize("rank", [0, 8])
def test_a_supervised_start_learns_the_answers_and_is_what_the_kl_refers_to(pair, tmp_path, rank):
    rows = [
        {"prompt": "describe the cat", "chosen": [{"role": "assistant", "content": "it was red"}]}
    ] * 400
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    extra = (
        "--prompts",
        tmp_path / "p.jsonl",
        "--sft_examples",
        400,
        "--sft_learning_rate",
        1e-2,
        "--lora_rank",
        rank,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.main(arguments(pair, whole, *extra))
    first = train.read_jsonl(whole / "samples.jsonl")[0]
    assert all(0 < p <= 1 for p in first["token_p"]) and len(first["token_p"]) == len(
        first["tokens"]
    )
    assert (
        first["response"] == "it was red" or rank
    )  # adapters alone cannot teach a random model to talk
    assert read_metrics(whole)[0]["kl"] == pytest.approx(0, abs=1e-6)
    train.main(arguments(pair, parts, *extra, rollouts=2))
    train.main(["--resume", str(parts), "--rollouts", "4"])
    assert read_metrics(whole) == read_metrics(parts)


def test_a_cut_demonstration_does_not_teach_to_stop():
    from machinery import sft

    examples = [(PROMPTS[0], "the cat is red"), (PROMPTS[0], "it")]
    vocabulary = shared_vocabulary(make_policy(), TOKENIZER)
    demo = sft.demonstrations(TOKENIZER, examples, vocabulary, max_tokens=8)
    texts = [
        TOKENIZER.decode(ids[mask])
        for ids, mask in zip(demo.response_ids, demo.response_mask, strict=True)
    ]
    assert not texts[0].endswith("<end>") and texts[1] == "it <end>"
    assert demo.prompt_mask.sum(-1).max() + demo.response_mask.sum(-1).max() == 8


def test_sft_needs_chosen_answers(pair, tmp_path):
    assert 'needs a column "chosen"' in error_of(
        arguments(pair, tmp_path / "out", "--sft_examples", 4)
    )


def test_the_length_window_punishes_stubs_and_novels_only():
    penalty = grpo.length_window(torch.tensor([0, 4, 8, 1024, 1536, 2048, 9000]), sigma=2.0)
    assert penalty.tolist() == [1.0, 0.5, 0.0, 0.0, 2.0, 4.0, 4.0]


def test_the_std_floor_shrinks_advantages_of_quiet_groups_only():
    rewards = torch.tensor([0.0, 0.1, 0.0, 4.0])
    assert group_advantages(rewards, 2, std_floor=1.0).tolist() == pytest.approx(
        [-0.05, 0.05, -1.0, 1.0]
    )


def test_devs_reward_shaping_changes_the_advantages_and_never_the_logged_reward(pair, tmp_path):
    train.main(arguments(pair, tmp_path / "a", rollouts=1))
    train.main(
        arguments(
            pair, tmp_path / "b", "--length_penalty", 5, "--advantage_std_floor", 3, rollouts=1
        )
    )
    a, b = (train.read_jsonl(tmp_path / x / "samples.jsonl")[0] for x in "ab")
    assert a["reward"] == b["reward"] and a["advantage"] != b["advantage"]


def test_the_memory_estimate_counts_weights_exactly_and_names_the_flag_that_would_help(
    pair, monkeypatch
):
    config = train.parse(arguments(pair, "unused", "--lora_rank", 4))
    policy, reward = make_policy(), make_classifier()
    parts = load.memory_estimate(config, policy.config, reward.config)
    assert parts["policy weights"] == 4 * sum(p.numel() for p in policy.parameters())
    assert parts["reward model weights"] == 4 * sum(p.numel() for p in reward.parameters())
    adapters = sum(
        p.numel() for n, p in load.add_lora(policy, 4).named_parameters() if "lora_" in n
    )
    assert parts["adapters, gradients, optimizer"] == 4 * 5 * adapters
    assert load.check_memory(config) > 0  # on a CPU nothing is refused
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (held, held))
    gpu = replace(config, device="cuda", sample_batch=10_000, prompts_per_rollout=5_000)
    held = 1.2 * load.total_estimate(
        load.memory_estimate(replace(gpu, sample_batch=1), policy.config, reward.config)
    )
    with pytest.raises(ValueError, match="--sample_batch"):
        load.check_memory(gpu)


class Capped(Qwen3ForCausalLM):
    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        out.logits = 0.5 * torch.tanh(out.logits)
        return out


def test_a_policy_with_capped_logits_or_live_dropout_is_refused_at_the_start():
    config = train.Config(dtype="float32", device="cpu")
    torch.manual_seed(0)
    capped = Capped(make_policy().config).eval()
    args = TOKENIZER, shared_vocabulary(capped, TOKENIZER), PROMPTS, config
    with pytest.raises(ValueError, match="soft-capped"):
        load.self_check(capped, *args)
    gaps = load.self_check(make_policy(), *args)
    assert max(gaps.values()) < 1e-4
    noisy = make_policy("gpt2")
    noisy.transformer.drop.p = 0.5
    noisy.train()
    with pytest.raises(ValueError, match="log-probs differ|soft-capped"):
        load.self_check(noisy, *args)


def test_every_preset_is_a_valid_configuration():
    for name in train.flags.PRESETS:
        config = train.parse(["--preset", name, "--band", "2.0"])
        assert config.band == 2.0 and (config.policy is None) == (name in tiny.WORLDS)


def test_a_failed_save_keeps_the_last_good_checkpoint(pair, tmp_path, monkeypatch):
    plain = torch.save

    def full_disk(state, path):
        plain(state, path) if "checkpoint-2" in str(path) else (_ for _ in ()).throw(
            OSError(28, "No space left on device")
        )

    monkeypatch.setattr(torch, "save", full_disk)
    message = error_of(arguments(pair, tmp_path / "run"))
    assert "No space left" in message and "intact" in message
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"checkpoint-2"}


# ---------------------------------------------------------------------------------------------------------------------
# eval.py


@pytest.fixture(scope="module")
def runs(pair, tmp_path_factory):
    """Two runs of three rollouts."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("grpo", "datc"):
        train.main(arguments(pair, folder / name, "--credit", name, rollouts=3))
    return folder


def evaluated(capsys, *argv) -> str:
    capsys.readouterr()
    evaluate.main([str(a) for a in argv])
    return capsys.readouterr().out


def model_flags(pair):
    flags = {
        "policy": pair / "policy",
        "reward_model": pair / "reward_model",
        "prompts": pair / "prompts.jsonl",
    }
    return [x for k, v in flags.items() for x in (f"--{k}", v)] + ["--max_response_tokens", 8]


def test_eval_reward_sets_models_side_by_side_with_win_rates(pair, runs, capsys):
    out = evaluated(capsys, "reward", runs / "grpo", runs / "datc", pair / "policy", "--samples", 4)
    assert (
        out.count("\n| " + str(runs)) == 2 + 3
        and "win rate" in out
        and out.startswith("No held-out prompts known")
    )
    same = evaluated(capsys, "reward", runs / "grpo", runs / "grpo", "--samples", 2)
    assert "| 0.5 " in same, "a model against itself on the same seeds wins half"


def test_eval_plot_and_compare_write_figures_and_tables(pair, runs, tmp_path, capsys):
    out = evaluated(capsys, "plot", runs / "grpo", runs / "datc", "--out", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG" and "| datc" in out
    flags = [
        *model_flags(pair),
        "--rollouts",
        2,
        "--credit",
        "grpo",
        "datc+rloo@0.5",
        "--seeds",
        2,
        "--folder",
        tmp_path / "c",
    ]
    out = evaluated(capsys, "compare", *flags, "--out", tmp_path / "c.png")
    assert out.count("datc+rloo@0.5") == 2 and len(list((tmp_path / "c" / "tiny").iterdir())) == 4
    config = evaluate.read_config(tmp_path / "c" / "tiny" / "datc+rloo@0.5-0.0006-s1")
    assert (config.credit, config.grad_at, config.advantage, config.seed) == (
        "datc",
        [0.5],
        "rloo",
        1,
    )
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("metrics.jsonl")}
    evaluated(capsys, "compare", *flags, "--out", tmp_path / "c.png")
    assert written == {p: p.stat().st_mtime_ns for p in written}, (
        "what is there is not trained again"
    )
    with pytest.raises(SystemExit, match="holds another run: --band 4.0 .not 2.0"):
        evaluated(capsys, "compare", *flags, "--band", 2.0, "--out", tmp_path / "c.png")


def test_eval_heatmap_is_one_page_with_escaped_text_and_every_token(runs, tmp_path, capsys):
    rows = train.read_jsonl(runs / "datc" / "samples.jsonl")
    rows[0]["tokens"][0] = "<script>alert(1)</script>"
    hostile = tmp_path / "run"
    hostile.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (hostile / name).write_text((runs / "datc" / name).read_text())
    (hostile / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    evaluated(capsys, "heatmap", hostile)
    page = (hostile / "heatmap.html").read_text()
    assert (
        "<script" not in page
        and "&lt;script&gt;" in page
        and "http" not in page
        and "prefers-color-scheme" in page
    )
    assert page.count("<span class=t") == sum(len(r["tokens"]) for r in rows)


def test_the_gain_through_shared_parameters_is_the_derivative_along_the_parameter_step(pair):
    config = replace(train.parse(arguments(pair, "unused")), beta=0.0, missing_eos_penalty=0.0)
    policy, model = make_policy("gpt2").double(), make_reward_model("gpt2", double=True)
    learner = train.Learner(policy, model, shared_vocabulary(policy, TOKENIZER), config)
    rollout = make_rollout(policy)
    x, p = evaluate.predicted_gains(learner, rollout, 0)
    rewards, grad = model.score(rollout, with_grad=True)
    a, mask = group_advantages(rewards, 2), rollout.response_mask
    hidden, logp, entropy = learner.forward(rollout)
    inputs = learner.evidence(
        train.Scored(rollout, rewards, a, grad, None), hidden, logp, entropy, 0, None
    )
    w = learner.method(inputs).weights
    (a[:, None] * (w - 1) * logp / mask.sum(-1, keepdim=True) * mask).sum().div(4).backward()
    steps = [t.grad for t in learner.weights]
    value = grad[mask] @ model.embedding[:V].T

    def reward_at(h):
        with torch.no_grad():
            for t, s in zip(learner.weights, steps, strict=True):
                t.add_(h * s)
            out = evaluate.relaxed_reward(learner, rollout, value).item()
            for t, s in zip(learner.weights, steps, strict=True):
                t.sub_(h * s)
        return out

    assert (reward_at(1e-5) - reward_at(-1e-5)) / 2e-5 == pytest.approx(p, rel=1e-5)
    assert x == pytest.approx(
        ((a[:, None] * (w - 1) * inputs.work).sum(-1) / mask.sum(-1)).mean().item()
    )
    assert x > 0


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


def test_eval_gain_fidelity_and_cost_print_their_tables(pair, tmp_path, capsys):
    out = evaluated(capsys, "gain", *model_flags(pair), "--batches", 3, "--out", tmp_path / "g.png")
    assert "| 3 " in out and "Pearson" in out and (tmp_path / "g.png").exists()
    out = evaluated(
        capsys,
        "fidelity",
        *model_flags(pair),
        "--responses",
        3,
        "--top_k",
        4,
        "--points",
        "1.0",
        "0.25,0.75",
    )
    assert (
        "| 0.25,0.75" in out
        and "prefix differences" in out
        and "--grad_at" in out
        and "chance in 32" in out
    )
    assert "random_direction" not in out
    texts = int(out.split(" substituted")[0].split()[-1])
    assert texts % 5 == 0 and f"{-(-texts // 64)} reward-model passes" in out
    out = evaluated(capsys, "cost", *model_flags(pair), "--rollouts", 1, "--no_work")
    assert "datc / grpo" in out


def test_a_linear_reward_models_first_order_work_is_perfectly_faithful(pair, capsys, monkeypatch):
    """The yardstick measures what it says: where the reward IS linear in the embeddings, d and exact d rank alike."""

    def linear(backbone, head, embeds, mask, places):
        taste = torch.linspace(-1, 1, embeds.shape[-1])
        total = (embeds * mask[..., None]).cumsum(1) @ taste
        return total.gather(1, places)

    monkeypatch.setattr(reward_grad, "read_score", linear)
    command = ["fidelity", *model_flags(pair), "--responses", 4, "--points", "1.0", "--credit"]
    out = evaluated(
        capsys,
        *command,
        "datc",
        "inverted",
        "oracle",
        "grpo",
        "random_direction",
        "entropy",
        "red_band",
    )
    measured = {
        row[1].strip(): float(row[3])
        for row in (line.split("|") for line in out.splitlines())
        if len(row) > 5 and row[2].strip().isdigit()
    }
    assert measured["1.0"] == measured["datc"] == 1 and measured["inverted"] == -1
    assert measured["red_band"] == measured["prefix differences"]
    out = evaluated(capsys, *command, "oracle", "--top_k", 8)
    assert "| oracle             | 4         | 1 " in out
    assert (
        "grpo" not in measured and abs(measured["random_direction"]) < 0.9 and "entropy" in measured
    )


def test_ranks_average_ties_and_spearman_is_theirs():
    assert evaluate.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert evaluate.spearman(x, x.exp()) == pytest.approx(1) and evaluate.spearman(
        x, -x
    ) == pytest.approx(-1)


FIELDS = {
    "alpaca_eval": {"instruction", "output", "generator"},
    "arena_hard": {"uid", "ans_id", "model", "messages", "tstamp", "metadata"},
    "mt_bench": {"question_id", "answer_id", "model_id", "choices", "tstamp"},
}
QUESTIONS = {
    "alpaca_eval": [{"instruction": "describe the cat"}, {"instruction": "describe the dog"}],
    "arena_hard": [{"uid": "u1", "prompt": "describe the cat"}, {"uid": "u2", "prompt": "a"}],
    "mt_bench": [
        {"question_id": 81, "turns": ["a", "describe the cat"]},
        {"question_id": 82, "turns": ["the", "a"]},
    ],
}


@pytest.mark.parametrize("name", FIELDS)
def test_eval_answers_writes_one_record_a_question_in_the_benchmarks_format(
    runs, tmp_path, capsys, name
):
    questions, out = tmp_path / "q.jsonl", tmp_path / "answers.json"
    questions.write_text(json.dumps(QUESTIONS[name][0]) + "\n")
    command = [
        "answers",
        runs / "datc",
        "--format",
        name,
        "--questions",
        questions,
        "--out",
        out,
        "--max_tokens",
        6,
    ]
    evaluated(capsys, *command)
    questions.write_text(
        "".join(json.dumps(q) + "\n" for q in [*QUESTIONS[name], QUESTIONS[name][0]])
    )
    first = out.read_text()
    evaluated(capsys, *command)
    records = json.loads(out.read_text()) if name == "alpaca_eval" else train.read_jsonl(out)
    assert len(records) == 2 and all(set(r) == FIELDS[name] for r in records)
    assert (
        json.dumps(records[0], indent=None)[:40] in first.replace("\n ", "").replace(" {", "{")
        or name == "alpaca_eval"
    )
    if name == "arena_hard":
        user, assistant = records[1]["messages"]
        assert user == {"role": "user", "content": "a"} and isinstance(
            assistant["content"]["answer"], str
        )
    if name == "mt_bench":
        assert [len(r["choices"][0]["turns"]) for r in records] == [2, 2]


def test_eval_says_what_is_wrong_with_a_path(runs, tmp_path):
    def refused(*argv):
        with pytest.raises(SystemExit) as info:
            evaluate.main([str(a) for a in argv])
        return str(info.value)

    assert "not a run folder" in refused("plot", tmp_path)
    (tmp_path / "config.json").write_text((runs / "grpo" / "config.json").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "rew')
    assert "no complete rollout" in refused("plot", tmp_path)
    assert "Unknown flags: --colour" in refused("plot", runs / "grpo", "--colour", "red")
    other = json.loads((runs / "grpo" / "config.json").read_text()) | {"reward_model": "another"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    (tmp_path / "metrics.jsonl").write_text((runs / "grpo" / "metrics.jsonl").read_text())
    assert "different reward models" in refused("reward", runs / "grpo", tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Errors: each names the flag and the fix, and costs nothing.


def error_of(argv, capsys=None) -> str:
    with pytest.raises(SystemExit) as info:
        train.main([str(a) for a in argv])
    return str(info.value)


def test_wrong_flags_are_named_before_anything_is_loaded(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load_tokenizer", lambda *_: pytest.fail("a model was loaded"))
    base = arguments(pair, tmp_path / "x")
    for extra, expected in {
        ("--group_size", 1): "--group_size is 1",
        ("--band", 0.5): "--band is 0.5",
        ("--credit", "best"): "Known methods: datc",
        ("--grad_at", 1.5): "--grad_at",
        ("--temperature", 0): "--temperature",
        ("--preset", "gpt5"): "Presets: tiny",
        ("--advantage", "best"): "rank_normal",
        ("--dtype", "int4"): "--dtype 'int4' is unknown",
        ("--device", "cuda"): "torch sees no GPU",
        ("--credit", "oracle"): "tiny worlds only",
        ("--resume", tmp_path / "nowhere"): "no run is there",
        ("--output_dir", pair): "is not empty",
    }.items():
        assert expected in error_of([*base, *extra])


def test_prompt_files_that_cannot_be_used_are_refused(pair, tmp_path):
    def refused(text, *extra):
        file = tmp_path / "p.jsonl"
        file.write_text(text)
        return error_of(arguments(pair, tmp_path / "out", "--prompts", file, *extra))

    assert "no such file" in error_of(
        arguments(pair, tmp_path / "out", "--prompts", "missing.jsonl")
    )
    assert "is empty" in refused("\n")
    assert "one JSON object a line" in refused("describe the cat\n")
    assert "no column 'question' (it has: prompt)" in refused(
        '{"prompt": "a"}\n', "--prompt_column", "question"
    )
    assert "empty prompt" in refused('{"prompt": " "}\n')
    long = json.dumps({"prompt": "the " * 100}) + "\n"
    assert (
        "1 of 2 prompts" in (message := refused('{"prompt": "a"}\n' + long))
        and "--max_prompt_tokens 64" in message
    )
    assert not (tmp_path / "out").exists()


def test_prompts_may_be_strings_or_messages_and_a_final_answer_is_dropped():
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for row, column in (
        ({"prompt": "a"}, "prompt"),
        ({"prompt": [user]}, "prompt"),
        ({"messages": [user, answer]}, "messages"),
    ):
        assert load.as_messages(row, column, "x") == [user]


def test_models_that_cannot_be_used_are_refused(pair, tmp_path):
    base = arguments(pair, tmp_path / "out")
    assert "lacks score.weight" in error_of([*base, "--reward_model", pair / "policy"])
    TOKENIZER.save_pretrained(tmp_path / "bare")
    make_policy().save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    assert "--chat_template FILE" in error_of([*base, "--policy", tmp_path / "bare"])
    (tmp_path / "t.jinja").write_text(tiny.CHAT_TEMPLATE)
    train.main(
        [
            *base,
            "--policy",
            str(tmp_path / "bare"),
            "--chat_template",
            str(tmp_path / "t.jinja"),
            "--rollouts",
            "1",
        ]
    )


def test_a_folder_that_holds_another_run_is_left_alone(pair, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    message = error_of(arguments(pair, tmp_path))
    assert "not empty" in message and "--resume" in message
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_nan_reward_stops_the_run_and_keeps_the_last_checkpoint(pair, tmp_path, monkeypatch):
    plain = reward_grad.read_score

    def breaks(*args):
        out = plain(*args)
        return out * torch.nan if (tmp_path / "run" / "checkpoint-2").exists() else out

    monkeypatch.setattr(reward_grad, "read_score", breaks)
    assert "NaN" in error_of(arguments(pair, tmp_path / "run", rollouts=10))
    assert len(read_metrics(tmp_path / "run")) == 2
    assert len(weights_of(tmp_path / "run" / "checkpoint-2")) > 5


# ---------------------------------------------------------------------------------------------------------------------
# The tiny world.


def test_the_person_likes_kind_words_on_the_topic_in_sentences():
    def gold(text, **kw):
        return tiny.gold_reward("cat", text.split(), **kw)

    assert gold("the cat is lovely and kind .") == pytest.approx(5.0)
    assert gold("the dog is ugly and bad .") == pytest.approx(5 * (-1 - 1.5 - 1.5) / 3)
    assert gold("the cat is red and blue .") == pytest.approx(5 / 3)
    assert gold("lovely lovely lovely cat") < gold("the lovely cat is lovely") - 1
    assert gold("the is a .") == gold("") == -5
    assert gold("the cat", stopped=False) == gold("the cat") - 1


def test_a_world_is_built_once_and_a_half_built_one_is_never_used(tmp_path, monkeypatch):
    small = tiny.Recipe(hidden_size=16, layers=1, sft_texts=64, reward_steps=3, reward_topics=2)
    monkeypatch.setitem(tiny.WORLDS, "small", small)
    plain = tiny.train_reward_model
    monkeypatch.setattr(
        tiny, "train_reward_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        tiny.build("small", tmp_path)
    monkeypatch.setattr(tiny, "train_reward_model", plain)
    folder = tiny.build("small", tmp_path)
    assert tiny.build("small", tmp_path) == folder
    assert {p.name for p in folder.iterdir()} == {
        "policy",
        "reward_model",
        "prompts.jsonl",
        "held_out.jsonl",
    }
    monkeypatch.setitem(tiny.WORLDS, "small", replace(small, rms_norm_eps=1e-6))
    assert tiny.build("small", tmp_path) != folder
