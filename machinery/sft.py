"""Lightweight supervised fine-tuning: the policy that RL starts from, and that its KL refers to.

The loss is the negative log-prob of the answer's tokens and of the token that ends the turn; the
prompt is only read. It uses the same forward as GRPO (grpo.py), so what is tuned here is exactly
what is sampled there.
"""

import random

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import response_hidden, response_mean, token_logprobs
from machinery.rollout import (
    Messages,
    Rollout,
    Vocabulary,
    encode_prompt,
    pad,
    to_padded,
    turn_end_id,
)


def demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    examples: list[tuple[Messages, str]],
    vocabulary: Vocabulary,
    max_tokens: int | None = None,
    **template: object,
) -> Rollout:
    """Conversations and the answers to learn, as a rollout that a demonstrator has written.

    At most half of `max_tokens` goes to the prompt. A cut answer has lost its end, and so does not
    teach to stop there.
    """
    turn_end = turn_end_id(tokenizer)
    if turn_end is None:
        turn_end = vocabulary.stop_ids[0]
    prompts = []
    answers = []
    for messages, answer in examples:
        prompt = encode_prompt(tokenizer, messages, **template)
        ids = tokenizer(answer, add_special_tokens=False).input_ids + [turn_end]
        if max_tokens:
            prompt = prompt[-(max_tokens // 2) :]
            ids = ids[: max_tokens - len(prompt)]
        prompts.append(prompt)
        answers.append(ids)
    prompt_ids, prompt_mask = pad(prompts, vocabulary.pad_id, left=True)
    response_ids, response_mask = pad(answers, vocabulary.pad_id)
    return Rollout(
        messages=[messages for messages, _ in examples],
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        free_mask=response_mask,
        stopped=torch.ones(len(examples), dtype=torch.bool),
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
    title: str = "sft",
    **template: object,
) -> list[float]:
    """Train the policy on (conversation, answer) pairs: AdamW, its rate falling linearly to zero.

    Returns the loss of every step (mean over answers of the mean over tokens, in nats).
    `max_tokens` is for prompt and answer together: long prompts are cut on the left, long answers
    on the right.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    order = []
    for epoch in range(epochs):
        order += random.Random(seed + epoch).sample(range(len(examples)), len(examples))
    starts = range(0, len(order), batch)
    losses = []
    policy.train()
    bar = tqdm(starts, desc=title, dynamic_ncols=True)
    for step, start in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / len(starts))
        chosen = [examples[i] for i in order[start : start + batch]]
        loss = 0.0
        for i in range(0, len(chosen), micro_batch):
            few = chosen[i : i + micro_batch]
            demo = demonstrations(tokenizer, few, vocabulary, max_tokens, **template)
            part = answer_loss(policy, demo.to(policy.device), vocabulary, len(chosen))
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        bar.set_postfix(loss=f"{loss:.3f}")
    return losses


def answer_loss(
    policy: PreTrainedModel, demo: Rollout, vocabulary: Vocabulary, num_responses: int
) -> torch.Tensor:
    """The share of these answers in the mean negative log-prob of `num_responses` answers."""
    mask = demo.response_mask
    hidden = response_hidden(policy, demo)[mask]  # (N, H)
    head = policy.get_output_embeddings().weight[: vocabulary.size]
    logp, _ = token_logprobs(hidden, head, demo.response_ids[mask])  # (N,)
    return -response_mean(to_padded(logp, mask), mask, num_responses)
