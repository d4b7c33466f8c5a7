"""One whole rollout of train.py, recalculated densely in float64 from the README's formulas.

Two epochs, a temperature, all reward shaping, active clipping, a KL, gradient clipping and weight
decay at once; nothing of the project is used but the sampled ids. Then every metric.
"""

import copy
import math

import pytest
import torch

import machinery.start
import train
from conftest import PROMPTS, TOKENIZER, V, make_policy, make_reward_model
from machinery.config import Config
from machinery.rollout import Rollout
from train import Learner

SIGMA = 0.8  # σ0, in place of its measurement
CONFIG = Config(
    credit="datc",
    band=3.0,
    rollouts=1,
    prompts_per_rollout=3,
    group_size=4,
    max_response_tokens=12,
    temperature=0.7,
    missing_eos_penalty=0.7,
    length_penalty=1.0,
    advantage_std_floor=1.0,  # of a spread: the second group has less
    learning_rate=0.02,
    weight_decay=0.1,
    max_grad_norm=0.5,
    epsilon=0.1,
    epochs=2,
    beta=0.1,
    micro_batch=5,
    device="cpu",
    dtype="float64",
)


class Response:
    """One response, densely: what the formulas need of it."""

    def __init__(self, rollout: Rollout, i: int):
        self.prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]
        self.ids = rollout.response_ids[i][rollout.response_mask[i]]
        self.stopped = bool(rollout.stopped[i])
        self.length = len(self.ids)
        tokens = TOKENIZER.convert_ids_to_tokens(self.ids.tolist())
        self.free = torch.tensor([token != "<end>" for token in tokens])
        words = rollout.messages[i][-1]["content"]
        said = " ".join(tokens[:-1] if self.stopped else tokens)
        self.before = TOKENIZER(f"<user> {words} <end> <assistant>").input_ids
        self.text = TOKENIZER(f"<user> {words} <end> <assistant> {said} <end>").input_ids

    def logits(self, policy):  # (T, V)
        ids = torch.cat([self.prompt, self.ids])[None]
        start = len(self.prompt) - 1
        return policy(input_ids=ids).logits[0, start:-1, :V] / CONFIG.temperature

    def logp(self, policy):  # (T,)
        return self.logits(policy).log_softmax(-1)[torch.arange(self.length), self.ids]


def reward_and_slope(model, response):
    """R, and ∂R/∂e at the response's tokens, 0 at the stop token: (T, D)."""
    table = model.get_input_embeddings().weight
    embeds = table[torch.tensor(response.text)][None].detach().requires_grad_()
    last = model.base_model(inputs_embeds=embeds).last_hidden_state[0, -1]
    reward = model.score.weight[0] @ last
    (slope,) = torch.autograd.grad(reward, embeds)
    f = torch.zeros(response.length, table.shape[1]).double()
    seen = response.length - response.stopped
    f[:seen] = slope[0, len(response.before) :][:seen]
    return reward.item(), f


def dense_work(policy, model, response, f):  # (5), (T,)
    with torch.no_grad():
        p = response.logits(policy).softmax(-1)  # (T, V)
        v = f @ model.get_input_embeddings().weight[:V].T
        g = p * (v - (p * v).sum(-1, keepdim=True))
        k = torch.nn.functional.one_hot(response.ids, V) - p
        return (g * k).sum(-1)


def dense_weights(d, advantage, free, band):  # (6): weights (T,), τ
    x = d[free]
    if len(x) < 2:  # nothing to compare
        return torch.ones(len(d)).double(), 1.0
    z = (x - x.mean()) / (x.std(correction=0) + 1e-3 * x.abs().mean())
    u = advantage * z

    def weights(tau):
        return len(u) * (u / tau).softmax(-1)

    def fits(tau):
        return weights(tau).max() <= band and weights(tau).min() >= 1 / band

    low, high = 1.0, 1e6
    if fits(low):
        high = low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    w = torch.ones(len(d)).double()
    w[free] = weights(high)
    return w, high


def shaped_reward(reward, response):
    penalty = CONFIG.missing_eos_penalty * (not response.stopped)
    short = max(0.0, (8 - response.length) / 8)
    return reward - penalty - SIGMA * CONFIG.length_penalty * 0.5 * short


def dense_advantages(shaped):  # (1), groups of G
    floor = SIGMA * CONFIG.advantage_std_floor
    advantages = []
    for start in range(0, len(shaped), CONFIG.group_size):
        group = torch.tensor(shaped[start : start + CONFIG.group_size]).double()
        std = max(group.std(correction=0).item(), floor)
        advantages += ((group - group.mean()) / std).tolist()
    return advantages


def adamw(parameters, gradients, state, step):
    for p, g, moments in zip(parameters, gradients, state, strict=True):
        moments[0] = 0.9 * moments[0] + 0.1 * g
        moments[1] = 0.999 * moments[1] + 0.001 * g * g
        p.data *= 1 - CONFIG.learning_rate * CONFIG.weight_decay
        mean = moments[0] / (1 - 0.9**step)
        square = moments[1] / (1 - 0.999**step)
        p.data -= CONFIG.learning_rate * mean / (square.sqrt() + 1e-8)


def golden(policy, model, responses):
    """Trains the policy by the formulas; returns the metrics."""
    count = len(responses)
    start = copy.deepcopy(policy)
    rewards, slopes = zip(*[reward_and_slope(model, r) for r in responses], strict=True)
    shaped = [shaped_reward(*both) for both in zip(rewards, responses, strict=True)]
    advantages = dense_advantages(shaped)
    works = [dense_work(start, model, r, f) for r, f in zip(responses, slopes, strict=True)]
    allocated = []
    for d, a, r in zip(works, advantages, responses, strict=True):
        allocated.append(dense_weights(d, a, r.free, CONFIG.band))
    with torch.no_grad():
        old = [r.logp(start) for r in responses]
    parameters = list(policy.parameters())
    state = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
    stats = {
        "loss": 0.0,
        "kl": 0.0,
        "grad_norm": 0.0,
        "entropy": 0.0,
        "clip_ratio/region_mean": 0.0,
    }
    for epoch in range(CONFIG.epochs):
        loss = torch.zeros(()).double()
        kl = torch.zeros(()).double()
        for i, r in enumerate(responses):
            logp = r.logp(policy)
            spread = advantages[i] * allocated[i][0]
            rho = (logp - old[i]).exp()
            clipped = rho.clamp(1 - CONFIG.epsilon, 1 + CONFIG.epsilon)
            loss = loss - torch.minimum(rho * spread, clipped * spread).mean() / count
            far = old[i] - logp  # the start is the policy before the update
            kl = kl + (far.exp() - far - 1).mean() / count
            p = r.logits(policy).softmax(-1)
            stats["entropy"] += -(p * p.log()).sum(-1).mean().item() / count / CONFIG.epochs
            outside = ((rho < 1 - CONFIG.epsilon) & (spread < 0)) | (
                (rho > 1 + CONFIG.epsilon) & (spread > 0)
            )
            share = outside.double().mean().item() / count / CONFIG.epochs
            stats["clip_ratio/region_mean"] += share
        gradients = torch.autograd.grad(loss + CONFIG.beta * kl, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        gradients = [g * min(1.0, CONFIG.max_grad_norm / (norm + 1e-6)) for g in gradients]
        adamw(parameters, gradients, state, epoch + 1)
        for name, value in (("loss", loss.item()), ("kl", kl.item()), ("grad_norm", norm)):
            stats[name] += value / CONFIG.epochs
    groups = torch.tensor(rewards).view(-1, CONFIG.group_size)
    weights = [w for w, _ in allocated]
    gains = [(a * (w - 1) * d).mean() for a, w, d in zip(advantages, weights, works, strict=True)]
    return stats | {
        "reward": groups.mean().item(),
        "reward_std": groups.std(-1, correction=0).mean().item(),
        "frac_reward_zero_std": (groups.std(-1) == 0).double().mean().item(),
        "completions/mean_length": sum(r.length for r in responses) / count,
        "completions/clipped_ratio": sum(not r.stopped for r in responses) / count,
        "credit/ess_ratio": sum(1 / w.square().mean().item() for w in weights) / count,
        "credit/max_weight": max(w.max().item() for w in weights),
        "credit/tau_mean": sum(tau for _, tau in allocated) / count,
        "credit/predicted_gain": (sum(gains) / count).item(),
        "learning_rate": CONFIG.learning_rate,
    }


def test_a_whole_rollout_is_the_formulas(tmp_path, monkeypatch):
    policy = make_policy("gpt2", eos_token_id=2).double()
    with torch.no_grad():  # stops now and then, so that short, stopped and cut responses appear
        policy.transformer.wte.weight[2] *= 1.4
    model = make_reward_model("gpt2", double=True)
    untrained = copy.deepcopy(policy)
    seen = []
    plain = Learner.sample

    def noted(learner, prompts):
        seen.append(plain(learner, prompts))
        return seen[-1]

    monkeypatch.setattr(Learner, "sample", noted)
    monkeypatch.setattr(machinery.start, "starting_std", lambda *_: SIGMA)
    config = train.replace(CONFIG, output_dir=str(tmp_path / "run"))
    (row,) = train.train(policy, model, TOKENIZER, PROMPTS, config)
    rollout = seen[-1]
    responses = [Response(rollout, i) for i in range(len(rollout))]
    lengths = [r.length for r in responses]
    assert min(lengths) < 8 < max(lengths) and 0 < sum(r.stopped for r in responses) < 12
    expected = golden(untrained, model.model, responses)
    assert expected["clip_ratio/region_mean"] > 0.01 and expected["kl"] > 1e-4
    assert expected["grad_norm"] > CONFIG.max_grad_norm
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for mine, theirs in zip(untrained.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6)
