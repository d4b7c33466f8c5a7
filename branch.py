"""Token values by branching (9): what would the reward be with another token here? [ours]

(2) asks what the reward would do if an input embedding moved a little, and no transformer is linear
over the step from one token to another. Branching puts the other token there, exactly: it and the
next few sampled tokens run on the cached prefix (`run_branches`); every later position responds to
their keys and values exactly (`response_of_readers`); only what follows from that is linear.

    v_t(b) - v_t(a_t) = Σ_layers Σ_heads Σ_{s > t+w} <g_s, o_s(b) - o_s>,        g_s = ∂R/∂o_s   (9)

with o_s the output of one head at position s, and w the look-ahead. A branch that reaches the end
of the text needs no reader: its value is its own score less R. So a look-ahead beyond the end is
exact substitution, and w is the dial between the gradient and the truth. Left out: what is done
with the values (credit.py). Any decoder with softmax attention works; see `refuse_other_attention`.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from datc import at_least_float32, log_normaliser
from machinery.rollout import Rollout
from reward_grad import Inputs, RewardModel

BRANCH_TOKENS = 512  # of one response, in one forward


def token_values(
    reward_model: RewardModel, rollout: Rollout, alternatives: Tensor, lookahead: int
) -> Tensor:
    """(9): estimated R(y with b at t) - R(y) for each alternative b.

    Args:
        alternatives: (B, T, S) ids to try; -1 = none.
        lookahead: w >= 0, sampled tokens that follow a branch exactly.
    Returns:
        (B, T, S) in at least float32; 0 for none, for the sampled token itself, and at places that
        the reward model does not see or that are frozen.
    """
    values = []
    size = reward_model.reward_batch
    for part, tokens in zip(rollout.split(size), alternatives.split(size), strict=True):
        inputs = reward_model.inputs(part)
        own = tokens == part.response_ids[..., None]
        here = (part.free_mask & inputs.content)[..., None] & (tokens >= 0) & ~own  # (b, T, S)
        values.append(_values_of_slice(reward_model, inputs, tokens, here, lookahead))
    return torch.cat(values)


def alternatives(
    hidden: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    temperature: float,
    branches: int,
    branch_prob: float,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """The policy's likeliest other tokens: at most `branches`, each with p >= `branch_prob`.

    Args:
        hidden: (N, H) policy states, lm_head: (V, H), token_ids: (N,) the sampled tokens.
    Returns:
        ids (N, S), -1 where there is none, and their log-probs (N, S), -inf there.
    """
    count = min(branches, len(lm_head) - 1)
    ids = []
    logps = []
    hidden = hidden.to(at_least_float32(hidden))
    for h, a in zip(hidden.split(chunk), token_ids.split(chunk), strict=True):
        logits = h @ lm_head.to(h.dtype).T / temperature  # (n, V)
        logp = logits - log_normaliser(h, lm_head, temperature)[:, None]
        others = logp.scatter(1, a[:, None], -torch.inf)
        best = others.topk(count)
        likely = best.values.exp() >= branch_prob
        ids.append(best.indices.where(likely, torch.full_like(best.indices, -1)))
        logps.append(best.values.masked_fill(~likely, -torch.inf))
    return torch.cat(ids), torch.cat(logps)


# ----------------------------------------------------------------------------------------------
# One slice of responses.


@dataclass
class Branches:
    """The branches of b responses, padded to K each: W = w + 1 tokens from a place of the text."""

    tokens: Tensor  # (b, K, W) ids: the alternative, then the sampled tokens that follow it
    start: Tensor  # (b, K) place t of the alternative in the text
    window: Tensor  # (b, K, W) places t ... t+w, cut at the end of the text
    inside: Tensor  # (b, K, W) bool: whether the text goes that far
    length: Tensor  # (b,) of the texts

    def chunk(self, columns: slice) -> "Branches":
        parts = (self.tokens, self.start, self.window, self.inside)
        return Branches(*(part[:, columns] for part in parts), self.length)


def _values_of_slice(
    reward_model: RewardModel, inputs: Inputs, tokens: Tensor, here: Tensor, lookahead: int
) -> Tensor:
    """`token_values` of at most reward_batch responses, (b, T, S)."""
    dtype = at_least_float32(reward_model.embedding)
    values = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
    most = int(here.flatten(1).sum(-1).max())
    if not most:
        return values
    # The branches of each response in the first columns, in their order.
    order = here.flatten(1).int().argsort(dim=-1, descending=True, stable=True)[:, :most]  # (b, K)
    there = here.flatten(1).gather(1, order)  # (b, K)
    alternative = tokens.flatten(1).gather(1, order).clamp(min=0)
    start = inputs.places.gather(1, order // tokens.shape[-1])
    lookahead = min(lookahead, inputs.ids.shape[1])  # nothing follows behind the end
    branches = _make_branches(inputs, alternative, start, lookahead)
    reading = _read_main_text(reward_model, inputs)
    size = max(1, BRANCH_TOKENS // (lookahead + 1))
    found = []
    for column in range(0, most, size):
        part = branches.chunk(slice(column, column + size))
        found.append(_values_of_chunk(reward_model, reading, part))
    found = torch.cat(found, 1).to(dtype).masked_fill(~there, 0.0)  # (b, K)
    return values.flatten(1).scatter(1, order, found).view_as(values)


def _make_branches(inputs: Inputs, alternative: Tensor, start: Tensor, lookahead: int) -> Branches:
    """Branches of the given tokens (b, K) at the given places (b, K)."""
    length = inputs.mask.sum(-1)  # (b,)
    last = (length - 1)[:, None, None]
    ahead = torch.arange(lookahead + 1, device=start.device)
    places = start[..., None] + ahead  # (b, K, W)
    window = torch.minimum(places, last)
    b, k, w = window.shape
    tokens = inputs.ids.gather(1, window.view(b, k * w)).view(b, k, w)
    tokens = torch.cat([alternative[..., None], tokens[..., 1:]], -1)
    return Branches(tokens, start, window, places <= last, length)


# ----------------------------------------------------------------------------------------------
# The main text: what its heads read, wrote, and how the reward depends on it.


@dataclass
class Head:
    """One layer's attention on the main text, h query heads on k key heads."""

    query: Tensor  # (b, h, L, d)
    key: Tensor  # (b, k, L, d)
    value: Tensor  # (b, k, L, d)
    output: Tensor  # (b, h, L, d)  o
    scaling: float
    gradient: Tensor | None = None  # (b, h, L, d)  g = ∂R/∂o


@dataclass
class Reading:
    """What passes through the model's attention leaves here, layer by layer."""

    rewards: Tensor | None = None  # (b,) R of the main texts
    layers: dict[int, Head] = field(default_factory=dict)
    branches: Branches | None = None  # what runs now; None = the main text
    change: Tensor | None = None  # (b, K) what the layers so far add to (9)


READING: list[Reading] = []  # the one that the attention function writes to, last


def _read_main_text(reward_model: RewardModel, inputs: Inputs) -> Reading:
    """One forward and backward of the sampled texts."""
    reading = Reading()
    embeds = reward_model.embedding[inputs.ids].detach().requires_grad_()  # (b, L, D)
    places = torch.arange(embeds.shape[1], device=embeds.device)[None]
    with torch.enable_grad():
        hidden = _forward(reward_model, reading, embeds, places)
        last = inputs.mask.sum(-1) - 1  # (b,)
        rows = torch.arange(len(last), device=last.device)
        scores = _read_head(reward_model, hidden[rows, last])  # (b,)
        with _listening(reward_model, reading):  # a checkpointed forward runs again in backward
            torch.autograd.grad(scores.sum(), embeds)
    reading.rewards = scores.detach()
    return reading


def _read_head(reward_model: RewardModel, hidden: Tensor) -> Tensor:  # (..., H) -> (...)
    dtype = at_least_float32(hidden)
    return hidden.to(dtype) @ reward_model.head.to(dtype)


@torch.no_grad()
def _values_of_chunk(reward_model: RewardModel, reading: Reading, branches: Branches) -> Tensor:
    """(9) of K branches per response, (b, K), from one forward over all of them."""
    b, k, w = branches.tokens.shape
    reading.branches = branches
    reading.change = torch.zeros(b, k, dtype=torch.float64, device=branches.tokens.device)
    embeds = reward_model.embedding[branches.tokens.view(b, k * w)]  # (b, K W, D)
    hidden = _forward(reward_model, reading, embeds, branches.window.view(b, k * w))
    # A branch that reaches the end of the text has its own score.
    steps = branches.length[:, None] - 1 - branches.start  # (b, K) from the branch to the end
    ends = steps < w
    at = (torch.arange(k, device=steps.device) * w) + steps.clamp(max=w - 1)  # (b, K)
    index = at[..., None].expand(-1, -1, hidden.shape[-1])
    scores = _read_head(reward_model, hidden.gather(1, index))  # (b, K)
    exact = scores.double() - reading.rewards[:, None].double()
    return torch.where(ends, exact, reading.change)


def _forward(reward_model: RewardModel, reading: Reading, embeds: Tensor, places: Tensor) -> Tensor:
    """The backbone's last hidden states, its attention replaced by `attend`."""
    no_mask = torch.zeros(1, 1, 1, 1, dtype=embeds.dtype, device=embeds.device)  # taken as it is
    with _listening(reward_model, reading):
        out = reward_model.backbone(
            inputs_embeds=embeds, attention_mask=no_mask, position_ids=places, use_cache=False
        )
    return out.last_hidden_state


class _listening:
    """The reward model's attention is `attend`, and it writes to this reading."""

    def __init__(self, reward_model: RewardModel, reading: Reading):
        self.backbone = reward_model.backbone
        self.reading = reading

    def __enter__(self) -> None:
        self.usual = self.backbone.config._attn_implementation
        self.backbone.set_attn_implementation("datc_branch")
        READING.append(self.reading)

    def __exit__(self, *_: object) -> None:
        READING.pop()
        self.backbone.set_attn_implementation(self.usual)


# ----------------------------------------------------------------------------------------------
# Attention.


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its attention: (b, h, M, d) -> (b, M, h, d)."""
    reading = READING[-1]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if reading.branches is not None:
        head = reading.layers[module.layer_idx]
        return run_branches(reading, head, query, key, value).transpose(1, 2), None
    refuse_other_attention(module, query.shape[2], options)
    # Texts are padded on the right, so the causal mask also hides the padding.
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    if module.layer_idx not in reading.layers:
        states = [x.detach() for x in (query, key, value, output)]
        head = Head(*states, scaling)
        reading.layers[module.layer_idx] = head

        def keep(gradient: Tensor) -> None:
            head.gradient = gradient.detach()

        # A hook on the tensor and not on the module: a checkpointed module runs twice.
        output.register_hook(keep)
    return output.transpose(1, 2), None


AttentionInterface.register("datc_branch", attend)


def refuse_other_attention(module: torch.nn.Module, length: int, options: dict) -> None:
    """Raise ValueError for attention that is no plain softmax over all that came before."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ValueError("--credit branch: the reward model's attention is capped or has sinks.")
    window = options.get("sliding_window")
    if window is not None and window < length:
        raise ValueError(
            f"--credit branch: the reward model's attention sees {window} tokens back, and a text "
            f"has {length}."
        )


def run_branches(reading: Reading, head: Head, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the branches' tokens: to the main text before their start, and to themselves.

    Args:
        query: (b, h, K W, d); key, value: (b, k, K W, d).
    Returns:
        (b, h, K W, d). Counts in passing what this layer's readers make of the branches.
    """
    branches = reading.branches
    b, count, w = branches.tokens.shape
    groups = query.shape[1] // key.shape[1]
    key = key.unflatten(2, (count, w))  # (b, k, K, W, d)
    value = value.unflatten(2, (count, w))
    reading.change += response_of_readers(head, branches, key, value, groups)
    key = key.repeat_interleave(groups, 1)  # (b, h, K, W, d)
    value = value.repeat_interleave(groups, 1)
    before = head.key.repeat_interleave(groups, 1)  # (b, h, L, d)
    to_text = query @ before.transpose(-1, -2) * head.scaling  # (b, h, K W, L)
    place = torch.arange(before.shape[2], device=query.device)
    seen = place < branches.start[..., None]  # (b, K, L)
    seen = seen.repeat_interleave(w, 1)[:, None]  # (b, 1, K W, L)
    to_text = to_text.masked_fill(~seen, -torch.inf)
    own = query.unflatten(2, (count, w)) @ key.transpose(-1, -2) * head.scaling  # (b, h, K, W, W)
    causal = torch.ones(w, w, dtype=torch.bool, device=query.device).tril()
    own = own.masked_fill(~causal, -torch.inf).flatten(2, 3)  # (b, h, K W, W)
    weights = torch.cat([to_text, own], -1).float().softmax(-1).to(query.dtype)
    text = weights[..., :-w] @ head.value.repeat_interleave(groups, 1)  # (b, h, K W, d)
    return text + (weights[..., -w:].unflatten(2, (count, w)) @ value).flatten(2, 3)


def response_of_readers(
    head: Head, branches: Branches, key: Tensor, value: Tensor, groups: int
) -> Tensor:
    """Σ_heads Σ_{s > t+w} <g_s, o_s(b) - o_s> of one layer, (b, K) in float64.

    A head's output is o = Σ_j e_j v_j / Z with e_j = exp(q·k_j) and Z = Σ_j e_j. Exchanging the
    keys and values of the window's positions j adds Σ_j (e'_j v'_j - e_j v_j) to the numerator and
    Σ_j (e'_j - e_j) to Z. Divided by the old Z, with a_j = e_j / Z and ρ_j = e'_j / e_j =
    exp(q·(k'_j - k_j)):

        o' - o = Σ_j a_j [ρ_j (v'_j - o) - (v_j - o)] / (1 + Σ_j a_j (ρ_j - 1)).

    Args:
        key, value: (b, k, K, W, d) of the branches' tokens.
    """
    dtype = at_least_float32(key)
    query = head.query.to(dtype).unflatten(1, (-1, groups))  # (b, k, g, L, d)
    gradient = head.gradient.to(dtype).unflatten(1, (-1, groups))
    go = (gradient * head.output.to(dtype).unflatten(1, (-1, groups))).sum(-1)  # (b, k, g, L)
    old_key = _at_window(head.key, branches.window).to(dtype)  # (b, k, K W, d)
    old_value = _at_window(head.value, branches.window).to(dtype)
    new_key = key.flatten(2, 3).to(dtype)
    new_value = value.flatten(2, 3).to(dtype)

    def along(states: Tensor, columns: Tensor) -> Tensor:  # -> (b, k, g, L, K W)
        return states @ columns[:, :, None].transpose(-1, -2)

    log_z = _log_normaliser(head, dtype, groups)  # (b, k, g, L)
    old = along(query, old_key) * head.scaling
    share = (old - log_z[..., None]).exp()  # a_j
    inside = branches.inside.flatten(1)[:, None, None, None]  # (b, 1, 1, 1, K W)
    share = share * inside
    ratio = (along(query, new_key - old_key) * head.scaling).clamp(max=50).exp()  # ρ_j
    change = ratio * (along(gradient, new_value) - go[..., None])
    change = share * (change - (along(gradient, old_value) - go[..., None]))
    size = branches.window.shape[1:]
    change = change.unflatten(-1, size).sum(-1)  # (b, k, g, L, K)
    weight = 1 + (share * (ratio - 1)).unflatten(-1, size).sum(-1)
    place = torch.arange(query.shape[3], device=query.device)[:, None]
    readers = place > branches.window[..., -1][:, None]  # (b, L, K)
    return (change / weight * readers[:, None, None]).sum((1, 2, 3)).double()


def _at_window(states: Tensor, window: Tensor) -> Tensor:
    """(b, k, L, d) states of the main text at the windows' places, (b, k, K W, d)."""
    index = window.flatten(1)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[-1]))


def _log_normaliser(head: Head, dtype: torch.dtype, groups: int, chunk: int = 512) -> Tensor:
    """log Z of each position of the main text, (b, k, g, L), a few positions at a time."""
    query = head.query.to(dtype).unflatten(1, (-1, groups))  # (b, k, g, L, d)
    key = head.key.to(dtype)[:, :, None].transpose(-1, -2)  # (b, k, 1, d, L)
    length = query.shape[3]
    place = torch.arange(length, device=query.device)
    found = []
    for start in range(0, length, chunk):
        scores = query[..., start : start + chunk, :] @ key * head.scaling  # (b, k, g, c, L)
        later = place > place[start : start + chunk, None]  # (c, L)
        found.append(scores.masked_fill(later, -torch.inf).logsumexp(-1))
    return torch.cat(found, -1)
