"""Measures every family against `transformers`, for the table of docs/families.md.

    python tests/parity/families_table.py            # prints the table
    python tests/parity/families_table.py --write    # and puts it into the page

Needs torch; takes some two minutes. `test_families_parity.py` asserts the same.
Each is the largest absolute difference of logits (or scores) over valid tokens, in
float32, of a tiny random model with weights far from the flat start.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from make_goldens import padded_batch, torch_logits
from tiny_families import FAMILIES, T, random_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from family_checks import (  # noqa: E402
    LIMIT,
    decode_gap,
    jppo_logits,
    largest,
    round_trip,
)

from jppo.models import transformer  # noqa: E402
from jppo.models.hf import load_hf, save_hf  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- parity table -->", "<!-- end -->"
COLUMNS = (
    "logits, no pads",
    "logits, 7 left pads",
    "cached decode",
    "round trip",
    "opens in transformers",
    "sequence classification",
)


# ── measurements ─────────────────────────────────────────────────────────────


def family_of(name: str) -> str:
    return name.split()[0]


def gaps_by_row(cfg, params, model, seed: int) -> list[float]:
    """Gap to torch of the row without pads, and of the one with 7."""
    tokens, mask = padded_batch(cfg.vocab_size, seed, t=T)
    want = torch_logits(model, tokens, mask)
    if want[mask].std() < 0.3:
        raise ValueError("logits too flat to tell one model from another")
    got = jppo_logits(cfg, params, tokens, mask)
    rows = zip(got, want, mask, strict=True)
    return [largest(g[m], w[m]) for g, w, m in rows]


def changed(params: dict) -> dict:
    """Weights that torch has not seen yet, so that nothing of theirs can be left."""
    return jax.tree.map(
        lambda x: x + 0.01 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )


def open_in_torch(folder: Path, kind: str) -> tuple[Any, list[str]]:
    """The model as transformers opens it, and the keys that did not fit."""
    import transformers

    model, info = getattr(transformers, kind).from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype="float32",  # of a model cast later, the rotary table stays rounded
    )
    odd = [info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")]
    return model.eval(), sorted(str(key) for keys in odd for key in keys)


def opened_gap(folder: Path, cfg, params, seed: int) -> float:
    """Gap of a saved model to itself opened by AutoModelForCausalLM."""
    params = changed(params)
    save_hf(folder / "opened", cfg, params)
    model, odd = open_in_torch(folder / "opened", "AutoModelForCausalLM")
    return float("inf") if odd else max(gaps_by_row(cfg, params, model, seed))


def has_scorer(name: str) -> bool:
    """Whether transformers has a class with a scalar head for this family."""
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return family_of(name) in known


def score_gap(folder: Path, name: str, seed: int) -> float:
    """Gap of scores: theirs opened here, and changed, saved and opened there."""
    theirs = random_model(name, seed, scorer=True)
    theirs.save_pretrained(folder / "scorer")
    cfg, params = load_hf(folder / "scorer")
    tokens, mask = padded_batch(cfg.vocab_size, seed, t=T)

    def gap(model, params) -> float:
        model.config.pad_token_id = 0  # saved without a tokenizer; torch asks for one
        want = torch_logits(model, tokens, mask)[:, 0]
        run = jax.jit(transformer.hidden_states, static_argnums=0)
        hidden = run(cfg, params, tokens, mask)
        return largest(transformer.scalar_head(params, hidden[:, -1]), want)

    params_2 = {**changed(params), "head": params["head"]}
    save_hf(folder / "scorer 2", cfg, params_2)
    model, odd = open_in_torch(
        folder / "scorer 2", "AutoModelForSequenceClassification"
    )
    if odd or model.config.num_labels != 1:
        return float("inf")
    return max(gap(theirs, params), gap(model, params_2))


def imported(name: str, seed: int, folder: Path) -> tuple[Any, Any, dict]:
    """(torch model, config, params) of a tiny random model of this family."""
    model = random_model(name, seed)
    model.save_pretrained(folder / "theirs")
    return model, *load_hf(folder / "theirs")


# ── the table ────────────────────────────────────────────────────────────────


def bound(gap: float) -> str:
    """The next 1, 2 or 5 times a power of ten: the digit does not flicker."""
    if not gap <= LIMIT:
        return f"**{gap:.0e}**"
    steps = (float(f"{d}e{e}") for e in range(-8, 0) for d in (1, 2, 5))
    return f"≤ {next(step for step in steps if gap <= step):.0e}".replace("e-0", "e-")


def measure(name: str, seed: int = 0) -> dict[str, float | bool | None]:
    """What the columns say of one model; None where transformers has no such class."""
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        model, cfg, params = imported(name, seed, folder)
        tokens, mask = padded_batch(cfg.vocab_size, seed, t=T)
        want = jppo_logits(cfg, params, tokens, mask)
        values = (
            *gaps_by_row(cfg, params, model, seed),
            decode_gap(cfg, params, tokens, mask, want),
            round_trip(folder, cfg, params),
            opened_gap(folder, cfg, params, seed),
            score_gap(folder, name, seed) if has_scorer(name) else None,
        )
    return dict(zip(COLUMNS, values, strict=True))


def cell(value: float | bool | None) -> str:
    if value is None:
        return "no class"
    if isinstance(value, bool):
        return "bit-equal" if value else "**differs**"
    return bound(value)


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def make_table() -> str:
    head = [line(["model", *COLUMNS]), "|---" * (1 + len(COLUMNS)) + "|"]
    return "\n".join(
        head + [line([name, *map(cell, measure(name).values())]) for name in FAMILIES]
    )


def documented() -> dict[str, dict[str, str]]:
    """The table of the page: row → column → cell."""
    text = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0].strip()
    head, _, *rows = [
        [cell.strip() for cell in one.strip("|").split("|")]
        for one in text.splitlines()
    ]
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into the page")
    args = parser.parse_args()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    table = make_table()
    print(table)
    if args.write:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
