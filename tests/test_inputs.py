"""What people bring: prompt files, templates, tokenizers with gaps, models of other kinds."""

import gzip
import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

import reward_grad
import train
from conftest import (
    TOKENIZER,
    arguments,
    error_of,
    make_classifier,
    make_policy,
    make_reward_model,
    make_rollout,
    read_metrics,
)
from machinery import load, tiny
from machinery.config import parse
from machinery.prompts import as_messages, chosen_answer, load_rows
from machinery.rollout import ids_in_use, shared_vocabulary
from reward_grad import RewardModel, template_around_answer, text_around_answer

# ----------------------------------------------------------------------------------------------
# Rows.

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def test_prompts_may_be_texts_or_messages_and_a_final_answer_is_dropped():
    assert as_messages({"prompt": "a"}, "prompt", "x") == [USER]
    assert as_messages({"prompt": [USER]}, "prompt", "x") == [USER]
    assert as_messages({"messages": [USER, ANSWER]}, "messages", "x") == [USER]
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    joined = as_messages({"prompt": [{"role": "user", "content": parts}]}, "prompt", "x")
    assert joined == [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {"role": "user"},
        ["text"],
        [[USER]],
        [],
        "",
        " ",
        "\ud800",
        [ANSWER],
        [{"from": "a"}],
    ]
    + [[{"role": "user", "content": content}] for content in (None, 7, [7], [{"type": "image"}])],
)
def test_a_prompt_that_is_none_is_refused_with_its_row(value):
    with pytest.raises(ValueError, match="row 3"):
        as_messages({"prompt": value}, "prompt", "--prompts f, row 3")


@pytest.mark.parametrize(
    "chosen", [None, "", " ", 7, [], [USER], [USER, {**ANSWER, "content": ""}]]
)
def test_a_chosen_answer_that_is_none_is_refused_with_its_row(chosen):
    with pytest.raises(ValueError, match="row 3"):
        chosen_answer(chosen, "row 3")


def test_rows_are_read_from_every_usual_kind_of_file(tmp_path):
    rows = [{"prompt": "the cat\u2028is\x85red"}, {"prompt": "ä 猫"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files = {
        "plain.jsonl": lines.encode(),
        "bom.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "crlf.jsonl": lines.replace("\n", "\r\n").encode(),
        "array.json": json.dumps(rows, indent=1).encode(),
        "array.jsonl": json.dumps(rows).encode(),
        "packed.jsonl.gz": gzip.compress(lines.encode()),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert load_rows(str(tmp_path / name)) == rows, name
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    pd.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    for path in (tmp_path / "rows.parquet", tmp_path / "rows.csv", folder):
        assert load_rows(str(path)) == rows, path


def test_prompt_files_that_cannot_be_used_are_refused(pair, tmp_path):
    out = tmp_path / "out"

    def refused(text, *extra):
        file = tmp_path / "p.jsonl"
        file.write_text(text)
        return error_of(arguments(pair, out, "--prompts", file, *extra))

    assert "no such file" in error_of(arguments(pair, out, "--prompts", "missing.jsonl"))
    assert "is empty" in refused("\n")
    assert "one JSON object a line; line 1" in refused("describe the cat\n")
    assert "row 2: must be an object" in refused('{"prompt": "a"}\n7\n')
    unknown = refused('{"prompt": "a"}\n', "--prompt_column", "question")
    assert "no column 'question' (it has: prompt)" in unknown
    assert "row 2: an empty prompt" in refused('{"prompt": "a"}\n{"prompt": " "}\n')
    long = json.dumps({"prompt": "the " * 100})
    message = refused('{"prompt": "a"}\n' + long)
    assert "1 of 2 prompts" in message and "row 2" in message
    assert "--max_prompt_tokens 64" in message
    needs = refused('{"prompt": "a"}\n', "--sft_examples", 4)
    assert 'row 1: --sft_examples needs a column "chosen"' in needs
    assert not out.exists()


# ----------------------------------------------------------------------------------------------
# Templates.

WORDS = "hello there Yes friend No".split()


def byte_level(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows some words, with and without a space before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<pad>", "<end>", *alphabet]
    merges = []
    for word in WORDS:
        for start in (word, "Ġ" + word):
            made = start[0]
            for letter in start[1:]:
                merges.append((made, letter))
                made += letter
                vocabulary.append(made)
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    core = Tokenizer(models.BPE(ids, list(dict.fromkeys(merges))))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrapped(core, template)


def metaspace(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the SentencePiece kind: a space before a word is the word's first mark."""
    letters = [chr(c) for c in range(33, 127)]
    pieces = ["<pad>", "<end>", "<unk>", "▁", "\n", *letters]
    pieces += WORDS + ["▁" + word for word in WORDS]
    scores = [(piece, -10.0 + len(piece)) for piece in dict.fromkeys(pieces)]
    core = Tokenizer(models.Unigram(scores, unk_id=2))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return wrapped(core, template)


def wrapped(core: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    tokenizer.chat_template = template
    return tokenizer


LOOP = "{% for m in messages %}{% if m.role == 'user' %}"
LLAMA2 = (
    LOOP + "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} <end>{% endif %}{% endfor %}"
)
ALPACA = LOOP + (
    "### Instruction:\n{{ m.content }}\n\n### Response:"
    "{% else %}\n{{ m.content }}<end>{% endif %}{% endfor %}"
)
VICUNA = LOOP + (
    "USER: {{ m.content }} ASSISTANT:{% else %} {{ m.content }}<end>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [LLAMA2, ALPACA, VICUNA])
@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_space_before_an_answer_stands_there_once(make, template):
    """The policy samples the space that its generation prompt lacks; the template adds another."""
    tokenizer = make(template)
    messages = [{"role": "user", "content": "hello there"}]
    before, after = text_around_answer(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    whole = tokenizer(before + "No friend" + after, add_special_tokens=False).input_ids
    start = tokenizer(prompt, add_special_tokens=False).input_ids
    upto = tokenizer(before + "No friend", add_special_tokens=False).input_ids
    sampled = upto[len(start) :]
    trimmed = reward_grad.must_trim(tokenizer, tokenizer)
    prefix, suffix = template_around_answer(tokenizer, messages, trimmed)
    assert prefix + sampled + suffix == whole


def test_a_template_whose_splice_is_never_its_text_is_refused():
    glued = "{% for m in messages %}{{ m.role }} hell{{ m.content }}{% endfor %}"
    policy = byte_level(LLAMA2)
    policy.add_tokens(["hellYes"])
    other = byte_level(glued)
    other.add_tokens(["hellYes"])
    with pytest.raises(ValueError, match="chat template"):
        reward_grad.must_trim(other, policy)


def pair_with(tmp_path, pair, policy_template=None, reward_template=None):
    """The pair's directories with other templates; flags for train.py."""
    flags = []
    models_of = {
        "policy": (make_policy(initializer_range=0.05), policy_template),
        "reward_model": (make_classifier(), reward_template),
    }
    for name, (model, template) in models_of.items():
        if template is not None:
            tokenizer = tiny.make_tokenizer()
            tokenizer.chat_template = template
            model.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
            flags += [f"--{name}", tmp_path / name]
    return [*arguments(pair, tmp_path / "out", rollouts=1), *map(str, flags)]


def test_every_prompt_is_rendered_by_both_templates_before_anything_is_trained(pair, tmp_path):
    user_only = "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} <end> "
    user_only += "{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": [USER]})
        + "\n"
        + json.dumps({"prompt": [{"role": "human", "content": "describe the cat"}]})
    )
    silent = pair_with(tmp_path / "silent", pair, policy_template=user_only)
    message = error_of([*silent, "--prompts", str(tmp_path / "p.jsonl")])
    assert "row 2" in message and "'human'" in message and "policy's" in message
    silent = pair_with(tmp_path / "reward", pair, reward_template=user_only)
    message = error_of([*silent, "--prompts", str(tmp_path / "p.jsonl")])
    assert "prompt 2" in message and "reward model's" in message
    raising = "{{ raise_exception('only one turn') }}"
    message = error_of(pair_with(tmp_path / "raising", pair, policy_template=raising))
    assert "row 1" in message and "only one turn" in message
    message = error_of(pair_with(tmp_path / "none", pair, reward_template=""))
    assert "reward model's tokenizer has no chat template" in message
    assert not list(tmp_path.glob("*/out"))


def test_texts_longer_than_a_models_positions_are_refused_before_training(pair, tmp_path):
    message = error_of([*arguments(pair, tmp_path / "out"), "--max_response_tokens", "126"])
    assert "--policy has 128 positions" in message
    assert not (tmp_path / "out").exists()


def test_a_policy_without_a_template_takes_the_reward_models(pair, tmp_path, capsys):
    tiny.make_tokenizer().save_pretrained(tmp_path / "bare")
    make_policy(initializer_range=0.05).save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    base = arguments(pair, tmp_path / "out", "--policy", tmp_path / "bare", rollouts=1)
    train.main(base)
    assert "takes the reward model's" in capsys.readouterr().out
    (tmp_path / "t.jinja").write_text(tiny.CHAT_TEMPLATE)
    train.main(
        [*base, "--chat_template", str(tmp_path / "t.jinja"), "--output_dir", str(tmp_path / "b")]
    )
    assert read_metrics(tmp_path / "out") == read_metrics(tmp_path / "b")


# ----------------------------------------------------------------------------------------------
# The vocabulary.


def gapped_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 5 and, behind a gap, 40 and 41: the stop token lies beyond len(tokenizer)."""
    ids = {word: i for i, word in enumerate("<pad> <unk> a b c d".split())}
    ids |= {"e": 40, "<end>": 41}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    return tokenizer


def test_ids_may_have_gaps_and_a_stop_token_behind_them_still_stops():
    tokenizer = gapped_tokenizer()
    assert len(tokenizer) < 42 == ids_in_use(tokenizer)
    policy = make_policy(rows=64)
    policy.generation_config.eos_token_id = None
    vocabulary = shared_vocabulary(policy, tokenizer)
    assert vocabulary.size == 42 and vocabulary.stop_ids == [41]
    model = RewardModel(make_classifier(rows=50), tokenizer, tokenizer)
    assert model.size == 42


def test_a_stop_token_outside_the_shared_vocabulary_is_refused():
    with pytest.raises(ValueError, match="Stop token 41"):
        shared_vocabulary(make_policy(rows=64), gapped_tokenizer(), reward_rows=41)


# ----------------------------------------------------------------------------------------------
# Models.


def test_models_that_cannot_be_used_are_refused(pair, tmp_path):
    base = arguments(pair, tmp_path / "out")
    assert "lacks score.weight" in error_of([*base, "--reward_model", pair / "policy"])
    make_classifier(num_labels=2).save_pretrained(tmp_path / "two")
    TOKENIZER.save_pretrained(tmp_path / "two")
    assert "one label" in error_of([*base, "--reward_model", tmp_path / "two"])
    config = MambaConfig(vocab_size=120, hidden_size=16, num_hidden_layers=1, eos_token_id=2)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    TOKENIZER.save_pretrained(tmp_path / "mamba")
    message = error_of([*base, "--policy", tmp_path / "mamba", "--credit", "grpo"])
    assert "no attention model" in message
    message = error_of([*base, "--attn_implementation", "flash_attention_2"])
    assert "--attn_implementation flash_attention_2" in message


def test_a_reward_models_config_need_not_list_its_one_label(pair, tmp_path):
    make_classifier().save_pretrained(tmp_path / "r")
    TOKENIZER.save_pretrained(tmp_path / "r")
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    for name in ("id2label", "label2id", "num_labels"):
        config.pop(name, None)
    (tmp_path / "r" / "config.json").write_text(json.dumps(config))
    flags = arguments(pair, tmp_path / "out", "--reward_model", tmp_path / "r")
    assert load.load_reward_model(load.settle(parse(flags)), TOKENIZER).head.dim() == 1


def test_adapters_are_a_policy_to_go_on_from_and_no_reward_model(pair, tmp_path):
    lora = ("--lora_rank", 4, "--learning_rate", 1e-2)
    train.main(arguments(pair, tmp_path / "first", *lora, rollouts=2))
    adapters = tmp_path / "first" / "final"
    for rank in (0, 4):
        config = load.settle(parse(arguments(pair, "x", "--policy", adapters, "--lora_rank", rank)))
        policy = load.load_policy(config)
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        assert (trained == sum(p.numel() for p in policy.parameters())) == (rank == 0)
        ids = torch.tensor([[3, 5, 7]])
        plain = load.load_policy(replace(config, policy=str(pair / "policy")), trainable=False)
        assert not torch.allclose(policy(input_ids=ids).logits, plain(input_ids=ids).logits)
    train.main(arguments(pair, tmp_path / "on", *lora, "--policy", adapters, rollouts=1))
    message = error_of(arguments(pair, tmp_path / "out", "--reward_model", adapters))
    assert "merge_and_unload" in message


def test_a_reward_model_whose_gradient_is_not_its_slope_is_refused(pair, tmp_path, monkeypatch):
    model = make_reward_model()
    rollout = make_rollout(make_policy())
    load.check_gradient(model, rollout)
    plain = reward_grad.reward_and_gradient

    def backwards(*args):
        rewards, grad = plain(*args)
        return rewards, -grad

    monkeypatch.setattr(reward_grad, "reward_and_gradient", backwards)
    assert "its gradient says" in error_of(arguments(pair, tmp_path / "out"))
    train.main(arguments(pair, tmp_path / "grpo", "--credit", "grpo", rollouts=1))


def test_models_load_without_kernels_from_the_hub(pair, monkeypatch):
    asked = []

    def noted(auto, plain):
        def load_it(*args, **options):
            asked.append(options["use_kernels"])
            return plain(*args, **options)

        monkeypatch.setattr(auto, "from_pretrained", load_it)

    for auto in (load.AutoModelForCausalLM, load.AutoModelForSequenceClassification):
        noted(auto, auto.from_pretrained)
    load.prepare(load.settle(parse(arguments(pair, "x"))))
    assert asked == [False, False]
