"""Train a policy with GRPO, and any credit method, against a frozen reward model.

    python train.py                      DATC on the tiny world, which is built first: minutes on a laptop
    python train.py --credit grpo        the same loop, every token's weight one
    python train.py --help               every flag

Read `train` first: it is the algorithm. Around it stand the configuration, the run folder and `main`, which only parses and
loads.
"""

import json
import random
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import baselines  # noqa: F401  registers its methods
from credit import FROM_THE_GRADIENT, Credit, CreditInputs, CreditMethod, Source, get_credit_method
from grpo import (
    clipped_surrogate,
    k3_kl,
    length_window,
    response_advantages,
    response_hidden,
    response_mean,
    token_logprobs,
)
from machinery import config as flags
from machinery import tiny
from machinery.config import Config, changed_flags, check_config
from machinery.load import (
    check_memory,
    load_examples,
    load_policy,
    load_prompts,
    load_reward_model,
    load_tokenizer,
    self_check,
)
from machinery.rollout import (
    Messages,
    Rollout,
    Vocabulary,
    join,
    no_dropout,
    sample,
    shared_vocabulary,
    take,
    to_padded,
)
from machinery.sft import sft
from reward_grad import RewardModel

# ----------------------------------------------------------------------------------------------
# What the flags say on this machine.


def parse(argv: list[str] | None = None) -> Config:
    """The flags, with device and dtype settled, and with what only torch and the methods can refuse."""
    config = flags.parse(argv, description=__doc__.split("\n\n")[0])
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    check_machine(config)
    return replace(config, device=device, dtype=dtype)


def check_machine(config: Config) -> None:
    """Raise ValueError for a credit method or a device that is not there."""
    get_credit_method(config.credit)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {config.device}: torch sees no GPU here. Use --device cpu, or a CUDA build of torch."
        )


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step on one rollout.


@dataclass(frozen=True)
class Scored:
    """A rollout, and what is known about each of its responses before the update."""

    rollout: Rollout
    rewards: Tensor  # (B,) raw
    advantages: Tensor  # (B,)
    reward_grad: Tensor | None  # (B, T, D) where the scoring pass gave it
    reference_logp: Tensor | None  # (B, T) where beta > 0
    sharpness: Tensor | None = None  # (B,) where it is not A

    def __len__(self) -> int:
        return len(self.rollout)

    def split(self, n: int) -> Iterator["Scored"]:
        for start, rollout in zip(
            range(0, len(self.rollout), n), self.rollout.split(n), strict=True
        ):
            rest = [getattr(self, f.name) for f in fields(self)[1:]]
            yield Scored(rollout, *(None if v is None else v[start : start + n] for v in rest))


class Clock:
    """Seconds spent by phase; what runs inside another phase is counted there only once."""

    def __init__(self, device: str):
        self.seconds, self.cuda, self.inner = defaultdict(float), device.startswith("cuda"), 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer, self.inner = self.inner, 0.0
        start = self._now()
        yield
        spent = self._now() - start
        self.seconds[phase] += spent - self.inner
        self.inner = outer + spent

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Learner:
    """The models and the optimizer of a run, and the passes that the loop makes through them."""

    def __init__(
        self,
        policy: PreTrainedModel,
        reward_model: RewardModel,
        vocabulary: Vocabulary,
        config: Config,
    ):
        self.policy, self.reward_model, self.vocabulary, self.config = (
            policy,
            reward_model,
            vocabulary,
            config,
        )
        self.method: CreditMethod = get_credit_method(config.credit)
        self.weights = [p for p in policy.parameters() if p.requires_grad]
        self.mark_start()
        group = {
            "params": self.weights,
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay,
        }
        self.optimizer = torch.optim.AdamW([group])
        self.needs_gradient = bool(self.method.needs & FROM_THE_GRADIENT)
        self.grad_at_sample = self.needs_gradient and set(config.grad_at) == {
            1.0
        }  # the scoring pass gives it

    def mark_start(self) -> None:
        """Take the weights as they are for the policy that RL starts from, the KL's reference."""
        self.start = [w.detach().clone() for w in self.weights] if self.config.beta else []

    @property
    def lm_head(self) -> Tensor:  # (V, H)
        return self.policy.get_output_embeddings().weight[: self.vocabulary.size]

    def sample(self, tokenizer: PreTrainedTokenizerBase, prompts: list[Messages]) -> Rollout:
        c = self.config
        return sample(
            self.policy, tokenizer, prompts, self.vocabulary, c.group_size, c.max_response_tokens,
            c.temperature, c.sample_batch, **c.template,
        )  # fmt: skip

    def advantages(
        self, rollout: Rollout, rewards: Tensor, sigma: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """A (1) of each response and its sharpness, both (B,), from the shaped reward, which changes A and never f_t."""
        c, lengths = self.config, rollout.response_mask.sum(-1)  # (B,)
        shaped = (
            rewards
            - c.missing_eos_penalty * ~rollout.stopped
            - length_window(lengths, sigma * c.length_penalty)
        )
        floor = sigma * c.advantage_std_floor
        return response_advantages(
            c.advantage, shaped, lengths, rollout.group_size, c.max_response_tokens, floor
        )

    def forward(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (N, H) of the N response tokens, logp (B, T) and entropy (B, T), 0 on padding."""
        mask = rollout.response_mask
        hidden = response_hidden(self.policy, rollout)[mask]  # (N, H)
        flat = token_logprobs(
            hidden, self.lm_head, rollout.response_ids[mask], self.config.temperature
        )
        return hidden, *(to_padded(values, mask) for values in flat)

    @torch.no_grad()
    def reference_logp(self, rollout: Rollout) -> Tensor:
        """(B, T) log-probs under the policy RL started from: the trained weights are swapped out for one pass."""
        now = [w.data for w in self.weights]
        for w, s in zip(self.weights, self.start, strict=True):
            w.data = s
        try:
            return torch.cat(
                [self.forward(micro)[1] for micro in rollout.split(self.config.micro_batch)]
            )
        finally:
            for w, data in zip(self.weights, now, strict=True):
                w.data = data

    def evidence(
        self, part: Scored, hidden: Tensor, logp: Tensor, entropy: Tensor, step: int, generator
    ) -> CreditInputs:
        """What a credit method may read, from a forward that the loss needs anyway."""
        rollout = part.rollout
        source = Source(
            rollout=replace(rollout, reward_grad=part.reward_grad),
            hidden=hidden.detach(),
            logp=logp.detach(),
            entropy=entropy,
            lm_head=self.lm_head.detach(),
            reward_model=self.reward_model,
            temperature=self.config.temperature,
            grad_at=self.config.grad_at,
        )
        return CreditInputs(
            response_ids=rollout.response_ids,
            response_mask=rollout.response_mask,
            free_mask=rollout.free_mask,
            advantages=part.advantages,
            rewards=part.rewards,
            band=self.config.band,
            step=step,
            generator=generator,
            sharpness=part.sharpness,
            source=source,
        )

    @torch.no_grad()
    def decide(
        self, scored: Scored, step: int, generator: torch.Generator
    ) -> tuple[CreditInputs, Credit]:
        """The credit of a whole rollout in one call of the method, and what the method read."""
        passes = [self.forward(micro.rollout) for micro in scored.split(self.config.micro_batch)]
        hidden, logp, entropy = (torch.cat(values) for values in zip(*passes, strict=True))
        inputs = self.evidence(scored, hidden, logp, entropy, step, generator)
        return inputs, self.method(inputs)

    def update(
        self, scored: Scored, step: int, clock: Clock
    ) -> tuple[dict[str, float], Credit, CreditInputs, Tensor]:
        """(2) to (7): credit and one clipped step (per epoch). Returns metrics and, for the log, credit and log-probs."""
        config, count = self.config, len(scored.rollout)
        generator = torch.Generator().manual_seed(step_seed(config.seed, step))
        micros = list(scored.split(config.micro_batch))
        credits: list[Credit] = []  # of each micro-batch, decided once, in the first epoch
        inputs: list[CreditInputs] = []
        old_logp: list[Tensor] = []
        totals: dict[str, float] = defaultdict(float)
        if "whole_batch" in self.method.needs:
            with clock("credit"):
                whole_inputs, whole = self.decide(scored, step, generator)
                inputs = [whole_inputs]
                starts = range(0, count, config.micro_batch)
                credits = [take(whole, slice(i, i + config.micro_batch)) for i in starts]
        for epoch in range(config.epochs):
            for i, micro in enumerate(micros):
                mask = micro.rollout.response_mask
                hidden, logp, entropy = self.forward(
                    micro.rollout
                )  # ONE policy forward serves credit and loss
                if epoch == 0:
                    old_logp.append(logp.detach())
                    if len(credits) <= i:
                        with clock("credit"), torch.no_grad():
                            inputs.append(
                                self.evidence(micro, hidden, old_logp[i], entropy, step, generator)
                            )
                            credits.append(self.method(inputs[i]))
                loss, stats = clipped_surrogate(
                    logp, old_logp[i], credits[i].token_advantages, mask, config.epsilon, count
                )
                stats |= {"loss": loss.detach(), "entropy": response_mean(entropy, mask, count)}
                if config.beta:
                    kl = k3_kl(logp, micro.reference_logp, mask, count)
                    loss, stats["kl"] = loss + config.beta * kl, kl.detach()
                loss.backward()
                for name, value in stats.items():
                    totals[name] += value.item() / config.epochs
            norm = torch.nn.utils.clip_grad_norm_(self.weights, config.max_grad_norm).item()
            if not norm < float("inf"):
                raise FloatingPointError(
                    f"The policy's gradient is {norm} at rollout {step}. The last checkpoint is as it was; "
                    "lower --learning_rate, or use --dtype float32."
                )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            totals["grad_norm"] += norm / config.epochs
        return dict(totals), join(credits), read_by_the_method(scored, inputs), torch.cat(old_logp)


def read_by_the_method(scored: Scored, parts: list[CreditInputs]) -> CreditInputs:
    """The micro-batches' inputs as one, for the log: with the work where the method read it."""
    works = [part.computed("work") for part in parts]
    return CreditInputs(
        response_ids=scored.rollout.response_ids,
        response_mask=scored.rollout.response_mask,
        free_mask=scored.rollout.free_mask,
        advantages=scored.advantages,
        rewards=scored.rewards,
        band=parts[0].band,
        step=parts[0].step,
        generator=parts[0].generator,
        sharpness=scored.sharpness,
        work=None if works[0] is None else torch.cat(works),
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is logged.


def credit_metrics(credit: Credit, inputs: CreditInputs) -> dict[str, float]:
    """How uneven the weights are, and X: the gain that DATC's first-order model predicts over GRPO's."""
    if credit.weights is None:
        return {}
    mask, weights = inputs.response_mask, credit.weights.double()
    metrics = {
        "credit/ess_ratio": effective_share(weights, mask).mean().item(),
        "credit/max_weight": weights.max().item(),
    }
    if credit.tau is not None:
        metrics["credit/tau_mean"] = credit.tau.mean().item()
    work = inputs.computed("work")
    if work is not None:
        gain = inputs.advantages.double()[:, None] * (weights - 1) * work.double()
        metrics["credit/predicted_gain"] = response_mean(gain, mask, len(mask)).item()
    return metrics


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """(mean w)² / mean w² of each response, (B,): the share of its tokens that carry the credit; 1 where all weights are 0."""
    w = weights.masked_fill(~mask, 0.0)
    total, squares = w.sum(-1), w.square().sum(-1)
    return torch.where(
        squares > 0, total.square() / (squares * mask.sum(-1)).clamp(min=1e-300), 1.0
    )


def rollout_metrics(scored: Scored, group_size: int) -> dict[str, float]:
    groups = scored.rewards.double().view(-1, group_size)
    lengths = scored.rollout.response_mask.sum(-1).double()
    return {
        "reward": groups.mean().item(),
        "reward_std": groups.std(-1, correction=0).mean().item(),
        "frac_reward_zero_std": (scored.advantages.view(-1, group_size) == 0)
        .all(-1)
        .double()
        .mean()
        .item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": (~scored.rollout.stopped).double().mean().item(),
    }


def gpu_metrics(rollout: Rollout, clock: Clock) -> dict[str, float]:
    """On a GPU: tokens a second in the two phases that take the time, and the peak memory since the run began."""
    if not clock.cuda:
        return {}
    tokens = rollout.response_mask.sum().item()
    speed = {
        f"tokens_per_second/{phase}": tokens / clock.seconds[phase]
        for phase in ("sample", "update")
    }
    return {**speed, "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def sample_rows(
    scored: Scored,
    credit: Credit,
    work: Tensor | None,
    probs: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
) -> Iterator[dict]:
    """The first prompt's group, token by token, for samples.jsonl."""
    rollout = scored.rollout
    for i in range(rollout.group_size):
        mask = rollout.response_mask[i]
        ids = rollout.response_ids[i][mask].tolist()
        columns = {
            "weight": credit.weights,
            "advantage": credit.token_advantages,
            "work": work,
            "p": probs,
        }
        yield {
            "step": step,
            "prompt": rollout.messages[i],
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "reward": scored.rewards[i].item(),
            "advantage": scored.advantages[i].item(),
            "tokens": [tokenizer.decode([t]) for t in ids],
            **{
                f"token_{k}": [round(v, 6) for v in c[i][mask].tolist()]
                for k, c in columns.items()
                if c is not None
            },
        }


def shaded(row: dict) -> str:
    """A sample for the terminal: tokens shaded by weight, orange where they are reinforced and blue where suppressed."""
    weights = row.get("token_weight", [1.0] * len(row["tokens"]))
    colour = (255, 140, 0) if row["advantage"] > 0 else (60, 120, 255)
    words = []
    for text, w in zip(row["tokens"], weights, strict=True):
        strength = min(w / 4, 1.0) if row["advantage"] else 0.0
        back = ";".join(str(round(255 + (c - 255) * strength)) for c in colour)
        words.append(
            f"\033[30;48;2;{back}m{text}\033[0m" if sys.stderr.isatty() else f"{text}({w:.1f})"
        )
    return f"{row['prompt'][-1]['content']} [reward {row['reward']:.2f}, A {row['advantage']:+.2f}]: {' '.join(words)}"


# ---------------------------------------------------------------------------------------------------------------------
# The run folder.


class Run:
    """runs/NAME: config.json, metrics.jsonl, samples.jsonl, checkpoint-N/ after N rollouts, final/."""

    def __init__(self, config: Config):
        self.folder = Path(config.resume or config.output_dir)
        refuse_taken(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = asdict(replace(config, resume=None, output_dir=str(self.folder)))
        write_whole(self.folder / "config.json", json.dumps(saved, indent=1))
        self.step = last_checkpoint(self.folder) if config.resume else 0
        for name in (
            "metrics",
            "samples",
        ):  # lines written after the checkpoint will be written again
            path = self.folder / f"{name}.jsonl"
            rows = read_jsonl(path) if path.exists() else []
            write_whole(path, "".join(json.dumps(r) + "\n" for r in rows if r["step"] < self.step))

    def append(self, name: str, rows: list[dict]) -> None:
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def load(self, name: str, learner: Learner) -> None:
        """Take the weights, and where it has one the optimizer, from a checkpoint."""
        state = torch.load(self.folder / name / "trainer.pt", map_location="cpu")
        for weight, saved in zip(learner.weights, state["weights"], strict=True):
            weight.data.copy_(saved)
        if "optimizer" in state:
            learner.optimizer.load_state_dict(state["optimizer"])

    def save(
        self,
        name: str,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: bool = True,
    ) -> None:
        """Write to a draft and rename: a killed or failed save costs nothing that was there before."""
        draft = self.folder / f"{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            learner.policy.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            # No random states: each rollout seeds its own, and its number is also the prompt cursor.
            state = {"weights": [w.detach() for w in learner.weights]}
            torch.save(
                state | ({"optimizer": learner.optimizer.state_dict()} if optimizer else {}),
                draft / "trainer.pt",
            )
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(draft, ignore_errors=True)
            raise OSError(
                f"{self.folder / name} could not be written ({error}); what was saved before is intact."
            ) from error
        shutil.rmtree(self.folder / name, ignore_errors=True)
        draft.rename(self.folder / name)


def refuse_taken(config: Config) -> None:
    """Raise ValueError where --output_dir holds something: nothing is ever overwritten."""
    if not config.resume and (folder := Path(config.output_dir)).exists() and any(folder.iterdir()):
        raise ValueError(
            f"--output_dir {folder} is not empty. Choose another, or go on with it: --resume {folder}"
        )


def last_checkpoint(folder: Path) -> int:
    """N of the newest complete checkpoint-N in a run folder, 0 if there is none; drafts of a killed save do not count."""
    return max(
        (int(p.name[11:]) for p in folder.glob("checkpoint-*") if p.name[11:].isdigit()), default=0
    )


def write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a log; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


@contextmanager
def finish_rollout_on_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C asks to stop after the rollout in progress, so that weights and logs agree; a second one stops at once."""
    asked = threading.Event()

    def handle(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)
        tqdm.write(
            "Stopping after this rollout (Ctrl-C again: at once, going back to the last checkpoint)."
        )

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


# ---------------------------------------------------------------------------------------------------------------------
# The loop.


def step_seed(seed: int, step: int) -> int:
    return seed * 1_000_003 + step


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def choose_prompts(prompts: list[Messages], step: int, config: Config) -> list[Messages]:
    """The prompts of a rollout: a fresh shuffle an epoch, a function of seed and step alone, so resuming needs no cursor."""
    first = step * config.prompts_per_rollout
    places = (divmod(i, len(prompts)) for i in range(first, first + config.prompts_per_rollout))
    return [prompts[shuffled(len(prompts), config.seed, epoch)[i]] for epoch, i in places]


def starting_std(
    run: Run,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Messages],
    count: int = 128,
) -> float:
    """σ0: the median group std of the raw reward over `count` prompts under the policy RL starts from. [dev]"""
    saved = (
        run.folder / "sigma0.json"
    )  # measured once a run: a resumed one must not measure another
    if saved.exists():
        return json.loads(saved.read_text())
    config = replace(
        learner.config, seed=learner.config.seed + 1_000
    )  # other prompts than the first rollouts'
    spreads = []
    for step in tqdm(range(-(-count // config.prompts_per_rollout)), desc="σ0", dynamic_ncols=True):
        torch.manual_seed(step_seed(config.seed, step))
        rewards, _ = learner.reward_model.score(
            learner.sample(tokenizer, choose_prompts(prompts, step, config))
        )
        spreads.append(rewards.view(-1, config.group_size).std(-1, correction=0))
    sigma = torch.cat(spreads).median().item()
    write_whole(saved, json.dumps(sigma))
    return sigma


def train(
    policy: PreTrainedModel,
    reward_model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Messages],
    config: Config,
    gold: Callable[[PreTrainedTokenizerBase, Rollout], list[float]] | None = None,
    examples: list[tuple[Messages, str]] | None = None,
) -> list[dict[str, float]]:
    """Run `config.rollouts` rollouts, writing the run folder, and return the metrics of each.

    Args:
        policy: trained in place; its weights with requires_grad are what is learned.
        gold: the true reward of each response, where it is known (the tiny world); only logged.
        examples: (conversation, answer) pairs to fine-tune on before RL starts; None = start as it is.
    Raises:
        ValueError: a configuration that cannot work. FloatingPointError: a reward or gradient that is not finite.
    """
    check_config(config)
    check_machine(config)
    config = replace(config, output_dir=config.resume or config.output_dir or new_folder(config))
    run = Run(config)
    no_dropout(policy)
    vocabulary = shared_vocabulary(policy, tokenizer, reward_model.size)
    learner = Learner(policy, reward_model, vocabulary, config)
    if (run.folder / "start").exists():
        run.load("start", learner)
    elif examples:
        limit = config.max_prompt_tokens + config.max_response_tokens
        sft(
            policy, tokenizer, examples, vocabulary, micro_batch=config.micro_batch, max_tokens=limit,
            learning_rate=config.sft_learning_rate, seed=config.seed, **config.template,
        )  # fmt: skip
        run.save("start", learner, tokenizer, optimizer=False)
    learner.mark_start()
    torch.manual_seed(config.seed)
    checks = self_check(policy, tokenizer, vocabulary, prompts, config)
    sigma = (
        starting_std(run, learner, tokenizer, prompts)
        if config.length_penalty or config.advantage_std_floor
        else 0.0
    )
    if run.step:
        run.load(f"checkpoint-{run.step}", learner)
    policy.train()
    history = read_jsonl(run.folder / "metrics.jsonl")
    with finish_rollout_on_interrupt() as interrupted:
        bar = tqdm(
            range(run.step, config.rollouts),
            initial=run.step,
            total=config.rollouts,
            dynamic_ncols=True,
        )
        for step in bar:
            clock = Clock(str(policy.device))
            torch.manual_seed(step_seed(config.seed, step))
            with clock("total"):
                with clock("sample"):
                    rollout = learner.sample(tokenizer, choose_prompts(prompts, step, config))
                with clock("score"):
                    rewards, grad = reward_model.score(
                        rollout, with_grad=learner.grad_at_sample
                    )  # (B,), (B, T, D)
                    advantages, sharpness = learner.advantages(rollout, rewards, sigma)  # (1)
                with clock("update"):
                    reference = learner.reference_logp(rollout) if config.beta else None
                    scored = Scored(rollout, rewards, advantages, grad, reference, sharpness)
                    metrics, credit, inputs, logp = learner.update(
                        scored, step, clock
                    )  # (2) to (7)

            row = {"step": step, **rollout_metrics(scored, config.group_size)}
            if gold is not None:
                row["gold_reward"] = sum(gold(tokenizer, rollout)) / len(rollout)
            row |= {
                **metrics,
                "learning_rate": config.learning_rate,
                **credit_metrics(credit, inputs),
            }
            total = clock.seconds.pop("total") + sum(clock.seconds.values())
            row |= {
                f"time/{phase}": clock.seconds[phase]
                for phase in ("sample", "score", "credit", "update")
            }
            row["time/total"] = total
            row |= gpu_metrics(rollout, clock) | (checks if step == 0 else {})
            history.append(row)
            samples = list(
                sample_rows(scored, credit, inputs.computed("work"), logp.exp(), tokenizer, step)
            )
            run.append("metrics", [row])
            run.append("samples", samples)
            shown = {
                "reward": row["reward"],
                "gold": row.get("gold_reward"),
                "length": row["completions/mean_length"],
            }
            bar.set_postfix({k: f"{v:.2f}" for k, v in shown.items() if v is not None})
            if step % 25 == 24:
                bar.write(shaded(max(samples, key=lambda s: abs(s["advantage"]))), file=sys.stderr)
            done = step + 1
            if done % config.save_every == 0 or done == config.rollouts or interrupted.is_set():
                run.save(f"checkpoint-{done}", learner, tokenizer)
            if interrupted.is_set():
                tqdm.write(
                    f"Stopped after {done} rollouts. Go on with: python train.py --resume {run.folder}"
                )
                return history
    run.save("final", learner, tokenizer, optimizer=False)
    return history


def new_folder(config: Config) -> str:
    """runs/PRESET-CREDIT-sSEED, or that with the first free number behind it."""
    method = config.credit.rpartition(":")[2]
    base = f"runs/{config.preset}-{method}-s{config.seed}"
    names = [base, *(f"{base}-{n}" for n in range(2, 10_000))]
    return next(name for name in names if not Path(name).exists())


def settle(config: Config) -> Config:
    """Fill in what the flags left open: the tiny world's models and prompts."""
    if config.preset in tiny.WORLDS and config.reward_model is None:
        world = tiny.build(config.preset)
        own = {
            "policy": world / "policy",
            "reward_model": world / "reward_model",
            "prompts": world / "prompts.jsonl",
        }
        config = replace(
            config, **{k: str(v) for k, v in own.items() if getattr(config, k) is None}
        )
    for name in ("policy", "reward_model", "prompts"):
        if getattr(config, name) is None:
            raise ValueError(f"--{name} is missing: give a hub id or a path.")
    if config.credit == "oracle" and not tiny.is_world(Path(config.reward_model).parent):
        raise ValueError(
            "--credit oracle scores a text for every alternative of every token: it is for the tiny worlds only."
        )
    return config


def prepare(config: Config, trainable: bool = True) -> dict[str, object]:
    """What `train` takes: policy, reward model, tokenizer, prompts, gold and examples. Cheap refusals come first.

    Not `trainable`: the policy is only looked at, without adapters or gradients, and training's memory is not asked for.
    """
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    prompts = load_prompts(config, tokenizer)
    examples = load_examples(config) if config.sft_examples else None
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
        torch.cuda.reset_peak_memory_stats()
        if config.dtype == "bfloat16" and (config.lora_rank or not trainable):
            torch.set_float32_matmul_precision(
                "high"
            )  # TF32 holds bf16 factors exactly and sums in float32
    if trainable and (need := check_memory(config)) and config.device.startswith("cuda"):
        print(f"Estimated peak memory: {need / 2**30:.1f} GiB.")
    return {
        "policy": load_policy(config, trainable),
        "reward_model": load_reward_model(config, tokenizer),
        "tokenizer": tokenizer,
        "prompts": prompts,
        "gold": tiny.gold_rewards if tiny.is_world(Path(config.reward_model).parent) else None,
        "examples": examples,
    }


@contextmanager
def plain_errors() -> Iterator[None]:
    """A user's mistake, or a run that broke, as one line without a traceback."""
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. A run goes on from its last checkpoint with --resume.")
    except torch.OutOfMemoryError as error:
        smaller = (
            "--sample_batch, --reward_batch or --micro_batch smaller, or --gradient_checkpointing"
        )
        sys.exit(
            f"error: the GPU ran out of memory: {error}\nTry {smaller}; a run goes on with --resume."
        )


def main(argv: list[str] | None = None) -> None:
    with plain_errors():
        config = settle(parse(argv))
        config = replace(
            config, output_dir=config.resume or config.output_dir or new_folder(config)
        )
        refuse_taken(config)  # before anything is loaded
        if config.preset in tiny.WORLDS:
            transformers.utils.logging.disable_progress_bar()  # of loading and saving, which take no time here
        history = train(**prepare(config), config=config)
        report(history, config)


def report(history: list[dict], config: Config) -> None:
    """Where the run is, what it reached, and what to compare it with."""
    last = history[-10:]
    if not last:
        return
    means = {
        k: sum(r[k] for r in last) / len(last) for k in ("reward", "gold_reward") if k in last[0]
    }
    print(
        f"\nRun: {config.output_dir}   mean of the last {len(last)} rollouts: "
        + ", ".join(f"{k} {v:.2f}" for k, v in means.items())
    )
    if config.credit != "grpo":
        without = ["credit", "band", "grad_at", "output_dir", "resume", "device", "dtype"]
        if tiny.is_world(Path(config.reward_model).parent):
            without += ["policy", "reward_model", "prompts"]
        changed = {"preset": config.preset, **changed_flags(config, tuple(without))}
        others = [
            f"--{k}" if v is True else f"--{k} {v}"
            for k, v in changed.items()
            if (k, v) != ("preset", "tiny")
        ]
        print("Compare with GRPO:", " ".join(["python train.py --credit grpo", *others]))


if __name__ == "__main__":
    main()
