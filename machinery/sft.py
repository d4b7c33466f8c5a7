"""Lightweight supervised fine-tuning: the policy that RL starts from, and that its KL term refers to.

The loss is the negative log-prob of the answer's tokens and of the token that ends the turn; the prompt is only read. It
uses the same forward as GRPO (grpo.py), so what is tuned here is exactly what is sampled there.
"""

import random

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import response_hidden, response_mean, token_logprobs
from machinery.rollout import Messages, Rollout, Vocabulary, encode_prompt, pad, turn_end_id


def demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    examples: list[tuple[Messages, str]],
    vocabulary: Vocabulary,
    max_tokens: int | None = None,
    **template: object,
) -> Rollout:
    """Conversations and the answers to learn, as a rollout that a demonstrator has written (all of it counts)."""
    end = turn_end_id(tokenizer)
    end = [vocabulary.stop_ids[0] if end is None else end]
    prompts = [encode_prompt(tokenizer, messages, **template) for messages, _ in examples]
    answers = [tokenizer(a, add_special_tokens=False).input_ids + end for _, a in examples]
    if max_tokens:  # at most half goes to the prompt; a cut answer has lost its end, and so does not teach to stop there
        prompts = [p[-(max_tokens // 2) :] for p in prompts]
        answers = [a[: max_tokens - len(p)] for p, a in zip(prompts, answers, strict=True)]
    prompt_ids, prompt_mask = pad(prompts, vocabulary.pad_id, left=True)
    response_ids, response_mask = pad(answers, vocabulary.pad_id)
    stopped = torch.ones(len(examples), dtype=torch.bool)
    messages = [m for m, _ in examples]
    return Rollout(
        messages,
        prompt_ids,
        prompt_mask,
        response_ids,
        response_mask,
        response_mask,
        stopped,
        group_size=1,
    )


def sft(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[tuple[Messages, str]],
    vocabulary: Vocabulary,
    epochs: int = 2,
    batch: int = 16,
    micro_batch: int = 16,
    learning_rate: float = 1e-4,
    max_tokens: int | None = None,
    seed: int = 0,
    **template: object,
) -> list[float]:
    """Train the policy's trainable weights on (conversation, answer) pairs, AdamW with a linear decay to zero.

    Returns the loss of every step (mean over answers of the mean over tokens, in nats). `max_tokens` is for
    prompt and answer together: long prompts are cut on the left, long answers on the right.
    """
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    order = [
        i
        for epoch in range(epochs)
        for i in random.Random(seed + epoch).sample(range(len(examples)), len(examples))
    ]
    steps, losses = [order[i : i + batch] for i in range(0, len(order), batch)], []
    policy.train()
    for step, rows in enumerate(bar := tqdm(steps, desc="sft", dynamic_ncols=True)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / len(steps))
        losses.append(0.0)
        for start in range(0, len(rows), micro_batch):
            chosen = [examples[i] for i in rows[start : start + micro_batch]]
            demo = demonstrations(tokenizer, chosen, vocabulary, max_tokens, **template).to(
                policy.device
            )
            hidden = response_hidden(policy, demo)[demo.response_mask]  # (N, H)
            head = policy.get_output_embeddings().weight[: vocabulary.size]
            flat, _ = token_logprobs(hidden, head, demo.response_ids[demo.response_mask])  # (N,)
            logp = flat.new_zeros(demo.response_ids.shape).masked_scatter(
                demo.response_mask, flat
            )  # (B, T)
            loss = -response_mean(logp, demo.response_mask, len(rows))
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses
