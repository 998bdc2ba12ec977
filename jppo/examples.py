"""Rows to token ids: examples of supervised training, and pairs of preferences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jppo.chat import (
    Message,
    Prompt,
    check_messages,
    columns,
    example_turns,
    is_chat,
    render_example,
)
from jppo.models.tokenizer import eos_token_ids
from jppo.readers import DataError
from jppo.tokens import encode


class Example(NamedTuple):
    """Token ids of a training text, and which of them the loss is over."""

    ids: list[int]
    trained: list[bool]


class Pair(NamedTuple):
    """A preference: `chosen` was liked better than `rejected`, by at least `margin`."""

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0


class PairExample(NamedTuple):
    """A preference as token ids; both begin with the same prompt."""

    chosen: Example
    rejected: Example
    margin: float = 0.0


def encode_example(tokenizer: Any, row: dict[str, Any], where: str = "row") -> Example:
    """Token ids of a row, with marks on those that supervised training is over.

    Rows as in `render_example`, but of `messages` every assistant's turn is trained.
    Prompt and completions are encoded apart and joined, because a policy meets the
    prompt's own tokens. Special tokens are added at the very start only, and a BOS
    that the template wrote is not doubled. Plain strings end with the EOS token,
    which is trained; chats end as their template has it.
    """
    turns, chat = example_turns(tokenizer, row, where)
    parts = encode(tokenizer, [text for text, _ in turns], special=False)
    ids = _opening(tokenizer)
    if ids and parts[0][: len(ids)] == ids:
        ids = []
    trained = [False] * len(ids)
    for part, (_, own) in zip(parts, turns, strict=True):
        ids, trained = ids + part, trained + [own] * len(part)
    if not any(trained):
        raise DataError(f"{where}: the completion is empty: nothing to learn")
    eos = eos_token_ids(tokenizer)
    if not chat and eos and ids[-1] not in eos:
        ids, trained = [*ids, eos[0]], [*trained, True]
    return Example(ids, trained)


def _opening(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    (ids,) = encode(tokenizer, [""])
    if len(ids) > 1 or tokenizer.bos_token_id != tokenizer.eos_token_id:
        while ids and ids[-1] == tokenizer.eos_token_id:  # that it puts after one
            ids = ids[:-1]
    return ids


# Preferences


def _split_pair(row: dict[str, Any], where: str) -> tuple[Prompt, Any, Any, float]:
    """(prompt, chosen, rejected, margin), the prompt found where it is implicit."""
    margin = row.get("margin")
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(f"{where}: column 'margin' must be a number, got {margin!r}")
    if not math.isfinite(margin):
        raise DataError(f"{where}: column 'margin' must be finite, got {margin}")
    if row.get("prompt") is None and is_chat(row.get("chosen")):
        chosen, rejected = columns(row, where, "chosen", "rejected")
        check_messages(chosen, where)
        check_messages(rejected, where)
        same = _shared(chosen, rejected)
        if not same:
            raise DataError(
                f"{where}: chosen and rejected share no message that could be the"
                " prompt: give a column 'prompt'"
            )
        return chosen[:same], chosen[same:], rejected[same:], float(margin)
    row = row if row.get("prompt") is not None else row | {"prompt": ""}
    prompt, chosen, rejected = columns(row, where, "prompt", "chosen", "rejected")
    return prompt, chosen, rejected, float(margin)


def _shared(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Messages at the start that two chats share, leaving one of each to differ."""
    most = min(len(a), len(b)) - 1
    return next((i for i in range(most) if a[i] != b[i]), most)


def render_pair(tokenizer: Any, row: dict[str, Any], where: str = "row") -> Pair:
    """A preference as texts, from a row in one of these forms:

    - `prompt` (may be empty or absent), `chosen`, `rejected`: strings;
    - `prompt`: messages; `chosen`, `rejected`: the messages that answer it;
    - `chosen`, `rejected`: whole chats; what they share at the start is the prompt.

    `margin`, a number, is optional. A chat's completions end with the end-of-turn
    token, as a policy's do: white space that the template writes after it is left
    out. tokenizer may be None for strings.
    """
    prompt, chosen, rejected, margin = _split_pair(row, where)
    if isinstance(prompt, str):
        return Pair(prompt, chosen, rejected, margin)
    if tokenizer is None:
        raise DataError(
            f"{where}: chosen and rejected are messages: give a tokenizer to write them"
        )
    (opening, better), (_, worse) = (
        render_example(tokenizer, {"prompt": prompt, "completion": messages}, place)
        for messages, place in (
            (chosen, f"{where}: chosen"),
            (rejected, f"{where}: rejected"),
        )
    )
    ends = [_end_of_turn(tokenizer, text) for text in (better, worse)]
    return Pair(opening, ends[0], ends[1], margin)


def _end_of_turn(tokenizer: Any, text: str) -> str:
    """The text up to its EOS, where nothing but white space follows that."""
    short = text.rstrip()
    ends = tokenizer.convert_ids_to_tokens(list(eos_token_ids(tokenizer)))
    return short if short.endswith(tuple(ends)) else text


def encode_pair(tokenizer: Any, row: dict[str, Any], where: str = "row") -> PairExample:
    """A preference as token ids, with marks on the completions.

    Rows as in `render_pair`; tokens and EOS as in `encode_example`.
    """
    prompt, chosen, rejected, margin = _split_pair(row, where)
    examples = [
        encode_example(
            tokenizer, {"prompt": prompt, "completion": text}, f"{where}: {name}"
        )
        for name, text in (("chosen", chosen), ("rejected", rejected))
    ]
    return PairExample(examples[0], examples[1], margin)
