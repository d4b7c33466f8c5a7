"""Commands: tables, figures and files of eval.py, and the experiments of study.py."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import eval as evaluate
import reward_grad
import study
import train
from conftest import (
    TOKENIZER,
    V,
    arguments,
    evaluated,
    make_policy,
    make_reward_model,
    make_rollout,
    model_flags,
)
from machinery.config import parse
from machinery.run import Run, read_config, read_jsonl
from machinery.show import spearman
from train import Learner


def test_eval_reward_sets_models_side_by_side_with_win_rates(pair, runs, capsys):
    out = evaluated(capsys, "reward", runs / "grpo", runs / "datc", pair / "policy", "--samples", 4)
    assert (
        out.count("\n| " + str(runs)) == 2 + 3
        and "win rate" in out
        and out.startswith("No held-out prompts known")
    )
    same = evaluated(capsys, "reward", runs / "grpo", runs / "grpo", "--samples", 2)
    assert "| 0.5 " in same, "a model against itself on the same seeds wins half"


def test_eval_plot_and_compare_write_figures_and_tables(pair, runs, tmp_path, capsys):
    out = evaluated(capsys, "plot", runs / "grpo", runs / "datc", "--out", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG" and "| datc" in out
    flags = [
        *model_flags(pair),
        "--rollouts",
        2,
        "--credit",
        "grpo",
        "datc+rloo@0.5",
        "--seeds",
        2,
        "--folder",
        tmp_path / "c",
    ]
    out = evaluated(capsys, "compare", *flags, "--out", tmp_path / "c.png")
    assert out.count("datc+rloo@0.5") == 2 and len(list((tmp_path / "c" / "tiny").iterdir())) == 4
    config = read_config(tmp_path / "c" / "tiny" / "datc+rloo@0.5-0.0006-s1")
    assert (config.credit, config.grad_at, config.advantage, config.seed) == (
        "datc",
        [0.5],
        "rloo",
        1,
    )
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("metrics.jsonl")}
    evaluated(capsys, "compare", *flags, "--out", tmp_path / "c.png")
    assert written == {p: p.stat().st_mtime_ns for p in written}, (
        "what is there is not trained again"
    )
    with pytest.raises(SystemExit, match="holds another run: --band 4.0 .not 2.0"):
        evaluated(capsys, "compare", *flags, "--band", 2.0, "--out", tmp_path / "c.png")


def test_eval_heatmap_is_one_page_with_escaped_text_and_every_token(runs, tmp_path, capsys):
    rows = read_jsonl(runs / "datc" / "samples.jsonl")
    rows[0]["tokens"][0] = "<script>alert(1)</script>"
    hostile = tmp_path / "run"
    hostile.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (hostile / name).write_text((runs / "datc" / name).read_text())
    (hostile / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    evaluated(capsys, "heatmap", hostile)
    page = (hostile / "heatmap.html").read_text()
    assert (
        "<script" not in page
        and "&lt;script&gt;" in page
        and "http" not in page
        and "prefers-color-scheme" in page
    )
    assert page.count("<span class=t") == sum(len(r["tokens"]) for r in rows)


def test_the_gain_through_shared_parameters_is_the_derivative_along_the_parameter_step(pair):
    config = replace(parse(arguments(pair, "unused")), beta=0.0, missing_eos_penalty=0.0)
    policy = make_policy("gpt2").double()
    model = make_reward_model("gpt2", double=True)
    learner = Learner(policy, model, TOKENIZER, config)
    rollout = learner.compare(learner.score(make_rollout(policy)))
    x, p = study.predicted_gains(learner, rollout)
    a = rollout.advantages
    mask = rollout.response_mask
    hidden, logp, entropy = learner.forward(rollout)
    credited = learner.credit(rollout, hidden, logp, entropy)
    w = credited.weights
    lengths = mask.sum(-1, keepdim=True)
    (a[:, None] * (w - 1) * logp / lengths * mask).sum().div(4).backward()
    steps = [t.grad for t in learner.parameters]
    value = rollout.reward_grad[mask] @ model.embedding[:V].T

    def reward_at(h):
        with torch.no_grad():
            for t, s in zip(learner.parameters, steps, strict=True):
                t.add_(h * s)
            reward = study.relaxed_reward(learner, rollout, value).item()
            for t, s in zip(learner.parameters, steps, strict=True):
                t.sub_(h * s)
        return reward

    assert (reward_at(1e-5) - reward_at(-1e-5)) / 2e-5 == pytest.approx(p, rel=1e-5)
    expected = ((a[:, None] * (w - 1) * credited.work).sum(-1) / mask.sum(-1)).mean()
    assert x == pytest.approx(expected.item()) and x > 0


def test_eval_gain_fidelity_and_cost_print_their_tables(pair, tmp_path, capsys):
    out = evaluated(capsys, "gain", *model_flags(pair), "--batches", 3, "--out", tmp_path / "g.png")
    assert "| 3 " in out and "Pearson" in out and (tmp_path / "g.png").exists()
    out = evaluated(
        capsys,
        "fidelity",
        *model_flags(pair),
        "--responses",
        3,
        "--top_k",
        4,
        "--points",
        "1.0",
        "0.25,0.75",
    )
    assert (
        "| 0.25,0.75" in out
        and "prefix differences" in out
        and "--grad_at" in out
        and "chance in 32" in out
    )
    assert "random_direction" not in out
    texts = int(out.split(" substituted")[0].split()[-1])
    assert texts % 5 == 0 and f"{-(-texts // 64)} reward-model passes" in out
    out = evaluated(capsys, "cost", *model_flags(pair), "--rollouts", 1, "--no_work")
    assert "datc / grpo" in out


def test_a_linear_reward_models_first_order_work_is_perfectly_faithful(pair, capsys, monkeypatch):
    """Where the reward IS linear in the embeddings, d and the exact d rank alike."""

    def linear(backbone, head, embeds, mask, places):
        taste = torch.linspace(-1, 1, embeds.shape[-1])
        total = (embeds * mask[..., None]).cumsum(1) @ taste
        return total.gather(1, places)

    monkeypatch.setattr(reward_grad, "read_score", linear)
    command = ["fidelity", *model_flags(pair), "--responses", 4, "--points", "1.0", "--credit"]
    out = evaluated(
        capsys,
        *command,
        "datc",
        "inverted",
        "oracle",
        "grpo",
        "random_direction",
        "entropy",
        "red_band",
    )
    measured = {
        row[1].strip(): float(row[3])
        for row in (line.split("|") for line in out.splitlines())
        if len(row) > 5 and row[2].strip().isdigit()
    }
    assert measured["1.0"] == measured["datc"] == 1 and measured["inverted"] == -1
    assert measured["red_band"] == measured["prefix differences"]
    out = evaluated(capsys, *command, "oracle", "--top_k", 8)
    assert "| oracle             | 4         | 1 " in out
    assert (
        "grpo" not in measured and abs(measured["random_direction"]) < 0.9 and "entropy" in measured
    )


def test_spearman_is_the_correlation_of_ranks_with_ties_at_their_average():
    assert spearman([1.0, 2.0, 3.0, 4.0], [2.0, 5.0, 6.0, 99.0]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [5.0, 2.0, 1.0]) == pytest.approx(-1)
    # Ranks 3.5, 1, 3.5, 2 against 4, 1, 3, 2.
    tied = np.corrcoef([3.5, 1.0, 3.5, 2.0], [4.0, 1.0, 3.0, 2.0])[0, 1]
    assert spearman([3.0, 1.0, 3.0, 2.0], [9.0, 1.0, 3.0, 2.0]) == pytest.approx(tied)


FIELDS = {
    "alpaca_eval": {"instruction", "output", "generator"},
    "arena_hard": {"uid", "ans_id", "model", "messages", "tstamp", "metadata"},
    "mt_bench": {"question_id", "answer_id", "model_id", "choices", "tstamp"},
}


QUESTIONS = {
    "alpaca_eval": [{"instruction": "describe the cat"}, {"instruction": "describe the dog"}],
    "arena_hard": [{"uid": "u1", "prompt": "describe the cat"}, {"uid": "u2", "prompt": "a"}],
    "mt_bench": [
        {"question_id": 81, "turns": ["a", "describe the cat"]},
        {"question_id": 82, "turns": ["the", "a"]},
    ],
}


@pytest.mark.parametrize("name", FIELDS)
def test_eval_answers_writes_one_record_a_question_in_the_benchmarks_format(
    runs, tmp_path, capsys, name
):
    questions, out = tmp_path / "q.jsonl", tmp_path / "answers.json"
    questions.write_text(json.dumps(QUESTIONS[name][0]) + "\n")
    command = [
        "answers",
        runs / "datc",
        "--format",
        name,
        "--questions",
        questions,
        "--out",
        out,
        "--max_tokens",
        6,
    ]
    evaluated(capsys, *command)
    questions.write_text(
        "".join(json.dumps(q) + "\n" for q in [*QUESTIONS[name], QUESTIONS[name][0]])
    )
    first = out.read_text()
    evaluated(capsys, *command)
    records = json.loads(out.read_text()) if name == "alpaca_eval" else read_jsonl(out)
    assert len(records) == 2 and all(set(r) == FIELDS[name] for r in records)
    assert (
        json.dumps(records[0], indent=None)[:40] in first.replace("\n ", "").replace(" {", "{")
        or name == "alpaca_eval"
    )
    if name == "arena_hard":
        user, assistant = records[1]["messages"]
        assert user == {"role": "user", "content": "a"} and isinstance(
            assistant["content"]["answer"], str
        )
    if name == "mt_bench":
        assert [len(r["choices"][0]["turns"]) for r in records] == [2, 2]


def test_eval_says_what_is_wrong_with_a_path(runs, tmp_path):
    def refused(*argv):
        with pytest.raises(SystemExit) as info:
            evaluate.main([str(a) for a in argv])
        return str(info.value)

    assert "not a run folder" in refused("plot", tmp_path)
    (tmp_path / "config.json").write_text((runs / "grpo" / "config.json").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "rew')
    assert "no complete rollout" in refused("plot", tmp_path)
    assert "Unknown flags: --colour" in refused("plot", runs / "grpo", "--colour", "red")
    other = json.loads((runs / "grpo" / "config.json").read_text()) | {"reward_model": "another"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    (tmp_path / "metrics.jsonl").write_text((runs / "grpo" / "metrics.jsonl").read_text())
    assert "different reward models" in refused("reward", runs / "grpo", tmp_path)


def refused(capsys, *argv) -> str:
    """What eval.py says when it refuses, by its own line or by argparse's."""
    with pytest.raises(SystemExit) as info:
        evaluated(capsys, *argv)
    return f"{info.value} {capsys.readouterr().err}"


def test_an_answer_file_holds_one_models_answers(runs, tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"instruction": "describe the cat"}) + "\n")
    command = ["--format", "alpaca_eval", "--questions", questions, "--max_tokens", 4]
    out = tmp_path / "a.json"
    evaluated(capsys, "answers", runs / "datc", *command, "--out", out)
    before = out.read_text()
    message = refused(capsys, "answers", runs / "grpo", *command, "--out", out)
    assert "holds answers of 'datc'" in message and out.read_text() == before


@pytest.mark.parametrize("turns", ["one text", [], [" "], [7], None])
def test_a_row_that_is_no_question_is_refused_with_its_number(runs, tmp_path, capsys, turns):
    rows = [{"question_id": 1, "turns": ["a"]}, {"question_id": 2, "turns": turns}]
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--format", "mt_bench", "--questions", questions, "--out", tmp_path / "a.json"]
    assert "row 2" in refused(capsys, "answers", runs / "datc", *command)


def test_a_comparison_that_is_stopped_stops_and_tables_finished_runs_only(
    pair, tmp_path, capsys, monkeypatch
):
    plain = Run.log

    def ask(run, step, rollout):
        plain(run, step, rollout)
        if run.folder.name == "datc-0.0006-s0" and step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log", ask)
    flags = [*model_flags(pair), "--rollouts", 3, "--seeds", 2, "--folder", tmp_path / "c"]
    out = evaluated(capsys, "compare", *flags, "--out", tmp_path / "c.png")
    assert "1 of 4 runs are finished" in out
    assert out.count("| grpo") == 2 and "| datc" not in out
    assert {p.name for p in (tmp_path / "c" / "tiny").iterdir()} == {
        "grpo-0.0006-s0",
        "datc-0.0006-s0",
    }
    monkeypatch.undo()
    out = evaluated(capsys, "compare", *flags, "--out", tmp_path / "c.png")
    assert "Stopped" not in out and out.count("| datc") == 2


def test_each_run_is_evaluated_with_its_own_settings(pair, runs, tmp_path, capsys):
    short = arguments(pair, tmp_path / "short", "--max_response_tokens", 3, rollouts=1)
    train.main(short)
    out = evaluated(capsys, "reward", runs / "datc", tmp_path / "short", "--samples", 2)
    rows = [line for line in out.splitlines() if line.count("|") == 6][2:]
    lengths = [float(row.split("|")[4]) for row in rows]
    assert lengths[0] > 3 >= lengths[1]


def test_counts_and_points_out_of_range_are_refused_by_name(capsys):
    for command in (
        ("fidelity", "--points", "2"),
        ("fidelity", "--points", "-1"),
        ("fidelity", "--responses", "0"),
        ("fidelity", "--top_k", "-3"),
        ("compare", "--seeds", "0"),
        ("gain", "--batches", "0"),
        ("reward", "x", "--samples", "0"),
        ("reward", "x", "--seed", str(10**30)),
    ):
        assert command[-2] in refused(capsys, *command), command
    assert "Did you mean --out" in refused(capsys, "plot", "x", "--aut", "y")
