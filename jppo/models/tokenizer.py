"""Tokenizers from local directories, as their `tokenizer.json` spells them out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EOS = "jppo_eos_ids"  # attribute of a tokenizer


def import_transformers() -> Any:
    """The `transformers` module, imported late (seconds) and without its notices."""
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"  # else it prints that PyTorch was not found
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before
    return transformers


def load_tokenizer(path: str | os.PathLike) -> Any:
    """The `transformers` tokenizer of a local directory; the network is never asked.

    `tokenizer.json` is taken as it stands: the classes of `transformers` 5 that carry
    a model's name rebuild the pre-tokenizer and lose, for one, SmolLM2's digit
    splitter. A missing pad token becomes eos; that is safe because jppo's masks come
    from lengths and stop positions, never from token ids.

    A model may end a turn with several tokens: those in `generation_config.json`, or
    else in `config.json`, are kept for `eos_token_ids`.

    Raises FileNotFoundError without a tokenizer there, ValueError for one that cannot
    be read, has no eos token, or has more ids than the model beside it.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such directory")
    exact = (path / "tokenizer.json").is_file()
    if not exact and not (path / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"{path}: no tokenizer.json")
    transformers = import_transformers()
    kind = transformers.PreTrainedTokenizerFast if exact else transformers.AutoTokenizer
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # class names differ, on purpose
    try:
        tokenizer = kind.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as e:  # tokenizers raises bare Exception for a broken file
        reason = str(e).strip().splitlines()[:1]
        raise ValueError(f"{path}: unreadable tokenizer ({' '.join(reason)})") from e
    finally:
        transformers.logging.set_verbosity(verbosity)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{path}: the tokenizer has no eos token, so no end to learn")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _check_size(path, len(tokenizer))
    set_eos_token_ids(tokenizer, _eos_of_model(path))
    return tokenizer


def eos_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a text: the tokenizer's own EOS first; empty if there is none.

    A tokenizer has room for one EOS; `load_tokenizer` keeps the model's others on it.
    """
    own = tokenizer.eos_token_id
    ids = (*(() if own is None else (own,)), *getattr(tokenizer, _EOS, ()))
    return tuple(dict.fromkeys(int(i) for i in ids))


def set_eos_token_ids(tokenizer: Any, ids: Sequence[int]) -> None:
    """Further ids that end a text, besides the tokenizer's own EOS."""
    setattr(tokenizer, _EOS, tuple(ids))


def special_token_ids(tokenizer: Any) -> dict[str, Any]:
    """bos, eos and pad for a model's config; several eos ids are a list, as there."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    if tokenizer is None:
        return dict.fromkeys(keys)
    ids = {key: getattr(tokenizer, key) for key in keys}
    eos = eos_token_ids(tokenizer)
    return ids | {"eos_token_id": list(eos)} if len(eos) > 1 else ids


def _eos_of_model(path: Path) -> list[int]:
    """eos ids of the files beside a tokenizer, as `transformers` chooses them."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((path / name).read_text("utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{path / name}: eos_token_id is {found}, expected ids")
        return ids
    return []


def _check_size(path: Path, ids: int) -> None:
    """An id past the embedding would be clamped by JAX without a word."""
    try:
        rows = json.loads((path / "config.json").read_text()).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return
    if isinstance(rows, int) and ids > rows:
        raise ValueError(f"{path}: the tokenizer has {ids} ids, the model {rows}")
