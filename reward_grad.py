"""The frozen reward model: what it scores, and how its score moves with each response token.

Opens with f_t as a pure function; then the model's input, which is always its own template around
the policy's own token ids (text is never decoded and encoded again: that does not give the ids
back); then scores, the gradient along a path (8), and prefixes. Left out: what the gradient is
used for (datc.py). Equation numbers are the README's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from datc import at_least_float32
from machinery.rollout import Messages, Rollout, ids_in_use, no_dropout, pad

# ----------------------------------------------------------------------------------------------
# f_t = ∂R/∂e_t.


def reward_and_gradient(
    backbone: torch.nn.Module, head: Tensor, embeds: Tensor, mask: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards of b texts given as embeddings, and each reward's gradient at some of its tokens.

    Args:
        backbone: a causal transformer without its head; its parameters are frozen.
        head: (H,) the score head's only row.
        embeds: (b, L, D) input embeddings, padded on the right.
        mask: (b, L) bool, the tokens that are there.
        places: (b, T) where in its text each response token stands.
    Returns:
        rewards (b,) and f (b, T, D), in at least float32, both without a graph.
    """
    embeds = embeds.detach().requires_grad_()
    with torch.enable_grad():  # callers may be under no_grad
        last = mask.sum(-1, keepdim=True) - 1  # (b, 1)
        rewards = read_score(backbone, head, embeds, mask, last)[:, 0]  # (b,)
        # Texts do not see each other, so the sum's gradient is each reward's own.
        (grad,) = torch.autograd.grad(rewards.sum(), embeds)  # (b, L, D)
    index = places[..., None].expand(-1, -1, grad.shape[-1])  # (b, T, D)
    return rewards.detach(), grad.gather(1, index).to(rewards.dtype)


def read_score(
    backbone: torch.nn.Module, head: Tensor, embeds: Tensor, mask: Tensor, places: Tensor
) -> Tensor:
    """The score head in at least float32 at some positions: (b, L, D), (b, L), (b, K) -> (b, K).

    Called with embeddings, transformers' own classifiers pool position -1 whatever the mask, so
    where to read is ours to say.
    """
    out = backbone(inputs_embeds=embeds, attention_mask=mask.long(), use_cache=False)
    index = places[..., None].expand(-1, -1, out.last_hidden_state.shape[-1])  # (b, K, H)
    hidden = out.last_hidden_state.gather(1, index)  # (b, K, H)
    dtype = at_least_float32(hidden)
    return hidden.to(dtype) @ head.to(dtype)


# ----------------------------------------------------------------------------------------------
# The template around an answer.

PLACEHOLDER = "DATC-ANSWER"
CLEAN = "Yes"  # an answer that merges with nothing around it


def template_around_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, trimmed: bool = False
) -> tuple[list[int], list[int]]:
    """Ids that the chat template puts before and after an assistant's answer.

    A placeholder is rendered as the answer and cut out, so whatever the template adds (empty
    thinking, turn end, newline) stays in its place, and whatever it would do to the answer's text
    (trim it, rewrite it) cannot happen to sampled ids.

    Args:
        trimmed: leave out the white space before the answer; see `must_trim`.
    """
    before, after = text_around_answer(tokenizer, messages)
    if trimmed:
        before = before.rstrip()
    prefix = tokenizer(before, add_special_tokens=False).input_ids
    # What follows an answer is tokenized behind one: some tokenizers mark where a text begins.
    alone = tokenizer(CLEAN, add_special_tokens=False).input_ids
    answered = tokenizer(CLEAN + after, add_special_tokens=False).input_ids
    return prefix, answered[len(alone) :]


def text_around_answer(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[str, str]:
    """What the chat template writes before and after an assistant's answer."""
    if not tokenizer.chat_template:
        raise ValueError(
            "The reward model's tokenizer has no chat template, "
            "so what it was trained to score is unknown."
        )
    answered = [*messages, {"role": "assistant", "content": PLACEHOLDER}]
    text = tokenizer.apply_chat_template(answered, tokenize=False)
    before, found, after = text.rpartition(PLACEHOLDER)
    if not found:
        raise ValueError(
            "The reward model's chat template does not show the assistant's answer as it is given."
        )
    return before, after


def must_trim(
    tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Whether the white space before the answer comes with the sampled ids already.

    A template may write a space (or newline) before an answer that its generation prompt lacks:
    the policy then samples it, and spliced into the template it would stand there twice. The
    splice of a clean answer is compared with the ids of the whole text.

    Raises ValueError where they differ with the space and without.
    """
    if not (tokenizer.chat_template and policy_tokenizer.chat_template):
        return False  # refused elsewhere, where a conversation is rendered
    messages = [{"role": "user", "content": "Hi"}]
    answer = clean_answer(policy_tokenizer, messages)
    before, after = text_around_answer(tokenizer, messages)
    whole = tokenizer(before + CLEAN + after, add_special_tokens=False).input_ids
    for trimmed in (False, True):
        prefix, suffix = template_around_answer(tokenizer, messages, trimmed)
        if prefix + answer + suffix == whole:
            return trimmed
    raise ValueError(
        "The reward model's chat template around the ids of a sampled answer gives other ids "
        f"than for its text: {tokenizer.convert_ids_to_tokens(prefix + answer + suffix)} and "
        f"{tokenizer.convert_ids_to_tokens(whole)}. Give the policy a template with the same "
        "white space before an answer as in its generation prompt: --chat_template FILE."
    )


def clean_answer(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The ids that a policy would sample for CLEAN after its template's generation prompt."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, _ = text_around_answer(tokenizer, messages)
    lead = before.removeprefix(prompt)
    if lead.strip():  # the template puts more than white space there, which is not sampled
        prompt = before
    start = tokenizer(prompt, add_special_tokens=False).input_ids
    whole = tokenizer(before + CLEAN, add_special_tokens=False).input_ids
    if whole[: len(start)] == start:
        return whole[len(start) :]
    return tokenizer(CLEAN, add_special_tokens=False).input_ids


def check_same_tokens(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, size: int) -> None:
    """Refuse a policy and a reward model that mean different tokens by an id below `size`."""
    ids = list(range(size))
    ours = a.convert_ids_to_tokens(ids)
    theirs = b.convert_ids_to_tokens(ids)
    for i, x, y in zip(ids, ours, theirs, strict=True):
        if x != y:
            raise ValueError(
                f"--policy and --reward_model have different tokenizers: id {i} is {x!r} for the "
                f"policy and {y!r} for the reward model. DATC compares their tokens one by one, "
                "so choose a pair of one model family."
            )


@dataclass
class Inputs:
    """A slice of reward-model inputs: b texts of at most L tokens, padded on the right."""

    ids: Tensor  # (b, L)
    mask: Tensor  # (b, L) bool
    places: Tensor  # (b, T) where each response token stands in its text, 0 if it does not
    content: Tensor  # (b, T) bool: response tokens that are in the text
    prefix_length: Tensor  # (b,)


# ----------------------------------------------------------------------------------------------
# The reward model.


class RewardModel:
    """A frozen causal sequence classifier with one output, read as R(x, y)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        reward_batch: int = 8,
    ):
        """Freeze the model and check that the method's assumptions hold for it.

        Raises ValueError for: tokenizers that differ on a shared id; a head that is not one
        bias-free row; a backbone that is not causal; an input embedding that is no plain look-up.
        """
        self.model = model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.reward_batch = reward_batch
        no_dropout(model)
        self.backbone = model.base_model
        self.embedding = model.get_input_embeddings().weight  # (rows, D)  W
        config = model.config.get_text_config()
        known = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id = next(i for i in known if i is not None and i < len(self.embedding))
        self.positions = getattr(config, "max_position_embeddings", None)
        in_use = (ids_in_use(tokenizer), ids_in_use(policy_tokenizer))
        self.size = min(len(self.embedding), *in_use)
        check_same_tokens(policy_tokenizer, tokenizer, self.size)
        self.trimmed = must_trim(tokenizer, policy_tokenizer)
        head = getattr(model, "score", None)
        if not isinstance(head, torch.nn.Linear) or head.bias is not None or len(head.weight) != 1:
            raise ValueError(
                "--reward_model must be a sequence classifier with num_labels 1 and a bias-free "
                f"linear `score` head; this one has {head}."
            )
        self.head = head.weight[0]  # (H,)
        self._check_backbone()

    @torch.no_grad()
    def _check_backbone(self) -> None:
        ids = torch.arange(4, device=self.embedding.device)[None] % len(self.embedding)  # (1, 4)
        plain = self.embedding[ids]
        if not torch.equal(self.model.get_input_embeddings()(ids), plain):
            raise ValueError(
                "--reward_model scales or transforms its token embeddings; "
                "v = W f (2) needs a plain look-up."
            )
        changed = torch.cat([plain[:, :-1], -plain[:, -1:] - 1], 1)
        before = self.backbone(inputs_embeds=plain).last_hidden_state[:, :-1].float()
        after = self.backbone(inputs_embeds=changed).last_hidden_state[:, :-1].float()
        if not torch.allclose(before, after, rtol=1e-2, atol=1e-2 * before.abs().max().item()):
            raise ValueError(
                "--reward_model is not causal: an earlier position reacts to a later token."
            )

    def inputs(self, rollout: Rollout) -> Inputs:
        """Template prefix, sampled ids without the stop token, template suffix, for each response.

        Raises ValueError for a text longer than the model's positions: a cut one is another text.
        """
        device = self.embedding.device
        parts = {}  # the G responses of a prompt share its messages, so render them once
        texts = []
        prefixes = []
        content = rollout.content_mask  # (b, T)
        for messages, ids, keep in zip(
            rollout.messages, rollout.response_ids, content, strict=True
        ):
            if id(messages) not in parts:
                parts[id(messages)] = template_around_answer(self.tokenizer, messages, self.trimmed)
            prefix, suffix = parts[id(messages)]
            texts.append(prefix + ids[keep].tolist() + suffix)
            prefixes.append(len(prefix))
        content = content.to(device)
        longest = max(len(text) for text in texts)
        if self.positions and longest > self.positions:
            raise ValueError(
                f"A conversation of {longest} tokens does not fit the reward model's "
                f"{self.positions} positions, and cutting it would score another text. "
                "Lower --max_prompt_tokens or --max_response_tokens."
            )
        ids, mask = pad(texts, self.pad_id)  # (b, L)
        prefix_length = torch.tensor(prefixes, device=device)  # (b,)
        places = prefix_length[:, None] + torch.arange(content.shape[1], device=device)  # (b, T)
        places = places.masked_fill(~content, 0)
        return Inputs(ids.to(device), mask.to(device), places, content, prefix_length)

    def _read(self, embeds: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        return read_score(self.backbone, self.head, embeds, mask, places)

    def _reward(self, embeds: Tensor, mask: Tensor) -> Tensor:  # (b, L, D), (b, L) -> (b,)
        return self._read(embeds, mask, mask.sum(-1, keepdim=True) - 1)[:, 0]

    def _reward_and_grad(self, inputs: Inputs, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards (b,) at these embeddings (b, L, D), and f (b, T, D), 0 where no token stands."""
        rewards, grad = reward_and_gradient(
            self.backbone, self.head, embeds, inputs.mask, inputs.places
        )
        grad = grad.masked_fill(~inputs.content[..., None], 0.0)
        broken = ~(grad.isfinite().all((1, 2)) & rewards.isfinite())  # (b,)
        if broken.any():
            first = broken.nonzero()[0, 0]
            text = self.tokenizer.decode(inputs.ids[first][inputs.mask[first]])
            raise FloatingPointError(
                f"The reward or its gradient is NaN or infinite for this conversation: {text!r}"
            )
        return rewards, grad

    # -- what the loop calls -------------------------------------------------------------------

    def score(self, rollout: Rollout, with_grad: bool = False) -> tuple[Tensor, Tensor | None]:
        """Rewards of the sampled responses, and with them f_t at the sample if asked for.

        Returns:
            rewards (B,), raw and in at least float32; reward_grad (B, T, D), 0 on stop tokens and
            padding, or None.
        Raises:
            ValueError: a conversation longer than the model's positions.
            FloatingPointError: a NaN, naming the response.
        """
        rewards = []
        grads = []
        for part in rollout.split(self.reward_batch):
            inputs = self.inputs(part)
            embeds = self.embedding[inputs.ids]  # (b, L, D)
            if with_grad:
                reward, grad = self._reward_and_grad(inputs, embeds)
                grads.append(grad)
            else:
                with torch.no_grad():
                    reward = self._reward(embeds, inputs.mask)
            rewards.append(reward)
        rewards = torch.cat(rewards)
        if not rewards.isfinite().all():
            first = (~rewards.isfinite()).nonzero()[0].item()
            raise FloatingPointError(
                f"The reward of response {first} of this rollout is {rewards[first].item()}."
            )
        return rewards, torch.cat(grads) if with_grad else None

    def grad(self, rollout: Rollout, expected_embeds: Tensor, grad_at: Sequence[float]) -> Tensor:
        """(8): f_t as the mean gradient along the path from expected to sampled embeddings.

        Args:
            expected_embeds: (B, T, D) ē_t of (2), read at free tokens only.
            grad_at: points α in [0, 1]; 1 is the sample, [0.25, 0.75] a two-point path. One
                forward and backward each.
        Returns:
            (B, T, D): the mean over α of ∂R/∂e_t at ē + α (e - ē), all free positions moved
            together, prompt and frozen positions left at the sample; 0 where the reward model does
            not see the token.
        """
        grads = []
        slices = expected_embeds.split(self.reward_batch)
        for part, expected in zip(rollout.split(self.reward_batch), slices, strict=True):
            inputs = self.inputs(part)
            sampled = self.embedding[inputs.ids]  # (b, L, D)
            relaxed = self._in_place(inputs, part, expected.to(sampled.dtype), sampled)
            points = []
            for alpha in grad_at:
                # relaxed + alpha * (sampled - relaxed), exact at both ends.
                at = torch.lerp(relaxed, sampled, alpha)  # (b, L, D)
                points.append(self._reward_and_grad(inputs, at)[1])
            grads.append(torch.stack(points).mean(0))
        return torch.cat(grads)

    def _in_place(self, inputs: Inputs, part: Rollout, expected: Tensor, sampled: Tensor) -> Tensor:
        """Expected embeddings at the free tokens' places, sampled ones elsewhere, (b, L, D)."""
        free = part.free_mask & inputs.content  # (b, T)
        rows, columns = free.nonzero(as_tuple=True)
        moved = sampled.clone()
        moved[rows, inputs.places[rows, columns]] = expected[rows, columns]
        return moved

    @torch.no_grad()
    def prefix_scores(self, rollout: Rollout) -> Tensor:
        """The score head read after every prefix of the response, in one forward: (B, T+1).

        [:, 0] stands at the end of the template's prefix, [:, t] after response token t, and
        [:, T_i] and all behind it are R(x, y) after the suffix; so the differences of neighbours
        sum to R(x, y) - R(x, nothing) and are 0 on padding.
        """
        scores = []
        for part in rollout.split(self.reward_batch):
            inputs = self.inputs(part)
            last = inputs.mask.sum(-1, keepdim=True) - 1  # (b, 1)
            ends = torch.where(inputs.content, inputs.places, last)  # (b, T)
            cut = ~part.stopped  # a cut response has no stop token whose place could read R(x, y)
            final = part.response_mask[cut].sum(-1) - 1
            ends[cut, final] = last[cut, 0]
            places = torch.cat([inputs.prefix_length[:, None] - 1, ends], 1)  # (b, T+1)
            scores.append(self._read(self.embedding[inputs.ids], inputs.mask, places))
        return torch.cat(scores)

    @torch.no_grad()
    def substituted(self, rollout: Rollout, places: Tensor, tokens: Tensor) -> Tensor:
        """R with one token exchanged and the rest as sampled: what v_t(b) approximates.

        Args:
            rollout: one response.
            places: (N,) positions in it.
            tokens: (N, S) ids to put there in turn.
        Returns:
            (N, S) rewards in float64, at the cost of N S texts in slices of `reward_batch`.
        """
        n = tokens.numel()
        ids = rollout.response_ids.repeat(n, 1)  # (N S, T)
        row = torch.arange(n, device=ids.device)
        ids[row, places.repeat_interleave(tokens.shape[1])] = tokens.flatten()
        copies = {}
        for name in ("prompt_ids", "prompt_mask", "response_mask", "free_mask", "stopped"):
            one = getattr(rollout, name)
            copies[name] = one.expand(n, *one.shape[1:])
        texts = replace(
            rollout, messages=rollout.messages * n, response_ids=ids, group_size=1, **copies
        )
        return self.score(texts)[0].double().view(tokens.shape)
