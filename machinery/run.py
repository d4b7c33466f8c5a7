"""The run folder: what is logged and saved, how a run stops, and how it goes on.

runs/NAME/ holds config.json, metrics.jsonl (one line per rollout), samples.jsonl (the responses to
the first prompt of each rollout, token by token), checkpoint-N/ after N rollouts, and final/.
Files and folders are written to a draft and renamed, so a killed run leaves the last good state.
Left out: what a metric means in words (README.md), and figures (eval.py).
"""

import fcntl
import importlib
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import response_mean
from machinery.config import Config, as_arguments, changed_flags, is_run_folder, read_flags
from machinery.rollout import Rollout

Gold = Callable[[PreTrainedTokenizerBase, Rollout], list[float]]  # the true reward, where known


class Run:
    """A run folder, and the learner whose progress it keeps."""

    def __init__(self, config: Config, learner: object, gold: Gold | None = None):
        """Open the folder. A resumed one is only read here: `resume` is what first writes to it.

        Raises ValueError where --output_dir holds something.
        """
        refuse_taken(config)
        self.config = config
        self.learner = learner  # train.Learner
        self.gold = gold
        self.folder = Path(config.resume or config.output_dir)
        self.step = last_checkpoint(self.folder) if config.resume else 0
        self.history: list[dict] = []
        self.checks: dict[str, float] = {}  # of the start, logged with the first rollout
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        if not config.resume:
            self._write_config()

    def resume(self) -> None:
        """Load the last checkpoint, if there is one, and drop what was logged after it."""
        if self.step:
            self.load(f"checkpoint-{self.step}")
        self._write_config()
        for name in ("metrics", "samples"):
            path = self.folder / f"{name}.jsonl"
            rows = read_jsonl(path) if path.exists() else []
            kept = [row for row in rows if row["step"] < self.step]
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.history = read_jsonl(self.folder / "metrics.jsonl")

    def _write_config(self) -> None:
        saved = asdict(replace(self.config, resume=None, output_dir=str(self.folder)))
        write_whole(self.folder / "config.json", json.dumps(saved, indent=1))

    def steps(self) -> Iterator[int]:
        """The numbers of the rollouts to come, under a progress bar. Saves between them.

        Ends early when asked to stop (Ctrl-C); "final" is written after the last one only.
        """
        total = self.config.rollouts
        self.track = tracker(self.config, self.folder)
        with self.lock, stop_when_asked() as asked:
            self.bar = tqdm(
                range(self.step, total), initial=self.step, total=total, dynamic_ncols=True
            )
            for step in self.bar:
                yield step
                done = step + 1
                if done % self.config.save_every == 0 or done == total or asked.is_set():
                    self.save(f"checkpoint-{done}")
                if asked.is_set():
                    again = f"python train.py --resume {self.folder}"
                    self.bar.write(f"Stopped after {done} rollouts. Go on with: {again}")
                    return
            self.save("final", optimizer=False)

    def log(self, step: int, rollout: Rollout) -> None:
        """One line of metrics and the first group's samples; now and then a sample to look at."""
        learner = self.learner
        row = {"step": step, **rollout_metrics(rollout)}
        if self.gold is not None:
            row["gold_reward"] = sum(self.gold(learner.tokenizer, rollout)) / len(rollout)
        row |= {name: value.item() for name, value in learner.stats.items()}
        row["learning_rate"] = self.config.learning_rate
        row |= credit_metrics(rollout)
        row |= time_metrics(rollout, learner.lap.seconds, learner.policy.device)
        if step == 0:
            row |= self.checks
        samples = sample_rows(rollout, learner.tokenizer, step)
        self._append("metrics", [row])
        self._append("samples", samples)
        self.history.append(row)
        self.track(row)

        shown = {"reward": row["reward"], "length": row["completions/mean_length"]}
        if "gold_reward" in row:
            shown["gold"] = row["gold_reward"]
        self.bar.set_postfix({name: f"{value:.2f}" for name, value in shown.items()})
        if step == 0 or (step + 1) % 25 == 0:
            telling = max(samples, key=lambda sample: abs(sample["advantage"]))
            self.bar.write(shaded(telling), file=sys.stderr)

    def _append(self, name: str, rows: list[dict]) -> None:
        path = self.folder / f"{name}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            raise OSError(f"{path} could not be written ({error}).") from error

    def save(self, name: str, optimizer: bool = True) -> None:
        """The policy as `save_pretrained` writes it, and the optimizer's state.

        No random states: each rollout seeds its own, and its number is also the prompt cursor.
        Raises OSError where it cannot be written; the draft is removed, what was there is intact.
        """
        draft = self.folder / f"{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            self.learner.policy.save_pretrained(draft)
            self.learner.tokenizer.save_pretrained(draft)
            if optimizer:
                torch.save(self.learner.optimizer.state_dict(), draft / "optimizer.pt")
        except (OSError, RuntimeError, SafetensorError) as error:  # each reports a full disk
            shutil.rmtree(draft, ignore_errors=True)
            raise OSError(
                f"{self.folder / name} could not be written ({error}); "
                "what was saved before is intact."
            ) from error
        shutil.rmtree(self.folder / name, ignore_errors=True)
        draft.rename(self.folder / name)

    def load(self, name: str) -> None:
        """Take the weights, and where it has one the optimizer's state, from a saved folder."""
        folder = self.folder / name
        optimizer = self.learner.optimizer
        try:
            load_weights(self.learner.policy, folder)
            if (folder / "optimizer.pt").exists():
                state = torch.load(folder / "optimizer.pt", map_location="cpu")
                optimizer.load_state_dict(state)
        except Exception as error:  # torch, pickle, zip and safetensors each have their own
            raise ValueError(
                f"{folder} cannot be read ({error}). Remove it, and the run goes on from the "
                "checkpoint before it."
            ) from error
        for group in optimizer.param_groups:  # which came back with the old run's rates
            group["lr"] = self.config.learning_rate
            group["weight_decay"] = self.config.weight_decay


def load_weights(policy: PreTrainedModel, folder: Path) -> None:
    """Copy saved weights, or saved adapters, into a policy that is there already."""
    if hasattr(policy, "peft_config"):
        import peft

        adapters = peft.load_peft_weights(str(folder), device="cpu")
        peft.set_peft_model_state_dict(policy, adapters)
    else:
        saved = type(policy).from_pretrained(folder, dtype=policy.dtype, use_kernels=False)
        policy.load_state_dict(saved.state_dict())


# ----------------------------------------------------------------------------------------------
# Folders and files.


def lock(folder: Path) -> TextIO:
    """An open file that only one process can hold; the system frees it when that process ends.

    Raises ValueError where another process holds it.
    """
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"{folder} is in use: another process is training there.") from error
    return file


def refuse_taken(config: Config) -> None:
    """Raise ValueError where --output_dir holds something: nothing is ever overwritten."""
    if config.resume:
        return
    folder = Path(config.output_dir)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"--output_dir {folder} is not empty. "
            f"Choose another, or go on with it: --resume {folder}"
        )


def new_folder(config: Config) -> str:
    """runs/PRESET-CREDIT-sSEED, or that with the first free number behind it."""
    method = config.credit.rpartition(":")[2]
    base = f"runs/{config.preset}-{method}-s{config.seed}"
    name = base
    number = 2
    while Path(name).exists():
        name = f"{base}-{number}"
        number += 1
    return name


def last_checkpoint(folder: Path) -> int:
    """N of the newest complete checkpoint-N in a run folder, 0 if there is none.

    Drafts of a killed save do not count.
    """
    numbers = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error}); it is as it was.") from error


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a log; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def load_run(path: str) -> tuple[Config, list[dict]]:
    """Flags and metrics of a run folder. Raises ValueError where there are none."""
    folder = Path(path)
    if not is_run_folder(folder):
        raise ValueError(
            f"{path} is not a run folder (it has no config.json of ours). Runs are under runs/."
        )
    metrics = folder / "metrics.jsonl"
    rows = read_jsonl(metrics) if metrics.exists() else []
    if not rows:
        raise ValueError(f"{path} has no complete rollout yet: metrics.jsonl is empty.")
    return read_config(folder), rows


def read_config(folder: Path) -> Config:
    return Config(**read_flags(folder))


@contextmanager
def stop_when_asked() -> Iterator[threading.Event]:
    """Ctrl-C asks to stop after the rollout in progress, so that weights and logs agree.

    A cluster's SIGTERM does the same. A second one stops at once.
    """
    asked = threading.Event()
    previous = {}

    def handle(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, previous[number])
        tqdm.write(
            "Stopping after this rollout "
            "(Ctrl-C again: at once, going back to the last checkpoint)."
        )

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def plain_errors() -> Iterator[None]:
    """A user's mistake, or a run that broke, as one line without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # whatever the locale says
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. A run goes on from its last checkpoint with --resume.")
    except torch.OutOfMemoryError as error:
        sys.exit(
            f"error: the GPU ran out of memory: {error}\n"
            "Try --sample_batch, --reward_batch or --micro_batch smaller, or "
            "--gradient_checkpointing; a run goes on with --resume."
        )


# ----------------------------------------------------------------------------------------------
# What is logged.


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    groups = rollout.rewards.double().view(-1, rollout.group_size)  # (B/G, G)
    ties = (rollout.advantages.view(-1, rollout.group_size) == 0).all(-1)
    lengths = rollout.response_mask.sum(-1).double()
    return {
        "reward": groups.mean().item(),
        "reward_std": groups.std(-1, correction=0).mean().item(),
        "frac_reward_zero_std": ties.double().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": (~rollout.stopped).double().mean().item(),
    }


def credit_metrics(rollout: Rollout) -> dict[str, float]:
    """How uneven the weights are, and X: the first-order gain that DATC predicts over GRPO."""
    if rollout.weights is None:
        return {}
    mask = rollout.response_mask
    weights = rollout.weights.double()
    metrics = {
        "credit/ess_ratio": effective_share(weights, mask).mean().item(),
        "credit/max_weight": weights.max().item(),
    }
    if rollout.branches is not None:
        tried = rollout.branches[rollout.free_mask].double()
        metrics["credit/branches_per_token"] = tried.mean().nan_to_num().item()
    if rollout.tau is not None:
        metrics["credit/tau_mean"] = rollout.tau.mean().item()
    if rollout.work is not None:
        gain = rollout.advantages.double()[:, None] * (weights - 1) * rollout.work.double()
        metrics["credit/predicted_gain"] = response_mean(gain, mask, len(mask)).item()
    return metrics


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """(mean w)² / mean w² of each response, (B,): the share of its tokens that carry the credit.

    1 where all weights are 0.
    """
    w = weights.masked_fill(~mask, 0.0)
    total = w.sum(-1)
    squares = w.square().sum(-1)
    share = total.square() / (squares * mask.sum(-1)).clamp(min=1e-300)
    return torch.where(squares > 0, share, 1.0)


def time_metrics(
    rollout: Rollout, seconds: dict[str, float], device: torch.device
) -> dict[str, float]:
    """Seconds by phase; on a GPU also tokens per second, and the peak memory since the start."""
    phases = ("sample", "score", "credit", "update")
    metrics = {f"time/{phase}": seconds[phase] for phase in phases}
    metrics["time/total"] = sum(metrics.values())
    if device.type == "cuda":
        tokens = rollout.response_mask.sum().item()
        for phase in ("sample", "update"):
            metrics[f"tokens_per_second/{phase}"] = tokens / seconds[phase]
        metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics


def sample_rows(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, step: int) -> list[dict]:
    """The first prompt's group, token by token, for samples.jsonl."""
    columns = {
        "token_weight": rollout.weights,
        "token_advantage": rollout.token_advantages,
        "token_work": rollout.work,
        "token_p": rollout.old_logp.exp(),
    }
    rows = []
    for i in range(rollout.group_size):
        mask = rollout.response_mask[i]
        ids = rollout.response_ids[i][mask].tolist()
        row = {
            "step": step,
            "prompt": rollout.messages[i],
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "reward": rollout.rewards[i].item(),
            "advantage": rollout.advantages[i].item(),
            "tokens": [tokenizer.decode([token]) for token in ids],
        }
        for name, values in columns.items():
            if values is not None:
                row[name] = [round(value, 6) for value in values[i][mask].tolist()]
        rows.append(row)
    return rows


ORANGE = (255, 140, 0)  # a reinforced token
BLUE = (60, 120, 255)  # a suppressed one


def shaded(row: dict) -> str:
    """A sample for the terminal: tokens shaded by weight, or with their weights where no colour is.

    Orange where they are reinforced, blue where suppressed.
    """
    weights = row.get("token_weight", [1.0] * len(row["tokens"]))
    colour = ORANGE if row["advantage"] > 0 else BLUE
    words = []
    for text, weight in zip(row["tokens"], weights, strict=True):
        if sys.stderr.isatty():
            strength = min(weight / 4, 1.0) if row["advantage"] else 0.0
            back = ";".join(str(round(255 + (c - 255) * strength)) for c in colour)
            words.append(f"\033[30;48;2;{back}m{text}\033[0m")
        else:
            words.append(f"{text}({weight:.1f})")
    facts = f"reward {row['reward']:.2f}, A {row['advantage']:+.2f}"
    return f"{row['prompt'][-1]['content']} [{facts}]: {' '.join(words)}"


def tracker(config: Config, folder: Path) -> Callable[[dict], None]:
    """Where --report_to sends each row of metrics, beside metrics.jsonl."""
    module = tracker_module(config.report_to)
    if module is None:
        return ignore
    if config.report_to == "tensorboard":
        writer = module.SummaryWriter(str(folder))

        def to_tensorboard(row: dict) -> None:
            for name, value in row.items():
                writer.add_scalar(name, value, row["step"])
            writer.flush()

        return to_tensorboard
    module.init(project="datc", name=folder.name, config=asdict(config))

    def to_dashboard(row: dict) -> None:  # wandb and trackio share their interface
        module.log(row, step=row["step"])

    return to_dashboard


def tracker_module(name: str) -> object | None:
    """The module behind --report_to. Raises ValueError, with the pip command, where missing."""
    if name == "none":
        return None
    modules = {"tensorboard": "torch.utils.tensorboard"}
    try:
        return importlib.import_module(modules.get(name, name))
    except ImportError as error:
        raise ValueError(f"--report_to {name} needs a package: pip install {name}") from error


def ignore(row: dict) -> None:
    pass


# ----------------------------------------------------------------------------------------------
# What is told before and after.


def banner(config: Config, policy: PreTrainedModel, reward_model: PreTrainedModel) -> str:
    """Four lines: the device, the models, the run folder, and what differs from the preset."""
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    device = config.device
    if device.startswith("cuda"):
        device += f" ({torch.cuda.get_device_name()})"
    changed = changed_flags(config, ("device", "dtype", "output_dir", "resume"))
    changed = {name: v for name, v in changed.items() if not in_a_world(name, v)}
    return "\n".join(
        [
            f"device  {device}, {config.dtype}",
            f"models  policy {size_of(policy)}, {in_millions(trained)} trained; "
            f"reward model {size_of(reward_model)}",
            f"run     {config.resume or config.output_dir}",
            f"flags   preset {config.preset} {as_arguments(changed)}".rstrip(),
        ]
    )


def size_of(model: PreTrainedModel) -> str:
    count = sum(p.numel() for p in model.parameters())
    return f"{in_millions(count)} ({model.config.model_type})"


def in_millions(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count < 1e7 else f"{count / 1e6:,.0f}M"


def in_a_world(name: str, value: object) -> bool:
    """Whether a flag only holds the path of a part of a tiny world, which nobody has to give."""
    paths = name in ("policy", "reward_model", "prompts")
    return paths and Path(str(value)).parent.name.startswith("world-")


def report(history: list[dict], config: Config) -> None:
    """Where the run is, what it reached, and what to compare it with."""
    last = history[-10:]
    if not last:
        return
    reached = []
    for name in ("reward", "gold_reward"):
        if name in last[0]:
            mean = sum(row[name] for row in last) / len(last)
            reached.append(f"{name} {mean:.2f}")
    folder = config.resume or config.output_dir
    print(f"\nRun: {folder}   mean of the last {len(last)} rollouts: {', '.join(reached)}")
    if config.credit != "grpo":
        without = ("credit", "band", "grad_at", "output_dir", "resume", "device", "dtype")
        changed = {"preset": config.preset, **changed_flags(config, without)}
        changed = {name: v for name, v in changed.items() if not in_a_world(name, v)}
        if config.preset == "tiny":
            del changed["preset"]
        command = f"python train.py --credit grpo {as_arguments(changed)}"
        print("Compare with GRPO:", command.rstrip())
