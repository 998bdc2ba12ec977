"""What is asked of every family, without torch: cached decoding and the way back."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jppo import decode
from jppo.logprobs import head_logits
from jppo.models import transformer
from jppo.models.hf import load_hf, save_hf

LIMIT = 2e-4  # largest absolute difference of float32 logits
PROMPT = 10  # tokens that are prefilled; the others follow one by one


def largest(a: Any, b: Any) -> float:
    """Largest absolute difference; of NaNs, infinity."""
    return float(np.nan_to_num(np.abs(np.asarray(a) - b).max(), nan=np.inf))


def jppo_logits(cfg, params, tokens, mask) -> np.ndarray:
    run = jax.jit(transformer.logits, static_argnums=0)
    return np.asarray(run(cfg, params, tokens, mask))


def decode_gap(cfg, params, tokens, mask, want) -> float:
    """Gap of prefill and single cached steps to `want`, one forward over everything."""
    run = jax.jit(functools.partial(decode.forward_cached, cfg))
    tokens, mask = jnp.asarray(tokens), jnp.asarray(mask)
    kernel, transposed = transformer.lm_kernel(params)
    layers, positions = decode.unstack(params), transformer.positions_of(mask)
    width = tokens.shape[1]
    caches, gap = decode.empty_caches(cfg, len(tokens), width), 0.0
    for end in range(PROMPT, width + 1):
        new = slice(0, PROMPT) if end == PROMPT else slice(end - 1, end)
        valid = mask & (np.arange(width) < end)
        hidden, caches = run(
            params, layers, tokens[:, new], positions[:, new], valid, caches, new.start
        )
        got = head_logits(
            hidden, kernel, transposed=transposed, softcap=cfg.final_softcap
        )
        gap = max(gap, largest(got, want[:, end - 1]))
    return gap


def same_trees(a: dict, b: dict) -> bool:
    """Bit for bit."""
    a, b = flatten_dict(a, sep="/"), flatten_dict(b, sep="/")
    return a.keys() == b.keys() and all(
        np.asarray(a[key]).tobytes() == np.asarray(b[key]).tobytes() for key in a
    )


def round_trip(folder: Path, cfg, params) -> bool:
    """Import → export → import gives the same config and the same bits."""
    save_hf(folder / "again", cfg, params)
    cfg_back, back = load_hf(folder / "again")
    return cfg_back == cfg and same_trees(back, params)
