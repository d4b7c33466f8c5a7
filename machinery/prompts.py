"""Prompts: from a file or a hub data set to conversations that both models can read.

Whatever is wrong with a row is said with its number, before any model is loaded. Left out: how a
conversation becomes the reward model's input (reward_grad.py).
"""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from machinery.config import Config
from machinery.rollout import Messages, encode_prompt
from reward_grad import template_around_answer

# ----------------------------------------------------------------------------------------------
# Rows.


def load_rows(source: str, flag: str = "--prompts") -> list[dict]:
    """Rows of a file, a folder, or a hub data set given as NAME:SPLIT or NAME:CONFIG:SPLIT.

    JSON and JSON lines are read here, where a broken row has a number; `datasets` reads the rest
    (.csv, .parquet, .jsonl.gz, a folder of files, the hub).
    """
    path = Path(source)
    if path.suffix in (".json", ".jsonl") and not path.is_dir():
        rows = read_json(path, f"{flag} {source}")
    else:
        rows = load_with_datasets(source, f"{flag} {source}")
    if not rows:
        raise ValueError(f"{flag} {source} is empty.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{flag} {source}, row {number}: must be an object with columns, "
                f"not {json.dumps(row)[:80]}"
            )
    return rows


def read_json(path: Path, what: str) -> list[dict]:
    """One JSON array, or one object per line."""
    if not path.is_file():
        raise ValueError(f"{what}: there is no such file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{what} is no JSON array: {error}") from error
    rows = []
    # Not splitlines: U+2028 and U+0085 are legal inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{what} must hold one JSON object a line; line {number}: {error}"
                ) from error
    return rows


def load_with_datasets(source: str, what: str) -> list[dict]:
    from datasets import load_dataset

    kinds = {".csv": "csv", ".parquet": "parquet", ".gz": "json", ".tsv": "csv"}
    path = Path(source)
    try:
        if path.is_dir():
            return list(load_dataset(source, split="train"))
        if path.is_file():
            kind = kinds.get(path.suffix, "text")
            return list(load_dataset(kind, data_files=source, split="train"))
        if path.suffix in kinds:
            raise FileNotFoundError("there is no such file")
        name, *parts = source.split(":")
        split = parts.pop() if parts else "train"
        return list(load_dataset(name, *parts, split=split))
    except Exception as error:  # datasets raises many kinds; all mean the same to the user
        raise ValueError(
            f"{what}: neither a file here nor a data set that loads ({error}). "
            "Use FILE.jsonl, NAME:SPLIT or NAME:CONFIG:SPLIT."
        ) from error


class EmptyRowError(ValueError):
    """A row with nothing to answer: an error in a file of yours, left out of a hub data set."""


def as_messages(row: dict, column: str, where: str) -> Messages:
    """One row as a conversation that ends with the user.

    The column holds a text, or a list of messages whose final answer, if any, is left out.

    Args:
        where: names the row in what is raised.
    Raises:
        EmptyRowError: nothing to answer. ValueError: anything else that is not a conversation.
    """
    if column not in row:
        raise ValueError(
            f"{where} has no column {column!r} (it has: {', '.join(row)}). "
            "Name it with --prompt_column."
        )
    value = row[column]
    if value is None:
        raise EmptyRowError(f"{where}: an empty prompt in column {column!r}.")
    messages = as_conversation(value, f"{where}, column {column!r}")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or not messages[-1]["content"].strip():
        raise EmptyRowError(
            f"{where}: an empty prompt in column {column!r}: {json.dumps(row, default=str)[:200]}"
        )
    return messages


def as_conversation(value: object, where: str) -> Messages:
    """A text as the user's only message, or a list of messages, their contents as plain text."""
    if isinstance(value, str):
        return [{"role": "user", "content": checked_text(value, where)}]
    if not isinstance(value, list):
        raise ValueError(f"{where}: a text or a list of messages is needed, not {value!r:.80}")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where}: every message needs a role and a content; this one has not: "
                f"{message!r:.80}"
            )
        content = as_text(message.get("content"), where)
        messages.append({"role": message["role"], "content": content})
    return messages


def as_text(content: object, where: str) -> str:
    """A message's content: a text, or a list of text parts, which are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return checked_text(content, where)
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise ValueError(f"{where}: content must be text, not {part!r:.80}")
        texts.append(checked_text(text, where))
    return "".join(texts)


def checked_text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair is no text: {error}") from error
    return text


def prompt_column(rows: list[dict], config: Config) -> str:
    if config.prompt_column:
        return config.prompt_column
    return "messages" if "messages" in rows[0] and "prompt" not in rows[0] else "prompt"


# ----------------------------------------------------------------------------------------------
# Conversations.


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Messages]:
    """All prompts as conversations, none longer than --max_prompt_tokens.

    In a file of yours a prompt that is empty or too long is an error, since you can mend it; from
    a hub data set it is left out and counted.
    """
    source = config.prompts
    yours = Path(source).exists()
    rows = load_rows(source)
    column = prompt_column(rows, config)
    prompts = []
    empty = 0
    too_long = []  # (tokens, row number)
    for number, row in with_progress(rows, "prompts"):
        where = f"--prompts {source}, row {number}"
        try:
            messages = as_messages(row, column, where)
        except EmptyRowError:
            if yours:
                raise
            empty += 1
            continue
        length = prompt_length(tokenizer, messages, where, **config.template)
        if length > config.max_prompt_tokens:
            too_long.append((length, number))
        else:
            prompts.append(messages)
    if too_long and (yours or not prompts):
        length, number = max(too_long)
        raise ValueError(
            f"{len(too_long)} of {len(rows)} prompts in {source} are longer than "
            f"--max_prompt_tokens {config.max_prompt_tokens}; the longest is row {number} with "
            f"{length} tokens. Raise the limit or shorten them."
        )
    if empty or too_long:
        print(
            f"Of {len(rows)} prompts, left out {len(too_long)} longer than --max_prompt_tokens "
            f"and {empty} empty ones."
        )
    if not prompts:
        raise ValueError(f"--prompts {source} holds nothing to answer.")
    return prompts


def with_progress(rows: list, title: str) -> Iterable[tuple[int, object]]:
    """Rows and their numbers from 1, with a bar where there are many."""
    few = len(rows) < 5_000
    bar = tqdm(rows, desc=title, dynamic_ncols=True, disable=True if few else None)
    return enumerate(bar, start=1)


def prompt_length(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str, **template: object
) -> int:
    """Tokens of a prompt in the policy's template, which must show the user's words."""

    def render() -> str:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **template
        )

    check_rendering(render, messages, f"{where}: the policy's chat template")
    return len(encode_prompt(tokenizer, messages, **template))


def check_rendering(render: Callable[[], str], messages: Messages, what: str) -> None:
    """Raise ValueError where a template raises, or leaves out what the last message says.

    Templates drop roles that they do not know in silence ("human" in place of "user").
    """
    try:
        text = render()
    except Exception as error:  # whatever a template's author thought of
        raise ValueError(f"{what} cannot render it: {error}") from error
    last = messages[-1]
    if last["content"].strip() not in text:
        raise ValueError(
            f"{what} leaves out the last message (its role is {last['role']!r}): "
            f"{last['content'][:80]!r}"
        )


def check_conversations(
    prompts: list[Messages],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    reward_positions: int | None,
) -> None:
    """Raise ValueError where a prompt does not go through the reward model's template.

    Or where prompt and response are longer than the positions that either model was made for: a
    model with rotary positions would go on beyond them in silence.
    """
    for number, messages in with_progress(prompts, "reward model's template"):
        where = f"--prompts {config.prompts}, prompt {number}"

        def render(messages: Messages = messages) -> str:
            answer = {"role": "assistant", "content": "x"}
            return reward_tokenizer.apply_chat_template([*messages, answer], tokenize=False)

        if reward_tokenizer.chat_template:
            check_rendering(render, messages, f"{where}: the reward model's chat template")
        prefix, suffix = template_around_answer(reward_tokenizer, messages)
        prompt = len(encode_prompt(tokenizer, messages, **config.template))
        scored = len(prefix) + config.max_response_tokens + len(suffix)
        for name, length, limit in (
            ("policy", prompt + config.max_response_tokens, positions),
            ("reward_model", scored, reward_positions),
        ):
            if limit and length > limit:
                raise ValueError(
                    f"{where}: with --max_response_tokens {config.max_response_tokens} it takes "
                    f"{length} tokens, and --{name} has {limit} positions. Lower "
                    "--max_response_tokens or --max_prompt_tokens."
                )


def load_examples(config: Config) -> list[tuple[Messages, str]]:
    """--sft_examples rows of --prompts, shuffled: each conversation and its "chosen" answer.

    The answer is a text, or chat messages that end with it.
    """
    rows = load_rows(config.prompts)
    yours = Path(config.prompts).exists()
    column = prompt_column(rows, config)
    order = random.Random(config.seed).sample(range(len(rows)), len(rows))
    examples = []
    for i in order:
        where = f"--prompts {config.prompts}, row {i + 1}"
        if "chosen" not in rows[i]:
            raise ValueError(
                f'{where}: --sft_examples needs a column "chosen"; or give --sft_examples 0.'
            )
        try:
            messages = as_messages(rows[i], column, where)
            examples.append((messages, chosen_answer(rows[i]["chosen"], where)))
        except EmptyRowError:
            if yours:
                raise
        if len(examples) == config.sft_examples:
            break
    return examples


def chosen_answer(chosen: object, where: str) -> str:
    """The text of an answer. Raises EmptyRowError where there is none."""
    if isinstance(chosen, str):
        answer = checked_text(chosen, where)
    else:
        turns = as_conversation(chosen or [], f'{where}, column "chosen"')
        ends_well = bool(turns) and turns[-1]["role"] == "assistant"
        answer = turns[-1]["content"] if ends_well else ""
    if not answer.strip():
        raise EmptyRowError(f'{where}: "chosen" holds no answer of the assistant: {chosen!r:.80}')
    return answer
