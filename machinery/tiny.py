"""A world small enough for a CPU: tokenizer, policy, reward model, prompts, hidden preferences.

Made to behave like text: most tokens are grammar, a few are decisions, and the reward model, which
has only seen pairwise choices of a hidden "person", can be fooled. Because the person is known, a
run reports the GOLD reward beside the learned one. Everything is saved as ordinary Hugging Face
directories and loaded by the code that loads an 8B pair.
"""

import hashlib
import json
import random
import shutil
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from machinery.rollout import Messages, Rollout, pad, shared_vocabulary
from machinery.sft import sft

TOPICS = (
    "cat dog horse bird train boat bridge house garden river hill cake bread soup song film".split()
)
HELD_OUT = "storm city book clock".split()
NOUNS = TOPICS + HELD_OUT
KIND = "lovely kind warm bright gentle happy sweet fine".split()
RUDE = "ugly stupid nasty awful dirty boring bad cruel".split()
PLAIN = (
    "red blue green old new small large long short round flat wooden heavy light dark plain".split()
)
ADJECTIVES = KIND + RUDE + PLAIN
FUNCTION = "the is and a . it was we saw there one with".split()
FORMS = (
    "the N is A and A .",
    "it was a A N .",
    "we saw the A N and it was A .",
    "there was one A N with a A N .",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """What a world is made of; a change here or in this file builds a new one.

    `rms_norm_eps` of the reward model sets how smooth it is in its input embeddings, and so how
    faithful its first-order gradient is. 1e-6 is what real models use.
    """

    rms_norm_eps: float = 1e-3
    hidden_size: int = 96
    layers: int = 2
    sft_texts: int = 3000
    reward_steps: int = 450
    reward_topics: int = 16
    seed: int = 0


WORLDS = {"tiny": Recipe(), "tiny-sharp": Recipe(rms_norm_eps=1e-6)}


# ----------------------------------------------------------------------------------------------
# The person: what is really wanted.


def gold_reward(topic: str, words: list[str], stopped: bool = True) -> float:
    """The hidden preference: kind words on the topic, in sentences; about -12 to 5.

    5 × the mean over content words (kind +1, rude -1.5, plain 0, the topic +1, another noun -1)
    - 5 × (adjectives right after a content word + immediate repeats) / length; -5 without any
    content word; -1 for a cut response.
    """
    value = dict.fromkeys(KIND, 1.0)
    value |= dict.fromkeys(RUDE, -1.5)
    value |= dict.fromkeys(PLAIN, 0.0)
    value |= dict.fromkeys(NOUNS, -1.0)
    value[topic] = 1.0
    content = [value[word] for word in words if word in value]
    cut = 0.0 if stopped else 1.0
    if not content:
        return -5.0 - cut
    heaped = 0
    for before, word in pairwise(words):
        heaped += before in value and word in ADJECTIVES
        heaped += before == word
    return 5.0 * sum(content) / len(content) - 5.0 * heaped / len(words) - cut


def gold_rewards(tokenizer: PreTrainedTokenizerFast, rollout: Rollout) -> list[float]:
    """The gold reward of each response of a rollout."""
    rewards = []
    for i, messages in enumerate(rollout.messages):
        ids = rollout.response_ids[i][rollout.content_mask[i]].tolist()
        topic = messages[-1]["content"].split()[-1]
        words = tokenizer.convert_ids_to_tokens(ids)
        rewards.append(gold_reward(topic, words, bool(rollout.stopped[i])))
    return rewards


# ----------------------------------------------------------------------------------------------
# Texts.


def prompt(topic: str) -> Messages:
    return [{"role": "user", "content": f"describe the {topic}"}]


def sentences(rng: random.Random, topic: str, count: int) -> list[str]:
    """Words of `count` sentences.

    The shares of topic, kind and rude words are drawn once for the whole text.
    """
    on_topic = rng.random()
    kind = rng.random()
    rude = rng.random()
    words = []
    for slot in " ".join(rng.choice(FORMS) for _ in range(count)).split():
        if slot == "N":
            slot = topic if rng.random() < on_topic else rng.choice(NOUNS)
        elif slot == "A":
            slot = rng.choice(rng.choices((KIND, RUDE, PLAIN), (kind, rude, 0.5))[0])
        words.append(slot)
    return words


def anything(rng: random.Random, topic: str) -> list[str]:
    """A text from a wider distribution than the policy's, for the reward model.

    What it never saw it would reward at random.
    """
    if rng.random() < 0.25:  # word salad from a small pool
        kinds = (FUNCTION, ADJECTIVES, NOUNS, [topic])
        pool = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 6))]
        return [rng.choice(pool) for _ in range(rng.randint(1, 36))]
    words = sentences(rng, topic, rng.randint(1, 4))
    if rng.random() < 0.3:  # telegram style
        words = [word for word in words if word not in FUNCTION]
    return words[: rng.randint(0, len(words))] if rng.random() < 0.3 else words


# ----------------------------------------------------------------------------------------------
# Models.


def make_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<unk>", "<end>", "<user>", "<assistant>"]
    words = [*special, "describe", *FUNCTION, *NOUNS, *ADJECTIVES]
    ids = {word: i for i, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        additional_special_tokens=["<user>", "<assistant>"],
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, **extra: object
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.hidden_size // 4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **extra,
    )


def train_policy(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> None:
    """Fine-tune on sentences, two epochs."""
    rng = random.Random(recipe.seed)
    topics = [rng.choice(TOPICS) for _ in range(recipe.sft_texts)]
    examples = []
    for topic in topics:
        text = " ".join(sentences(rng, topic, rng.randint(2, 4)))
        examples.append((prompt(topic), text))
    sft(
        policy,
        tokenizer,
        examples,
        shared_vocabulary(policy, tokenizer),
        epochs=2,
        batch=32,
        micro_batch=32,
        learning_rate=3e-3,
        title="building the world: policy",
    )


def train_reward_model(
    model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> None:
    """Bradley-Terry on pairs of texts about one topic.

    They are labelled with P(first is better) = sigmoid(4 × the gold difference).
    """
    rng = random.Random(recipe.seed)
    peak = 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=peak, total_steps=recipe.reward_steps, pct_start=0.1
    )
    title = "building the world: reward model"
    bar = tqdm(range(recipe.reward_steps), desc=title, dynamic_ncols=True)
    for _ in bar:
        loss, accuracy = pair_loss(model, tokenizer, rng, recipe.reward_topics)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(pair_accuracy=f"{accuracy:.2f}")


def pair_loss(
    model: Qwen3ForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    topics: int,
) -> tuple[Tensor, float]:
    """The Bradley-Terry loss on fresh texts, four per topic in all six pairs.

    Returns it, and how often the model agrees with the person.
    """
    about = []
    for _ in range(topics):
        about += [rng.choice(NOUNS)] * 4
    texts = [anything(rng, topic) for topic in about]
    rendered = []
    for topic, words in zip(about, texts, strict=True):
        answer = {"role": "assistant", "content": " ".join(words)}
        rendered.append(tokenizer.apply_chat_template([*prompt(topic), answer], tokenize=False))
    ids, mask = pad(tokenizer(rendered, add_special_tokens=False).input_ids, tokenizer.pad_token_id)
    out = model.base_model(input_ids=ids, attention_mask=mask.long())
    last = out.last_hidden_state[torch.arange(len(about)), mask.sum(-1) - 1]  # (4 topics, H)
    score = model.score(last).view(topics, 4)
    gold = [gold_reward(topic, words) for topic, words in zip(about, texts, strict=True)]
    gold = torch.tensor(gold).view(topics, 4)
    first, second = torch.triu_indices(4, 4, offset=1)
    margin = score[:, first] - score[:, second]  # (topics, 6)
    truth = gold[:, first] - gold[:, second]  # (topics, 6)
    coin = torch.tensor([rng.random() for _ in range(margin.numel())]).view_as(margin)
    chosen = (coin < torch.sigmoid(4 * truth)).float()
    loss = F.binary_cross_entropy_with_logits(margin, chosen)
    agree = (margin > 0) == (truth > 0)
    return loss, agree[truth != 0].float().mean().item()


# ----------------------------------------------------------------------------------------------
# Build once, then load like any other pair of models.


def is_world(folder: Path) -> bool:
    return folder.name.startswith("world-") and (folder / "held_out.jsonl").exists()


def build(name: str, root: Path = Path("runs")) -> Path:
    """The folder of world `name`, built if this recipe has not been built before.

    It holds policy/, reward_model/, prompts.jsonl and held_out.jsonl.
    """
    recipe = WORLDS[name]
    source = Path(__file__).read_bytes() + json.dumps(asdict(recipe)).encode()
    folder = root / f"world-{name}-{hashlib.sha256(source).hexdigest()[:8]}"
    if folder.exists():
        return folder
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer()
    policy = Qwen3ForCausalLM(model_config(recipe, tokenizer, tie_word_embeddings=True))
    train_policy(policy, tokenizer, recipe)
    config = model_config(recipe, tokenizer, num_labels=1, rms_norm_eps=recipe.rms_norm_eps)
    reward_model = Qwen3ForSequenceClassification(config)
    train_reward_model(reward_model, tokenizer, recipe)

    for model, part in ((policy, "policy"), (reward_model, "reward_model")):
        model.save_pretrained(draft / part)
        tokenizer.save_pretrained(draft / part)
    for topics, part in ((TOPICS, "prompts"), (HELD_OUT, "held_out")):
        rows = [json.dumps({"prompt": prompt(topic)[0]["content"]}) + "\n" for topic in topics]
        (draft / f"{part}.jsonl").write_text("".join(rows))
    draft.rename(folder)  # a half-built world never has the name that is looked for
    return folder
