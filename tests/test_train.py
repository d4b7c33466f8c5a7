"""The loop: credit and updates, checkpoints and resuming, what is refused at the start."""

import importlib
import json
import os
import re
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

import credit
import datc
import machinery.start
import reward_grad
import study
import train
from conftest import (
    PROMPTS,
    TOKENIZER,
    arguments,
    close,
    error_of,
    make_classifier,
    make_policy,
    make_reward_model,
    make_rollout,
    read_metrics,
    same_weights,
    weights_of,
)
from machinery import load, tiny
from machinery.config import PRESETS, Config, parse
from machinery.rollout import choose_prompts, shared_vocabulary
from machinery.run import Run, credit_metrics, read_jsonl, rollout_metrics
from reward_grad import RewardModel
from train import Learner


def test_every_flag_has_a_sentence_and_every_metric_and_method_is_in_the_readme(pair, tmp_path):
    for flag in fields(Config):
        assert len(flag.metadata["help"].split()) > 1, f"--{flag.name} has no help"
    text = Path("README.md").read_text()
    train.main(arguments(pair, tmp_path / "run", rollouts=1))
    names = set(read_metrics(tmp_path / "run")[0]) - {"step"}
    names |= {name for name in credit.CREDIT if "for_tests" not in name}
    missing = sorted(name for name in names if f"`{name}`" not in text)
    assert not missing, f"README.md does not explain {missing}"


def test_every_function_and_test_that_the_readme_names_is_there():
    text = Path("README.md").read_text()
    tests = "".join(p.read_text() for p in [Path("test_credit.py"), *Path("tests").glob("*.py")])
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    for module, function in re.findall(r"`(datc|grpo|credit|reward_grad|branch)\.(\w+)`", text):
        assert hasattr(importlib.import_module(module), function), function
    for method in re.findall(r"`RewardModel\.(\w+)`", text):
        assert hasattr(RewardModel, method), method


def test_the_same_seed_gives_the_same_run_and_another_seed_another(pair, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train.main(arguments(pair, tmp_path / name, "--seed", seed))
    assert (
        read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b") != read_metrics(tmp_path / "c")
    )
    assert same_weights(tmp_path / "a" / "final", tmp_path / "b" / "final")


def test_train_takes_models_that_are_already_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = make_policy("gpt2", resid_pdrop=0.5)
    before = [p.clone() for p in policy.parameters()]
    config = Config(rollouts=2, max_response_tokens=8)
    history = train.train(policy, make_reward_model("gpt2"), TOKENIZER, PROMPTS, config)
    assert len(history) == 2 and history[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert (tmp_path / "runs" / "tiny-datc-s0" / "final" / "model.safetensors").exists()


def test_datc_with_a_band_of_one_trains_like_grpo_bit_for_bit(pair, tmp_path):
    train.main(arguments(pair, tmp_path / "grpo", "--credit", "grpo"))
    train.main(arguments(pair, tmp_path / "datc", "--credit", "datc", "--band", 1))
    assert read_metrics(tmp_path / "grpo", "credit/") == read_metrics(tmp_path / "datc", "credit/")
    assert same_weights(tmp_path / "grpo" / "final", tmp_path / "datc" / "final")
    train.main(arguments(pair, tmp_path / "four", "--credit", "datc"))
    assert not same_weights(tmp_path / "grpo" / "final", tmp_path / "four" / "final")


@pytest.mark.parametrize(
    "extra", [("--credit", "shuffle", "--grad_at", "0.25", "0.75"), ("--epochs", "2")]
)
def test_four_rollouts_are_two_and_a_resume_and_two(pair, tmp_path, extra):
    train.main(arguments(pair, tmp_path / "whole", *extra))
    train.main(arguments(pair, tmp_path / "parts", *extra, rollouts=2))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 2, "reward": 99}\n{"step": 3, "rew'
        )  # a rollout after the checkpoint, and a killed write
    train.main(["--resume", str(tmp_path / "parts"), "--rollouts", "4"])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    assert same_weights(tmp_path / "whole" / "final", tmp_path / "parts" / "final")
    assert len(read_jsonl(tmp_path / "parts" / "samples.jsonl")) == 4 * 4


def make_learner(pair, *flags, policy=None, **changes) -> Learner:
    """A learner on fresh random models, with train.py's flags."""
    config = replace(parse(arguments(pair, "unused", *flags)), **changes)
    return Learner(policy or make_policy(), make_reward_model(), TOKENIZER, config)


def gradient(pair, micro_batch, method="datc", **changes):
    """The gradient of one update on twelve responses, by parameter name, and its metrics."""
    flags = ("--credit", method, "--micro_batch", micro_batch)
    learner = make_learner(pair, *flags, max_grad_norm=1e9, learning_rate=1e-9, **changes)
    rollout = make_rollout(learner.policy, PROMPTS, group_size=4)
    rollout = learner.refer(learner.compare(learner.score(rollout)))
    off = rollout.reference_logp - 0.1 * rollout.response_mask
    kept = {}

    def keep():
        for name, p in learner.policy.named_parameters():
            kept[name] = p.grad.clone()

    learner.optimizer.step = keep
    credited = study.one_update(learner, replace(rollout, reference_logp=off))
    return kept, {**learner.stats, **credit_metrics(credited)}


@credit.credit_method("whole_batch_for_tests", needs=("work", "entropy", "hidden", "whole_batch"))
def whole_batch_for_tests(x):
    assert len(x.advantages) == 12 and x.hidden.shape[:2] == x.work.shape == x.entropy.shape
    return credit.multiplicative(x, x.response_mask * x.entropy / x.entropy.max())


@pytest.mark.parametrize("method", credit.CREDIT)
def test_micro_batches_of_any_size_give_the_same_gradient(pair, method):
    extra = {"advantage": "rloo"} if method == "red" else {}
    whole, metrics = gradient(pair, 12, method, **extra)
    for size in (5,):
        parts, m = gradient(pair, size, method, **extra)
        for name, g in whole.items():
            close(parts[name], g, 1e-3, 1e-5 * g.abs().max().item())
        assert m.keys() == metrics.keys() and all(
            abs(m[k] - metrics[k]) < 1e-4 * (1 + abs(metrics[k])) for k in m
        )


def test_the_loop_hands_the_sharpness_of_the_estimator_to_the_allocation(pair, monkeypatch):
    seen = []
    method = credit.CREDIT["datc"]
    spy = lambda x: seen.append(x) or method(x)  # noqa: E731
    spy.needs = method.needs
    monkeypatch.setitem(credit.CREDIT, "datc", spy)
    gradient(pair, 12, advantage="rloo")
    close(seen[0].sharpness.square().mean(), 1.0, 1e-5)
    close(seen[0].advantages / seen[0].advantages.square().mean().sqrt(), seen[0].sharpness, 1e-5)
    assert not torch.allclose(seen[0].advantages, seen[0].sharpness)


def test_every_trained_weight_gets_a_gradient_and_the_reward_rises(pair, tmp_path):
    gradients, _ = gradient(pair, 6)
    assert all(g.abs().max() > 0 for g in gradients.values()), [
        n for n, g in gradients.items() if g.abs().max() == 0
    ]
    flags = ("--learning_rate", 1e-2, "--beta", 0)
    train.main(arguments(pair, tmp_path / "run", *flags, rollouts=16))
    rewards = torch.tensor([row["reward"] for row in read_metrics(tmp_path / "run")])
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.5 * rewards[:5].std(), rewards


def test_grpo_asks_the_reward_model_for_no_gradient(pair, monkeypatch):
    def refuse(*_):
        raise AssertionError("GRPO computed credit evidence")

    monkeypatch.setattr(RewardModel, "_reward_and_grad", refuse)
    monkeypatch.setattr(datc, "work", refuse)
    learner = make_learner(pair, "--credit", "grpo")
    rollout = learner.score(make_rollout(learner.policy))
    assert rollout.reward_grad is None
    study.one_update(learner, learner.refer(learner.compare(rollout)))


def test_one_policy_forward_per_micro_batch_serves_credit_and_loss(pair, monkeypatch):
    learner = make_learner(pair, "--micro_batch", "2", "--beta", 0)
    rollout = learner.compare(learner.score(make_rollout(learner.policy)))
    backbone = learner.policy.base_model
    plain = backbone.forward
    calls = []

    def counted(**inputs):
        calls.append(len(inputs["input_ids"]))
        return plain(**inputs)

    monkeypatch.setattr(backbone, "forward", counted)
    study.one_update(learner, rollout)
    assert calls == [2, 2]


def test_the_reference_is_the_start_however_far_the_policy_has_moved(pair):
    learner = make_learner(pair)
    policy = learner.policy
    rollout = make_rollout(policy)
    before = learner.reference_logp(rollout)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    moved = [p.clone() for p in policy.parameters()]
    assert torch.equal(learner.reference_logp(rollout), before)
    assert all(torch.equal(a, b) for a, b in zip(moved, policy.parameters(), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_can_be_resumed(pair, tmp_path, monkeypatch, capsys, number):
    plain = Run.log

    def ask(run, step, rollout):
        plain(run, step, rollout)
        if step == 2:
            signal.raise_signal(number)  # as Ctrl-C does, or a cluster that ends a job

    monkeypatch.setattr(Run, "log", ask)
    before = signal.getsignal(number)
    train.main(arguments(pair, tmp_path / "run", rollouts=100_000))
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert signal.getsignal(number) is before
    assert (tmp_path / "run" / "checkpoint-3" / "optimizer.pt").exists()
    assert not (tmp_path / "run" / "final").exists()
    train.main(["--resume", str(tmp_path / "run"), "--rollouts", "4"])
    assert len(read_metrics(tmp_path / "run")) == 4


def test_lora_trains_float32_adapters_against_the_frozen_start_and_saves_them_in_peft_format(
    pair, tmp_path
):
    from peft import PeftModel

    out = tmp_path / "run"
    lora = (
        "--lora_rank",
        4,
        "--learning_rate",
        1e-2,
        "--gradient_checkpointing",
        "--dtype",
        "bfloat16",
    )
    train.main(arguments(pair, out, *lora))
    rows = read_metrics(out)
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0 and 0 < rows[0]["check/sampler_gap"] < 0.1
    base = load.AutoModelForCausalLM.from_pretrained(pair / "policy", dtype=torch.bfloat16)
    tuned = PeftModel.from_pretrained(base, out / "final")
    adapters = {n: p for n, p in tuned.named_parameters() if "lora_" in n}
    assert len(adapters) == 2 * 2 * 7 and all(p.dtype == torch.float32 for p in adapters.values())
    assert all(p.abs().max() > 0 for p in adapters.values())
    assert not any("lm_head" in n for n in adapters)
    ids = torch.tensor([[3, 5, 7, 2]])
    moved = (tuned(input_ids=ids).logits - make_policy_logits(pair, ids)).abs().max()
    assert moved > 1e-3


def test_lora_scales_its_update_by_two(pair, tmp_path):
    train.main(arguments(pair, tmp_path / "run", "--lora_rank", 4, rollouts=1))
    saved = json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())
    assert saved["lora_alpha"] / saved["r"] == 2


def test_every_prompt_is_used_once_before_any_comes_again():
    prompts = [[{"role": "user", "content": str(i)}] for i in range(6)]
    for epoch in range(2):
        chosen = []
        for step in range(3 * epoch, 3 * epoch + 3):
            chosen += choose_prompts(prompts, step, seed=0, count=2)
        assert sorted(m[0]["content"] for m in chosen) == list("012345")


def test_only_a_group_without_any_advantage_counts_as_a_tie():
    rollout = make_rollout(make_policy(), PROMPTS, group_size=3)
    one_in_the_middle = [1.0, 0.0, -1.0]
    a_tie = [0.0, 0.0, 0.0]
    advantages = torch.tensor(one_in_the_middle + a_tie + one_in_the_middle)
    rollout = replace(rollout, rewards=torch.arange(9.0), advantages=advantages)
    assert rollout_metrics(rollout)["frac_reward_zero_std"] == pytest.approx(1 / 3)


def test_the_starting_spread_is_the_median_of_the_groups(pair, monkeypatch):
    config = Config(prompts_per_rollout=2, group_size=2, max_response_tokens=4)
    learner = Learner(make_policy(), make_reward_model(), TOKENIZER, config)
    spreads = iter([1.0, 3.0, 2.0, 1000.0, 5.0, 4.0])

    def score(rollout):
        rewards = []
        for _ in range(2):
            rewards += [0.0, 2 * next(spreads)]
        return torch.tensor(rewards), None

    monkeypatch.setattr(learner.reward_model, "score", score)
    assert machinery.start.starting_std(learner, PROMPTS, count=6) == 3.0


def make_policy_logits(pair, ids):
    return load.AutoModelForCausalLM.from_pretrained(pair / "policy", dtype=torch.bfloat16)(
        input_ids=ids
    ).logits


@pytest.mark.parametrize("rank", [0, 8])
def test_a_supervised_start_learns_the_answers_and_is_what_the_kl_refers_to(pair, tmp_path, rank):
    answer = [{"role": "assistant", "content": "it was red"}]
    row = json.dumps({"prompt": "describe the cat", "chosen": answer})
    (tmp_path / "p.jsonl").write_text((row + "\n") * 160)
    extra = ("--prompts", tmp_path / "p.jsonl", "--sft_examples", 160, "--lora_rank", rank)
    extra += ("--sft_learning_rate", 3e-2, "--micro_batch", 16)
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    train.main(arguments(pair, parts, *extra, rollouts=2))
    first = read_jsonl(parts / "samples.jsonl")[0]
    assert all(0 < p <= 1 for p in first["token_p"])
    assert len(first["token_p"]) == len(first["tokens"])
    if rank == 0:  # adapters alone cannot teach a random model to talk
        assert first["response"] == "it was red"
    assert read_metrics(parts)[0]["kl"] == pytest.approx(0, abs=1e-6)
    # The same start, four rollouts at once or two and two.
    shutil.copytree(parts, whole)
    shutil.rmtree(whole / "checkpoint-2")
    train.main(["--resume", str(whole), "--rollouts", "4"])
    train.main(["--resume", str(parts), "--rollouts", "4"])
    assert read_metrics(whole) == read_metrics(parts)


def test_a_cut_demonstration_does_not_teach_to_stop():
    from machinery import sft

    examples = [(PROMPTS[0], "the cat is red"), (PROMPTS[0], "it")]
    vocabulary = shared_vocabulary(make_policy(), TOKENIZER)
    demo = sft.demonstrations(TOKENIZER, examples, vocabulary, max_tokens=8)
    texts = [
        TOKENIZER.decode(ids[mask])
        for ids, mask in zip(demo.response_ids, demo.response_mask, strict=True)
    ]
    assert not texts[0].endswith("<end>") and texts[1] == "it <end>"
    assert demo.prompt_mask.sum(-1).max() + demo.response_mask.sum(-1).max() == 8


def test_sft_needs_chosen_answers(pair, tmp_path):
    assert 'needs a column "chosen"' in error_of(
        arguments(pair, tmp_path / "out", "--sft_examples", 4)
    )


def test_devs_reward_shaping_changes_the_advantages_and_never_the_logged_reward(pair, tmp_path):
    size = ("--prompts_per_rollout", 32, "--micro_batch", 128, "--reward_batch", 128)
    shaping = ("--length_penalty", 5, "--advantage_std_floor", 3)
    train.main(arguments(pair, tmp_path / "a", *size, rollouts=1))
    train.main(arguments(pair, tmp_path / "b", *size, *shaping, rollouts=1))
    a = read_jsonl(tmp_path / "a" / "samples.jsonl")[0]
    b = read_jsonl(tmp_path / "b" / "samples.jsonl")[0]
    assert a["reward"] == b["reward"] and a["advantage"] != b["advantage"]


def test_the_memory_estimate_counts_weights_exactly_and_names_the_flag_that_would_help(
    pair, monkeypatch, capsys
):
    config = parse(arguments(pair, "unused", "--lora_rank", 4))
    policy, reward = make_policy(), make_classifier()
    parts = load.memory_estimate(config, policy.config, reward.config)
    assert parts["policy weights"] == 4 * sum(p.numel() for p in policy.parameters())
    assert parts["reward model weights"] == 4 * sum(p.numel() for p in reward.parameters())
    adapters = sum(
        p.numel() for n, p in load.add_lora(policy, 4).named_parameters() if "lora_" in n
    )
    assert parts["adapters, gradients, optimizer"] == 4 * 5 * adapters
    assert load.check_memory(config) > 0  # on a CPU nothing is refused
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (held, held))
    gpu = replace(config, device="cuda", sample_batch=10_000, prompts_per_rollout=5_000)
    small = load.memory_estimate(replace(gpu, sample_batch=1), policy.config, reward.config)
    held = 1.2 * load.total_estimate(small)
    load.check_memory(gpu)  # an estimate of a phase only warns
    assert "--sample_batch" in capsys.readouterr().out
    held = parts["policy weights"]  # but what is held throughout cannot be argued with
    with pytest.raises(ValueError, match="the GPU has"):
        load.check_memory(gpu)


class Capped(Qwen3ForCausalLM):
    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        out.logits = 0.5 * torch.tanh(out.logits)
        return out


def test_a_policy_with_capped_logits_or_live_dropout_is_refused_at_the_start():
    config = Config(dtype="float32", device="cpu")
    torch.manual_seed(0)
    capped = Capped(make_policy().config).eval()
    args = TOKENIZER, shared_vocabulary(capped, TOKENIZER), PROMPTS, config
    with pytest.raises(ValueError, match="soft-capped"):
        load.self_check(capped, *args)
    gaps = load.self_check(make_policy(), *args)
    assert max(gaps.values()) < 1e-4
    noisy = make_policy("gpt2")
    noisy.transformer.drop.p = 0.5
    noisy.train()
    with pytest.raises(ValueError, match="log-probs differ|soft-capped"):
        load.self_check(noisy, *args)


def test_every_preset_is_a_valid_configuration():
    for name in PRESETS:
        config = parse(["--preset", name, "--band", "2.0"])
        assert config.band == 2.0 and (config.policy is None) == (name in tiny.WORLDS)


def test_a_failed_save_keeps_the_last_good_checkpoint(pair, tmp_path, monkeypatch):
    plain = torch.save

    def full_disk(state, path):
        plain(state, path) if "checkpoint-2" in str(path) else (_ for _ in ()).throw(
            OSError(28, "No space left on device")
        )

    monkeypatch.setattr(torch, "save", full_disk)
    message = error_of(arguments(pair, tmp_path / "run"))
    assert "No space left" in message and "intact" in message
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"checkpoint-2"}


def test_wrong_flags_are_named_before_anything_is_loaded(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "load_policy_tokenizer", lambda *_: pytest.fail("a model was loaded"))
    base = arguments(pair, tmp_path / "x")
    for extra, expected in {
        ("--group_size", 1): "--group_size is 1",
        ("--band", 0.5): "--band is 0.5",
        ("--credit", "best"): "Known methods: branch",
        ("--grad_at", 1.5): "--grad_at",
        ("--temperature", 0): "--temperature",
        ("--preset", "gpt5"): "Presets: tiny",
        ("--advantage", "best"): "rank_normal",
        ("--dtype", "int4"): "--dtype 'int4' is unknown",
        ("--device", "cuda"): "torch sees no GPU",
        ("--credit", "oracle"): "tiny worlds only",
        ("--resume", tmp_path / "nowhere"): "no run is there",
        ("--output_dir", pair): "is not empty",
    }.items():
        assert expected in error_of([*base, *extra])


def test_a_folder_that_holds_another_run_is_left_alone(pair, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    message = error_of(arguments(pair, tmp_path))
    assert "not empty" in message and "--resume" in message
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_nan_reward_stops_the_run_and_keeps_the_last_checkpoint(pair, tmp_path, monkeypatch):
    plain = reward_grad.read_score

    def breaks(*args):
        out = plain(*args)
        return out * torch.nan if (tmp_path / "run" / "checkpoint-2").exists() else out

    monkeypatch.setattr(reward_grad, "read_score", breaks)
    assert "NaN" in error_of(arguments(pair, tmp_path / "run", rollouts=10))
    assert len(read_metrics(tmp_path / "run")) == 2
    assert len(weights_of(tmp_path / "run" / "checkpoint-2")) > 5


def test_the_person_likes_kind_words_on_the_topic_in_sentences():
    def gold(text, **kw):
        return tiny.gold_reward("cat", text.split(), **kw)

    assert gold("the cat is lovely and kind .") == pytest.approx(5.0)
    assert gold("the dog is ugly and bad .") == pytest.approx(5 * (-1 - 1.5 - 1.5) / 3)
    assert gold("the cat is red and blue .") == pytest.approx(5 / 3)
    assert gold("lovely lovely lovely cat") < gold("the lovely cat is lovely") - 1
    assert gold("the is a .") == gold("") == -5
    assert gold("the cat", stopped=False) == gold("the cat") - 1


def test_a_world_is_built_once_and_a_half_built_one_is_never_used(tmp_path, monkeypatch):
    small = tiny.Recipe(hidden_size=16, layers=1, sft_texts=64, reward_steps=3, reward_topics=2)
    monkeypatch.setitem(tiny.WORLDS, "small", small)
    plain = tiny.train_reward_model
    monkeypatch.setattr(
        tiny, "train_reward_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        tiny.build("small", tmp_path)
    monkeypatch.setattr(tiny, "train_reward_model", plain)
    folder = tiny.build("small", tmp_path)
    assert tiny.build("small", tmp_path) == folder
    assert {p.name for p in folder.iterdir()} == {
        "policy",
        "reward_model",
        "prompts.jsonl",
        "held_out.jsonl",
    }
    monkeypatch.setitem(tiny.WORLDS, "small", replace(small, rms_norm_eps=1e-6))
    assert tiny.build("small", tmp_path) != folder
