"""The frozen reward model: what it scores, and how its score moves with each response token's embedding.

f_t = ∂R/∂e_t is taken at the sampled embeddings (the paper) or along a path from the policy's expected embeddings (8). The
model's input is always its own template around the policy's own token ids: text is never decoded and encoded again, since that
does not give the ids back. Left out: what the gradient is used for (datc.py). Equation numbers are the README's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import Messages, Rollout, no_dropout, pad

PLACEHOLDER = "DATC-ANSWER"


def template_around_answer(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids that the chat template puts before and after an assistant's answer.

    A placeholder is rendered as the answer and cut out, so whatever the template adds (empty thinking, turn end, newline)
    stays in its place, and whatever it would do to the answer's text (trim it, rewrite it) cannot happen to sampled ids.
    """
    if not tokenizer.chat_template:
        raise ValueError("The reward model's tokenizer has no chat template, so what it was trained to score is unknown.")
    text = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": PLACEHOLDER}], tokenize=False)
    before, found, after = text.rpartition(PLACEHOLDER)
    if not found:
        raise ValueError("The reward model's chat template does not show the assistant's answer as it is given.")
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))


def check_same_tokens(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, size: int) -> None:
    """Refuse a policy and a reward model that mean different tokens by an id below `size` (ValueError, first id shown)."""
    ours, theirs = (t.convert_ids_to_tokens(list(range(size))) for t in (a, b))
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if x != y:
            raise ValueError(
                f"--policy and --reward_model have different tokenizers: id {i} is {x!r} for the policy and {y!r} for the "
                "reward model. DATC compares their tokens one by one, so choose a pair of one model family."
            )


@dataclass
class _Inputs:
    """One slice of reward-model inputs, b rows of L positions, padded on the right."""

    ids: Tensor  # (b, L)
    mask: Tensor  # (b, L) bool
    place: Tensor  # (b, T) where each response token stands in the input; anything for tokens that are not there
    content: Tensor  # (b, T) bool: response tokens that are there
    prefix_length: Tensor  # (b,)

    def gather(self, values: Tensor) -> Tensor:
        """(b, L, D) per input position -> (b, T, D) per response token, 0 where the model does not see the token."""
        index = self.place[..., None].expand(-1, -1, values.shape[-1])
        return values.gather(1, index).masked_fill(~self.content[..., None], 0.0)


class RewardModel:
    """A frozen sequence-classification model with one output, read as R(x, y) and differentiated at the tokens of y."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        reward_batch: int = 8,
    ):
        """Check that the method's assumptions hold for this model and freeze it.

        Raises ValueError for: tokenizers that differ on a shared id; a head that is not one bias-free row; a backbone that
        is not causal; an input embedding that is more than a look-up.
        """
        self.model, self.tokenizer, self.reward_batch = model.requires_grad_(False), tokenizer, reward_batch
        no_dropout(model)
        self.backbone, self.head = model.base_model, getattr(model, "score", None)
        self.embedding = model.get_input_embeddings().weight  # (rows, D)  W
        self.pad_id = next(
            i for i in (model.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None
        )
        self.size = min(len(self.embedding), len(tokenizer), len(policy_tokenizer))
        check_same_tokens(policy_tokenizer, tokenizer, self.size)
        if not isinstance(self.head, torch.nn.Linear) or self.head.bias is not None or self.head.out_features != 1:
            raise ValueError(
                "--reward_model must be a sequence classifier with num_labels 1 and a bias-free linear `score` head; "
                f"this one has {self.head}."
            )
        self._check_backbone()

    @torch.no_grad()
    def _check_backbone(self) -> None:
        ids = torch.arange(4, device=self.embedding.device)[None] % len(self.embedding)  # (1, 4)
        plain = self.embedding[ids]
        if not torch.equal(self.model.get_input_embeddings()(ids), plain):
            raise ValueError("--reward_model scales or transforms its token embeddings; v = W f (2) needs a plain look-up.")
        changed = torch.cat([plain[:, :-1], -plain[:, -1:] - 1], 1)
        a, b = (self.backbone(inputs_embeds=x).last_hidden_state[:, :-1].float() for x in (plain, changed))
        if not torch.allclose(a, b, rtol=1e-2, atol=1e-2 * a.abs().max().item()):
            raise ValueError("--reward_model is not causal: an earlier position reacts to a later token.")

    # -- inputs and score ---------------------------------------------------------------------------------------------

    def _inputs(self, rollout: Rollout) -> _Inputs:
        device, rows, prefixes = self.embedding.device, [], []
        parts = {id(m): template_around_answer(self.tokenizer, m) for m in {id(m): m for m in rollout.messages}.values()}
        for messages, ids, keep in zip(rollout.messages, rollout.response_ids, rollout.content_mask, strict=True):
            prefix, suffix = parts[id(messages)]
            rows.append(prefix + ids[keep].tolist() + suffix)
            prefixes.append(len(prefix))
        longest, limit = max(map(len, rows)), getattr(self.model.config, "max_position_embeddings", None)
        if limit and longest > limit:
            raise ValueError(
                f"A conversation of {longest} tokens does not fit the reward model's {limit} positions, and cutting it would "
                "score another text. Lower --max_prompt_tokens or --max_response_tokens."
            )
        ids, mask = (t.to(device) for t in pad(rows, self.pad_id))  # (b, L)
        prefix_length = torch.tensor(prefixes, device=device)  # (b,)
        place = prefix_length[:, None] + torch.arange(rollout.response_ids.shape[1], device=device)  # (b, T)
        content = rollout.content_mask.to(device)
        return _Inputs(ids, mask, place.masked_fill(~content, 0), content, prefix_length)

    def _read(self, embeds: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """The score head, in at least float32, at the given positions of each row: (b, L, D), (b, L), (b, K) -> (b, K).

        Called with embeddings, transformers' own classifiers pool position -1 whatever the mask, so pooling is ours.
        """
        hidden = self.backbone(inputs_embeds=embeds, attention_mask=mask.long(), use_cache=False).last_hidden_state
        hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))  # (b, K, H)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(dtype) @ self.head.weight[0].to(dtype)

    def _reward(self, embeds: Tensor, mask: Tensor) -> Tensor:  # (b, L, D), (b, L) -> (b,)
        last = mask.sum(-1, keepdim=True) - 1  # (b, 1)
        return self._read(embeds, mask, last)[:, 0]

    def _reward_and_grad(self, inputs: _Inputs, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards (b,) at these embeddings (b, L, D), and their gradient at the response tokens (b, T, D)."""
        embeds = embeds.detach().requires_grad_()
        with torch.enable_grad():  # callers may be under no_grad
            rewards = self._reward(embeds, inputs.mask)  # (b,)
            (grad,) = torch.autograd.grad(rewards.sum(), embeds)  # rows are independent: the sum's gradient is each one's own
        grad = inputs.gather(grad.to(rewards.dtype))  # (b, T, D)
        if bad := (~(grad.isfinite().all((1, 2)) & rewards.isfinite())).nonzero().flatten().tolist():
            text = self.tokenizer.decode(inputs.ids[bad[0]][inputs.mask[bad[0]]])
            raise FloatingPointError(f"The reward or its gradient is NaN or infinite for this conversation: {text!r}")
        return rewards.detach(), grad

    # -- what the loop calls ------------------------------------------------------------------------------------------

    def score(self, rollout: Rollout, with_grad: bool = False) -> tuple[Tensor, Tensor | None]:
        """Rewards of the sampled responses, and with them f_t at the sample (1 + 1 passes in place of two separate ones).

        Returns:
            rewards (B,), raw and in at least float32; reward_grad (B, T, D), 0 on stop tokens and padding, or None.
        Raises:
            ValueError: a conversation longer than the model's positions. FloatingPointError: a NaN, naming the response.
        """
        rewards, grads = [], []
        for part in rollout.split(self.reward_batch):
            inputs = self._inputs(part)
            if with_grad:
                reward, grad = self._reward_and_grad(inputs, self.embedding[inputs.ids])
                grads.append(grad)
            else:
                with torch.no_grad():
                    reward = self._reward(self.embedding[inputs.ids], inputs.mask)
            rewards.append(reward)
        rewards = torch.cat(rewards)
        if not rewards.isfinite().all():
            bad = (~rewards.isfinite()).nonzero()[0].item()
            raise FloatingPointError(f"The reward of response {bad} of this rollout is {rewards[bad].item()}.")
        return rewards, torch.cat(grads) if with_grad else None

    def grad(self, rollout: Rollout, expected_embeds: Tensor, grad_at: Sequence[float]) -> Tensor:
        """f_t as the mean gradient along the path from expected to sampled embeddings, (8).

        Args:
            expected_embeds: (B, T, D) ē_t of (2), read at free tokens only.
            grad_at: points α in [0, 1]; 1 is the sample, [0.25, 0.75] a two-point path. One forward and backward each.
        Returns:
            (B, T, D): the mean over α of ∂R/∂e_t at ē + α (e - ē), all free positions moved together, prompt and frozen
            positions left at the sample; 0 where the reward model does not see the token.
        """
        grads = []
        for start, part in zip(range(0, len(rollout), self.reward_batch), rollout.split(self.reward_batch), strict=True):
            inputs = self._inputs(part)
            sampled = self.embedding[inputs.ids]  # (b, L, D)
            expected = expected_embeds[start : start + self.reward_batch].to(sampled.dtype)
            toward = expected - self.embedding[part.response_ids]  # (b, T, D)  ē - e
            toward = toward.masked_fill(~(part.free_mask & inputs.content)[..., None], 0.0)
            index = inputs.place[..., None].expand(-1, -1, sampled.shape[-1])
            shift = torch.zeros_like(sampled).scatter_add(1, index, toward)  # (b, L, D)
            points = [self._reward_and_grad(inputs, sampled + (1 - alpha) * shift)[1] for alpha in grad_at]
            grads.append(torch.stack(points).mean(0))
        return torch.cat(grads)

    @torch.no_grad()
    def prefix_scores(self, rollout: Rollout) -> Tensor:
        """The score head read after every prefix of the response, in one forward: (B, T+1).

        [:, 0] stands at the end of the template's prefix, [:, t] after response token t, and [:, T_i] and all behind it are
        R(x, y) after the suffix; so the differences of neighbours sum to R(x, y) - R(x, nothing) and are 0 on padding.
        """
        scores = []
        for part in rollout.split(self.reward_batch):
            inputs = self._inputs(part)
            last = inputs.mask.sum(-1, keepdim=True) - 1  # (b, 1)
            ends = torch.where(inputs.content, inputs.place, last)  # (b, T) stop tokens and padding read R(x, y)
            ends[~part.stopped, part.response_mask[~part.stopped].sum(-1) - 1] = last[~part.stopped, 0]  # cut: so does T_i
            places = torch.cat([inputs.prefix_length[:, None] - 1, ends], 1)  # (b, T+1)
            scores.append(self._read(self.embedding[inputs.ids], inputs.mask, places))
        return torch.cat(scores)

    @torch.no_grad()
    def substituted(self, rollout: Rollout, places: Tensor, tokens: Tensor) -> Tensor:
        """R with one token exchanged and the rest as sampled: what the first-order v_t(b) approximates.

        Args:
            rollout: one response.
            places: (N,) positions in it.
            tokens: (N, S) ids to put there in turn.
        Returns:
            (N, S) rewards in float64, at the cost of N S texts in slices of `reward_batch`.
        """
        n = tokens.numel()
        ids = rollout.response_ids.repeat(n, 1)  # (N S, T)
        ids[torch.arange(n, device=ids.device), places.repeat_interleave(tokens.shape[1])] = tokens.flatten()
        same = ("prompt_ids", "prompt_mask", "response_mask", "free_mask", "stopped")
        copies = {name: (t := getattr(rollout, name)).expand(n, *t.shape[1:]) for name in same}
        texts = replace(rollout, messages=rollout.messages * n, response_ids=ids, group_size=1, **copies)
        return self.score(texts)[0].double().view(tokens.shape)
