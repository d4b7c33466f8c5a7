"""Every flag of train.py, the presets, and what can be refused before torch is even imported.

One dataclass, `Config`, holds all flags. It is put together from small dataclasses, one per topic,
because that is how `--help` shows them. Names are TRL's where the meaning is the same.
"""

import argparse
import difflib
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from transformers import HfArgumentParser


def flag(default: object, help: str) -> object:
    """A dataclass field with a help text; list defaults are copied for every instance."""
    metadata = {"help": help}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Experiment:
    _argument_group_name = "what to run"

    preset: str = flag(
        "tiny",
        "tiny, tiny-sharp, qwen3-0.6b, or a setting of the paper: qwen3-14b-base, qwen3-14b, "
        "llama-3.1-8b-base, llama-3.1-8b-instruct; any other flag overrides it",
    )
    policy: str | None = flag(None, "hub id or directory of the policy; default: the tiny world's")
    reward_model: str | None = flag(
        None, "hub id or directory of the reward model; default: the tiny world's"
    )
    prompts: str | None = flag(
        None, "JSONL file, or hub data set as NAME:SPLIT; default: the tiny world's"
    )
    prompt_column: str | None = flag(
        None, 'column with a string or a list of chat messages; default: "prompt" or "messages"'
    )
    chat_template: str | None = flag(None, "file with a chat template for a policy that has none")
    enable_thinking: bool = flag(False, "let the chat template switch thinking on (Qwen3)")
    seed: int = flag(0, "all randomness of rollout n comes from (seed, n)")


@dataclass
class CreditFlags:
    _argument_group_name = "the credit of a token, (1) to (6) and (9)"

    credit: str = flag(
        "datc",
        "how the advantage is spread over tokens: a method of credit.py or baselines.py, "
        "or FILE.py:NAME for one of your own",
    )
    band: float = flag(4.0, "λ: credit weights stay within [1/λ, λ]; 1 is GRPO")
    grad_at: list[float] = flag(
        [1.0],
        "where the reward gradient is taken: 1 = the sample (paper), or points on the path from "
        "the expected embedding (0) to it, e.g. 0.25 0.75",
    )
    lookahead: int = flag(2, "--credit branch: sampled tokens that follow a branch exactly (9)")
    branches: int = flag(2, "--credit branch: alternatives per token, the policy's likeliest")
    branch_prob: float = flag(0.02, "--credit branch: smallest probability of an alternative")
    advantage: str = flag("grpo", "a response's advantage: grpo, dr_grpo, rloo, rank_normal")
    missing_eos_penalty: float = flag(
        1.0, "subtracted from the reward of a response that was cut; 0 = none"
    )
    length_penalty: float = flag(
        0.0, "scale of the soft length window, in σ0; 0 = none, 1 = the paper's presets"
    )
    advantage_std_floor: float = flag(
        0.0,
        "smallest group standard deviation to divide by, in σ0; 0 = none, 0.5 in the paper's "
        "presets; σ0 = the starting policy's median group standard deviation, measured first where "
        "needed",
    )


@dataclass
class Rollouts:
    _argument_group_name = "rollouts"

    rollouts: int = flag(100, "rollouts to train for; each is one optimizer step per epoch")
    prompts_per_rollout: int = flag(2, "prompts in a rollout")
    group_size: int = flag(4, "responses to each prompt, at least 2")
    max_prompt_tokens: int = flag(64, "longest prompt, in the policy's tokens with its template")
    max_response_tokens: int = flag(48, "where a response is cut")
    temperature: float = flag(1.0, "sampling temperature, also of the log-probs in the loss")


@dataclass
class Update:
    _argument_group_name = "the update, (7)"

    learning_rate: float = flag(6e-4, "AdamW, constant")
    weight_decay: float = flag(0.01, "AdamW's, on all trained parameters")
    max_grad_norm: float = flag(1.0, "clip the gradient's norm to this")
    epsilon: float = flag(0.2, "clip range of the probability ratio; acts with --epochs above 1")
    epochs: int = flag(1, "optimizer steps on one rollout")
    beta: float = flag(0.05, "weight of the KL to the policy RL starts from; 0 = no reference pass")
    lora_rank: int = flag(
        0, "train LoRA adapters of this rank (alpha = 2 rank); 0 = all weights, in float32"
    )
    sft_examples: int = flag(
        0, 'fine-tune first on this many "chosen" answers of --prompts; 0 = none'
    )
    sft_learning_rate: float = flag(1e-4, "AdamW, decaying to 0 over two epochs of SFT")


@dataclass
class Machine:
    _argument_group_name = "the machine (nothing here changes what is learned)"

    device: str = flag("auto", "cuda, cpu; auto = a GPU if there is one")
    dtype: str = flag("auto", "of frozen weights: bfloat16, float32; auto = bfloat16 on a GPU")
    attn_implementation: str = flag("sdpa", "sdpa, eager or flash_attention_2")
    gradient_checkpointing: bool = flag(
        False, "recompute activations in backward, in policy and reward model"
    )
    micro_batch: int = flag(8, "responses per forward and backward of the policy")
    reward_batch: int = flag(8, "responses per pass of the reward model")
    sample_batch: int = flag(64, "responses generated at a time: what the KV cache must hold")


@dataclass
class Folder:
    _argument_group_name = "the run folder"

    output_dir: str | None = flag(
        None, "run folder, must be new; default: runs/PRESET-CREDIT-sSEED, numbered if taken"
    )
    save_every: int = flag(50, "rollouts between checkpoints")
    resume: str | None = flag(
        None, "run folder to go on with, from its last checkpoint and with its flags"
    )
    report_to: str = flag(
        "none", "where metrics go beside metrics.jsonl: none, tensorboard, wandb, trackio"
    )


GROUPS = (Experiment, CreditFlags, Rollouts, Update, Machine, Folder)


@dataclass
class Config(Folder, Machine, Update, Rollouts, CreditFlags, Experiment):
    """Every flag. The defaults are the tiny world's."""

    @property
    def template(self) -> dict[str, object]:
        """What the chat template is told, beside the messages."""
        return {"enable_thinking": self.enable_thinking}


# ----------------------------------------------------------------------------------------------
# Presets.

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
QWEN3 = {**PAPER, "reward_model": "Skywork/Skywork-Reward-V2-Qwen3-8B"}
LLAMA3 = {**PAPER, "reward_model": "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {"dtype": "float32"},
    "tiny-sharp": {"dtype": "float32"},
    "qwen3-14b-base": {**QWEN3, "policy": "Qwen/Qwen3-14B-Base", "sft_examples": 10_000},
    "qwen3-14b": {**QWEN3, "policy": "Qwen/Qwen3-14B"},
    "llama-3.1-8b-base": {**LLAMA3, "policy": "meta-llama/Llama-3.1-8B", "sft_examples": 10_000},
    "llama-3.1-8b-instruct": {**LLAMA3, "policy": "meta-llama/Llama-3.1-8B-Instruct"},
    "qwen3-0.6b": {  # any 12 GB card
        **PAPER,
        "policy": "Qwen/Qwen3-0.6B",
        "reward_model": "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        "max_prompt_tokens": 512,
        "max_response_tokens": 512,
        "sample_batch": 32,
    },
}

# ----------------------------------------------------------------------------------------------
# What may stand in a flag.

AT_LEAST = {
    "band": 1,
    "group_size": 2,
    "rollouts": 1,
    "prompts_per_rollout": 1,
    "max_response_tokens": 1,
    "epochs": 1,
    "micro_batch": 1,
    "reward_batch": 1,
    "sample_batch": 1,
    "save_every": 1,
    "beta": 0,
    "lora_rank": 0,
    "length_penalty": 0,
    "advantage_std_floor": 0,
    "missing_eos_penalty": 0,
    "sft_examples": 0,
    "lookahead": 0,
    "branches": 1,
    "branch_prob": 0,
}
ABOVE_ZERO = (
    "temperature",
    "learning_rate",
    "max_grad_norm",
    "epsilon",
    "max_prompt_tokens",
    "sft_learning_rate",
)
MAX_SEED = 10**9
CHOICES = {
    "advantage": ("grpo", "dr_grpo", "rloo", "rank_normal"),
    "dtype": ("bfloat16", "float16", "float32", "float64", "auto"),
    "report_to": ("none", "tensorboard", "wandb", "trackio"),
}


def check_config(config: Config) -> None:
    """Raise ValueError, naming the flag and the fix, for what the flags alone show to be wrong."""
    for name, least in AT_LEAST.items():
        value = getattr(config, name)
        if not value >= least:
            raise ValueError(f"--{name} is {value}; it must be at least {least}.")
    for name in ABOVE_ZERO:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"--{name} is {value}; it must be above 0.")
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"--{name} {value!r} is unknown. Known: {', '.join(known)}.")
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"--seed is {config.seed}; it must be from 0 to {MAX_SEED}.")
    if not config.grad_at or not all(0 <= alpha <= 1 for alpha in config.grad_at):
        raise ValueError(
            f"--grad_at is {config.grad_at}; "
            "give points between 0 (expected embedding) and 1 (the sample)."
        )


# What a resumed run may be given anew; anything else would be another experiment.
MAY_CHANGE = {
    *(one.name for one in fields(Machine)),
    *("rollouts", "learning_rate", "weight_decay", "max_grad_norm"),
    *("save_every", "report_to", "resume"),
}


def check_resumed(config: Config, saved: dict[str, object]) -> None:
    """Raise ValueError, by name, for flags given to --resume that make another experiment."""
    told = []
    for one in fields(Config):
        value = getattr(config, one.name)
        if one.name not in MAY_CHANGE and value != saved.get(one.name, value):
            told.append(f"--{one.name} {value} (the run has {saved[one.name]})")
    if told:
        raise ValueError(
            f"--resume {config.resume} goes on with that run's flags; this would be another "
            f"experiment: {', '.join(told)}. Start a new run for it."
        )


# Types of eval.py's flags, so that argparse refuses the rest by the flag's name.


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def not_negative(text: str) -> int:
    """A whole number, 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return number


def seed_number(text: str) -> int:
    """A whole number from which all seeds of a run can be calculated."""
    number = int(text)
    if not 0 <= number <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SEED}, not {text}")
    return number


def path_points(text: str) -> str:
    """Points of a path, as 0.25,0.75: each from 0 (expected embedding) to 1 (the sample)."""
    for alpha in text.split(","):
        if not 0 <= float(alpha) <= 1:
            raise argparse.ArgumentTypeError(f"points lie between 0 and 1, not at {alpha}")
    return text


def branching_pair(text: str) -> str:
    """BRANCHES,LOOKAHEAD of (9)."""
    branches, _, lookahead = text.partition(",")
    positive(branches)
    not_negative(lookahead)
    return text


def show_help(description: str) -> None:
    """Answer --help and leave, where it is asked for."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        title = description.partition("\n")[0] + " Equation numbers: README.md."
        parser = make_parser(title)
        first, _ = parser.parse_known_args([a for a in sys.argv[1:] if a not in ("-h", "--help")])
        parser.set_defaults(**PRESETS.get(first.preset, {}))
        parser.parse_args(["--help"])


def make_parser(description: str = "") -> HfArgumentParser:
    usage = "python train.py [--FLAG VALUE ...]"
    return HfArgumentParser(GROUPS, usage=usage, description=description, allow_abbrev=False)


def parse(argv: list[str] | None = None) -> Config:
    """Flags over the preset's (or the resumed run's) values over the defaults.

    Raises ValueError for an unknown preset or flag, a value out of range, or a run that is not
    there. Device and dtype may still be "auto": `settle` in machinery/load.py knows the machine.
    """
    parser = make_parser()
    first, _ = parser.parse_known_args(argv)
    saved = read_flags(Path(first.resume)) if first.resume else {}
    if first.resume:
        parser.set_defaults(**saved)
    elif first.preset in PRESETS:
        parser.set_defaults(**PRESETS[first.preset])
    else:
        known = ", ".join(PRESETS)
        raise ValueError(f"--preset {first.preset!r} is unknown. Presets: {known}.")
    *groups, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    refuse_unknown(unknown, [one.name for one in fields(Config)])
    values = {}
    for group in groups:
        values |= asdict(group)
    config = Config(**values)
    check_config(config)
    check_resumed(config, saved)
    return config


def refuse_unknown(flags: list[str], known: list[str]) -> None:
    """Raise ValueError for flags that nobody reads, with the nearest that exists."""
    if not flags:
        return
    name = next((flag for flag in flags if flag.startswith("-")), flags[0])
    near = difflib.get_close_matches(name.lstrip("-").partition("=")[0], known, 1)
    hint = f" Did you mean --{near[0]}?" if near else ""
    raise ValueError(f"Unknown flags: {' '.join(flags)}.{hint} See --help.")


def read_flags(folder: Path) -> dict[str, object]:
    """The flags that a run folder was started with.

    Raises ValueError where no run is there, or one of a version with other flags.
    """
    if is_run_folder(folder.parent) and not is_run_folder(folder):
        raise ValueError(f"{folder} is a part of a run; give the run folder: {folder.parent}")
    saved = folder / "config.json"
    if not saved.is_file():
        raise ValueError(f"--resume {folder}: no run is there (config.json is missing).")
    try:
        flags = json.loads(saved.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{saved} is no JSON: {error}") from error
    known = {one.name for one in fields(Config)}
    unknown = sorted(set(flags) - known)
    if unknown:
        raise ValueError(
            f"{saved} has flags that this version does not know: {', '.join(unknown)}. "
            "Use the version that wrote it."
        )
    flags["resume"] = None
    flags["output_dir"] = str(folder)  # it may have been moved
    return flags


def is_run_folder(folder: Path) -> bool:
    """Whether a config.json is there that holds our flags (a model directory has one too)."""
    try:
        flags = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(flags, dict) and "prompts_per_rollout" in flags


def changed_flags(config: Config, without: tuple[str, ...] = ()) -> dict[str, object]:
    """The flags that differ from their preset's, by name."""
    plain = replace(Config(), **PRESETS[config.preset])
    changed = {}
    for one in fields(Config):
        value = getattr(config, one.name)
        if value != getattr(plain, one.name) and one.name not in without:
            changed[one.name] = value
    return changed


def as_arguments(values: dict[str, object]) -> str:
    """Flags as one would type them."""
    words = []
    for name, value in values.items():
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(one) for one in value]
        elif value is not True:
            words.append(shlex.quote(str(value)))
    return " ".join(words)
