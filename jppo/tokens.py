"""Texts to token arrays, and where a response ends: stop tokens and stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jppo.config import ConfigError
from jppo.models.tokenizer import eos_token_ids
from jppo.types import Rollout


def encode(
    tokenizer: Any, texts: Sequence[str], *, special: bool = True
) -> list[list[int]]:
    """Token ids a text, exactly as the tokenizer's own post-processing has them.

    Except that a text which brings its own BOS, as chat templates write it, gets no
    second one. special=False adds none at all: the text goes on from another.
    """
    rows = tokenizer(
        list(texts), return_attention_mask=False, add_special_tokens=special
    )["input_ids"]
    twice = [tokenizer.bos_token_id] * 2
    return [row[1:] if None not in twice and row[:2] == twice else row for row in rows]


def pad(
    rows: Sequence[Sequence[int]], width: int, pad_id: int, *, left: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32, mask bool), each `[b, width]`; every row must fit."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        at = slice(width - len(row), None) if left else slice(0, len(row))
        tokens[i, at], mask[i, at] = row, True
    return tokens, mask


def pad_token_id(tokenizer: Any, stop_ids: Sequence[int]) -> int:
    """The pad token, or a stop token where there is none.

    Safe, because masks come from lengths and stop positions and never from ids.
    """
    pad_id = tokenizer.pad_token_id
    return int(stop_ids[0] if pad_id is None else pad_id)


def stop_token_ids(tokenizer: Any, stop: Sequence[str]) -> tuple[int, ...]:
    """Every EOS of the model, then the id of each stop text that is one token.

    Raises ConfigError for a text that cannot occur, and where no token would stop.
    """
    ids = list(eos_token_ids(tokenizer))
    for text in stop:
        found = _stop_ids(tokenizer, text)
        ids += found if len(found) == 1 else []
    if not ids:
        raise ConfigError(
            "the tokenizer has no EOS token: give sampling.stop a text of one token"
        )
    return tuple(dict.fromkeys(int(i) for i in ids))


def stop_strings(tokenizer: Any, stop: Sequence[str]) -> tuple[str, ...]:
    """The stop texts of several tokens, which the host looks for (`trim_rollout`)."""
    several = [text for text in stop if len(_stop_ids(tokenizer, text)) > 1]
    return tuple(dict.fromkeys(several))


def _stop_ids(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.encode(text, add_special_tokens=False)
    if not found:
        raise ConfigError(f"sampling.stop text {text!r} is 0 tokens: remove it")
    unk = tokenizer.unk_token_id
    if unk is not None and unk in found and tokenizer.unk_token not in text:
        raise ConfigError(f"sampling.stop text {text!r} is not in the vocabulary")
    return found


def trim_at_stop_strings(
    tokenizer: Any, tokens: np.ndarray, mask: np.ndarray, stops: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Responses `[b, t]` cut at the first stop string: (mask, which).

    The token that completes the string is the last valid one; its text may go on
    beyond the string. which `[b]` int32: the string that ended the row, −1 for rows
    without one, whose mask stays. The string may lie anywhere in the token borders:
    it is looked for in the text, special tokens included.
    """
    mask, which = mask.copy(), np.full(len(mask), -1, np.int32)
    for i, (row, keep) in enumerate(zip(tokens, mask, strict=True)):
        at = np.flatnonzero(keep)
        ids = row[at].tolist()
        if _first(tokenizer, ids, stops) < 0:
            continue
        # A string that a prefix holds, every longer prefix holds: so bisect.
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if _first(tokenizer, ids[:middle], stops) < 0:
                low = middle + 1
            else:
                high = middle
        which[i] = _first(tokenizer, ids[:low], stops)
        mask[i, at[low:]] = False
    return mask, which


def _first(tokenizer: Any, ids: list[int], stops: Sequence[str]) -> int:
    """Which stop string stands first in the text of these tokens, −1 for none."""
    text = tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    found = [(text.find(stop), j) for j, stop in enumerate(stops) if stop in text]
    return min(found)[1] if found else -1


def trim_rollout(
    tokenizer: Any,
    rollout: Rollout,
    stops: Sequence[str],
    *,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Rollout:
    """The rollout, on the host, as if sampling had ended at the first stop string.

    What was drawn after it is gone: padding without weight. `stop_index` goes on
    after `stop_ids` with the strings. Waits for the device.
    """
    host = jax.device_get(rollout)
    t = host.mask.shape[1]
    mask, which = trim_at_stop_strings(tokenizer, host.tokens[:, -t:], host.mask, stops)
    # A row that its stop token ended at the same place keeps that as its reason.
    ended = (which >= 0) & ~(host.stopped & (mask == host.mask).all(-1))
    prompts = host.tokens[:, :-t], host.valid[:, :-t]
    answers = np.where(mask, host.tokens[:, -t:], np.int32(pad_id))
    return dataclasses.replace(
        host,
        tokens=np.concatenate([prompts[0], answers], -1),
        valid=np.concatenate([prompts[1], mask], -1),
        mask=mask,
        logp=np.where(mask, host.logp, np.float32(0)),
        stopped=host.stopped | ended,
        stop_index=np.where(ended, which + len(stop_ids), host.stop_index),
        lengths=mask.sum(-1, dtype=np.int32),
    )
