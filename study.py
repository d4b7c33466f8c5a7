"""The experiments behind `eval.py fidelity`, `gain`, `cost` and `compare`.

They ask of a pair of models, before a run is paid for: is the first-order work faithful to the
exact one, does the predicted gain survive shared parameters (Figure C3), what does a method cost,
and which method learns most. Left out: looking at a run (eval.py).
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from credit import CreditInputs
from datc import candidates, expected_embedding, token_value, work, work_on_support
from grpo import clipped_surrogate, response_hidden
from machinery.config import (
    Config,
    branching_pair,
    check_config,
    not_negative,
    parse,
    path_points,
    positive,
)
from machinery.load import prepare, settle
from machinery.rollout import Rollout, choose_prompts, join
from machinery.run import credit_metrics, load_run, read_config
from machinery.show import figure, print_table, spearman, trailing_mean
from train import Laps, Learner, train


def models_of(flags: list[str], trainable: bool = True) -> tuple[Learner, list]:
    """A learner on the models of train.py's own flags, and the prompts."""
    config = replace(settle(parse(flags)), sft_examples=0)
    m = prepare(config, trainable)
    return Learner(m["policy"], m["reward_model"], m["tokenizer"], config), m["prompts"]


def sampled_and_scored(learner: Learner, prompts: list, step: int) -> Rollout:
    """Steps 1 to 3 of the loop."""
    learner.begin(step)
    config = learner.config
    chosen = choose_prompts(prompts, step, config.seed, config.prompts_per_rollout)
    return learner.compare(learner.score(learner.sample(chosen)))


# ----------------------------------------------------------------------------------------------
# fidelity: how faithful is the first-order work to the exact one?


def fidelity(args: argparse.Namespace, flags: list[str]) -> None:
    """Spearman with the exact work over each response's free tokens.

    Of the first-order work at several --points, of prefix differences, and of what the methods
    named by --credit push (Ã_t, the sign of A included).
    """
    learner, prompts = models_of(flags, trainable=False)
    model = learner.reward_model
    model.reward_batch = args.batch
    groups = -(-args.responses // learner.config.group_size)
    learner.begin(0)
    torch.manual_seed(learner.config.seed)
    rollout = learner.sample(choose_prompts(prompts, 0, learner.config.seed, groups))
    pushes = pushed(args.credit, learner, rollout)
    chosen = []
    for number, one in enumerate(rollout.split(1)):
        if one.free_mask.sum() >= 3 and len(chosen) < args.responses:
            chosen.append((number, one))
    size = learner.vocabulary.size
    size = min(size, args.top_k + 1) if args.top_k else size
    total = sum(one.free_mask.sum().item() for _, one in chosen) * size
    print(
        f"{len(chosen)} responses, {total} substituted texts = {-(-total // args.batch)} "
        f"reward-model passes of {args.batch}."
    )
    found = []
    lap = Laps(learner.policy.device)
    with tqdm(total=total, desc="substituted texts", dynamic_ncols=True) as bar:
        for number, one in chosen:
            free = one.free_mask[0]
            push = {name: values[number][free] for name, values in pushes.items()}
            found.append(
                rank_correlations(learner, one, args.points, args.branchings, args.top_k, push, lap)
            )
            bar.update(free.sum().item() * size)
    seconds = {name: total / len(chosen) for name, total in lap.seconds.items()}
    found = pd.DataFrame(found)
    means = print_fidelity(found, args.points, args.branchings, seconds)
    if COSINE in found:
        width = model.embedding.shape[1]
        print(
            f"\nMean {COSINE} at the sample: {found[COSINE].mean():.3f}; "
            f"chance in {width} dimensions: {np.sqrt(2 / (np.pi * width)):.3f}."
        )
    print(advice(means, args.points))


def rank_correlations(
    learner: Learner,
    one: Rollout,
    points: list[str],
    branchings: list[str],
    top_k: int,
    pushes: dict[str, Tensor],
    lap: Laps,
) -> dict[str, float]:
    """Each evidence's Spearman with the exact work over a response's free tokens.

    And, where the sample is among the points, the mean |cos(f, e)| there. Seconds go to `lap`.
    """
    model = learner.reward_model
    temperature = learner.config.temperature
    table = model.embedding[: learner.vocabulary.size]  # (V, D)
    free = one.free_mask[0]
    ids = one.response_ids[0, free]  # (N,)
    with torch.no_grad():
        hidden = response_hidden(learner.policy, one)[0]  # (T, H)
        logits = hidden[free] @ learner.lm_head.T / temperature  # (N, V)
    allowed, sampled, support = candidates(logits, ids, top_k)  # (N, S), (N,), (N, S)
    lap("policy")
    exact_value = model.substituted(one, free.nonzero()[:, 0], allowed)  # (N, S)
    exact = work_on_support(support, sampled, exact_value)
    lap(EXACT)
    expected = expected_embedding(hidden, learner.lm_head, table, temperature)[None]  # (1, T, D)
    evidence = {}
    found = {}
    for name in points:
        alphas = [float(alpha) for alpha in name.split(",")]
        f = model.grad(one, expected, alphas)[0, free].double()  # (N, D)
        value = [token_value(g, table[row].double()) for g, row in zip(f, allowed, strict=True)]
        evidence[name] = work_on_support(support, sampled, torch.stack(value))
        if alphas == [1.0]:
            found[COSINE] = torch.cosine_similarity(f, table[ids].double()).abs().mean().item()
        lap(name)
    for name in branchings:
        evidence[f"branch {name}"] = branch_work(learner, one, hidden, name)[free]
        lap(f"branch {name}")
    evidence[PREFIXES] = model.prefix_scores(one).diff(dim=-1)[0, free]
    lap(PREFIXES)
    for name, d in {**evidence, **pushes}.items():
        if d.min() < d.max() and exact.min() < exact.max():
            found[name] = spearman(d.cpu(), exact.cpu())
    return found


def branch_work(learner: Learner, one: Rollout, hidden: Tensor, branching: str) -> Tensor:
    """(5) with token values by branching, for BRANCHES,LOOKAHEAD, (T,)."""
    branches, lookahead = (int(number) for number in branching.split(","))
    config = replace(learner.config, branches=branches, lookahead=lookahead)
    other = copy.copy(learner)
    other.config = config
    mask = one.response_mask
    with torch.no_grad():
        _, logp, entropy = learner.forward(one)
        return other.evidence(one, hidden[mask[0]], logp, entropy).branch_work[0]


PREFIXES = "prefix differences"
EXACT = "exact substitution"
COSINE = "|cos(f, e)|"


def pushed(names: list[str], learner: Learner, rollout: Rollout) -> dict[str, Tensor]:
    """Ã_t (B, T) of each credit method.

    It should push a token up the more, or down the less, the more that gains.
    """
    found = {}
    if names:
        rollout = learner.compare(learner.score(rollout))
    for name in names:
        config = replace(learner.config, credit=name)
        other = Learner(learner.policy, learner.reward_model, learner.tokenizer, config)
        found[name] = other.credit_beforehand(rollout).token_advantages
    return found


def print_fidelity(
    found: pd.DataFrame, points: list[str], branchings: list[str], seconds: dict[str, float]
) -> dict[str, float]:
    """Print the table and return each evidence's mean. `seconds` are those of one response."""
    cost = {PREFIXES: "1 + 0"}
    for name in points:
        passes = len(name.split(","))
        cost[name] = "0 + 1" if float(name.split(",")[0]) == passes == 1 else f"{passes} + {passes}"
    for name in branchings:
        cost[f"branch {name}"] = "1 + 1, and the branches"
    rows = []
    for name in found.columns.drop(COSINE, errors="ignore"):
        values = found[name].dropna()
        row = [name, len(values), values.mean(), values.sem(), cost.get(name, "")]
        rows.append([*row, seconds.get(name, "")])
    rows.append([EXACT, len(found), 1.0, 0.0, "", seconds.get(EXACT, "")])
    head = ["evidence", "responses", "fidelity", "standard error", "extra forward + backward"]
    print_table([*head, "seconds a response"], rows)
    return found.mean().to_dict()


def advice(means: dict[str, float], points: list[str]) -> str:
    """What to do with this reward model."""
    gradients = {name: means[name] for name in points if name in means}
    if not gradients:
        return (
            "\nNo response with three free tokens and varying work: nothing to advise on. "
            "Try longer responses."
        )
    best = max(gradients, key=gradients.get)
    text = f"\nBest gradient here: --grad_at {best.replace(',', ' ')} ({gradients[best]:.2f}). "
    by_branching = {name: mean for name, mean in means.items() if name.startswith("branch ")}
    if by_branching:
        ahead = max(by_branching, key=by_branching.get)
        if by_branching[ahead] > gradients[best]:
            branches, lookahead = ahead.removeprefix("branch ").split(",")
            text += (
                f"Branching ranks the tokens better ({by_branching[ahead]:.2f}): "
                f"--credit branch --branches {branches} --lookahead {lookahead}. "
            )
    if means.get(PREFIXES, -1) > max(gradients[best], *by_branching.values(), -1):
        text += f"Prefix differences rank the tokens better ({means[PREFIXES]:.2f}): "
        text += "try --credit red_band first. "
    return text + (
        "0 is chance, 1 the exact work: compare it with the fidelities, and what they led to in "
        "training, in README.md, and with --credit shuffle before believing a gain."
    )


# ----------------------------------------------------------------------------------------------
# gain: Figure C3. Does the predicted gain survive the policy's shared parameters?


def gain(args: argparse.Namespace, flags: list[str]) -> None:
    """Predicted gain with independent logits (X) against through shared weights (P), Figure C3."""
    learner, prompts = models_of(["--beta", "0", *flags])
    points = []
    for step in tqdm(range(args.batches), desc="batches", dynamic_ncols=True):
        points.append(predicted_gains(learner, sampled_and_scored(learner, prompts, step)))
    x, p = np.array(points).T
    slope, offset = np.polyfit(x, p, 1) if len(x) > 1 else (np.nan, np.nan)
    row = [len(x), np.mean(x > 0), np.mean(p > 0), slope, pd.Series(x).corr(pd.Series(p))]
    print_table(
        ["batches", "X > 0", "P > 0", "slope", "Pearson", "Spearman"], [[*row, spearman(x, p)]]
    )

    def draw(ax: object) -> None:
        ax.plot(x, p, "o", ms=4, alpha=0.6)
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, slope * ends + offset, label=f"P = {slope:.3g} X + {offset:.2g}")
        ax.axhline(0, lw=0.5, color="gray")

    title = "Predicted gain over GRPO"
    figure(args.out, [(title, "X: independent logits", "P: shared parameters", draw)])


def predicted_gains(learner: Learner, rollout: Rollout) -> tuple[float, float]:
    """X, the predicted gain over GRPO with independent logits, and P, through the parameters.

    Raises ValueError for a method that reads no work.
    """
    mask = rollout.response_mask
    hidden, logp, entropy = learner.forward(rollout)
    inputs = learner.evidence(rollout, hidden, logp, entropy)
    credited = learner.credit(rollout, hidden, logp, entropy)
    x = credit_metrics(credited).get("credit/predicted_gain")
    if x is None:
        raise ValueError(f"--credit {learner.config.credit} has no work to predict a gain from.")
    # J is linear in Ã at ratio 1, so the difference of two updates is the update of a difference.
    extra = credited.token_advantages - rollout.advantages[:, None] * mask
    loss, _ = clipped_surrogate(
        logp, logp.detach(), extra, mask, learner.config.epsilon, len(rollout)
    )
    move = torch.autograd.grad(-loss, learner.parameters)
    if learner.branches:
        relaxed = branched_reward(learner, rollout, inputs)
    else:
        f = inputs.reward_grad[mask]  # (N, D)
        table = learner.reward_model.embedding[: learner.vocabulary.size]
        relaxed = relaxed_reward(learner, rollout, token_value(f, table.to(f.dtype)))
    slope = torch.autograd.grad(relaxed, learner.parameters)
    p = sum((a.double() * b.double()).sum().item() for a, b in zip(move, slope, strict=True))
    return x, p


def relaxed_reward(learner: Learner, rollout: Rollout, token_value: Tensor) -> Tensor:
    """R̂(θ) = Σ <sg(v_t), p_t(θ)> over the response tokens; token_value (N, V)."""
    hidden = response_hidden(learner.policy, rollout)[rollout.response_mask]
    head = learner.lm_head.to(token_value.dtype)
    logits = hidden.to(token_value.dtype) @ head.T / learner.config.temperature
    return (logits.softmax(-1) * token_value).sum()


def branched_reward(learner: Learner, rollout: Rollout, inputs: CreditInputs) -> Tensor:
    """R̂(θ) on the sampled tokens and their alternatives, values by branching (9)."""
    mask = rollout.response_mask
    hidden = response_hidden(learner.policy, rollout)[mask]  # (N, H)
    ids, logp = inputs.branch_tokens
    support = torch.cat([ids[mask].clamp(min=0), rollout.response_ids[mask][:, None]], 1)
    values = torch.nn.functional.pad(inputs.branch_values[mask], (0, 1))  # (N, S+1)
    rows = learner.lm_head[support].to(values.dtype)  # (N, S+1, H)
    logits = (rows @ hidden.to(values.dtype)[..., None])[..., 0] / learner.config.temperature
    none = torch.nn.functional.pad(logp[mask].isinf(), (0, 1))
    return (logits.masked_fill(none, -torch.inf).softmax(-1) * values).sum()


# ----------------------------------------------------------------------------------------------
# cost.


def cost(args: argparse.Namespace, flags: list[str]) -> None:
    """GRPO and a credit method on the same rollouts, alternating: median seconds by phase.

    And the streamed work alone, at real sizes.
    """
    base, prompts = models_of(flags)
    base.policy.train()
    credit = base.config.credit if base.config.credit != "grpo" else "datc"
    learners = {}
    for name in ("grpo", credit):
        config = replace(base.config, credit=name)
        learners[name] = Learner(base.policy, base.reward_model, base.tokenizer, config)
    spent = []
    for step in tqdm(range(args.rollouts + 1), dynamic_ncols=True):
        order = ("grpo", credit) if step % 2 else (credit, "grpo")
        seconds = time_updates(learners, order, prompts, step)
        if step:  # the first is warm-up
            spent += seconds
    spent = pd.DataFrame(spent)
    phases = ["sample", "score", "credit", "update"]
    spent["total"] = spent[phases].sum(axis=1)
    medians = spent.groupby("method", sort=False)[[*phases, "total"]].median()
    rows = [[name, *medians.loc[name].tolist()] for name in learners]
    print_table(["credit", *phases, "total, s"], rows)
    totals = spent.pivot(index="step", columns="method", values="total")
    ratio = (totals[credit] / totals["grpo"]).median()
    print(f"\n{credit} / grpo: {ratio:.3f} (median of {args.rollouts} paired rollouts)\n")
    if not args.no_work:
        time_work(base.config)


def time_updates(
    learners: dict[str, Learner], order: tuple[str, ...], prompts: list, step: int
) -> list[dict]:
    """Seconds by phase of each method on one rollout, which is sampled once for all."""
    config = learners["grpo"].config
    learners["grpo"].begin(step)
    chosen = choose_prompts(prompts, step, config.seed, config.prompts_per_rollout)
    rollout = learners["grpo"].sample(chosen)
    sampling = learners["grpo"].lap.seconds["sample"]
    rows = []
    for name in order:
        learner = learners[name]
        learner.begin(step)
        one_update(learner, learner.refer(learner.compare(learner.score(rollout))))
        rows.append({"step": step, "method": name, **learner.lap.seconds, "sample": sampling})
    return rows


def one_update(learner: Learner, rollout: Rollout) -> Rollout:
    """Steps 4 to 7 of the loop, for one epoch. Returns the rollout with its credit."""
    if learner.wants_whole_batch:
        rollout = learner.credit_beforehand(rollout)
    micros = []
    for micro in rollout.split(learner.config.micro_batch):
        hidden, logp, entropy = learner.forward(micro)
        if micro.token_advantages is None:
            micro = learner.credit(micro, hidden, logp, entropy)
        learner.loss(micro, logp, entropy, len(rollout)).backward()
        micros.append(micro)
    learner.update()
    return join(micros)


def time_work(config: Config, width: int = 1024) -> None:
    """The streamed work on random matrices, by tokens and vocabulary."""
    dtype = getattr(torch, config.dtype)
    rows = []
    for n, v in [(256, 32_768), (1024, 32_768), (256, 151_936)]:
        hidden, grad = torch.randn(2, n, width, device=config.device).to(dtype)
        head, table = torch.randn(2, v, width, device=config.device).to(dtype)
        ids = torch.randint(v, (n,), device=config.device)
        lap = Laps(hidden.device)
        work(hidden, head, ids, grad, table)
        lap("work")
        seconds = lap.seconds["work"]
        rows.append([n, v, seconds, seconds / n * 1e3])
    print_table(["tokens N", "vocabulary V", "streamed work, s", "ms per token"], rows)


# ----------------------------------------------------------------------------------------------
# compare.


def compare(args: argparse.Namespace, flags: list[str]) -> None:
    """Train every method with every seed and rate, print the table, draw the curves.

    What is there already is kept, so a comparison that was stopped goes on.
    """
    base = settle(parse(flags))
    configs = {}
    for seed in range(args.seeds):
        for rate in args.learning_rates:
            for name in args.credit:
                config = configured(base, name, rate, seed, Path(args.folder))
                if Path(config.output_dir, "config.json").exists():
                    refuse_other(config)
                configs[name, rate, seed] = config
    runs = trained_runs(configs)
    table = comparison(runs, args.credit)
    best = table.loc[table.groupby("credit", sort=False)["area"].idxmax()]
    print(f"{base.preset}: {base.rollouts} rollouts; each method at its best rate, by area\n")
    print_comparison(best)
    print("\nAll rates\n")
    print_comparison(table.sort_values("rate", kind="stable"))
    draw_comparison(args.out, runs, best)


def trained_runs(configs: dict[tuple[str, float, int], Config]) -> pd.DataFrame:
    """The metrics of all runs, each trained where it has not been; the finished ones, if stopped.

    Raises ValueError where not one is finished.
    """
    finished = []
    stopped = False
    for (name, rate, seed), config in configs.items():
        folder = Path(config.output_dir)
        if not (folder / "final").exists() and not stopped:
            started = (folder / "config.json").exists()
            resume = config.output_dir if started else None
            train(**prepare(config), config=replace(config, resume=resume))
            stopped = not (folder / "final").exists()
        if (folder / "final").exists():
            rows = pd.DataFrame(load_run(config.output_dir)[1])
            finished.append(rows.assign(credit=name, rate=rate, seed=seed))
    if stopped:
        print(f"Stopped: {len(finished)} of {len(configs)} runs are finished. Call again to go on.")
    if not finished:
        raise ValueError("No run is finished yet, so there is nothing to compare.")
    return pd.concat(finished)


def configured(base: Config, name: str, rate: float, seed: int, folder: Path) -> Config:
    """The run behind METHOD@0.25,0.75+ESTIMATOR at a rate and a seed."""
    method, _, points = name.partition("@")
    credit, _, estimator = method.partition("+")
    label = name.rpartition(":")[2]  # of FILE.py:NAME
    config = replace(
        base,
        credit=credit,
        grad_at=[float(alpha) for alpha in points.split(",")] if points else base.grad_at,
        advantage=estimator or base.advantage,
        learning_rate=rate,
        seed=seed,
        output_dir=str(folder / base.preset / f"{label}-{rate:g}-s{seed}"),
    )
    check_config(config)
    return settle(config)


def refuse_other(config: Config) -> None:
    """Raise ValueError where a folder holds a run with other flags, or of another world."""
    saved = asdict(read_config(Path(config.output_dir)))
    free = {"output_dir", "resume", "save_every", "device", "reward_batch", "report_to"}
    told = []
    for name, value in asdict(config).items():
        if name not in free and saved[name] != value:
            told.append(f"--{name} {saved[name]} (not {value})")
    if told:
        raise ValueError(
            f"{config.output_dir} holds another run: {', '.join(told)}. "
            "Give another --folder, or remove it."
        )


def comparison(runs: pd.DataFrame, order: list[str]) -> pd.DataFrame:
    """One row per method and rate: means over seeds, and the area's spread."""
    rows = []
    for (name, rate), group in runs.groupby(["credit", "rate"], sort=False):
        areas = group.groupby("seed")["reward"].mean()
        last = group.groupby("seed").tail(10)
        row = {
            "credit": name,
            "rate": rate,
            "seeds": len(areas),
            "area": areas.mean(),
            "spread": areas.std() if len(areas) > 1 else 0.0,
            "final reward": last["reward"].mean(),
            "final gold": last["gold_reward"].mean() if "gold_reward" in last else np.nan,
            "length": last["completions/mean_length"].mean(),
            "s/rollout": group["time/total"].median(),
        }
        rows.append(row)
    rows.sort(key=lambda row: (order.index(row["credit"]), row["rate"]))
    return pd.DataFrame(rows)


def print_comparison(table: pd.DataFrame) -> None:
    head = ["credit", "learning rate", "seeds", "area ± sd over seeds", "final reward"]
    gold = bool(table["final gold"].notna().all())
    head += ["final gold"] * gold + ["length", "s/rollout"]
    rows = []
    for row in table.to_dict("records"):
        area = f"{row['area']:.2f} ± {row['spread']:.2f}"
        cells = [row["credit"], f"{row['rate']:g}", row["seeds"], area]
        cells += [f"{row['final reward']:.2f}"]
        cells += [f"{row['final gold']:.2f}"] * gold
        rows.append([*cells, row["length"], row["s/rollout"]])
    print_table(head, rows)


def draw_comparison(out: str, runs: pd.DataFrame, best: pd.DataFrame) -> None:
    """Trailing means over 25 rollouts: the mean over seeds, and their standard deviation."""

    def bands(key: str) -> Callable:
        def draw(ax: object) -> None:
            for name, rate in zip(best["credit"], best["rate"], strict=True):
                chosen = runs[(runs["credit"] == name) & (runs["rate"] == rate)]
                seeds = chosen.groupby("seed")[key]
                curves = np.stack([trailing_mean(values) for _, values in seeds])
                middle = curves.mean(0)
                spread = curves.std(0, ddof=min(1, len(curves) - 1))
                (line,) = ax.plot(middle, label=f"{name} ({rate:g})")
                places = range(len(middle))
                shade = {"alpha": 0.15, "color": line.get_color()}
                ax.fill_between(places, middle - spread, middle + spread, **shade)

        return draw

    panels = [("RM reward", "rollout", "reward, trailing 25", bands("reward"))]
    if "gold_reward" in runs:
        panels.append(("Gold reward", "rollout", "gold, trailing 25", bands("gold_reward")))
    panels.append(("Length", "rollout", "tokens", bands("completions/mean_length")))
    figure(out, panels)


# ----------------------------------------------------------------------------------------------


def add_commands(command: Callable) -> None:
    """The command line of this file's functions; `command(function)` gives its add_argument."""
    add = command(fidelity)
    add("--responses", type=positive, default=32, help="responses to measure on")
    alternatives = "alternatives per token, likeliest first; 0 = the whole vocabulary"
    add("--top_k", type=not_negative, default=0, help=alternatives)
    points = ["1.0", "0.75", "0.5", "0.25", "0.25,0.75"]
    add("--points", nargs="+", type=path_points, default=points, help="choices of --grad_at")
    pairs = "branching to rank, as BRANCHES,LOOKAHEAD"
    add("--branchings", nargs="*", type=branching_pair, default=["2,0", "2,2"], help=pairs)
    add("--credit", nargs="+", default=[], help="credit methods whose Ã to rank as well")
    add("--batch", type=positive, default=64, help="substituted texts per reward-model pass")
    add = command(gain)
    add("--batches", type=positive, default=100, help="rollouts to predict for")
    add("--out", default="runs/gain.png", help="PNG file")
    add = command(cost)
    add("--rollouts", type=positive, default=20, help="paired rollouts to time")
    add("--no_work", action="store_true", help="leave out the streamed work at real sizes")
    add = command(compare)
    methods = "methods; NAME@0.25,0.75 sets --grad_at, NAME+rloo --advantage"
    add("--credit", nargs="+", default=["grpo", "datc"], help=methods)
    add("--seeds", type=positive, default=3, help="seeds 0, 1, ...")
    rates = "every method with every rate"
    add("--learning_rates", "--learning_rate", nargs="+", type=float, default=[6e-4], help=rates)
    add("--folder", default="runs/compare", help="where the runs are kept, and found again")
    add("--out", default="runs/compare.png", help="PNG file")
