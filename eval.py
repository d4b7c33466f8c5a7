"""The one command that looks: at a run, and at a pair of models or a credit method.

    python eval.py COMMAND --help

A run's rewards, curves, picture and answer files are here; the experiments behind `fidelity`,
`gain`, `cost` and `compare` are in study.py. Flags that a command does not know are train.py's
(--preset, --policy, --reward_model, --prompts, --seed, ...), so any pair of models can be examined
before a run is paid for. Tables are printed as Markdown; pictures are written where --out says.
"""

import argparse
import html
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import study
from machinery import tiny
from machinery.config import (
    Config,
    is_run_folder,
    parse,
    positive,
    refuse_unknown,
    seed_number,
)
from machinery.load import (
    in_world,
    load_policy,
    load_policy_tokenizer,
    load_reward_model,
    settle,
)
from machinery.prompts import load_prompts, load_rows
from machinery.rollout import Messages, Vocabulary, sample, shared_vocabulary
from machinery.run import (
    BLUE,
    ORANGE,
    last_checkpoint,
    load_run,
    plain_errors,
    read_jsonl,
    write_whole,
)
from machinery.show import (
    figure,
    import_pyplot,
    interval,
    print_table,
    save_figure,
    trailing_mean,
)


def trained_policy(path: str, like: Config) -> tuple[Config, PreTrainedModel]:
    """The policy of a run folder (its end, or its last checkpoint), ready to sample.

    Or that of a model directory or hub id, which is sampled as `like` says.
    """
    if not is_run_folder(Path(path)):
        config = replace(like, policy=path)
        return config, load_policy(config, trainable=False)
    config, _ = load_run(path)
    folder = Path(path) / "final"
    if not folder.exists():
        step = last_checkpoint(Path(path))
        if not step:
            raise ValueError(f"{path} has no checkpoint yet.")
        folder = Path(path) / f"checkpoint-{step}"
    if not config.lora_rank:
        return config, load_policy(replace(config, policy=str(folder)), trainable=False)
    from peft import PeftModel

    base = load_policy(config, trainable=False)
    return config, PeftModel.from_pretrained(base, folder).eval()


# ----------------------------------------------------------------------------------------------
# reward: Table 1's first column.


def reward(args: argparse.Namespace, flags: list[str]) -> None:
    """RM reward (and gold, in the tiny world) on held-out prompts, models side by side.

    Each run answers with its own template and settings.
    """
    config = evaluation_config(args, flags)
    tokenizer = load_policy_tokenizer(config)
    prompts = load_prompts(config, tokenizer)
    prompts = random.Random(0).sample(prompts, min(args.num_prompts, len(prompts)))
    reward_model = load_reward_model(config, tokenizer)
    scores = []
    rows = []
    policy = None
    for name in args.models:
        del policy  # before the next one takes its place in memory
        own, policy = trained_policy(name, config)
        own_tokenizer = load_policy_tokenizer(own)
        vocabulary = shared_vocabulary(policy, own_tokenizer, reward_model.size)
        torch.manual_seed(args.seed)
        rollout = sample(
            policy,
            own_tokenizer,
            prompts,
            vocabulary,
            args.samples,
            own.max_response_tokens,
            own.temperature,
            own.sample_batch,
            **own.template,
        )
        rewards = reward_model.score(rollout)[0].double().cpu().numpy()
        length = rollout.response_mask.sum(-1).double().mean().item()
        stopped = rollout.stopped.double().mean().item()
        row = [name, float(rewards.mean()), interval(rewards), length, stopped]
        if in_world(config):
            row.append(float(np.mean(tiny.gold_rewards(own_tokenizer, rollout))))
        scores.append(rewards)
        rows.append(row)
    print(f"{len(prompts)} prompts × {args.samples} responses\n")
    head = ["model", "reward", "95%", "length", "stopped"]
    if in_world(config):
        head.append("gold")
    print_table(head, rows)
    print_win_rates(args.models, scores)


def evaluation_config(args: argparse.Namespace, flags: list[str]) -> Config:
    """The first run's flags, or the command line's where no run is among the models.

    With held-out prompts where some are known. Raises ValueError for runs of several reward models.
    """
    runs = [model for model in args.models if is_run_folder(Path(model))]
    if runs:
        refuse_unknown(flags, args.known)
        config, _ = load_run(runs[0])
    else:
        config = settle(parse(flags))
    for run in runs:
        if load_run(run)[0].reward_model != config.reward_model:
            raise ValueError(
                "These runs have different reward models; their rewards cannot be compared."
            )
    held_out = Path(config.prompts).with_name("held_out.jsonl")
    if args.held_out or held_out.exists():
        return replace(config, prompts=args.held_out or str(held_out))
    print("No held-out prompts known: using the training prompts. Give others with --held_out.")
    return config


def print_win_rates(models: list[str], scores: list[np.ndarray]) -> None:
    """How often each model's response is better than another's to the same prompt; ties half."""
    rows = []
    for i, a in enumerate(models):
        for j in range(i + 1, len(models)):
            wins = (scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j])
            rows.append([a, models[j], float(wins.mean()), interval(wins)])
    if rows:
        print()
        print_table(["model", "against", "win rate", "95%"], rows)


# ----------------------------------------------------------------------------------------------
# plot and heatmap: Figures 3, C1, C2 and 4.


def plot(args: argparse.Namespace, flags: list[str]) -> None:
    """Reward, gold reward, length and cumulative time against rollouts, and a table.

    Lines are trailing means over 25 rollouts, light points the rollouts themselves.
    """
    refuse_unknown(flags, args.known)
    loaded = {Path(run).name: load_run(run)[1] for run in args.runs}
    if len(loaded) < len(args.runs):
        loaded = {run: load_run(run)[1] for run in args.runs}

    def curve(key: str) -> Callable:
        def draw(ax: object) -> None:
            for name, rows in loaded.items():
                values = [row[key] for row in rows if key in row]
                if values:
                    (line,) = ax.plot(trailing_mean(values), label=name)
                    ax.plot(values, ".", ms=3, alpha=0.25, color=line.get_color())

        return draw

    def clock(ax: object) -> None:
        for name, rows in loaded.items():
            ax.plot(np.cumsum([row["time/total"] for row in rows]), label=name)

    panels = [("RM reward", "rollout", "reward", curve("reward"))]
    if any("gold_reward" in rows[0] for rows in loaded.values()):
        panels.append(("Gold reward", "rollout", "gold reward", curve("gold_reward")))
    panels.append(("Response length", "rollout", "tokens", curve("completions/mean_length")))
    panels.append(("Cumulative time", "rollout", "seconds", clock))
    figure(args.out, panels)
    table = []
    for name, rows in loaded.items():
        rewards = [row["reward"] for row in rows]
        seconds = float(np.mean([row["time/total"] for row in rows]))
        pace = table[0][4] if table else seconds
        mean = float(np.mean(rewards))
        last = float(np.mean(rewards[-25:]))
        table.append([name, len(rows), mean, last, seconds, seconds / pace])
    head = ["run", "rollouts", "mean reward", "last 25", "s/rollout", "time over the first run's"]
    print_table(head, table)


def heatmap(args: argparse.Namespace, flags: list[str]) -> None:
    """Sampled responses, tokens shaded by weight: orange where reinforced, blue where suppressed.

    A page with several rollouts and each token's numbers; or, where --out ends in .png, a picture
    of the good and the bad answer of one, GRPO's even shade above the weights of one or more runs
    that sampled these answers.
    """
    refuse_unknown(flags, args.known)
    runs = [weighted_samples(run) for run in args.runs]
    config, rows = runs[0]
    # In a tiny world a token is a word; elsewhere its text holds its own spaces.
    glue = " " if config.preset in tiny.WORLDS else ""
    out = args.out or str(Path(args.runs[0]) / "heatmap.html")
    if out.endswith(".png"):
        draw_picture(out, runs, args.step, glue)
    else:
        write_page(out, rows, config, glue, args.rollouts)


def weighted_samples(run: str) -> tuple[Config, list[dict]]:
    """The flags of a run, and its samples. Raises ValueError where they have no weights."""
    config, _ = load_run(run)
    path = Path(run) / "samples.jsonl"
    rows = [row for row in read_jsonl(path) if "token_weight" in row]
    if not rows:
        raise ValueError(
            f"{path} holds no weights: {config.credit!r} does not work by weights, "
            "or the run is empty."
        )
    return config, rows


STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --quiet: #667 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --page: #16181c; --quiet: #99a } }
body { font: 16px/1.7 Georgia, serif; color: var(--ink); background: var(--page); max-width: 52em;
       margin: 2em auto; padding: 0 1em }
h2 { font-size: 1em; margin: 2em 0 .2em } .note { color: var(--quiet); font: 13px sans-serif }
.t { border-radius: 3px; padding: .08em .1em; white-space: pre-wrap; cursor: help }
"""


def write_page(out: str, rows: list[dict], config: Config, glue: str, count: int) -> None:
    """HTML: the samples of `count` rollouts, spread over the run."""
    steps = sorted({row["step"] for row in rows})
    places = np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)
    shown = {steps[place] for place in places}
    body = [
        f"<h1>Credit of {html.escape(config.output_dir)}</h1><p class=note>"
        f"{html.escape(config.credit)}, band {config.band:g}. Darker = larger weight; "
        "orange = reinforced, blue = suppressed. Hover over a token for its numbers.</p>"
    ]
    for row in rows:
        if row["step"] in shown:
            body.append(response_as_html(row, config.band, glue))
    head = "<!doctype html><html lang=en><meta charset=utf-8><title>Token credit</title>"
    page = f"{head}<style>{STYLE}</style>{''.join(body)}</html>"
    Path(out).write_text(page, encoding="utf-8")
    print(f"Wrote {out}: {len(shown)} rollouts")


def response_as_html(row: dict, band: float, glue: str) -> str:
    question = html.escape(row["prompt"][-1]["content"])
    parts = [
        f"<h2>Rollout {row['step']}: {question}</h2><p class=note>"
        f"reward {row['reward']:.3f}, advantage {row['advantage']:+.3f}</p><p>"
    ]
    colour = " ".join(str(c) for c in (ORANGE if row["advantage"] > 0 else BLUE))
    for i, text in enumerate(row["tokens"]):
        facts = [repr(text)]
        for name in ("weight", "work", "p"):
            if f"token_{name}" in row:
                facts.append(f"{name} {row[f'token_{name}'][i]:.4g}")
        strength = shade(row["token_weight"][i], row, band)
        ink = ";color:#111" if strength > 0.4 else ""
        title = html.escape("  ".join(facts), quote=True)
        style = f"background:rgb({colour} / {strength:.2f}){ink}"
        space = "" if text[:1].isspace() or "\n" in text else glue
        parts.append(
            f'<span class=t style="{style}" title="{title}">{html.escape(text)}</span>{space}'
        )
    return "".join([*parts, "</p>"])


def shade(weight: float, row: dict, band: float) -> float:
    """How strongly a token is shaded, 0 to 1; not at all where the response has no advantage."""
    return min(weight / band, 1.0) if row["advantage"] else 0.0


def draw_picture(out: str, runs: list[tuple[Config, list[dict]]], step: int, glue: str) -> None:
    """PNG: a rollout's best and worst answer, under GRPO's and under the runs' weights."""
    config, rows = runs[0]
    group = sorted((row for row in rows if row["step"] == step), key=lambda row: row["advantage"])
    if not group:
        raise ValueError(f"--step {step}: the run holds no such rollout.")
    lines = []  # a heading, or (column, text, colour) of each token
    for kind, row in (("good", group[-1]), ("bad", group[0])):
        fate = "reinforced" if row["advantage"] > 0 else "suppressed"
        question = row["prompt"][-1]["content"]
        facts = f"reward {row['reward']:.1f}, A = {row['advantage']:+.2f}, so it is {fate}"
        lines.append(f'A {kind} answer to "{question}": {facts}')
        even = [1.0] * len(row["tokens"])
        lines += token_lines("GRPO", row, even, config.band, glue)
        for other, samples in runs:
            same = [one for one in samples if is_same_answer(one, row)]
            if not same:
                raise ValueError(f"{other.output_dir} has not sampled this answer.")
            name = other.credit.rpartition(":")[2].upper()
            lines += token_lines(name, row, same[0]["token_weight"], config.band, glue)
    plt = import_pyplot()
    width = 11
    spacing = 0.32  # inches from line to line
    height = spacing * len(lines) + 0.2
    character = 0.602 * FONT_SIZE / 72  # inches, of the monospace font
    fig = plt.figure(figsize=(width, height))
    for number, line in enumerate(lines):
        y = 1 - (number + 0.6) * spacing / height
        if isinstance(line, str):
            fig.text(0.015, y, line, fontsize=11, weight="bold", va="center")
            continue
        for column, text, colour in line:
            box = {"boxstyle": "square,pad=0.18", "facecolor": colour, "edgecolor": "none"}
            fig.text(
                0.015 + column * character / width,
                y,
                text,
                fontsize=FONT_SIZE,
                family="monospace",
                va="center",
                bbox=box if colour else None,
            )
    save_figure(fig, out)


FONT_SIZE = 10.5


def is_same_answer(a: dict, b: dict) -> bool:
    return all(a[name] == b[name] for name in ("step", "prompt", "tokens"))


def token_lines(
    name: str, row: dict, weights: list[float], band: float, glue: str, width: int = 118
) -> list[list[tuple[int, str, object]]]:
    """A response wrapped into lines of (column, text, shade), after the method's name."""
    colour = np.array(ORANGE if row["advantage"] > 0 else BLUE) / 255
    column = 8
    lines = [[(0, name, None)]]
    for text, weight in zip(row["tokens"], weights, strict=True):
        text = text.replace("\n", "⏎")
        if column + len(text) > width:
            lines.append([])
            column = 8
        strength = shade(weight, row, band)
        lines[-1].append((column, text, tuple(1 - strength * (1 - colour))))
        column += len(text) + 1 + bool(glue)
    return lines


# ----------------------------------------------------------------------------------------------
# answers: files that other harnesses read.


def alpaca_record(name: str, question: dict, replies: list[str]) -> dict:
    return {"instruction": question["instruction"], "output": replies[0], "generator": name}


def arena_record(name: str, question: dict, replies: list[str]) -> dict:
    key = question["uid"]
    return {
        "uid": key,
        "ans_id": f"{name}-{key}",
        "model": name,
        "messages": [
            {"role": "user", "content": question["prompt"]},
            {"role": "assistant", "content": {"answer": replies[0]}},
        ],
        "tstamp": time.time(),
        "metadata": {},
    }


def bench_record(name: str, question: dict, replies: list[str]) -> dict:
    key = question["question_id"]
    return {
        "question_id": key,
        "answer_id": f"{name}-{key}",
        "model_id": name,
        "choices": [{"index": 0, "turns": replies}],
        "tstamp": time.time(),
    }


@dataclass(frozen=True)
class Benchmark:
    """The shape of a benchmark's questions and answer file."""

    key: str  # names a question, in the question and in the record
    turns: str  # the column of a question that holds what is asked
    author: str  # the column of a record that names who answered
    record: Callable[[str, dict, list[str]], dict]
    as_list: bool = False  # one JSON list, in place of lines
    several: bool = False  # `turns` is a list of questions, each asked after the one before


BENCHMARKS = {
    "alpaca_eval": Benchmark(
        "instruction", "instruction", "generator", alpaca_record, as_list=True
    ),
    "arena_hard": Benchmark("uid", "prompt", "model", arena_record),
    "mt_bench": Benchmark("question_id", "turns", "model_id", bench_record, several=True),
}


def answers(args: argparse.Namespace, flags: list[str]) -> None:
    """Write a benchmark's answer file, one record per question.

    A second call goes on where the first stopped.
    """
    bench = BENCHMARKS[args.format]
    questions = load_rows(args.questions, "--questions")
    for number, question in enumerate(questions, start=1):
        check_question(question, bench, f"--questions {args.questions}, row {number}")
    name = args.name or short_name(args.model)
    out = Path(args.out)
    done = read_answers(out, bench)
    for record in done:
        if record[bench.author] != name:
            raise ValueError(
                f"--out {out} holds answers of {record[bench.author]!r}, and these would be "
                f"{name!r}'s: give another file, or --name."
            )
    seen = {record[bench.key] for record in done}
    if is_run_folder(Path(args.model)):
        refuse_unknown(flags, args.known)
        like = load_run(args.model)[0]
    else:
        like = settle(parse(flags))
    config, policy = trained_policy(args.model, like)
    tokenizer = load_policy_tokenizer(config)
    config = replace(config, max_response_tokens=args.max_tokens)
    vocabulary = shared_vocabulary(policy, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    for question in tqdm(questions, desc=args.format, dynamic_ncols=True):
        if question[bench.key] in seen:
            continue  # answered before, or twice in the file
        turns = question[bench.turns] if bench.several else [question[bench.turns]]
        replies = converse(policy, tokenizer, vocabulary, turns, config, args.seed)
        done.append(bench.record(name, question, replies))
        seen.add(question[bench.key])
        write_answers(out, done, bench)
    print(f"{out}: {len(done)} records")


def check_question(question: dict, bench: Benchmark, where: str) -> None:
    """Raise ValueError for a row that is no question of this benchmark."""
    for column in (bench.key, bench.turns):
        if question.get(column) is None:
            raise ValueError(f"{where} has no {column!r} (it has: {', '.join(question)}).")
    asked = question[bench.turns]
    turns = asked if bench.several else [asked]
    if not isinstance(turns, list) or not turns or not all(is_question(t) for t in turns):
        kind = "a list of texts" if bench.several else "a text"
        raise ValueError(f"{where}: {bench.turns!r} must be {kind}, not {asked!r:.80}")


def is_question(turn: object) -> bool:
    return isinstance(turn, str) and bool(turn.strip())


def short_name(model: str) -> str:
    """The last part of a path, with the run's name where that part is only "final" or the like."""
    parts = Path(model).parts
    unspecific = parts[-1] in ("final", "start", "policy") or parts[-1].startswith("checkpoint-")
    return "/".join(parts[-2:]) if unspecific else parts[-1]


def converse(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    turns: list[str],
    config: Config,
    seed: int,
) -> list[str]:
    """The policy's reply to each turn, the earlier ones before its eyes."""
    messages: Messages = []
    replies = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        torch.manual_seed(seed)
        rollout = sample(
            policy,
            tokenizer,
            [messages],
            vocabulary,
            1,
            config.max_response_tokens,
            config.temperature,
            **config.template,
        )
        ids = rollout.response_ids[0][rollout.content_mask[0]]
        replies.append(tokenizer.decode(ids, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def read_answers(path: Path, bench: Benchmark) -> list[dict]:
    if not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8")) if bench.as_list else read_jsonl(path)


def write_answers(path: Path, records: list[dict], bench: Benchmark) -> None:
    if bench.as_list:
        write_whole(path, json.dumps(records, indent=1))
    else:
        write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


# ----------------------------------------------------------------------------------------------
# The command line.


def commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True)

    def command(run: Callable) -> Callable:
        """A subcommand with the function's name and docstring; returns its add_argument."""
        first_line = run.__doc__.partition("\n")[0]
        p = sub.add_parser(
            run.__name__, help=first_line, description=run.__doc__, allow_abbrev=False
        )
        known = []
        p.set_defaults(function=run, known=known)

        def add(*names: str, **options: object) -> None:
            known.extend(name.lstrip("-") for name in names)
            p.add_argument(*names, **options)

        return add

    look_at_a_run(command)
    study.add_commands(command)
    return parser


def look_at_a_run(command: Callable) -> None:
    add = command(reward)
    add("models", nargs="+", help="run folders, model directories or hub ids")
    add("--held_out", help="prompts, as --prompts; default: the tiny world's held-out topics")
    add("--num_prompts", type=positive, default=64, help="at most this many prompts")
    add("--samples", type=positive, default=16, help="responses to each")
    add("--seed", type=seed_number, default=0, help="of the sampling")
    add = command(plot)
    add("runs", nargs="+", help="run folders")
    add("--out", default="runs/plot.png", help="PNG file")
    add = command(heatmap)
    add("runs", nargs="+", help="run folders; a page shows the first")
    add("--rollouts", type=positive, default=8, help="rollouts on the page, spread over the run")
    add("--step", type=int, default=0, help="the rollout in the picture, counted from 0")
    add("--out", help="HTML or PNG file; default: heatmap.html in the run folder")
    add = command(answers)
    add("model", help="run folder, model directory or hub id")
    add("--format", choices=BENCHMARKS, required=True, help="the benchmark")
    add("--questions", required=True, help="the benchmark's questions, as --prompts")
    add("--out", required=True, help="answer file")
    add("--name", help="generator name in the records; default: the folder's")
    add("--max_tokens", type=positive, default=2048, help="where an answer is cut")
    add("--seed", type=seed_number, default=0, help="of the sampling")


def main(argv: list[str] | None = None) -> None:
    args, flags = commands().parse_known_args(argv)
    with plain_errors():
        args.function(args, flags)


if __name__ == "__main__":
    main()
