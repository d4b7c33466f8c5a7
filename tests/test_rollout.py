"""The vocabulary, sampling, and templates and tokenizers like the real ones."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import reward_grad
from conftest import (
    KINDS,
    PROMPTS,
    TOKENIZER,
    V,
    close,
    make_classifier,
    make_policy,
    make_rollout,
    rows_of,
)
from grpo import response_hidden, token_logprobs
from machinery import rollout as rollouts
from machinery.rollout import Rollout, shared_vocabulary
from reward_grad import RewardModel


@pytest.mark.parametrize("kind", KINDS)
def test_training_log_probs_are_those_the_sampler_drew_from(kind):
    """In spite of hostile generation defaults, padding rows, a temperature and padded prompts."""
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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\n\n<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
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
