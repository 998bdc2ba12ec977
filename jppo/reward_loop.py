"""Training a reward model: from comparisons of texts to a model with a scalar head.

Texts are scored once a step and meet in every comparison that is known among them.
Where only the top of the model learns, the frozen trunk below is run once over all
texts and its output is kept, so that further passes cost next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jppo.config import ModelConfig, RewardTrainConfig
from jppo.console import Progress
from jppo.data import DataError, Pair, encode, pad
from jppo.fit_config import PairLossConfig
from jppo.fit_steps import fit_steps
from jppo.fitting import build_fit
from jppo.loading import Model
from jppo.models import transformer
from jppo.order import RowOrder
from jppo.preference import reward_objective
from jppo.rollout import run_trunk, sequence_scores
from jppo.sharding import make_mesh
from jppo.state import frozen_layers, init_fit, make_optimizer
from jppo.types import FitFrozen, Params, RankedBatch

PASS_TOKENS = 512  # tokens of one forward pass over many texts: kind to CPU caches
SHOWN = {"loss": "loss", "pair_accuracy": "pair acc", "score_margin": "margin"}


@runtime_checkable
class Comparisons(Protocol):
    """Texts, as (prompt, completion), and which of them beat which.

    A pass goes over `len` rows, a text or a pair each.
    """

    @property
    def texts(self) -> Sequence[tuple[str, str]]: ...

    @property
    def per_row(self) -> int:  # texts of one row, at most
        ...

    def __len__(self) -> int: ...

    def texts_of(self, rows: Sequence[int]) -> np.ndarray:
        """Numbers of the texts of these rows, each once."""
        ...

    def better(self, texts: np.ndarray) -> np.ndarray:
        """[i, j]: text texts[i] beats text texts[j]."""
        ...

    def margins(self, texts: np.ndarray) -> np.ndarray:
        """[i, j]: by how much at least, float32; 0 where nothing is known."""
        ...


class Ratings:
    """Texts with a rating each: one beats another that is rated `gap` lower."""

    def __init__(self, texts: Sequence[str], ratings: Sequence[float], gap: float):
        if len(texts) != len(ratings):
            raise DataError(f"{len(texts)} texts, {len(ratings)} ratings")
        self.texts = [("", text) for text in texts]
        self.ratings, self.gap = np.asarray(ratings, np.float64), gap

    def better(self, texts: np.ndarray) -> np.ndarray:
        r = self.ratings[texts]
        return r[:, None] - r[None, :] >= self.gap

    def margins(self, texts: np.ndarray) -> np.ndarray:
        return np.zeros((len(texts), len(texts)), np.float32)

    per_row = 1

    def __len__(self) -> int:
        return len(self.texts)

    def texts_of(self, rows: Sequence[int]) -> np.ndarray:
        return np.unique(rows)


class Pairs:
    """Preference pairs, of texts (`read_pairs`); a batch holds whole pairs."""

    def __init__(self, pairs: Sequence[Pair]):
        if not pairs:
            raise DataError("the list of preference pairs is empty")
        number: dict[tuple[str, str], int] = {}
        name = lambda p, text: number.setdefault((p, text), len(number))  # noqa: E731
        self.pairs = [
            (name(p.prompt, p.chosen), name(p.prompt, p.rejected)) for p in pairs
        ]
        self.texts = list(number)
        self._known = {at: p.margin for at, p in zip(self.pairs, pairs, strict=True)}

    def better(self, texts: np.ndarray) -> np.ndarray:
        return np.array([[(i, j) in self._known for j in texts] for i in texts])

    def margins(self, texts: np.ndarray) -> np.ndarray:
        known = [[self._known.get((i, j), 0.0) for j in texts] for i in texts]
        return np.array(known, np.float32)

    per_row = 2

    def __len__(self) -> int:
        return len(self.pairs)

    def texts_of(self, rows: Sequence[int]) -> np.ndarray:
        return np.unique([text for i in rows for text in self.pairs[i]])


class Encoded(NamedTuple):
    """Token ids a text, and where its completion begins."""

    ids: list[list[int]]
    begins: list[int]


def encode_texts(
    tokenizer: Any, texts: Sequence[tuple[str, str]], max_tokens: int
) -> Encoded:
    """prompt ids + completion ids, as a policy would have produced them."""
    prompts = encode(tokenizer, [p for p, _ in texts])
    answers = encode(tokenizer, [c for _, c in texts], special=False)
    ids = [list(p) + list(c) for p, c in zip(prompts, answers, strict=True)]
    for i, row in enumerate(ids):
        if not 0 < len(row) <= max_tokens:
            raise DataError(
                f"text {i} has {len(row)} tokens, expected 1 … {max_tokens}:"
                f" {texts[i][1][:60]!r}"
            )
    return Encoded(ids, [len(p) for p in prompts])


def _passes(ids: Sequence[Sequence[int]]) -> Iterator[tuple[np.ndarray, int, int]]:
    """(rows, slots, width) of forward passes over texts of about equal length."""
    order = np.argsort([len(row) for row in ids], kind="stable")
    widths = np.array([-(-len(ids[i]) // 8) * 8 for i in order])
    for width in np.unique(widths):
        rows, slots = order[widths == width], max(PASS_TOKENS // int(width), 1)
        for start in range(0, len(rows), slots):
            yield rows[start : start + slots], slots, int(width)


def _over_texts(fn: Any, ids: Sequence[Sequence[int]], bar: Progress | None = None):
    """fn(tokens, valid) over all texts in few shapes: (rows, output) of each pass."""
    for rows, slots, width in _passes(ids):
        batch = [ids[i] for i in rows] + [[0]] * (slots - len(rows))
        tokens, valid = pad(batch, width, 0, left=False)
        yield rows, np.asarray(fn(tokens, valid))[: len(rows)]
        if bar is not None:
            bar.advance(len(rows))


def score_texts(model: Model, texts: Sequence[tuple[str, str]]) -> np.ndarray:
    """Score of each (prompt, completion) by a reward model, `[b]` f32."""
    ids = encode_texts(model.tokenizer, texts, model.config.max_positions).ids
    fn = jax.jit(lambda p, t, v: sequence_scores(model.config, p, t, v))
    params = jax.device_put(model.params)
    scores = np.zeros(len(ids), np.float32)
    for rows, out in _over_texts(lambda t, v: fn(params, t, v), ids):
        scores[rows] = out
    return scores


def pair_accuracy(scores: np.ndarray, better: np.ndarray) -> float:
    """Share of the pairs that the scores order rightly; a tie counts half."""
    gap = scores[:, None] - scores[None, :]
    return float(((gap > 0) + 0.5 * (gap == 0))[better].mean())


def truncate(base: Model, layers: int | None) -> tuple[ModelConfig, Params]:
    """The first `layers` blocks of a model, with its final norm and no head."""
    params = {k: base.params[k] for k in ("embed", "blocks", "norm")}
    if layers is None:
        return base.config, params
    if not 0 < layers <= base.config.n_layers:
        raise DataError(f"layers is {layers}, the model has {base.config.n_layers}")
    params["blocks"] = jax.tree.map(lambda a: a[:layers], params["blocks"])
    return dataclasses.replace(base.config, n_layers=layers), params


class _Texts:
    """Comparisons as a source: trunk outputs (computed once) or token ids."""

    def __init__(self, cfg, trunk, base, data, settings, bar):
        self.data, self.settings = data, settings
        self.ids, self.begins = encode_texts(
            base.tokenizer, data.texts, settings.max_tokens
        )
        self.lengths = np.array([len(row) for row in self.ids])
        width = int(self.lengths.max())
        self.x, self.valid = pad(self.ids, width, 0, left=False)
        if trunk:
            fn, params = jax.jit(partial(run_trunk, cfg)), jax.device_put(trunk)
            x = np.zeros((len(self.ids), width, cfg.d_model), np.float32)
            bar.phase("trunk features", len(self.ids))
            for rows, out in _over_texts(lambda t, v: fn(params, t, v), self.ids, bar):
                w = min(width, out.shape[1])
                x[rows, :w] = out[:, :w]
            self.x = x

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, rows: Sequence[int], size: int, draw: int) -> RankedBatch:
        """Texts that are short of `size` rows are filled up with some again, which no
        comparison counts."""
        texts = self.data.texts_of(rows)
        full = np.resize(texts, size * self.data.per_row)
        better = np.zeros((len(full), len(full)), bool)
        better[: len(texts), : len(texts)] = self.data.better(texts)
        rng = np.random.default_rng([self.settings.seed, draw])
        margin = np.zeros(better.shape, np.float32)
        margin[: len(texts), : len(texts)] = self.data.margins(texts)
        host: tuple[Any, ...] = (self.x[full], self.valid[full], self._at(full, rng))
        return RankedBatch(*host, better, margin)  # type: ignore[arg-type]

    def _at(self, texts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Positions to read: the last, and random earlier ones of the completion."""
        last = self.lengths[texts] - 1
        begins = np.array([self.begins[i] for i in texts])
        first = np.minimum(begins + self.settings.first_read, last)
        shape = (len(texts), self.settings.reads)
        early = rng.integers(first[:, None], last[:, None] + 1, shape)
        return np.concatenate([last[:, None], early], axis=1).astype(np.int32)


def train_reward(
    base: Model,
    data: Comparisons,
    settings: RewardTrainConfig | None = None,
    *,
    quiet: bool = False,
) -> tuple[Model, list[dict[str, float]]]:
    """A reward model on the blocks of `base`, and its history, a dict a step.

    Head weights start as N(0, 1/√(d+1)) (arXiv 2403.17031). A last batch that reaches
    the end of a pass goes on into the next.
    """
    settings = settings or RewardTrainConfig()
    cfg, params = truncate(base, settings.layers)
    key = jax.random.key(settings.seed)
    params = params | {"head": transformer.init_head(key, cfg.d_model)}
    cut = frozen_layers(cfg, settings.train_layers, "train_layers")
    trunk, top = transformer.split_params(params, cut)
    rows = max(settings.batch_size // data.per_row, 1)
    steps = settings.epochs * -(-len(data) // rows)
    tx = make_optimizer(settings.optim, steps)
    state, frozen = init_fit(tx, top), FitFrozen(base={}, under={})
    objective = partial(reward_objective, cfg, PairLossConfig())
    run = build_fit(objective, tx, make_mesh({}, jax.devices()[:1]), state, frozen)
    state, frozen = run.place(state, frozen)
    history: list[dict[str, float]] = []
    with Progress(steps, title="reward model", quiet=quiet, keys=SHOWN) as bar:
        texts = _Texts(cfg, trunk, base, data, settings, bar)
        bar.phase("train")
        order = RowOrder(len(texts), seed=settings.seed)
        steps_of = fit_steps(run, state, frozen, texts, order, rows=rows, steps=steps)
        for step, state, metrics in steps_of:  # noqa: B007, the last state is used
            history.append({k: float(v) for k, v in metrics.items()})
            if step % max(steps // 12, 1) == 0 or step == steps:
                bar.step(step, history[-1])
    whole = transformer.merge_params(trunk, state.params)
    return Model(cfg, whole, base.tokenizer), history
