"""Small things to test on, shared by all tests: models, tokenizers, rollouts, runs on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

import eval as evaluate
import train
from machinery import load, tiny
from machinery.rollout import (
    Rollout,
    encode_prompt,
    no_dropout,
    pad,
    sample,
    shared_vocabulary,
    take,
)
from machinery.run import read_jsonl
from reward_grad import RewardModel

torch.set_num_threads(1)  # these models are too small to share


TOKENIZER = tiny.make_tokenizer()


V = len(TOKENIZER)


SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


SHAPE |= {"intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 128}


SHAPE |= {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.3}


SHAPE_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


SHAPE_GPT2 |= {"bos_token_id": 2, "initializer_range": 0.3}


KINDS = {
    "qwen3": (Qwen3Config, SHAPE, Qwen3ForCausalLM, Qwen3ForSequenceClassification),
    "llama": (LlamaConfig, SHAPE, LlamaForCausalLM, LlamaForSequenceClassification),
    "gpt2": (GPT2Config, SHAPE_GPT2, GPT2LMHeadModel, GPT2ForSequenceClassification),
}


def make_policy(kind="qwen3", rows=V + 20, seed=0, **extra):
    config, shape, causal, _ = KINDS[kind]
    torch.manual_seed(seed)
    model = causal(config(vocab_size=rows, **{**shape, **extra})).eval()
    no_dropout(model)
    return model


def make_classifier(kind="qwen3", rows=V + 1, seed=1, num_labels=1, **extra):
    config, shape, _, classifier = KINDS[kind]
    torch.manual_seed(seed)
    model = classifier(config(vocab_size=rows, num_labels=num_labels, **{**shape, **extra})).eval()
    no_dropout(model)
    return model


def make_reward_model(kind="qwen3", double=False, **extra):
    model = make_classifier(kind, **extra)
    return RewardModel(model.double() if double else model, TOKENIZER, TOKENIZER)


PROMPTS = [
    [{"role": "user", "content": text}]
    for text in ("describe the cat", "the dog is red and the", "a")
]


def make_rollout(policy, prompts=PROMPTS[:2], group_size=2, tokens=10, seed=3, **extra) -> Rollout:
    torch.manual_seed(seed)
    return sample(
        policy,
        TOKENIZER,
        prompts,
        shared_vocabulary(policy, TOKENIZER),
        group_size,
        tokens,
        **extra,
    )


def hand_made(responses: list[str], messages=PROMPTS[0]) -> Rollout:
    """A rollout of given texts; one that ends in <end> has stopped, the others were cut."""
    ids, mask = pad([TOKENIZER(r).input_ids for r in responses], 0)
    prompt, prompt_mask = pad([encode_prompt(TOKENIZER, messages)] * len(responses), 0, left=True)
    stopped = torch.tensor([r.endswith("<end>") for r in responses])
    return Rollout(
        [messages] * len(responses), prompt, prompt_mask, ids, mask, mask & (ids != 2), stopped, 1
    )


def rows_of(rollout: Rollout, i: int) -> Rollout:
    """Response i alone, in the smallest tensors that hold it."""
    t = rollout.response_mask[i].sum()
    p = rollout.prompt_mask[i].sum()
    one = take(rollout, slice(i, i + 1))
    return replace(
        one,
        prompt_ids=one.prompt_ids[:, -p:],
        prompt_mask=one.prompt_mask[:, -p:],
        response_ids=one.response_ids[:, :t],
        response_mask=one.response_mask[:, :t],
        free_mask=one.free_mask[:, :t],
        group_size=1,
    )


def random_case(seed: int, rows=6, tokens=40):
    """Work, advantages and masks of uneven lengths with some frozen tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, tokens + 1, (rows, 1), generator=g)
    response = torch.arange(tokens) < lengths
    free = response & (torch.rand(rows, tokens, generator=g) < 0.8)
    work = torch.randn(rows, tokens, generator=g) * torch.rand(rows, 1, generator=g).exp() * 1e-3
    return work, torch.randn(rows, generator=g) * 2, response, free


def close(a, b, rtol, atol=0.0):
    torch.testing.assert_close(a.double(), torch.as_tensor(b).double(), rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random policy and reward model on disk, with prompts, as a user would have them."""
    folder = tmp_path_factory.mktemp("pair")
    for model, name in (
        (make_policy(initializer_range=0.05), "policy"),
        (make_classifier(), "reward_model"),
    ):
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    rows = [json.dumps({"prompt": p[0]["content"]}) + "\n" for p in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(rows))
    return folder


def arguments(pair, out, *extra, rollouts=4):
    flags = {
        "policy": pair / "policy",
        "reward_model": pair / "reward_model",
        "prompts": pair / "prompts.jsonl",
    }
    flags |= {"output_dir": out, "rollouts": rollouts, "max_response_tokens": 10, "save_every": 2}
    return [str(x) for name, value in flags.items() for x in (f"--{name}", value)] + [
        str(x) for x in extra
    ]


def read_metrics(out: Path, *without):
    rows = read_jsonl(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.startswith(("time/", *without))} for r in rows]


def weights_of(folder: Path):
    return load.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_weights(a: Path, b: Path) -> bool:
    a, b = weights_of(a), weights_of(b)
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def runs(pair, tmp_path_factory):
    """Two runs of three rollouts."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("grpo", "datc"):
        train.main(arguments(pair, folder / name, "--credit", name, rollouts=3))
    return folder


def evaluated(capsys, *argv) -> str:
    capsys.readouterr()
    evaluate.main([str(a) for a in argv])
    return capsys.readouterr().out


def model_flags(pair):
    flags = {
        "policy": pair / "policy",
        "reward_model": pair / "reward_model",
        "prompts": pair / "prompts.jsonl",
    }
    return [x for k, v in flags.items() for x in (f"--{k}", v)] + ["--max_response_tokens", 8]


def error_of(argv, capsys=None) -> str:
    with pytest.raises(SystemExit) as info:
        train.main([str(a) for a in argv])
    return str(info.value)


def random_position(seed=0, n=5, v=37, d=11, h=13, extra_rows=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(n, h, generator=g), torch.randn(v, h, generator=g)
    grad, embedding = torch.randn(n, d, generator=g), torch.randn(v + extra_rows, d, generator=g)
    ids = torch.randint(0, v, (n,), generator=g)
    return hidden.to(dtype), head.to(dtype), ids, grad.to(dtype), embedding.to(dtype)
