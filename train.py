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
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

import tiny
from credit import Credit, CreditInputs, CreditMethod, get_credit_method
from datc import candidates, expected_embedding, magnitude_from, vocabulary_sums, work_from, work_on_support
from grpo import (
    ADVANTAGES,
    Messages,
    Rollout,
    Vocabulary,
    clipped_surrogate,
    k3_kl,
    length_window,
    no_dropout,
    response_advantages,
    response_hidden,
    response_mean,
    sample,
    shared_vocabulary,
    token_logprobs,
)
from load import check_memory, load_examples, load_policy, load_prompts, load_reward_model, load_tokenizer, self_check
from reward_grad import RewardModel
from sft import sft

# ---------------------------------------------------------------------------------------------------------------------
# Configuration.


def flag(default: object, help: str) -> object:
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**factory, metadata={"help": help})


@dataclass
class Config:
    """Every flag. The defaults are the tiny world's; --preset sets others, and any flag overrides its preset."""

    preset: str = flag("tiny", "tiny, tiny-sharp, qwen3-0.6b, or a setting of the paper: qwen3-14b-base, qwen3-14b, "
                               "llama-3.1-8b-base, llama-3.1-8b-instruct")  # fmt: skip
    policy: str | None = flag(None, "hub id or directory of the policy; default: the tiny world's")
    reward_model: str | None = flag(None, "hub id or directory of the reward model; default: the tiny world's")
    prompts: str | None = flag(None, "JSONL file, or hub data set as NAME:SPLIT; default: the tiny world's")
    prompt_column: str | None = flag(None, 'column with a string or a list of chat messages; default: "prompt" or "messages"')
    chat_template: str | None = flag(None, "file with a chat template for a policy that has none")
    enable_thinking: bool = flag(False, "let the chat template switch thinking on (Qwen3)")
    credit: str = flag("datc", "how the advantage is spread over tokens: a name registered in credit.py")
    band: float = flag(4.0, "λ: credit weights stay within [1/λ, λ]; 1 is GRPO")
    grad_at: list[float] = flag([1.0], "where the reward gradient is taken: 1 = the sample (paper), or points on the path from "
                                       "the expected embedding (0) to it, e.g. 0.25 0.75")  # fmt: skip
    advantage: str = flag("grpo", "a response's advantage: grpo, dr_grpo, rloo, rank_normal")
    rollouts: int = flag(100, "rollouts to train for; each is one optimizer step per epoch")
    prompts_per_rollout: int = flag(2, "prompts in a rollout")
    group_size: int = flag(4, "responses to each prompt, at least 2")
    max_prompt_tokens: int = flag(64, "longest prompt, in the policy's tokens with its template")
    max_response_tokens: int = flag(48, "where a response is cut")
    temperature: float = flag(1.0, "sampling temperature, also of the log-probs in the loss")
    missing_eos_penalty: float = flag(1.0, "subtracted from the reward of a response that was cut; 0 = none")
    length_penalty: float = flag(0.0, "scale of the soft length window, in σ0; 0 = none, 1 = [dev]")
    advantage_std_floor: float = flag(0.0, "smallest group std to divide by, in σ0; 0 = none, 0.5 = [dev]. σ0 = the "
                                           "starting policy's median group std, measured first where needed")  # fmt: skip
    sft_examples: int = flag(0, 'fine-tune first on this many "chosen" answers of --prompts; 0 = none')
    sft_learning_rate: float = flag(1e-4, "AdamW, decaying to 0 over two epochs of SFT")
    learning_rate: float = flag(6e-4, "AdamW, constant")
    weight_decay: float = flag(0.01, "AdamW")
    max_grad_norm: float = flag(1.0, "clip the gradient's norm to this")
    epsilon: float = flag(0.2, "clip range of the probability ratio; acts only with --epochs above 1")
    epochs: int = flag(1, "optimizer steps on one rollout")
    beta: float = flag(0.05, "weight of the KL to the policy RL starts from; 0 = no reference pass")
    lora_rank: int = flag(0, "train LoRA adapters of this rank (alpha = 2 rank); 0 = all weights, in float32")
    micro_batch: int = flag(8, "responses per forward and backward of the policy; changes memory, not the gradient")
    reward_batch: int = flag(8, "responses per pass of the reward model")
    sample_batch: int = flag(64, "responses generated at a time: what the KV cache must hold")
    gradient_checkpointing: bool = flag(False, "recompute activations in backward, in policy and reward model")
    attn_implementation: str = flag("sdpa", "sdpa, eager or flash_attention_2")
    dtype: str = flag("auto", "of frozen weights: bfloat16, float32; auto = bfloat16 on a GPU")
    device: str = flag("auto", "cuda, cpu; auto = a GPU if there is one")
    seed: int = flag(0, "all randomness of rollout n comes from (seed, n)")
    output_dir: str | None = flag(None, "run folder, must be new; default: runs/PRESET-CREDIT-sSEED, numbered if taken")
    save_every: int = flag(50, "rollouts between checkpoints")
    resume: str | None = flag(None, "run folder to go on with, from its last checkpoint and with its flags")

    @property
    def template(self) -> dict[str, object]:
        return {"enable_thinking": self.enable_thinking}


PAPER = {
    "prompts": "HuggingFaceH4/ultrafeedback_binarized:train_prefs",
    "rollouts": 250,
    "prompts_per_rollout": 8,
    "group_size": 8,
    "max_prompt_tokens": 2048,
    "max_response_tokens": 2048,
    "missing_eos_penalty": 0.0,
    "length_penalty": 1.0,
    "advantage_std_floor": 0.5,
    "learning_rate": 5e-5,
    "beta": 0.03,
    "lora_rank": 64,
    "micro_batch": 2,
    "reward_batch": 4,
    "sample_batch": 16,
    "gradient_checkpointing": True,
}
SKYWORK_QWEN3, SKYWORK_LLAMA = "Skywork/Skywork-Reward-V2-Qwen3-8B", "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {"dtype": "float32"},
    "tiny-sharp": {"dtype": "float32"},
    "qwen3-14b-base": {**PAPER, "policy": "Qwen/Qwen3-14B-Base", "reward_model": SKYWORK_QWEN3, "sft_examples": 10_000},
    "qwen3-14b": {**PAPER, "policy": "Qwen/Qwen3-14B", "reward_model": SKYWORK_QWEN3},
    "llama-3.1-8b-base": {**PAPER, "policy": "meta-llama/Llama-3.1-8B", "reward_model": SKYWORK_LLAMA, "sft_examples": 10_000},
    "llama-3.1-8b-instruct": {**PAPER, "policy": "meta-llama/Llama-3.1-8B-Instruct", "reward_model": SKYWORK_LLAMA},
    "qwen3-0.6b": {  # any 12 GB card
        **PAPER,
        "policy": "Qwen/Qwen3-0.6B",
        "reward_model": "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        "max_prompt_tokens": 512,
        "max_response_tokens": 512,
        "sample_batch": 32,
    },
}


def check_config(config: Config) -> None:
    """Raise ValueError, naming the flag and the fix, for what can be seen before anything is loaded."""
    get_credit_method(config.credit)
    if config.advantage not in ADVANTAGES:
        raise ValueError(f"--advantage {config.advantage!r} is unknown. Known: {', '.join(ADVANTAGES)}.")
    at_least = {"band": 1, "group_size": 2, "rollouts": 1, "prompts_per_rollout": 1, "max_response_tokens": 1, "epochs": 1}
    at_least |= {"micro_batch": 1, "reward_batch": 1, "sample_batch": 1, "save_every": 1, "beta": 0, "lora_rank": 0}
    at_least |= {"length_penalty": 0, "advantage_std_floor": 0, "missing_eos_penalty": 0, "sft_examples": 0}
    for name, least in at_least.items():
        if not getattr(config, name) >= least:
            raise ValueError(f"--{name} is {getattr(config, name)}; it must be at least {least}.")
    if config.dtype not in ("auto", "bfloat16", "float16", "float32", "float64"):
        raise ValueError(f"--dtype {config.dtype!r} is unknown. Known: bfloat16, float16, float32, float64, auto.")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {config.device}: torch sees no GPU here. Use --device cpu, or a CUDA build of torch.")
    for name in ("temperature", "learning_rate", "max_grad_norm", "epsilon", "max_prompt_tokens", "sft_learning_rate"):
        if not getattr(config, name) > 0:
            raise ValueError(f"--{name} is {getattr(config, name)}; it must be above 0.")
    if not config.grad_at or not all(0 <= a <= 1 for a in config.grad_at):
        raise ValueError(f"--grad_at is {config.grad_at}; give points between 0 (expected embedding) and 1 (the sample).")


def parse(argv: list[str] | None = None) -> Config:
    """Flags over the preset's (or the resumed run's) values over the defaults."""
    parser = HfArgumentParser(Config, description=__doc__.split("\n\n")[0])
    first, _ = parser.parse_known_args(argv)
    if first.resume:
        saved = Path(first.resume) / "config.json"
        if not saved.is_file():
            raise ValueError(f"--resume {first.resume}: no run is there (config.json is missing).")
        parser.set_defaults(**json.loads(saved.read_text()))
    elif first.preset in PRESETS:
        parser.set_defaults(**PRESETS[first.preset])
    else:
        raise ValueError(f"--preset {first.preset!r} is unknown. Presets: {', '.join(PRESETS)}.")
    (config,) = parser.parse_args_into_dataclasses(argv)
    gpu = torch.cuda.is_available()
    device = ("cuda" if gpu else "cpu") if config.device == "auto" else config.device
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if config.dtype == "auto" else config.dtype
    config = replace(config, device=device, dtype=dtype)
    check_config(config)
    return config


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

    def split(self, n: int) -> Iterator["Scored"]:
        for start, rollout in zip(range(0, len(self.rollout), n), self.rollout.split(n), strict=True):
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

    def __init__(self, policy: PreTrainedModel, reward_model: RewardModel, vocabulary: Vocabulary, config: Config):
        self.policy, self.reward_model, self.vocabulary, self.config = policy, reward_model, vocabulary, config
        self.method: CreditMethod = get_credit_method(config.credit)
        self.weights = [p for p in policy.parameters() if p.requires_grad]
        self.mark_start()
        group = {"params": self.weights, "lr": config.learning_rate, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.AdamW([group])
        self.needs_gradient = bool(self.method.needs & {"work", "work_magnitude", "reward_grad"})
        self.grad_at_sample = self.needs_gradient and set(config.grad_at) == {1.0}  # the scoring pass gives it

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

    def advantages(self, rollout: Rollout, rewards: Tensor, sigma: float = 0.0) -> tuple[Tensor, Tensor]:
        """A (1) of each response and its sharpness, both (B,), from the shaped reward, which changes A and never f_t."""
        c, lengths = self.config, rollout.response_mask.sum(-1)  # (B,)
        shaped = rewards - c.missing_eos_penalty * ~rollout.stopped - length_window(lengths, sigma * c.length_penalty)
        floor = sigma * c.advantage_std_floor
        return response_advantages(c.advantage, shaped, lengths, rollout.group_size, c.max_response_tokens, floor)

    def forward(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (N, H) of the N response tokens, logp (B, T) and entropy (B, T), 0 on padding."""
        mask = rollout.response_mask
        hidden = response_hidden(self.policy, rollout)[mask]  # (N, H)
        flat = token_logprobs(hidden, self.lm_head, rollout.response_ids[mask], self.config.temperature)
        return hidden, *(spread(values, mask) for values in flat)

    @torch.no_grad()
    def reference_logp(self, rollout: Rollout) -> Tensor:
        """(B, T) log-probs under the policy RL started from: the trained weights are swapped out for one pass."""
        now = [w.data for w in self.weights]
        for w, s in zip(self.weights, self.start, strict=True):
            w.data = s
        try:
            return torch.cat([self.forward(micro)[1] for micro in rollout.split(self.config.micro_batch)])
        finally:
            for w, data in zip(self.weights, now, strict=True):
                w.data = data

    @torch.no_grad()
    def evidence(self, part: Scored, hidden: Tensor, logp: Tensor, entropy: Tensor, step: int, generator) -> CreditInputs:
        """What the credit method asked for, (2) to (5), from a forward that the loss needs anyway."""
        rollout, model, needs, t = part.rollout, self.reward_model, self.method.needs, self.config.temperature
        mask, ids = rollout.response_mask, rollout.response_ids
        embedding = model.embedding[: self.vocabulary.size]  # (V, D)
        found = {}
        if self.needs_gradient:
            grad = part.reward_grad
            if grad is None:  # a point on the path needs the expected embedding, (2), and so the policy's forward
                expected = spread(expected_embedding(hidden, self.lm_head, embedding, t), mask)  # (B, T, D)
                grad = model.grad(rollout, expected, self.config.grad_at)
            found["reward_grad"] = grad
        if needs & {"work", "work_magnitude"}:
            sums = vocabulary_sums(hidden, self.lm_head, ids[mask], grad[mask], embedding, t)
            found["work"] = spread(work_from(sums), mask)
            found["work_magnitude"] = spread(magnitude_from(sums), mask)
        if "exact_work" in needs:
            found["exact_work"] = torch.cat([self.exact_work(r, h) for r, h in zip(
                rollout.split(1), spread(hidden, mask), strict=True)])  # fmt: skip
        if "prefix_scores" in needs:
            found["prefix_scores"] = model.prefix_scores(rollout)
        found |= {"entropy": entropy, "sampled_prob": logp.exp() * mask}
        if "hidden" in needs:
            found["hidden"] = spread(hidden, mask)
        if "token_embedding" in needs:
            found["token_embedding"] = embedding[ids] * mask[..., None]
        if "null_embedding" in needs:
            found["null_embedding"] = model.embedding[model.pad_id]
        return CreditInputs(
            response_ids=ids,
            response_mask=mask,
            free_mask=rollout.free_mask,
            advantages=part.advantages,
            rewards=part.rewards,
            band=self.config.band,
            step=step,
            generator=generator,
            sharpness=part.sharpness,
            **{name: value for name, value in found.items() if name in needs},
        )

    def exact_work(self, one: Rollout, hidden: Tensor, top_k: int = 8) -> Tensor:
        """(1, T) work of one response's free tokens from substituting the policy's top k tokens one by one; hidden (T, H)."""
        places = one.free_mask[0].nonzero()[:, 0]
        out = torch.zeros(one.free_mask.shape, dtype=torch.float64, device=hidden.device)
        if len(places):
            ids = one.response_ids[0, places]
            logits = hidden[places] @ self.lm_head.T / self.config.temperature  # (N, V)
            allowed, own, support = candidates(logits, ids, top_k)  # (N, S), (N,), (N, S)
            out[0, places] = work_on_support(support, own, self.reward_model.substituted(one, places, allowed))
        return out

    @torch.no_grad()
    def decide(self, micros: list[Scored], step: int, generator: torch.Generator) -> tuple[list[CreditInputs], Credit]:
        """The credit of a whole rollout in one call of the method, and what it read of each micro-batch."""
        inputs = [self.evidence(m, *self.forward(m.rollout), step, generator) for m in micros]
        return inputs, self.method(join(inputs))

    def update(self, scored: Scored, step: int, clock: Clock) -> tuple[dict[str, float], Credit, CreditInputs, Tensor]:
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
                inputs, whole = self.decide(micros, step, generator)
                credits = split_credit(whole, config.micro_batch)
        for epoch in range(config.epochs):
            for i, micro in enumerate(micros):
                mask = micro.rollout.response_mask
                hidden, logp, entropy = self.forward(micro.rollout)  # ONE policy forward serves credit and loss
                if epoch == 0:
                    old_logp.append(logp.detach())
                    if len(credits) <= i:
                        with clock("credit"), torch.no_grad():
                            inputs.append(self.evidence(micro, hidden, old_logp[i], entropy, step, generator))
                            credits.append(self.method(inputs[i]))
                loss, stats = clipped_surrogate(logp, old_logp[i], credits[i].token_advantages, mask, config.epsilon, count)
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
        return dict(totals), join(credits), join(inputs), torch.cat(old_logp)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """(N, ...) values of the N tokens in a (B, T) mask, put back in place: (B, T, ...), 0 elsewhere."""
    out = values.new_zeros(*mask.shape, *values.shape[1:])
    return out.masked_scatter(mask.view(*mask.shape, *[1] * (values.dim() - 1)), values)


def join(parts: list):
    """Micro-batches' CreditInputs, or Credits, as one; what has no batch dimension is the same in all."""
    first = {f.name: getattr(parts[0], f.name) for f in fields(parts[0])}
    batched = [name for name, value in first.items() if isinstance(value, Tensor) and name != "null_embedding"]
    return replace(parts[0], **{name: torch.cat([getattr(p, name) for p in parts]) for name in batched})


def split_credit(credit: Credit, n: int) -> list[Credit]:
    columns = [getattr(credit, f.name) for f in fields(Credit)]
    count = len(credit.token_advantages)
    return [Credit(*(None if v is None else v[i : i + n] for v in columns)) for i in range(0, count, n)]


# ---------------------------------------------------------------------------------------------------------------------
# What is logged.


def credit_metrics(credit: Credit, inputs: CreditInputs) -> dict[str, float]:
    """How uneven the weights are, and X: the gain that DATC's first-order model predicts over GRPO's."""
    if credit.weights is None:
        return {}
    mask, weights = inputs.response_mask, credit.weights.double()
    metrics = {"credit/ess_ratio": effective_share(weights, mask).mean().item(), "credit/max_weight": weights.max().item()}
    if credit.tau is not None:
        metrics["credit/tau_mean"] = credit.tau.mean().item()
    if inputs.work is not None:
        gain = inputs.advantages.double()[:, None] * (weights - 1) * inputs.work.double()
        metrics["credit/predicted_gain"] = response_mean(gain, mask, len(mask)).item()
    return metrics


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """(mean w)² / mean w² of each response, (B,): the share of its tokens that carry the credit; 1 where all weights are 0."""
    w = weights.masked_fill(~mask, 0.0)
    total, squares = w.sum(-1), w.square().sum(-1)
    return torch.where(squares > 0, total.square() / (squares * mask.sum(-1)).clamp(min=1e-300), 1.0)


def rollout_metrics(scored: Scored, group_size: int) -> dict[str, float]:
    groups = scored.rewards.double().view(-1, group_size)
    lengths = scored.rollout.response_mask.sum(-1).double()
    return {
        "reward": groups.mean().item(),
        "reward_std": groups.std(-1, correction=0).mean().item(),
        "frac_reward_zero_std": (scored.advantages.view(-1, group_size) == 0).all(-1).double().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": (~scored.rollout.stopped).double().mean().item(),
    }


def gpu_metrics(rollout: Rollout, clock: Clock) -> dict[str, float]:
    """On a GPU: tokens a second in the two phases that take the time, and the peak memory since the run began."""
    if not clock.cuda:
        return {}
    tokens = rollout.response_mask.sum().item()
    speed = {f"tokens_per_second/{phase}": tokens / clock.seconds[phase] for phase in ("sample", "update")}
    return {**speed, "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def sample_rows(
    scored: Scored, credit: Credit, work: Tensor | None, probs: Tensor, tokenizer: PreTrainedTokenizerBase, step: int
) -> Iterator[dict]:
    """The first prompt's group, token by token, for samples.jsonl."""
    rollout = scored.rollout
    for i in range(rollout.group_size):
        mask = rollout.response_mask[i]
        ids = rollout.response_ids[i][mask].tolist()
        columns = {"weight": credit.weights, "advantage": credit.token_advantages, "work": work, "p": probs}
        yield {
            "step": step,
            "prompt": rollout.messages[i],
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "reward": scored.rewards[i].item(),
            "advantage": scored.advantages[i].item(),
            "tokens": [tokenizer.decode([t]) for t in ids],
            **{f"token_{k}": [round(v, 6) for v in c[i][mask].tolist()] for k, c in columns.items() if c is not None},
        }


def shaded(row: dict) -> str:
    """A sample for the terminal: tokens shaded by weight, orange where they are reinforced and blue where suppressed."""
    weights = row.get("token_weight", [1.0] * len(row["tokens"]))
    colour = (255, 140, 0) if row["advantage"] > 0 else (60, 120, 255)
    words = []
    for text, w in zip(row["tokens"], weights, strict=True):
        strength = min(w / 4, 1.0) if row["advantage"] else 0.0
        back = ";".join(str(round(255 + (c - 255) * strength)) for c in colour)
        words.append(f"\033[30;48;2;{back}m{text}\033[0m" if sys.stderr.isatty() else f"{text}({w:.1f})")
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
        for name in ("metrics", "samples"):  # lines written after the checkpoint will be written again
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

    def save(self, name: str, learner: Learner, tokenizer: PreTrainedTokenizerBase, optimizer: bool = True) -> None:
        """Write to a draft and rename: a killed or failed save costs nothing that was there before."""
        draft = self.folder / f"{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            learner.policy.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            # No random states: each rollout seeds its own, and its number is also the prompt cursor.
            state = {"weights": [w.detach() for w in learner.weights]}
            torch.save(state | ({"optimizer": learner.optimizer.state_dict()} if optimizer else {}), draft / "trainer.pt")
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(draft, ignore_errors=True)
            raise OSError(f"{self.folder / name} could not be written ({error}); what was saved before is intact.") from error
        shutil.rmtree(self.folder / name, ignore_errors=True)
        draft.rename(self.folder / name)


def refuse_taken(config: Config) -> None:
    """Raise ValueError where --output_dir holds something: nothing is ever overwritten."""
    if not config.resume and (folder := Path(config.output_dir)).exists() and any(folder.iterdir()):
        raise ValueError(f"--output_dir {folder} is not empty. Choose another, or go on with it: --resume {folder}")


def last_checkpoint(folder: Path) -> int:
    """N of the newest complete checkpoint-N in a run folder, 0 if there is none; drafts of a killed save do not count."""
    return max((int(p.name[11:]) for p in folder.glob("checkpoint-*") if p.name[11:].isdigit()), default=0)


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
        tqdm.write("Stopping after this rollout (Ctrl-C again: at once, going back to the last checkpoint).")

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
    run: Run, learner: Learner, tokenizer: PreTrainedTokenizerBase, prompts: list[Messages], count: int = 128
) -> float:
    """σ0: the median group std of the raw reward over `count` prompts under the policy RL starts from. [dev]"""
    saved = run.folder / "sigma0.json"  # measured once a run: a resumed one must not measure another
    if saved.exists():
        return json.loads(saved.read_text())
    config = replace(learner.config, seed=learner.config.seed + 1_000)  # other prompts than the first rollouts'
    spreads = []
    for step in tqdm(range(-(-count // config.prompts_per_rollout)), desc="σ0", dynamic_ncols=True):
        torch.manual_seed(step_seed(config.seed, step))
        rewards, _ = learner.reward_model.score(learner.sample(tokenizer, choose_prompts(prompts, step, config)))
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
    sigma = starting_std(run, learner, tokenizer, prompts) if config.length_penalty or config.advantage_std_floor else 0.0
    if run.step:
        run.load(f"checkpoint-{run.step}", learner)
    policy.train()
    history = read_jsonl(run.folder / "metrics.jsonl")
    with finish_rollout_on_interrupt() as interrupted:
        bar = tqdm(range(run.step, config.rollouts), initial=run.step, total=config.rollouts, dynamic_ncols=True)
        for step in bar:
            clock = Clock(str(policy.device))
            torch.manual_seed(step_seed(config.seed, step))
            with clock("total"):
                with clock("sample"):
                    rollout = learner.sample(tokenizer, choose_prompts(prompts, step, config))
                with clock("score"):
                    rewards, grad = reward_model.score(rollout, with_grad=learner.grad_at_sample)  # (B,), (B, T, D)
                    advantages, sharpness = learner.advantages(rollout, rewards, sigma)  # (1)
                with clock("update"):
                    reference = learner.reference_logp(rollout) if config.beta else None
                    scored = Scored(rollout, rewards, advantages, grad, reference, sharpness)
                    metrics, credit, inputs, logp = learner.update(scored, step, clock)  # (2) to (7)

            row = {"step": step, **rollout_metrics(scored, config.group_size)}
            if gold is not None:
                row["gold_reward"] = sum(gold(tokenizer, rollout)) / len(rollout)
            row |= {**metrics, "learning_rate": config.learning_rate, **credit_metrics(credit, inputs)}
            total = clock.seconds.pop("total") + sum(clock.seconds.values())
            row |= {f"time/{phase}": clock.seconds[phase] for phase in ("sample", "score", "credit", "update")}
            row["time/total"] = total
            row |= gpu_metrics(rollout, clock) | (checks if step == 0 else {})
            history.append(row)
            samples = list(sample_rows(scored, credit, inputs.work, logp.exp(), tokenizer, step))
            run.append("metrics", [row])
            run.append("samples", samples)
            shown = {"reward": row["reward"], "gold": row.get("gold_reward"), "length": row["completions/mean_length"]}
            bar.set_postfix({k: f"{v:.2f}" for k, v in shown.items() if v is not None})
            if step % 25 == 24:
                bar.write(shaded(max(samples, key=lambda s: abs(s["advantage"]))), file=sys.stderr)
            done = step + 1
            if done % config.save_every == 0 or done == config.rollouts or interrupted.is_set():
                run.save(f"checkpoint-{done}", learner, tokenizer)
            if interrupted.is_set():
                tqdm.write(f"Stopped after {done} rollouts. Go on with: python train.py --resume {run.folder}")
                return history
    run.save("final", learner, tokenizer, optimizer=False)
    return history


def new_folder(config: Config) -> str:
    """runs/PRESET-CREDIT-sSEED, or that with the first free number behind it."""
    base = f"runs/{config.preset}-{config.credit}-s{config.seed}"
    names = [base, *(f"{base}-{n}" for n in range(2, 10_000))]
    return next(name for name in names if not Path(name).exists())


def settle(config: Config) -> Config:
    """Fill in what the flags left open: the tiny world's models and prompts."""
    if config.preset in tiny.WORLDS and config.reward_model is None:
        world = tiny.build(config.preset)
        own = {"policy": world / "policy", "reward_model": world / "reward_model", "prompts": world / "prompts.jsonl"}
        config = replace(config, **{k: str(v) for k, v in own.items() if getattr(config, k) is None})
    for name in ("policy", "reward_model", "prompts"):
        if getattr(config, name) is None:
            raise ValueError(f"--{name} is missing: give a hub id or a path.")
    if config.credit == "oracle" and not tiny.is_world(Path(config.reward_model).parent):
        raise ValueError("--credit oracle scores a text for every alternative of every token: it is for the tiny worlds only.")
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
            torch.set_float32_matmul_precision("high")  # TF32 holds bf16 factors exactly and sums in float32
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
        smaller = "--sample_batch, --reward_batch or --micro_batch smaller, or --gradient_checkpointing"
        sys.exit(f"error: the GPU ran out of memory: {error}\nTry {smaller}; a run goes on with --resume.")


def main(argv: list[str] | None = None) -> None:
    with plain_errors():
        config = settle(parse(argv))
        config = replace(config, output_dir=config.resume or config.output_dir or new_folder(config))
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
    means = {k: sum(r[k] for r in last) / len(last) for k in ("reward", "gold_reward") if k in last[0]}
    print(
        f"\nRun: {config.output_dir}   mean of the last {len(last)} rollouts: "
        + ", ".join(f"{k} {v:.2f}" for k, v in means.items())
    )
    if config.credit != "grpo":
        plain = replace(Config(), **PRESETS[config.preset])
        own = {"credit", "band", "grad_at", "output_dir", "resume", "device", "dtype"}
        own |= {"policy", "reward_model", "prompts"} if tiny.is_world(Path(config.reward_model).parent) else set()
        changed = {f.name: getattr(config, f.name) for f in fields(Config) if getattr(config, f.name) != getattr(plain, f.name)}
        changed = {"preset": config.preset, **{k: v for k, v in changed.items() if k not in own}}
        flags = [f"--{k}" if v is True else f"--{k} {v}" for k, v in changed.items() if (k, v) != ("preset", "tiny")]
        print("Compare with GRPO:", " ".join(["python train.py --credit grpo", *flags]))


if __name__ == "__main__":
    main()
