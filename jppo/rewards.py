"""User code that scores text: found, called with a time limit, and checked.

A reward function is `f(prompts, completions, **columns) -> list[float]`, one finite
number a completion. prompts are as they were given, texts or lists of messages;
completions are texts. Whatever else it does is one clear line that names the sample.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jppo.config import ConfigError

RewardFn = Callable[..., Sequence[float]]


class RewardError(RuntimeError):
    """The reward function failed or broke its contract."""


def find_function(spec: str) -> RewardFn:
    """`package.module:name` or `path/to/file.py:name`. Raises ConfigError."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ConfigError(
            f"reward.function {spec!r} must look like 'package.module:function' or"
            " 'file.py:function'"
        )
    try:
        if where.endswith(".py"):
            if not Path(where).is_file():
                raise ConfigError(f"reward.function: no such file: {where}")
            stem = f"jppo_reward_{Path(where).stem}"
            found = importlib.util.spec_from_file_location(stem, where)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[stem] = module  # where dataclasses look themselves up
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(
            f"reward.function {spec!r}: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(module, name, None)):
        known = [k for k, v in vars(module).items() if callable(v) and k[0] != "_"]
        raise ConfigError(f"{where} has no function {name!r}; it has {sorted(known)}")
    return getattr(module, name)


def check_columns(fn: RewardFn, columns: Sequence[str]) -> None:
    """Whether a reward function takes the columns of the prompts, before it is asked.

    Raises ConfigError naming the columns and the function's parameters.
    """
    name = getattr(fn, "__name__", repr(fn))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions of C have none
        return
    takes = f"{name}({', '.join(map(str, signature.parameters.values()))})"
    kind = inspect.Parameter
    kinds = {k: p.kind for k, p in signature.parameters.items()}
    places = [k for k, v in kinds.items() if v <= kind.POSITIONAL_OR_KEYWORD]
    named = {k for k in places[2:] if kinds[k] != kind.POSITIONAL_ONLY}
    named |= {k for k, v in kinds.items() if v == kind.KEYWORD_ONLY}
    first = {k for k in places[:2] if kinds[k] != kind.POSITIONAL_ONLY}
    open_ended = kind.VAR_KEYWORD in kinds.values()
    odd = [c for c in columns if c in first or not (c in named or open_ended)]
    if odd:
        raise ConfigError(
            f"the reward function {takes} does not take the column(s)"
            f" {', '.join(odd)} of the prompts: add **columns to its parameters, or"
            " leave the columns out"
        )
    try:
        signature.bind([], [], **dict.fromkeys(columns))
    except TypeError as error:
        raise ConfigError(
            f"the reward function {takes} cannot be called with prompts, completions"
            f" and the column(s) {', '.join(columns) or '(none)'}: {error}"
        ) from None


def timeout_of(fn: RewardFn, default: float) -> float | None:
    """Seconds that a reward function may take: its own `timeout`, if it has one."""
    return getattr(fn, "timeout", default)


def call(
    fn: RewardFn,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]] | None = None,
    *,
    timeout: float | None = 60.0,
) -> np.ndarray:
    """Scores `[b]` f32 from a reward function, within `timeout` seconds (None: any).

    Raises RewardError: the function raised, took too long, or returned anything but
    one finite number a completion.
    """
    name = getattr(fn, "__name__", repr(fn))
    outcome: dict[str, Any] = {}

    def work():
        try:
            outcome["value"] = fn(list(prompts), list(completions), **(columns or {}))
        except BaseException as error:  # re-raised below, on the caller's thread
            outcome["error"] = error

    # A daemon: a function that hangs must not keep the process from ending.
    thread = threading.Thread(target=work, daemon=True, name=f"reward:{name}")
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise RewardError(
            f"reward function {name} took longer than reward.timeout {timeout:g} s"
            f" for {len(completions)} completions, the first {completions[0][:60]!r}"
        )
    if "error" in outcome:
        error = outcome["error"]
        raise RewardError(
            f"reward function {name} raised {type(error).__name__}:"
            f" {' '.join(str(error).split())}"
        ) from error
    return _checked(name, outcome["value"], prompts, completions)


def _checked(
    name: str, value: Any, prompts: Sequence[Any], completions: Sequence[str]
) -> np.ndarray:
    unordered = isinstance(value, (str, bytes, dict, set, frozenset))
    single = not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0
    if unordered or single:
        raise RewardError(
            f"reward function {name} returned {type(value).__name__}"
            f" {str(value)[:60]!r}, expected a list of {len(completions)} numbers"
        )
    if len(value) != len(completions):
        raise RewardError(
            f"reward function {name} returned {len(value)} scores for"
            f" {len(completions)} completions"
        )
    scores = np.zeros(len(completions), np.float32)
    for i, item in enumerate(value):
        number = _as_float32(item)
        if not np.isfinite(number):
            raise RewardError(
                f"reward function {name} returned {repr(item)[:60]} for sample {i}:"
                f" prompt {str(prompts[i])[:60]!r}, completion {completions[i][:60]!r}"
            )
        scores[i] = number
    return scores


def _as_float32(item: Any) -> np.float32:
    """One number as training sees it; NaN for what is not one."""
    try:
        if isinstance(item, (str, bytes)) or np.ndim(item):
            return np.float32(np.nan)
        with np.errstate(over="ignore"):  # 1e39 is ∞ in float32
            return np.float32(float(item))
    except (TypeError, ValueError, OverflowError):
        return np.float32(np.nan)
