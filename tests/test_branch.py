"""Token values by branching (9): exact where they must be, and the closed form everywhere else."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AttentionInterface,
    MistralConfig,
    MistralForSequenceClassification,
)

import branch
import train
from conftest import (
    KINDS,
    SHAPE,
    TOKENIZER,
    V,
    arguments,
    close,
    make_classifier,
    make_policy,
    make_reward_model,
    make_rollout,
    read_metrics,
    rows_of,
)
from datc import work_on_support
from machinery import load
from machinery.config import Config
from machinery.rollout import unwrap
from reward_grad import RewardModel
from train import Learner

LONG = 1000  # a look-ahead beyond every end


def case(kind="qwen3", double=True, tokens=10, count=3, **extra):
    """A reward model, a rollout of four responses, and alternatives at every place."""
    model = make_reward_model(kind, double=double, **extra)
    rollout = make_rollout(make_policy(kind), tokens=tokens)
    generator = torch.Generator().manual_seed(5)
    tried = torch.randint(V, (*rollout.response_ids.shape, count), generator=generator)
    return model, rollout, tried


def places_of(model, rollout):
    """(B, T) where another token would make a difference that (9) estimates."""
    return rollout.free_mask & model.inputs(rollout).content


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_ahead_beyond_the_end_is_exact_substitution(kind):
    model, rollout, tried = case(kind, double=False)
    values = branch.token_values(model, rollout, tried, LONG)
    free = places_of(model, rollout)
    for i, one in enumerate(rollout.split(1)):
        places = free[i].nonzero()[:, 0]
        exact = model.substituted(one, places, tried[i, places]) - model.score(one)[0]
        close(values[i, places].double(), exact, 1e-3, 1e-4)
    assert values[~free].abs().sum() == 0


def test_a_reader_that_is_one_attention_layer_needs_no_look_ahead():
    """No norm and no MLP behind it: the reward is linear in what the heads write."""
    classifier = make_classifier("llama", num_hidden_layers=1).double()
    classifier.model.layers[0].mlp.down_proj.weight.data.zero_()
    classifier.model.norm = torch.nn.Identity()
    model = RewardModel(classifier, TOKENIZER, TOKENIZER)
    rollout = make_rollout(make_policy())
    tried = torch.randint(V, (*rollout.response_ids.shape, 4))
    now = branch.token_values(model, rollout, tried, 0)
    close(now, branch.token_values(model, rollout, tried, LONG), 1e-5, 1e-6)


SEEN = []


def noting(module, query, key, value, attention_mask, scaling=None, **_):
    """Plain causal attention, dense, that keeps what passes."""
    groups = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = dense_attention(query, key, value, scaling, groups)
    output.retain_grad() if output.requires_grad else None
    SEEN.append((query, key, value, output, scaling, groups))
    return output.transpose(1, 2), None


def dense_attention(query, key, value, scaling, groups):
    key = key.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    causal = torch.ones(scores.shape[-2:]).tril().bool()
    return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)


AttentionInterface.register("noting_for_tests", noting)


def read(model, ids):
    """What passes through the attention on a text, and its reward."""
    SEEN.clear()
    embeds = model.embedding[ids][None].detach().requires_grad_()
    model.backbone.set_attn_implementation("noting_for_tests")
    mask = torch.zeros(1, 1, 1, 1, dtype=embeds.dtype)
    places = torch.arange(len(ids))[None]
    out = model.backbone(
        inputs_embeds=embeds, attention_mask=mask, position_ids=places, use_cache=False
    )
    model.backbone.set_attn_implementation("sdpa")
    reward = out.last_hidden_state[0, -1] @ model.head.to(embeds.dtype)
    return list(SEEN), reward, out.last_hidden_state[0]


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_responds_exactly_and_all_behind_it_is_linear(kind, lookahead):
    """Recalculated densely: whole softmaxes over the edited text's keys and values."""
    model, rollout, tried = case(kind, count=2)
    inputs = model.inputs(rollout)
    values = branch.token_values(model, rollout, tried, lookahead)
    free = places_of(model, rollout)
    one = 0
    ids = inputs.ids[one][inputs.mask[one]]
    main, reward, _ = read(model, ids)
    reward.backward()
    for t in free[one].nonzero()[:, 0].tolist():
        place = inputs.places[one, t].item()
        if len(ids) - 1 - place <= lookahead:
            continue
        window = slice(place, place + lookahead + 1)
        for s in range(tried.shape[2]):
            edited = ids.clone()
            edited[place] = tried[one, t, s]
            expected = 0.0
            other, _, _ = read(model, edited)
            for now, then in zip(main, other, strict=True):
                query, key, value, output, scaling, groups = now
                key = key.clone()
                value = value.clone()
                key[:, :, window] = then[1][:, :, window]
                value[:, :, window] = then[2][:, :, window]
                moved = dense_attention(query, key, value, scaling, groups) - output
                behind = slice(place + lookahead + 1, None)
                expected += (output.grad * moved)[:, :, behind].sum().item()
            if tried[one, t, s] == ids[place]:
                expected = 0.0
            assert values[one, t, s].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_branch_is_the_edited_text():
    """The hidden states of its w + 1 tokens, in every kind of position."""
    for kind in KINDS:
        model, rollout, tried = case(kind)
        one = rows_of(rollout, 0)
        inputs = model.inputs(one)
        place = inputs.places[:, :1]  # the first token, (1, 1)
        branches = branch._make_branches(inputs, tried[:1, 0, :1], place, 3)
        reading = branch._read_main_text(model, inputs)
        reading.branches = branches
        reading.change = torch.zeros(1, 1).double()
        with torch.no_grad():
            embeds = model.embedding[branches.tokens[:, 0]]
            hidden = branch._forward(model, reading, embeds, branches.window[:, 0])[0]
        edited = inputs.ids[0].clone()
        edited[place[0, 0]] = tried[0, 0, 0]
        _, _, whole = read(model, edited)
        close(hidden, whole[branches.window[0, 0]].detach(), 1e-4, 1e-5)


def test_the_sampled_token_none_and_frozen_places_are_worth_nothing():
    model, rollout, tried = case()
    tried[..., 0] = rollout.response_ids
    tried[..., 1] = -1
    values = branch.token_values(model, rollout, tried, 1)
    assert (values[..., :2] == 0).all() and (values[~places_of(model, rollout)] == 0).all()
    assert (values[places_of(model, rollout)][:, 2] != 0).float().mean() > 0.9
    assert (branch.token_values(model, rollout, torch.full_like(tried, -1), 1) == 0).all()


def test_batches_chunks_and_padding_change_nothing(monkeypatch):
    model, rollout, tried = case()
    whole = branch.token_values(model, rollout, tried, 1)
    model.reward_batch = 1
    close(branch.token_values(model, rollout, tried, 1), whole, 1e-4, 1e-5)
    monkeypatch.setattr(branch, "BRANCH_TOKENS", 4)
    close(branch.token_values(model, rollout, tried, 1), whole, 1e-4, 1e-5)
    for i in range(len(rollout)):
        alone = rows_of(rollout, i)
        width = alone.response_ids.shape[1]
        part = branch.token_values(model, alone, tried[i : i + 1, :width], 1)
        close(part, whole[i : i + 1, :width], 1e-4, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_nothing_and_attention_is_put_back(kind):
    model, rollout, tried = case(kind)
    before = model.backbone.config._attn_implementation
    plain = branch.token_values(model, rollout, tried, 1)
    model.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model.model.train()
    close(branch.token_values(model, rollout, tried, 1), plain, 1e-6, 1e-8)
    assert model.backbone.config._attn_implementation == before


def test_a_window_shorter_than_the_text_is_refused_and_a_longer_one_is_not():
    rollout = make_rollout(make_policy())
    for window, fits in ((64, True), (5, False)):
        torch.manual_seed(0)
        shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
        config = MistralConfig(vocab_size=V, num_labels=1, sliding_window=window, **shape)
        classifier = MistralForSequenceClassification(config).eval()
        model = RewardModel(classifier, TOKENIZER, TOKENIZER)
        if fits:
            load.check_branching(model, rollout)
        else:
            with pytest.raises(ValueError, match="sees 5 tokens back"):
                load.check_branching(model, rollout)


def test_alternatives_are_the_likeliest_other_tokens():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 6, generator=generator), torch.randn(20, 6, generator=generator)
    sampled = torch.randint(20, (7,), generator=generator)
    ids, logp = branch.alternatives(hidden, head, sampled, 0.8, 4, 0.05, chunk=3)
    probs = (hidden @ head.T / 0.8).softmax(-1)
    for n in range(7):
        others = [i for i in probs[n].argsort(descending=True).tolist() if i != sampled[n]]
        expected = [i for i in others if probs[n, i] >= 0.05][:4]
        kept = ids[n][ids[n] >= 0].tolist()
        assert kept == expected
        close(logp[n][: len(kept)].exp(), probs[n][kept], 1e-5)
        assert logp[n][len(kept) :].isinf().all()


def branching_learner(**changes):
    config = replace(Config(credit="branch", device="cpu", dtype="float32"), **changes)
    return Learner(make_policy(), make_reward_model(), TOKENIZER, config)


def test_branch_work_is_the_work_on_the_sampled_token_and_its_alternatives():
    learner = branching_learner(branches=3, lookahead=1)
    rollout = learner.compare(learner.score(make_rollout(learner.policy)))
    inputs = learner.evidence(rollout, *learner.forward(rollout))
    work = inputs.branch_work
    ids, logp = inputs.branch_tokens
    values = branch.token_values(learner.reward_model, rollout, ids, 1)
    sampled = inputs.sampled_prob
    for i, t in rollout.free_mask.nonzero().tolist():
        kept = ids[i, t] >= 0
        logits = torch.cat([sampled[i, t].log()[None], logp[i, t][kept]])
        v = torch.cat([torch.zeros(1), values[i, t][kept]])
        d = work_on_support(logits[None], torch.tensor([0]), v[None])[0]
        assert work[i, t].item() == pytest.approx(d.item(), rel=1e-4, abs=1e-7)
    assert inputs.branch_count().max() <= 3


def test_a_token_without_an_alternative_gains_nothing():
    learner = branching_learner(branch_prob=2.0)
    rollout = learner.compare(learner.score(make_rollout(learner.policy)))
    inputs = learner.evidence(rollout, *learner.forward(rollout))
    assert (inputs.branch_work == 0).all() and inputs.branch_count().sum() == 0
    credited = learner.credit(rollout, *learner.forward(rollout))
    assert torch.equal(credited.weights[rollout.response_mask].unique(), torch.ones(1).double())


def test_branching_trains_with_adapters_and_logs_its_branches(pair, tmp_path):
    flags = ("--credit", "branch", "--lora_rank", 4, "--gradient_checkpointing", "--dtype")
    train.main(arguments(pair, tmp_path / "run", *flags, "bfloat16", rollouts=2))
    rows = read_metrics(tmp_path / "run")
    assert all(0 < row["credit/branches_per_token"] <= 2 for row in rows)
    assert all("credit/predicted_gain" in row for row in rows)


def test_the_policy_is_left_as_it_was():
    learner = branching_learner()
    rollout = learner.compare(learner.score(make_rollout(learner.policy)))
    learner.credit(rollout, *learner.forward(rollout))
    assert all(p.grad is None for p in unwrap(learner.policy).parameters())
    assert all(p.grad is None for p in learner.reward_model.model.parameters())
