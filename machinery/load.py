"""From names to things in memory: tokenizers, a policy (with LoRA), a reward model.

And what is refused before anything is trained. Left out: what is done with them (train.py).
"""

import importlib
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import branch
import grpo
from credit import get_credit_method
from grpo import response_hidden, token_logprobs
from machinery import tiny
from machinery.config import Config
from machinery.prompts import check_conversations, load_examples, load_prompts
from machinery.rollout import (
    Messages,
    Rollout,
    Vocabulary,
    encode_prompt,
    no_dropout,
    sample,
    take,
)
from machinery.run import tracker_module
from reward_grad import RewardModel, read_score

# ----------------------------------------------------------------------------------------------
# From flags to what `train` takes.


def settle(config: Config) -> Config:
    """Fill in what the flags left open: device, dtype, the tiny world's models and prompts.

    Raises ValueError for a method, a device or a model that is not there.
    """
    config = with_absolute_paths(config)
    get_credit_method(config.credit)
    tracker_module(config.report_to)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {config.device}: torch sees no GPU here. "
            "Use --device cpu, or a CUDA build of torch."
        )
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    config = replace(config, device=device, dtype=dtype)
    if config.preset in tiny.WORLDS and config.reward_model is None:
        # Loading and saving take no time there, and their bars would hide ours.
        transformers.utils.logging.disable_progress_bar()
        world = tiny.build(config.preset)
        config = replace(
            config,
            policy=config.policy or str(world / "policy"),
            reward_model=str(world / "reward_model"),
            prompts=config.prompts or str(world / "prompts.jsonl"),
        )
        config = with_absolute_paths(config)
    for name in ("policy", "reward_model", "prompts"):
        if getattr(config, name) is None:
            raise ValueError(f"--{name} is missing: give a hub id or a path.")
    if config.credit == "oracle" and not in_world(config):
        raise ValueError(
            "--credit oracle scores a text for every alternative of every token: "
            "it is for the tiny worlds only."
        )
    return config


def with_absolute_paths(config: Config) -> Config:
    """Paths of things that are there as absolute ones, so a run goes on from any directory."""
    changed = {}
    for name in ("policy", "reward_model", "prompts", "chat_template"):
        value = getattr(config, name)
        if value and Path(value).exists():
            changed[name] = str(Path(value).resolve())
    file, _, method = config.credit.rpartition(":")
    if file and Path(file).exists():
        changed["credit"] = f"{Path(file).resolve()}:{method}"
    return replace(config, **changed)


def in_world(config: Config) -> bool:
    """Whether the reward model is a tiny world's, so that the true reward is known."""
    return tiny.is_world(Path(config.reward_model).parent)


def prepare(config: Config, trainable: bool = True) -> dict[str, object]:
    """What `train` takes: policy, reward model, tokenizer, prompts, gold and examples.

    Cheap refusals come first. Not `trainable`: the policy is only looked at, without adapters or
    gradients, and training's memory is not asked for.
    """
    tokenizer = load_policy_tokenizer(config)
    reward_tokenizer = AutoTokenizer.from_pretrained(config.reward_model)
    prompts = load_prompts(config, tokenizer)
    examples = load_examples(config) if config.sft_examples else None
    limits = []
    for flag in ("policy", "reward_model"):
        shape = text_config(getattr(config, flag))
        if not hasattr(shape, "num_attention_heads"):
            raise ValueError(f"--{flag} is no attention model (it is a {shape.model_type}).")
        limits.append(getattr(shape, "max_position_embeddings", None))
    check_conversations(prompts, config, tokenizer, reward_tokenizer, *limits)
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
        torch.cuda.reset_peak_memory_stats()
        if config.dtype == "bfloat16" and (config.lora_rank or not trainable):
            # TF32 holds bf16 factors exactly and sums in float32.
            torch.set_float32_matmul_precision("high")
    if trainable:
        check_memory(config)
    return {
        "policy": load_policy(config, trainable),
        "reward_model": load_reward_model(config, tokenizer),
        "tokenizer": tokenizer,
        "prompts": prompts,
        "gold": tiny.gold_rewards if in_world(config) else None,
        "examples": examples,
    }


# ----------------------------------------------------------------------------------------------
# Models.


def load_policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The policy's tokenizer with a chat template.

    --chat_template's, its own, or, where it has none (a base model), the reward model's: the two
    share their tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(config.policy)
    if config.chat_template:
        if not Path(config.chat_template).is_file():
            raise ValueError(f"--chat_template {config.chat_template}: there is no such file.")
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        tokenizer.chat_template = AutoTokenizer.from_pretrained(config.reward_model).chat_template
        print("--policy has no chat template (a base model): it takes the reward model's.")
    if not tokenizer.chat_template:
        raise ValueError(
            f"--policy {config.policy} has no chat template, and the reward model has none either. "
            "Give one with --chat_template FILE."
        )
    return tokenizer


def is_adapter(name: str) -> bool:
    """Whether a directory holds LoRA adapters rather than a model, as our own final/ may."""
    return (Path(name) / "adapter_config.json").exists()


def base_of(name: str) -> str:
    """The model that a directory's adapters belong to, or the name itself."""
    if not is_adapter(name):
        return name
    return import_peft().PeftConfig.from_pretrained(name).base_model_name_or_path


def text_config(name: str) -> PretrainedConfig:
    """The config of the language model, which a multimodal checkpoint nests."""
    return AutoConfig.from_pretrained(base_of(name)).get_text_config()


def load_policy(config: Config, trainable: bool = True) -> PreTrainedModel:
    """The policy on its device: float32, or frozen in --dtype with float32 LoRA adapters.

    A directory of adapters is loaded on its base; they are trained further with --lora_rank, and
    merged without. Not `trainable`: as it is in --dtype, to sample from only.
    """
    full = trainable and config.lora_rank == 0
    policy = load_model(
        AutoModelForCausalLM,
        config,
        "policy",
        base_of(config.policy),
        dtype=torch.float32 if full else getattr(torch, config.dtype),
    ).to(config.device)
    no_dropout(policy)
    if is_adapter(config.policy):
        adapt = import_peft().PeftModel.from_pretrained
        policy = adapt(policy, config.policy, is_trainable=trainable and not full)
        if full:
            policy = policy.merge_and_unload().requires_grad_(True)
    elif trainable and not full:
        policy = add_lora(policy, config.lora_rank, config.seed)
    if not trainable:
        return policy.requires_grad_(False).eval()
    if config.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.lora_rank:
            policy.enable_input_require_grads()
    return policy


def load_model(auto: type, config: Config, flag: str, name: str, **options: object) -> object:
    """from_pretrained with what all our models share, its errors with the flag's name."""
    try:
        return auto.from_pretrained(
            name,
            attn_implementation=config.attn_implementation,
            use_kernels=False,  # they would be code from the hub, and on a GPU only
            **options,
        )
    except ImportError as error:
        raise ValueError(
            f"--{flag} {name}, --attn_implementation {config.attn_implementation}: {error}"
        ) from error


def import_peft() -> object:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            "LoRA adapters need peft: pip install peft (or --lora_rank 0 for full fine-tuning)."
        ) from error


def add_lora(policy: PreTrainedModel, rank: int, seed: int = 0) -> PreTrainedModel:
    """Float32 adapters on all linear layers but the output head, alpha = 2 rank, no dropout."""
    peft = import_peft()
    torch.manual_seed(seed)
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(policy, lora)


def load_reward_model(config: Config, policy_tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    """The frozen reward model in --dtype. Refuses a checkpoint without a trained one-label head."""
    name = config.reward_model
    if is_adapter(name):
        raise ValueError(
            f"--reward_model {name} is a directory of adapters. Merge it first: "
            "peft.AutoPeftModelForSequenceClassification.from_pretrained(DIR, num_labels=1)"
            ".merge_and_unload().save_pretrained(OUT), and save the tokenizer there too."
        )
    try:
        model, report = load_model(
            AutoModelForSequenceClassification,
            config,
            "reward_model",
            name,
            dtype=getattr(torch, config.dtype),
            num_labels=1,  # some configs list no labels
            output_loading_info=True,
        )
    except RuntimeError as error:  # the head has another shape
        raise ValueError(
            f"--reward_model {name} must be a sequence classifier with one label: {error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"--reward_model {name} lacks {', '.join(missing[:3])}: its score head "
            "would be random. Give a trained reward model (a sequence classifier with one label)."
        )
    model = model.to(config.device).eval()
    if config.gradient_checkpointing:
        # It does nothing in eval(); with dropout off, train() changes nothing else.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    tokenizer = AutoTokenizer.from_pretrained(config.reward_model)
    return RewardModel(model, tokenizer, policy_tokenizer, reward_batch=config.reward_batch)


# ----------------------------------------------------------------------------------------------
# Will it fit?


def shape_of(config: PretrainedConfig, auto: type) -> tuple[int, int]:
    """The size of a model that is never allocated, from its config.

    Returns:
        its parameters, and the sum of in + out features of the linear layers that LoRA adapts.
    """
    with torch.device("meta"):
        model = auto.from_config(config)
    left_alone = (model.get_output_embeddings(), getattr(model, "score", None))
    features = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module not in left_alone:
            features += module.in_features + module.out_features
    return sum(p.numel() for p in model.parameters()), features


def memory_estimate(
    config: Config, policy: PretrainedConfig, reward: PretrainedConfig
) -> dict[str, float]:
    """Bytes by purpose. What is named "phase: ..." takes turns, so only the largest counts.

    Counted from the two model configs alone: weights exactly, activations as one checkpoint per
    layer plus the widest layer's own (or every layer's own without --gradient_checkpointing). The
    allocator's slack is not in it; allow a tenth.
    """
    bytes_of = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
    frozen_size = bytes_of[config.dtype]
    full = config.lora_rank == 0
    policy_size = 4 if full else frozen_size
    count, features = shape_of(policy, AutoModelForCausalLM)
    reward_count, _ = shape_of(reward, AutoModelForSequenceClassification)
    trained = count if full else config.lora_rank * features
    # A gradient, two moments of Adam, the KL's reference; adapters stand beside their base.
    copies = 3 + bool(config.beta) + (not full)
    length = config.max_prompt_tokens + config.max_response_tokens
    responses = config.prompts_per_rollout * config.group_size
    sampled = min(config.sample_batch, responses)
    scored = min(config.reward_batch, responses)
    updated = min(config.micro_batch, responses)
    credit = config.credit != "grpo"
    cached = 2 * policy.num_hidden_layers * key_width(policy) * policy_size  # per token

    # Logits, their softmax and gradients; rows of W and of the output matrix.
    strip_width = 5 * updated * config.max_response_tokens + 2 * policy.hidden_size
    strips = 4 * grpo.STRIP * strip_width
    update = activations(config, policy, updated * length, policy_size, adapters=not full)
    scoring = activations(config, reward, scored * length, frozen_size, adapters=False)
    gradient = responses * config.max_response_tokens * reward.hidden_size * 4
    return {
        "policy weights": count * policy_size,
        "reward model weights": reward_count * frozen_size,
        "adapters, gradients, optimizer": trained * 4 * copies,
        "sampling: KV cache": cached * length * sampled,
        "scoring: activations": scoring * credit,
        "update: activations and vocabulary strip": update + strips,
        "reward gradient": gradient * credit,
    }


def key_width(model: PretrainedConfig) -> int:
    """Numbers that a layer's keys have per token."""
    heads = getattr(model, "num_key_value_heads", model.num_attention_heads)
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return heads * head


def activations(
    config: Config, model: PretrainedConfig, tokens: int, bytes_each: int, adapters: bool
) -> float:
    """Bytes that a forward of so many tokens keeps for its backward."""
    inner = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    layer = tokens * (14 * model.hidden_size + (4 + 2 * adapters) * inner) * bytes_each
    if not config.gradient_checkpointing:
        return layer * model.num_hidden_layers
    return layer + tokens * model.hidden_size * bytes_each * model.num_hidden_layers


def total_estimate(parts: dict[str, float]) -> float:
    """Peak bytes: what is held, and the largest of the phases."""
    held = sum(amount for name, amount in parts.items() if ":" not in name)
    return held + max(amount for name, amount in parts.items() if ":" in name)


def check_memory(config: Config) -> float:
    """Peak bytes as estimated from the models' configs; on a GPU, what to do if they are too many.

    The estimate of a phase only warns. Raises ValueError where what is held throughout is already
    more than the GPU has free.
    """
    parts = memory_estimate(config, text_config(config.policy), text_config(config.reward_model))
    need = 1.1 * total_estimate(parts)
    if not config.device.startswith("cuda"):
        return need
    free = torch.cuda.mem_get_info(config.device)[0]
    held = sum(amount for name, amount in parts.items() if ":" not in name)
    if need > free:
        table = "".join(f"\n  {v / 2**30:6.1f} GiB  {name}" for name, v in parts.items())
        text = (
            f"This run may need about {need / 2**30:.1f} GiB, and the GPU has "
            f"{free / 2**30:.1f} GiB free. Try: {remedy(config, parts, need - free)}, "
            f"or --gradient_checkpointing if it is off.{table}"
        )
        if held > free:
            raise ValueError(text)
        print(f"warning: {text}")
    return need


def remedy(config: Config, parts: dict[str, float], lacking: float) -> str:
    """The flag that would make room for so many bytes."""
    phases = {name: amount for name, amount in parts.items() if ":" in name}
    worst = max(phases, key=phases.get)
    if phases[worst] < lacking:  # no batch size would be small enough
        if config.lora_rank == 0:
            return "--lora_rank 64"
        return "--max_response_tokens, or take a smaller model"
    flags = {"sampling": "sample_batch", "scoring": "reward_batch", "update": "micro_batch"}
    return f"--{flags[worst.partition(':')[0]]} (smaller)"


# ----------------------------------------------------------------------------------------------
# Is it sound?


@torch.no_grad()
def self_check(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    prompts: list[Messages],
    config: Config,
) -> dict[str, float]:
    """Is lm_head(hidden) all there is to the logits, and does training see what was sampled?

    Returns the mean absolute gaps in nats, for the log. Raises ValueError where one is beyond what
    the dtype explains.
    """
    dtype = next(policy.parameters()).dtype
    limit = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    few = sorted(prompts[:16], key=lambda m: len(encode_prompt(tokenizer, m, **config.template)))
    rollout = sample(
        policy,
        tokenizer,
        [few[0], few[-1]],  # the shorter one is padded, so wrong position ids would show
        vocabulary,
        1,
        min(16, config.max_response_tokens),
        config.temperature,
        keep_logp=True,
        **config.template,
    )
    mask = rollout.response_mask
    head = policy.get_output_embeddings().weight[: vocabulary.size]
    hidden = response_hidden(policy, rollout)[mask]  # (N, H)
    logp, _ = token_logprobs(hidden, head, rollout.response_ids[mask], config.temperature)  # (N,)
    from_logits = model_logprobs(policy, rollout, vocabulary.size, config.temperature)  # (N,)
    gaps = {
        "check/logits_gap": (from_logits - logp).abs().mean().item(),
        "check/sampler_gap": (rollout.sampler_logp[mask] - logp).abs().mean().item(),
    }
    if not gaps["check/logits_gap"] <= limit:
        raise ValueError(
            "--policy does more than lm_head(hidden) on the way to its logits (mean gap "
            f"{gaps['check/logits_gap']:.2g} nats): soft-capped or scaled logits are not supported."
        )
    if not gaps["check/sampler_gap"] <= limit:
        raise ValueError(
            "The sampler's log-probs differ from the training forward's by "
            f"{gaps['check/sampler_gap']:.2g} nats on average (limit {limit}): the loss would be "
            "about another distribution. Try --attn_implementation eager."
        )
    return gaps


def model_logprobs(
    policy: PreTrainedModel, rollout: Rollout, size: int, temperature: float
) -> Tensor:
    """log p(a) of a small rollout's N tokens from the model's own logits, dense: (N,)."""
    mask = rollout.response_mask
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)  # (B, P+T)
    seen = torch.cat([rollout.prompt_mask, mask], 1).long()  # (B, P+T)
    places = (seen.cumsum(-1) - 1).clamp(min=0)
    out = policy(input_ids=ids, attention_mask=seen, position_ids=places, use_cache=False)
    start = rollout.prompt_ids.shape[1] - 1
    logits = out.logits[:, start:-1, :size][mask].float() / temperature  # (N, V)
    return logits.log_softmax(-1).gather(1, rollout.response_ids[mask][:, None])[:, 0]


def check_gradient(reward_model: RewardModel, rollout: Rollout) -> None:
    """Refuse a reward model whose gradient is not the slope of its reward.

    Whatever breaks it (a kernel without a backward, say) breaks the whole method without a word.
    The reward is compared a little up and down the gradient at one token; in bf16 a small step
    drowns and a large one is no longer straight, so one of three must agree within a factor 1.5.
    """
    if not rollout.content_mask.any():
        return  # nothing but stop tokens: no token to move
    _, grad = reward_model.score(rollout, with_grad=True)  # (B, T, D)
    size = reward_model.embedding[rollout.response_ids].norm(dim=-1)  # (B, T)
    weight = grad.norm(dim=-1) * size  # the token whose change by a share of itself says most
    row, place = divmod(weight.argmax().item(), grad.shape[1])
    one = take(rollout, slice(row, row + 1))
    f = grad[row]
    inputs = reward_model.inputs(one)
    where = inputs.places[0, place]
    embeds = reward_model.embedding[inputs.ids]  # (1, L, D)
    slope = f[place].norm()
    direction = (f[place] / slope.clamp(min=torch.finfo(f.dtype).tiny)).to(embeds.dtype)  # (D,)
    measured = []
    for share in (0.02, 0.1, 0.3):
        step = share * embeds[0, where].norm()
        rewards = []
        for sign in (1, -1):
            moved = embeds.clone()
            moved[0, where] += sign * step * direction
            with torch.no_grad():
                last = inputs.mask.sum(-1, keepdim=True) - 1
                head = reward_model.head
                score = read_score(reward_model.backbone, head, moved, inputs.mask, last)
                rewards.append(score[0, 0].double())
        measured.append(((rewards[0] - rewards[1]) / (2 * step.double())).item())
    if not any(slope.item() / 1.5 < found < 1.5 * slope.item() for found in measured):
        raise ValueError(
            f"--reward_model: its gradient says {slope.item():.3g} where its reward moves by "
            f"{', '.join(f'{found:.3g}' for found in measured)} per unit. Credit from it would be "
            "wrong. Try --attn_implementation eager, or --dtype float32."
        )


LONG = 4096  # tokens that no check text has


def check_branching(reward_model: RewardModel, rollout: Rollout) -> None:
    """Refuse a reward model on which branches do not see what the edited text would.

    With a look-ahead beyond the end, (9) is exact substitution; compared on three tokens.
    """
    free = rollout.free_mask & rollout.content_mask  # (B, T)
    row = free.sum(-1).argmax().item()
    one = take(rollout, slice(row, row + 1))
    places = free[row].nonzero()[:3, 0]
    if not len(places):
        return
    tokens = torch.full((1, one.response_ids.shape[1], 1), -1, device=one.response_ids.device)
    tokens[0, places, 0] = one.response_ids[0, places].roll(1)
    found = branch.token_values(reward_model, one, tokens, lookahead=LONG)[0, places, 0]
    alone = reward_model.score(one)[0]
    exact = reward_model.substituted(one, places, tokens[0, places])[:, 0] - alone
    dtype = reward_model.embedding.dtype
    limit = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-2
    gap = (found - exact).abs().max().item()
    if not gap <= limit * (1 + exact.abs().max().item()):
        raise ValueError(
            f"--credit branch: branches of this reward model differ from the edited texts by "
            f"{gap:.2g}. Its attention is not plain softmax over all that came before."
        )
