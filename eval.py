"""Everything that looks at a run or a checkpoint: rewards, figures, the theory's checks, costs, answer files.

    python eval.py COMMAND --help

Flags that a command does not know are train.py's (--preset, --policy, --reward_model, --prompts, --seed, ...), so any pair of
models can be examined before a run is paid for. Tables are printed as Markdown; pictures are written where --out says.
"""

import argparse
import html
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import train
from datc import candidates, expected_embedding, work, work_on_support
from grpo import clipped_surrogate, response_hidden
from machinery import tiny
from machinery.load import load_policy, load_prompts, load_reward_model, load_rows, load_tokenizer
from machinery.rollout import Rollout, sample, shared_vocabulary

# ---------------------------------------------------------------------------------------------------------------------
# One loader, one table printer, one figure helper.


def load_run(path: str) -> tuple[train.Config, list[dict]]:
    """Flags and metrics of a run folder."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{path} is not a run folder (it has no config.json). Runs are under runs/."
        )
    rows = train.read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not rows:
        raise ValueError(f"{path} has no complete rollout yet: metrics.jsonl is empty.")
    return read_config(folder), rows


def read_config(folder: Path) -> train.Config:
    return train.Config(**json.loads((folder / "config.json").read_text()))


def trained_policy(path: str, like: train.Config) -> tuple[train.Config, object]:
    """The policy of a run folder (its end, or its last checkpoint), or of a model directory or hub id; ready to sample."""
    if not (Path(path) / "config.json").is_file() or "credit" not in json.loads(
        (Path(path) / "config.json").read_text()
    ):
        config = replace(like, policy=path)
        return config, load_policy(config, trainable=False)
    config, _ = load_run(path)
    step, saved = train.last_checkpoint(Path(path)), Path(path) / "final"
    if not saved.exists():
        if not step:
            raise ValueError(f"{path} has no checkpoint yet.")
        saved = Path(path) / f"checkpoint-{step}"
    if not config.lora_rank:
        return config, load_policy(replace(config, policy=str(saved)), trainable=False)
    from peft import PeftModel

    return config, PeftModel.from_pretrained(load_policy(config, trainable=False), saved).eval()


def print_table(head: list[str], rows: list[list[object]]) -> None:
    cells = [
        head,
        ["---"] * len(head),
        *([f"{c:.3g}" if isinstance(c, float) else str(c) for c in r] for r in rows),
    ]
    widths = [max(len(r[i]) for r in cells) for i in range(len(head))]
    for r in cells:
        print("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |")


def figure(out: str, panels: list[tuple[str, str, str, Callable]]) -> None:
    """A row of panels (title, x label, y label, draw(axes)) as a PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("Figures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for ax, (title, x, y, draw) in zip(axes[0], panels, strict=True):
        draw(ax)
        ax.set(title=title, xlabel=x, ylabel=y)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=130)
    plt.close(fig)
    print(f"Wrote {out}")


def trailing_mean(values: list[float], window: int = 25) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def ranks(x: Tensor) -> Tensor:
    """Ranks of a (N,) tensor, ties by their average."""
    return (x[:, None] > x).sum(1).double() + ((x[:, None] == x).sum(1).double() + 1) / 2


def pearson(x: Tensor, y: Tensor) -> float:
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return (x @ y / (x.norm() * y.norm())).item()


def spearman(x: Tensor, y: Tensor) -> float:
    return pearson(ranks(x), ranks(y))


def interval(values: list[float], draws: int = 1000) -> tuple[float, float]:
    """Bootstrap 95% interval of the mean."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def models_of(flags: list[str], trainable: bool = True) -> tuple[train.Config, dict[str, object]]:
    """Config and models for train.py's own flags."""
    config = replace(train.settle(train.parse(flags)), sft_examples=0)
    return config, train.prepare(config, trainable)


# ---------------------------------------------------------------------------------------------------------------------
# reward: Table 1's first column.


def reward(args: argparse.Namespace, flags: list[str]) -> None:
    """RM reward (and gold, in the tiny world) on held-out prompts, models side by side, with pairwise win rates."""
    runs = [m for m in args.models if (Path(m) / "metrics.jsonl").exists()]
    if runs:
        refuse_unknown(flags)
    config = load_run(runs[0])[0] if runs else train.settle(train.parse(flags))
    if any(load_run(r)[0].reward_model != config.reward_model for r in runs):
        raise ValueError(
            "These runs have different reward models; their rewards cannot be compared."
        )
    held_out = Path(config.prompts).with_name("held_out.jsonl")
    if args.held_out or held_out.exists():
        config = replace(config, prompts=args.held_out or str(held_out))
    else:
        print("No held-out prompts known: using the training prompts. Give others with --held_out.")
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    prompts = load_prompts(config, tokenizer)
    prompts = random.Random(0).sample(prompts, min(args.num_prompts, len(prompts)))
    reward_model = load_reward_model(config, tokenizer)
    world = tiny.is_world(Path(config.reward_model).parent)
    scores, rows = [], []
    policy = None
    for name in args.models:
        del policy  # before the next one takes its place in memory
        _, policy = trained_policy(name, config)
        vocabulary = shared_vocabulary(policy, tokenizer, reward_model.size)
        torch.manual_seed(args.seed)
        rollout = sample(
            policy, tokenizer, prompts, vocabulary, args.samples, config.max_response_tokens,
            config.temperature, config.sample_batch, **config.template,
        )  # fmt: skip
        scores.append(reward_model.score(rollout)[0].double().tolist())
        low, high = interval(scores[-1])
        length, stopped = (
            rollout.response_mask.sum(-1).double().mean().item(),
            rollout.stopped.double().mean().item(),
        )
        gold = [statistics.fmean(tiny.gold_rewards(tokenizer, rollout))] if world else []
        rows.append(
            [name, statistics.fmean(scores[-1]), f"{low:.2f} to {high:.2f}", length, stopped, *gold]
        )
    print(f"{len(prompts)} prompts × {args.samples} responses\n")
    print_table(["model", "reward", "95%", "length", "stopped", *(["gold"] if world else [])], rows)
    versus = []
    for i, a in enumerate(args.models):
        for j in range(i + 1, len(args.models)):
            wins = [(x > y) + 0.5 * (x == y) for x, y in zip(scores[i], scores[j], strict=True)]
            low, high = interval(wins)
            versus.append([a, args.models[j], statistics.fmean(wins), f"{low:.2f} to {high:.2f}"])
    if versus:
        print()
        print_table(["model", "against", "win rate", "95%"], versus)


# ---------------------------------------------------------------------------------------------------------------------
# plot and heatmap: Figures 3, C1, C2 and 4.


def plot(args: argparse.Namespace, flags: list[str]) -> None:
    """Reward, gold reward and length against rollouts, trailing 25-rollout mean over light points, and cumulative time."""
    refuse_unknown(flags)
    loaded = {Path(r).name: load_run(r)[1] for r in args.runs}
    if len(loaded) < len(args.runs):
        loaded = {r: load_run(r)[1] for r in args.runs}

    def curve(key: str) -> Callable:
        def draw(ax) -> None:
            for name, rows in loaded.items():
                values = [r[key] for r in rows if key in r]
                if values:
                    (line,) = ax.plot(trailing_mean(values), label=name)
                    ax.plot(values, ".", ms=3, alpha=0.25, color=line.get_color())

        return draw

    def clock(ax) -> None:
        for name, rows in loaded.items():
            spent = torch.tensor([r["time/total"] for r in rows]).cumsum(0).tolist()
            ax.plot(spent, label=name)

    panels = [("RM reward", "rollout", "reward", curve("reward"))]
    if any("gold_reward" in rows[0] for rows in loaded.values()):
        panels.append(("Gold reward", "rollout", "gold reward", curve("gold_reward")))
    panels += [("Response length", "rollout", "tokens", curve("completions/mean_length"))]
    figure(args.out, [*panels, ("Cumulative time", "rollout", "seconds", clock)])
    table = []
    pace = statistics.fmean(r["time/total"] for r in next(iter(loaded.values())))
    for name, rows in loaded.items():
        mean = {k: statistics.fmean(r[k] for r in rows) for k in ("reward", "time/total")}
        last = statistics.fmean(r["reward"] for r in rows[-25:])
        table.append(
            [name, len(rows), mean["reward"], last, mean["time/total"], mean["time/total"] / pace]
        )
    print_table(
        ["run", "rollouts", "mean reward", "last 25", "s/rollout", "time over the first run's"],
        table,
    )


STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --quiet: #667 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --page: #16181c; --quiet: #99a } }
body { font: 16px/1.7 Georgia, serif; color: var(--ink); background: var(--page); max-width: 52em;
       margin: 2em auto; padding: 0 1em }
h2 { font-size: 1em; margin: 2em 0 .2em } .note { color: var(--quiet); font: 13px sans-serif }
.t { border-radius: 3px; padding: .08em .1em; white-space: pre-wrap; cursor: help }
"""


def heatmap(args: argparse.Namespace, flags: list[str]) -> None:
    """An HTML page of sampled responses, tokens shaded by weight: orange where reinforced, blue where suppressed."""
    refuse_unknown(flags)
    config, _ = load_run(args.run)
    path = Path(args.run) / "samples.jsonl"
    rows = [r for r in train.read_jsonl(path) if "token_weight" in r]
    if not rows:
        raise ValueError(
            f"{path} holds no weights: {config.credit!r} does not work by weights, or the run is empty."
        )
    steps = sorted({r["step"] for r in rows})
    shown = set(
        steps
        if len(steps) <= args.rollouts
        else [
            steps[round(i * (len(steps) - 1) / max(1, args.rollouts - 1))]
            for i in range(args.rollouts)
        ]
    )
    note = f"{config.credit}, band {config.band:g}. Darker = larger weight; orange = reinforced, blue = suppressed."
    body = [f"<h1>Credit of {html.escape(Path(args.run).name)}</h1>"]
    body.append(f"<p class=note>{html.escape(note)} Hover over a token for its numbers.</p>")
    for row in (r for r in rows if r["step"] in shown):
        body.append(f"<h2>Rollout {row['step']}: {html.escape(row['prompt'][-1]['content'])}</h2>")
        body.append(
            f"<p class=note>reward {row['reward']:.3f}, advantage {row['advantage']:+.3f}</p><p>"
        )
        colour = "255 140 0" if row["advantage"] > 0 else "60 120 255"
        for i, (text, w) in enumerate(zip(row["tokens"], row["token_weight"], strict=True)):
            strength = min(w / config.band, 1.0) * bool(row["advantage"])
            facts = [
                f"{k} {row[f'token_{k}'][i]:.4g}"
                for k in ("weight", "work", "p")
                if f"token_{k}" in row
            ]
            title = html.escape(f"{text!r}  " + "  ".join(facts), quote=True)
            space = (
                ""
                if text[:1].isspace() or "\n" in text
                else " "
                if config.preset in tiny.WORLDS
                else ""
            )
            ink = ";color:#111" if strength > 0.4 else ""
            style = f"background:rgb({colour} / {strength:.2f}){ink}"
            body.append(
                f'<span class=t style="{style}" title="{title}">{html.escape(text)}</span>{space}'
            )
        body.append("</p>")
    out = args.out or str(Path(args.run) / "heatmap.html")
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>DATC credit</title><style>{STYLE}</style>"
    page = f"{head}{''.join(body)}</html>"
    Path(out).write_text(page)
    print(f"Wrote {out}: {len(shown)} rollouts")


# ---------------------------------------------------------------------------------------------------------------------
# gain: Figure C3. Does the gain that X predicts token by token survive the policy's shared parameters?


def relaxed_reward(learner: train.Learner, rollout: Rollout, token_value: Tensor) -> Tensor:
    """R̂(θ) = Σ <sg(v_t), p_t(θ)> over the response tokens; token_value (N, V)."""
    hidden = response_hidden(learner.policy, rollout)[rollout.response_mask]
    logits = (
        hidden.to(token_value.dtype)
        @ learner.lm_head.to(token_value.dtype).T
        / learner.config.temperature
    )
    probs = logits.softmax(-1)  # (N, V)
    return (probs * token_value).sum()


def predicted_gains(learner: train.Learner, rollout: Rollout, step: int) -> tuple[float, float]:
    """X, DATC's predicted gain over GRPO with independent logits, and P, the same through the shared parameters."""
    config, mask = learner.config, rollout.response_mask
    rewards, grad = learner.reward_model.score(rollout, with_grad=learner.grad_at_sample)
    advantages, sharpness = learner.advantages(rollout, rewards)
    scored = train.Scored(rollout, rewards, advantages, grad, None, sharpness)
    hidden, logp, entropy = learner.forward(rollout)
    generator = torch.Generator().manual_seed(step)
    inputs = learner.evidence(scored, hidden.detach(), logp.detach(), entropy, step, generator)
    credit = learner.method(inputs)
    x = train.credit_metrics(credit, inputs).get("credit/predicted_gain")
    if x is None:
        raise ValueError(f"--credit {config.credit} has no work to predict a gain from.")
    extra = (
        credit.token_advantages - scored.advantages[:, None] * mask
    )  # J is linear in Ã at ratio 1: one backward
    loss, _ = clipped_surrogate(logp, logp.detach(), extra, mask, config.epsilon, len(rollout))
    move = torch.autograd.grad(-loss, learner.weights)
    f = inputs.reward_grad[mask]  # (N, D)
    value = f @ learner.reward_model.embedding[: learner.vocabulary.size].to(f.dtype).T  # (N, V)
    slope = torch.autograd.grad(relaxed_reward(learner, rollout, value), learner.weights)
    return x, sum((a.double() * b.double()).sum().item() for a, b in zip(move, slope, strict=True))


def gain(args: argparse.Namespace, flags: list[str]) -> None:
    """X against P over batches from one start, with the linear fit (Figure C3)."""
    config, m = models_of(["--beta", "0", *flags])
    vocabulary = shared_vocabulary(m["policy"], m["tokenizer"], m["reward_model"].size)
    learner = train.Learner(m["policy"], m["reward_model"], vocabulary, config)
    points = []
    for step in tqdm(range(args.batches), desc="batches", dynamic_ncols=True):
        torch.manual_seed(train.step_seed(config.seed, step))
        rollout = learner.sample(m["tokenizer"], train.choose_prompts(m["prompts"], step, config))
        points.append(predicted_gains(learner, rollout, step))
    x, p = torch.tensor(points, dtype=torch.float64).T
    slope = ((x - x.mean()) @ (p - p.mean()) / (x - x.mean()).square().sum()).item()
    offset = (p.mean() - slope * x.mean()).item()

    def draw(ax) -> None:
        ax.plot(x, p, "o", ms=4, alpha=0.6)
        ends = torch.tensor([x.min(), x.max()])
        ax.plot(ends, slope * ends + offset, label=f"P = {slope:.3g} X + {offset:.2g}")
        ax.axhline(0, lw=0.5, color="gray")

    print_table(
        ["batches", "X > 0", "P > 0", "slope", "Pearson", "Spearman"],
        [
            [
                len(x),
                (x > 0).double().mean().item(),
                (p > 0).double().mean().item(),
                slope,
                pearson(x, p),
                spearman(x, p),
            ]
        ],
    )
    figure(
        args.out,
        [("Predicted gain over GRPO", "X: independent logits", "P: shared parameters", draw)],
    )


# ---------------------------------------------------------------------------------------------------------------------
# fidelity: how faithful is the first-order work to the exact one?


def fidelity(args: argparse.Namespace, flags: list[str]) -> None:
    """Spearman with the exact work over each response's free tokens: of the first-order work, and of what a method pushes."""
    config, m = models_of(flags, trainable=False)
    policy, model, tokenizer = m["policy"], m["reward_model"], m["tokenizer"]
    model.reward_batch = args.batch
    vocabulary = shared_vocabulary(policy, tokenizer, model.size)
    learner = train.Learner(policy, model, vocabulary, config)
    table = model.embedding[: vocabulary.size]  # (V, D)
    groups = -(-args.responses // config.group_size)
    torch.manual_seed(config.seed)
    rollout = learner.sample(
        tokenizer,
        train.choose_prompts(m["prompts"], 0, replace(config, prompts_per_rollout=groups)),
    )
    pushes = pushed(args.credit, learner, rollout) if args.credit else {}
    rows = list(enumerate(rollout.split(1)))
    chosen = [(i, one) for i, one in rows if one.free_mask.sum() >= 3][: args.responses]
    size = args.top_k + 1 if args.top_k and args.top_k < vocabulary.size - 1 else vocabulary.size
    total = sum(one.free_mask.sum().item() for _, one in chosen) * size
    print(
        f"{len(chosen)} responses, {total} substituted texts = {-(-total // args.batch)} reward-model passes of {args.batch}."
    )
    paths = [[float(a) for a in point.split(",")] for point in args.points]
    found: dict[str, list[float]] = {
        name: [] for name in [*args.points, "prefix differences", *args.credit]
    }
    cosines: list[float] = []
    bar = tqdm(total=total, desc="substituted texts", dynamic_ncols=True)
    for i, one in chosen:
        free = one.free_mask[0]
        ids = one.response_ids[0, free]
        with torch.no_grad():
            hidden = response_hidden(policy, one)  # (1, T, H)
            logits = hidden[0, free] @ learner.lm_head.T / config.temperature  # (N, V)
        allowed, own, support = candidates(
            logits, ids, args.top_k
        )  # (N, S), (N,), (N, S); p is renormalised on them
        exact = work_on_support(support, own, model.substituted(one, free.nonzero()[:, 0], allowed))
        bar.update(allowed.numel())
        expected = expected_embedding(hidden[0], learner.lm_head, table, config.temperature)[
            None
        ]  # (1, T, D)
        for name, alphas in zip(args.points, paths, strict=True):
            f = model.grad(one, expected, alphas)[0, free].double()  # (N, D)
            value = torch.stack(
                [table[row].double() @ g for row, g in zip(allowed, f, strict=True)]
            )  # (N, S)
            append_rank_correlation(found[name], work_on_support(support, own, value), exact)
            if alphas == [1.0]:
                cosines += torch.cosine_similarity(f, table[ids].double()).abs().tolist()
        append_rank_correlation(
            found["prefix differences"], model.prefix_scores(one).diff(dim=-1)[0, free], exact
        )
        for name, push in pushes.items():
            append_rank_correlation(found[name], push[i][free], exact)
    bar.close()
    costs = {
        n: f"{len(a)} + {len(a)}" if a != [1.0] else "0 + 1"
        for n, a in zip(args.points, paths, strict=True)
    }
    costs |= {"prefix differences": "1 + 0"} | dict.fromkeys(args.credit, "")
    rows = [
        [n, len(v), statistics.fmean(v), standard_error(v), costs[n]] for n, v in found.items() if v
    ]
    print_table(
        ["evidence", "responses", "fidelity", "standard error", "extra forward + backward"], rows
    )
    if cosines:
        chance = math.sqrt(2 / (math.pi * table.shape[1]))
        cosine, width = statistics.fmean(cosines), table.shape[1]
        print(
            f"\nMean |cos(f, e)| at the sample: {cosine:.3f}; chance in {width} dimensions: {chance:.3f}."
        )
    print(advice([r for r in rows if r[0] not in args.credit]))


def pushed(names: list[str], learner: train.Learner, rollout: Rollout) -> dict[str, Tensor]:
    """Ã_t (B, T) of each credit method: it should push a token up the more, or down the less, the more that gains."""
    rewards, _ = learner.reward_model.score(rollout)
    advantages, sharpness = learner.advantages(rollout, rewards)
    scored = train.Scored(rollout, rewards, advantages, None, None, sharpness)
    found = {}
    for name in names:
        own = train.Learner(
            learner.policy,
            learner.reward_model,
            learner.vocabulary,
            replace(learner.config, credit=name),
        )
        _, credit = own.decide(scored, 0, torch.Generator().manual_seed(own.config.seed))
        found[name] = credit.token_advantages
    return found


def append_rank_correlation(into: list[float], d: Tensor, exact: Tensor) -> None:
    if len(d) >= 3 and d.min() < d.max() and exact.min() < exact.max():
        into.append(spearman(d, exact))


# Measured on the tiny worlds (README): world, --grad_at, fidelity, DATC's area less GRPO's at each one's best rate.
YARDSTICK = [
    ("tiny-sharp", "1.0", 0.10, -0.71),
    ("tiny", "1.0", 0.25, +0.23),
    ("tiny", "0.25 0.75", 0.52, +0.82),
    ("tiny-sharp", "0.25 0.75", 0.54, +0.33),
]


def advice(rows: list[list]) -> str:
    """What to do with this reward model, beside the pairs (fidelity, did DATC beat GRPO) of the tiny worlds."""
    gradients = [r for r in rows if r[0] != "prefix differences"]
    if not gradients:
        return "\nNo response with three free tokens and varying work: nothing to advise on. Try longer responses."
    best = max(gradients, key=lambda r: r[2])
    text = f"\nBest gradient here: --grad_at {best[0].replace(',', ' ')} (fidelity {best[2]:.2f} ± {best[3]:.2f}). "
    forward = next((r for r in rows if r[0] == "prefix differences"), None)
    if forward and forward[2] > best[2]:
        text += f"Prefix differences rank the tokens better ({forward[2]:.2f}): try --credit red_band first. "
    seen = "; ".join(
        f"{world} at {at}: fidelity {f:.2f}, {lead:+.2f} reward over GRPO"
        for world, at, f, lead in YARDSTICK
    )
    return f"{text}Yardstick: {seen}. Compare with --credit shuffle before believing a gain."


# ---------------------------------------------------------------------------------------------------------------------
# answers: files that other harnesses read.


def alpaca_record(name: str, question: dict, answers: list[str]) -> dict:
    return {"instruction": question["instruction"], "output": answers[0], "generator": name}


def arena_record(name: str, question: dict, answers: list[str]) -> dict:
    key = question["uid"]
    messages = [
        {"role": "user", "content": question["prompt"]},
        {"role": "assistant", "content": {"answer": answers[0]}},
    ]
    return {
        "uid": key,
        "ans_id": f"{name}-{key}",
        "model": name,
        "messages": messages,
        "tstamp": time.time(),
        "metadata": {},
    }


def bench_record(name: str, question: dict, answers: list[str]) -> dict:
    key = question["question_id"]
    choices = [{"index": 0, "turns": answers}]
    return {
        "question_id": key,
        "answer_id": f"{name}-{key}",
        "model_id": name,
        "choices": choices,
        "tstamp": time.time(),
    }


# format: (turns of a question, key of a question, key of a record, record, one JSON list in place of lines)
FORMATS = {
    "alpaca_eval": (
        lambda q: [q["instruction"]],
        "instruction",
        "instruction",
        alpaca_record,
        True,
    ),
    "arena_hard": (lambda q: [q["prompt"]], "uid", "uid", arena_record, False),
    "mt_bench": (lambda q: q["turns"], "question_id", "question_id", bench_record, False),
}


def answers(args: argparse.Namespace, flags: list[str]) -> None:
    """Write the answer file of a benchmark, one record a question; a second call goes on where the first stopped."""
    turns_of, key, record_key, record, as_list = FORMATS[args.format]
    questions = load_rows(args.questions)
    if missing := [i for i, q in enumerate(questions) if key not in q]:
        raise ValueError(
            f"--questions {args.questions}: row {missing[0] + 1} has no {key!r}, which {args.format} needs."
        )
    out = Path(args.out)
    done = (
        (json.loads(out.read_text()) if as_list else train.read_jsonl(out)) if out.exists() else []
    )
    seen = {r[record_key] for r in done}
    like, _ = (
        load_run(args.model)
        if (Path(args.model) / "metrics.jsonl").exists()
        else (train.settle(train.parse(flags)), None)
    )
    config, policy = trained_policy(args.model, like)
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    vocabulary = shared_vocabulary(policy, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    for question in tqdm(
        [q for q in questions if q[key] not in seen], desc=args.format, dynamic_ncols=True
    ):
        if question[key] in seen:
            continue  # the same question twice in the file
        messages, replies = [], []
        for turn in turns_of(question):
            messages.append({"role": "user", "content": turn})
            torch.manual_seed(args.seed)
            rollout = sample(
                policy,
                tokenizer,
                [messages],
                vocabulary,
                1,
                args.max_tokens,
                config.temperature,
                **config.template,
            )
            replies.append(
                tokenizer.decode(
                    rollout.response_ids[0][rollout.content_mask[0]], skip_special_tokens=True
                )
            )
            messages.append({"role": "assistant", "content": replies[-1]})
        done.append(record(args.name or Path(args.model).name, question, replies))
        seen.add(question[key])
        text = (
            json.dumps(done, indent=1) if as_list else "".join(json.dumps(r) + "\n" for r in done)
        )
        train.write_whole(out, text)
    print(f"{out}: {len(done)} records")


# ---------------------------------------------------------------------------------------------------------------------
# cost and compare.


def cost(args: argparse.Namespace, flags: list[str]) -> None:
    """GRPO and a credit method on the same rollouts, alternating: median seconds by phase; and the streamed work alone."""
    config, m = models_of(flags)
    vocabulary = shared_vocabulary(m["policy"], m["tokenizer"], m["reward_model"].size)
    names = ["grpo", config.credit if config.credit != "grpo" else "datc"]
    m["policy"].train()
    learners = {
        n: train.Learner(m["policy"], m["reward_model"], vocabulary, replace(config, credit=n))
        for n in names
    }
    spent: dict[str, list[dict[str, float]]] = {n: [] for n in names}
    for step in tqdm(range(args.rollouts + 1), dynamic_ncols=True):
        torch.manual_seed(train.step_seed(config.seed, step))
        clock = train.Clock(config.device)
        with clock("sample"):
            rollout = learners["grpo"].sample(
                m["tokenizer"], train.choose_prompts(m["prompts"], step, config)
            )
        for name in names if step % 2 else names[::-1]:
            own, learner = train.Clock(config.device), learners[name]
            with own("score"):
                rewards, grad = m["reward_model"].score(rollout, with_grad=learner.grad_at_sample)
            with own("update"):
                reference = learner.reference_logp(rollout) if config.beta else None
                advantages, sharpness = learner.advantages(rollout, rewards)
                learner.update(
                    train.Scored(rollout, rewards, advantages, grad, reference, sharpness),
                    step,
                    own,
                )
            if step:  # the first is warm-up
                spent[name].append({"sample": clock.seconds["sample"], **own.seconds})
    phases = ["sample", "score", "credit", "update"]
    rows = []
    for name in names:
        middle = [statistics.median(s.get(p, 0.0) for s in spent[name]) for p in phases]
        rows.append([name, *middle, statistics.median(sum(s.values()) for s in spent[name])])
    print_table(["credit", *phases, "total, s"], rows)
    ratio = statistics.median(
        sum(b.values()) / sum(a.values()) for a, b in zip(*spent.values(), strict=True)
    )
    print(f"\n{names[1]} / grpo: {ratio:.3f} (median of {args.rollouts} paired rollouts)\n")
    if args.no_work:
        return
    sizes = [(256, 32_768), (1024, 32_768), (256, 151_936)]
    table = []
    for n, v in sizes:
        dtype, h = getattr(torch, config.dtype), 1024
        make = lambda *s: torch.randn(*s, dtype=dtype, device=config.device)  # noqa: B023, E731
        inputs = (
            make(n, h),
            make(v, h),
            torch.randint(v, (n,), device=config.device),
            make(n, h),
            make(v, h),
        )
        clock = train.Clock(config.device)
        with clock("work"):
            work(*inputs)
        table.append([n, v, clock.seconds["work"], clock.seconds["work"] / n * 1e3])
    print_table(["tokens N", "vocabulary V", "streamed work, s", "ms a token"], table)


def refuse_other(folder: str, config: train.Config) -> None:
    """Raise ValueError where a folder holds a run with other flags, or of another world: it must not enter the table."""
    saved = asdict(read_config(Path(folder)))
    free = {"output_dir", "resume", "save_every", "device", "reward_batch"}
    if other := [k for k, v in asdict(config).items() if k not in free and saved[k] != v]:
        told = ", ".join(f"--{k} {saved[k]} (not {getattr(config, k)})" for k in other)
        raise ValueError(
            f"{folder} holds another run: {told}. Give another --folder, or remove it."
        )


def compare(args: argparse.Namespace, flags: list[str]) -> None:
    """Train every method with every seed and rate (what is there already is kept), print the table, draw the curves."""
    base = train.settle(train.parse(flags))
    results: dict[tuple[str, float], list[list[dict]]] = {}
    for seed in range(args.seeds):
        for rate in args.learning_rates:
            for name in args.credit:
                method, _, points = name.partition("@")
                credit, _, estimator = method.partition("+")
                label = name.rpartition(":")[2]  # of FILE.py:NAME
                out = Path(args.folder) / base.preset / f"{label}-{rate:g}-s{seed}"
                grad_at = [float(a) for a in points.split(",")] if points else base.grad_at
                flags_of_run = {
                    "credit": credit,
                    "grad_at": grad_at,
                    "advantage": estimator or base.advantage,
                }
                config = replace(
                    base, **flags_of_run, learning_rate=rate, seed=seed, output_dir=str(out)
                )
                train.check_config(train.settle(config))
                train.check_machine(config)
                if started := (out / "config.json").exists():
                    refuse_other(str(out), config)
                if not (out / "final").exists():
                    resume = str(out) if started else None
                    train.train(**train.prepare(config), config=replace(config, resume=resume))
                results.setdefault((name, rate), []).append(load_run(str(out))[1])
    world = "gold_reward" in next(iter(results.values()))[0][0]

    def mean(rows: list[dict], key: str) -> float:
        return statistics.fmean(r[key] for r in rows)

    table, curves = [], {}
    for (name, rate), runs in results.items():
        areas = [mean(r, "reward") for r in runs]
        spread = statistics.stdev(areas) if len(areas) > 1 else 0.0
        final = [
            statistics.fmean(mean(r[-10:], k) for r in runs)
            for k in ["reward"] + ["gold_reward"] * world
        ]
        length = statistics.fmean(mean(r[-10:], "completions/mean_length") for r in runs)
        seconds = statistics.median(x["time/total"] for r in runs for x in r)
        table.append(
            [
                name,
                f"{rate:g}",
                f"{statistics.fmean(areas):.2f} ± {spread:.2f}",
                *(f"{v:.2f}" for v in final),
                length,
                seconds,
            ]
        )
        if name not in curves or statistics.fmean(areas) > curves[name][0]:
            curves[name] = (statistics.fmean(areas), rate, runs)
    head = [
        "credit",
        "learning rate",
        "area ± sd over seeds",
        "final reward",
        *["final gold"] * world,
        "length",
        "s/rollout",
    ]
    table.sort(key=lambda row: (row[1], args.credit.index(row[0])))
    best = sorted(
        (r for r in table if f"{curves[r[0]][1]:g}" == r[1]), key=lambda r: args.credit.index(r[0])
    )
    print(
        f"{base.preset}: {args.seeds} seeds, {base.rollouts} rollouts; each method at its best rate, by area\n"
    )
    print_table(head, best)
    print("\nAll rates\n")
    print_table(head, table)

    def bands(key: str) -> Callable:
        def draw(ax) -> None:
            for name, (_, rate, runs) in curves.items():
                lines = torch.tensor([trailing_mean([r[key] for r in rows]) for rows in runs])
                middle, spread = (
                    lines.mean(0),
                    lines.std(0) if len(lines) > 1 else torch.zeros(lines.shape[1]),
                )
                (line,) = ax.plot(middle, label=f"{name} ({rate:g})")
                ax.fill_between(
                    range(len(middle)),
                    middle - spread,
                    middle + spread,
                    alpha=0.15,
                    color=line.get_color(),
                )

        return draw

    panels = [("RM reward", "rollout", "reward, trailing 25", bands("reward"))]
    panels += [("Gold reward", "rollout", "gold, trailing 25", bands("gold_reward"))] * world
    figure(args.out, [*panels, ("Length", "rollout", "tokens", bands("completions/mean_length"))])


# ---------------------------------------------------------------------------------------------------------------------


def refuse_unknown(flags: list[str]) -> None:
    if flags:
        raise ValueError(f"Unknown flags: {' '.join(flags)}")


def commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True)

    def command(run: Callable, name: str | None = None) -> argparse.ArgumentParser:
        p = sub.add_parser(
            name or run.__name__, help=run.__doc__, description=run.__doc__, allow_abbrev=False
        )
        p.set_defaults(function=run)
        return p

    p = command(reward)
    p.add_argument("models", nargs="+", help="run folders, model directories or hub ids")
    p.add_argument(
        "--held_out",
        help="JSONL file or NAME:SPLIT of prompts; default: the tiny world's held-out topics",
    )
    p.add_argument("--num_prompts", type=int, default=64, help="at most this many prompts")
    p.add_argument("--samples", type=int, default=16, help="responses to each")
    p.add_argument("--seed", type=int, default=0)
    p = command(plot)
    p.add_argument("runs", nargs="+", help="run folders")
    p.add_argument("--out", default="runs/plot.png")
    p = command(heatmap)
    p.add_argument("run", help="run folder")
    p.add_argument(
        "--rollouts", type=int, default=8, help="how many rollouts to show, spread over the run"
    )
    p.add_argument("--out", help="HTML file; default: heatmap.html in the run folder")
    p = command(gain)
    p.add_argument("--batches", type=int, default=100)
    p.add_argument("--out", default="runs/gain.png")
    p = command(fidelity)
    p.add_argument("--responses", type=int, default=32)
    p.add_argument(
        "--top_k",
        type=int,
        default=0,
        help="alternatives a token: the policy's top k; 0 = the whole vocabulary",
    )
    p.add_argument(
        "--points",
        nargs="+",
        default=["1.0", "0.75", "0.5", "0.25", "0.25,0.75"],
        help="choices of --grad_at",
    )
    p.add_argument("--credit", nargs="+", default=[], help="credit methods whose Ã to rank as well")
    p.add_argument("--batch", type=int, default=64, help="substituted texts per reward-model pass")
    p = command(answers)
    p.add_argument("model", help="run folder, model directory or hub id")
    p.add_argument("--format", choices=FORMATS, required=True)
    p.add_argument(
        "--questions", required=True, help="JSONL file or NAME:SPLIT with the benchmark's questions"
    )
    p.add_argument("--out", required=True)
    p.add_argument("--name", help="generator name in the records; default: the folder's")
    p.add_argument("--max_tokens", type=int, default=2048)
    p.add_argument("--seed", type=int, default=0)
    p = command(cost)
    p.add_argument("--rollouts", type=int, default=20)
    p.add_argument(
        "--no_work",
        action="store_true",
        help="leave out the timing of the streamed work at real sizes",
    )
    p = command(compare)
    p.add_argument(
        "--credit",
        nargs="+",
        default=["grpo", "datc"],
        help="methods; NAME@0.25,0.75 sets --grad_at, NAME+rloo --advantage",
    )
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--learning_rates", "--learning_rate", nargs="+", type=float, default=[6e-4])
    p.add_argument(
        "--folder", default="runs/compare", help="where the runs are kept, and found again"
    )
    p.add_argument("--out", default="runs/compare.png")
    return parser


def main(argv: list[str] | None = None) -> None:
    args, flags = commands().parse_known_args(argv)
    with train.plain_errors():
        args.function(args, flags)


if __name__ == "__main__":
    main()
