"""Advantages, token log-probs, and the loss."""

import pytest
import torch

import grpo
from conftest import close, random_position
from grpo import group_advantages, token_logprobs
from machinery.config import CHOICES


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
    for name in CHOICES["advantage"]:
        assert (advantages(name)[0][4:] == 0).all(), "ties get nothing"
    with pytest.raises(ValueError, match="--advantage 'best'"):
        advantages("best")


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


def test_the_length_window_punishes_stubs_and_novels_only():
    penalty = grpo.length_window(torch.tensor([0, 4, 8, 1024, 1536, 2048, 9000]), sigma=2.0)
    assert penalty.tolist() == [1.0, 0.5, 0.0, 0.0, 2.0, 4.0, 4.0]


def test_the_std_floor_shrinks_advantages_of_quiet_groups_only():
    rewards = torch.tensor([0.0, 0.1, 0.0, 4.0])
    assert group_advantages(rewards, 2, std_floor=1.0).tolist() == pytest.approx(
        [-0.05, 0.05, -1.0, 1.0]
    )
