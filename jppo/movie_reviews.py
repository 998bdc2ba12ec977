"""The task of the quick start: rated sentences, cut into parts, and two yardsticks.

Neither yardstick sees what it judges being trained: tf-idf + ridge stands beside the
reward model, and the VADER lexicon (gold) beside the policy's reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jppo.data import encode
from jppo.reward_loop import pair_accuracy

GAP = 1.0  # ratings at least this far apart make a pair
MAX_TOKENS = 24  # of the sentences that the reward model learns from


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything: the full run, or a smaller one that shows it works."""

    sentences: int = 1600  # the reward model learns from
    judged: int = 300  # held-out sentences, all pairs among which are judged
    openings: int = 192  # held-out openings, continued before and after
    steps: int = 22


FULL, FAST = Size(), Size(sentences=256, judged=100, openings=32, steps=2)


class Sentences(NamedTuple):
    """Disjoint parts of the rated sentences."""

    judged: list[tuple[str, float]]
    training: list[tuple[str, float]]
    held_out_openings: list[str]
    openings: list[str]


def opening(sentence: str) -> str:
    """The first three words of a review sentence, which the policy continues."""
    return " ".join(sentence.split()[:3])


def split(rows: list[tuple[str, float]], tokenizer: Any, size: Size, seed: int):
    """Held-out first, then what the reward model learns from, then openings."""
    order = np.random.default_rng(seed).permutation(len(rows))
    rows = [rows[i] for i in order]
    lengths = [len(ids) for ids in encode(tokenizer, [text for text, _ in rows])]
    short = [n <= MAX_TOKENS for n in lengths]
    start = 1000
    training = [r for r, ok in zip(rows[start:], short[start:], strict=True) if ok]
    chosen = training[: size.sentences]
    used = {text for text, _ in chosen}
    long = [text for text, _ in rows if len(text.split()) >= 10 and text not in used]
    held = {text for text, _ in rows[:start]}
    seen = {opening(t) for t in long if t not in held}
    unseen = [opening(t) for t in long if t in held and opening(t) not in seen]
    return Sentences(
        judged=rows[: size.judged],
        training=chosen,
        held_out_openings=list(dict.fromkeys(unseen))[: size.openings],
        openings=sorted(seen),
    )


def tfidf_accuracy(rows: list[tuple[str, float]], data: Sentences) -> float:
    """The yardstick: tf-idf + ridge on *all* sentences that are not judged."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    judged = {text for text, _ in data.judged}
    rest = [row for row in rows if row[0] not in judged]
    words = TfidfVectorizer(sublinear_tf=True)
    model = Ridge(alpha=1.0).fit(
        words.fit_transform([t for t, _ in rest]), [r for _, r in rest]
    )
    scores = model.predict(words.transform([t for t, _ in data.judged]))
    return pair_accuracy(scores, better_than(data.judged))


def better_than(rows: Sequence[tuple[str, float]]) -> np.ndarray:
    """[i, j]: people rated sentence i at least GAP above sentence j."""
    ratings = np.array([rating for _, rating in rows])
    return ratings[:, None] - ratings[None, :] >= GAP


def vader() -> Callable[..., list[float]]:
    """Gold: VADER's compound score of opening and continuation, from −1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    judge = SentimentIntensityAnalyzer()

    def gold(prompts, completions, **_):
        whole = map("".join, zip(prompts, completions, strict=True))
        return [judge.polarity_scores(text)["compound"] for text in whole]

    return gold
