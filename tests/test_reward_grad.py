"""The frozen reward model: its input, scores, gradients, prefixes, refusals."""

import pytest
import torch
from tokenizers import models

import datc
import reward_grad
from conftest import (
    KINDS,
    PROMPTS,
    TOKENIZER,
    V,
    close,
    hand_made,
    make_classifier,
    make_policy,
    make_reward_model,
    make_rollout,
    rows_of,
)
from grpo import response_hidden
from machinery import tiny
from reward_grad import RewardModel

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
    """Along the whole path <f, e - ē> adds up to the reward that it gains: (8), 64 midpoints."""
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


def test_a_half_precision_models_score_is_taken_in_float32():
    model = make_reward_model()
    half = RewardModel(model.model.bfloat16(), TOKENIZER, TOKENIZER)
    rewards, _ = half.score(hand_made(TEXTS))
    assert rewards.dtype == torch.float32
    assert not torch.equal(rewards, rewards.bfloat16().float())


def test_a_gradient_that_is_nan_alone_stops_too(monkeypatch):
    model = make_reward_model()
    plain = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a, **k: [g * torch.nan for g in plain(*a, **k)]
    )
    assert model.score(hand_made(TEXTS[:1]))[0].isfinite().all()
    with pytest.raises(FloatingPointError, match="the cat is red"):
        model.score(hand_made(TEXTS[:1]), with_grad=True)


def test_a_nan_reward_stops_with_the_conversation_it_came_from():
    model = make_reward_model()
    with torch.no_grad():
        model.embedding[TOKENIZER.convert_tokens_to_ids("red")] = torch.nan
    with pytest.raises(FloatingPointError, match="the cat is red"):
        model.score(hand_made(TEXTS[:1]), with_grad=True)
    with pytest.raises(FloatingPointError, match="response 0"):
        model.score(hand_made(TEXTS[:1]))
