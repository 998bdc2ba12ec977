"""Reward models from comparisons: they learn the order, whole or on a frozen trunk."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_chat import chat, chatty
from tokenizer_stub import make_tokenizer

from jppo.config import OptimConfig, RewardTrainConfig
from jppo.data import DataError, Pair, read_pairs
from jppo.loading import Model
from jppo.preference import pair_loss
from jppo.reward_loop import (
    Pairs,
    Ratings,
    encode_texts,
    pair_accuracy,
    score_texts,
    train_reward,
    truncate,
)

WORDS = ("red", "green", "blue", "one", "two", "three")


def base():
    return Model(tiny.CFG, tiny.params(), make_tokenizer(tiny.CFG.vocab_size))


def rated(n=48, seed=0):
    """Sentences of five words, the better the more 'red' is in them."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(WORDS, 5) for _ in range(n)]
    return [" ".join(row) for row in rows], [
        float((row == "red").sum()) for row in rows
    ]


def settings(**changes):
    optim = OptimConfig(lr=1e-2, schedule="constant")
    return RewardTrainConfig(batch_size=16, epochs=12, optim=optim, **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"train_layers": 1}, {"layers": 1, "train_layers": 1}, {"reads": 2}],
    ids=str,
)
def test_learns_the_order_of_texts_it_never_saw(changes):
    texts, ratings = rated()
    model, history = train_reward(
        base(), Ratings(texts, ratings, 1.0), settings(**changes), quiet=True
    )
    unseen, truth = rated(seed=1)
    better = np.subtract.outer(truth, truth) >= 1
    scores = score_texts(model, [("", text) for text in unseen])
    assert pair_accuracy(scores, better) > 0.85
    assert history[-1]["loss"] < history[0]["loss"]
    assert model.config.n_layers == changes.get("layers", 2)
    if changes.get("train_layers") and "layers" not in changes:
        kept = jax.tree.map(lambda a: a[0], model.params["blocks"])
        expected = jax.tree.map(lambda a: a[0], tiny.params()["blocks"])
        jax.tree.map(np.testing.assert_array_equal, kept, expected)


def test_a_turned_label_turns_the_order():
    texts, ratings = rated()
    data = Ratings(texts, [-r for r in ratings], 1.0)
    model, _ = train_reward(base(), data, settings(), quiet=True)
    scores = score_texts(model, [("", text) for text in texts])
    assert pair_accuracy(scores, np.subtract.outer(ratings, ratings) >= 1) < 0.2


def test_pairs_say_who_beats_whom():
    data = Pairs([Pair("red", "one", "two"), Pair("red", "two", "three")])
    assert data.texts == [("red", "one"), ("red", "two"), ("red", "three")]
    expected = [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    np.testing.assert_array_equal(data.better(np.arange(3)), expected)
    assert len(data) == 2
    np.testing.assert_array_equal(data.texts_of([0]), [0, 1])
    np.testing.assert_array_equal(data.texts_of([0, 1]), [0, 1, 2])


def test_pairs_with_prompts_are_learnt():
    texts, ratings = rated(24)
    pairs = [
        Pair("blue", texts[i], texts[j])
        for i in range(24)
        for j in range(24)
        if ratings[i] > ratings[j]
    ]
    model, history = train_reward(base(), Pairs(pairs[:64]), settings(), quiet=True)
    assert np.mean([h["pair_accuracy"] for h in history[-4:]]) > 0.85
    assert score_texts(model, [("blue", texts[0])]).shape == (1,)


def test_a_completion_goes_on_without_a_second_bos():
    tokenizer = make_tokenizer(16, add_bos=True)
    ids, begins = encode_texts(tokenizer, [("red one", "two"), ("", "two")], 8)
    bos = tokenizer.bos_token_id
    assert [row.count(bos) for row in ids] == [1, 1]
    assert (ids[0][0], begins) == (bos, [3, 1])
    assert ids[0][3:] == ids[1][1:] == tokenizer.encode("two", add_special_tokens=False)


def test_margins_widen_the_gap_that_is_asked_for():
    data = Pairs([Pair("red", "one", "two", 2.0), Pair("red", "two", "three")])
    np.testing.assert_array_equal(
        data.margins(np.array([2, 0, 1])), [[0, 0, 0], [0, 0, 2], [0, 0, 0]]
    )
    assert data.margins(np.arange(3)).dtype == np.float32
    better = jnp.array([[False, True], [False, False]])
    wide, *_ = pair_loss(jnp.array([1.0, 0.0]), better, jnp.full((2, 2), 3.0))
    np.testing.assert_allclose(wide, np.log1p(np.exp(2.0)), rtol=1e-6)

    def learned(margin):
        pairs = [Pair("", "red red", "blue", margin), Pair("", "red", "blue", margin)]
        _, history = train_reward(base(), Pairs(pairs), settings(), quiet=True)
        return history

    # the same first scores, the loss that the margin adds, and a wider gap at the end
    plain, wide = learned(0.0), learned(4.0)
    assert plain[0]["score_margin"] == wide[0]["score_margin"]
    assert wide[0]["loss"] > plain[0]["loss"] + 2
    assert wide[-1]["score_margin"] > plain[-1]["score_margin"]


def test_pairs_of_chats_train_a_reward_model(tmp_path):
    model = base()._replace(tokenizer=chatty(size=tiny.CFG.vocab_size))
    rows = [
        {
            "chosen": chat(user, "assistant red"),
            "rejected": chat(user, "assistant blue"),
        }
        for user in ("user one", "user two")
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = Pairs(read_pairs(path, model.tokenizer))
    trained, history = train_reward(model, data, settings(), quiet=True)
    assert history[-1]["pair_accuracy"] == 1
    scores = score_texts(trained, data.texts)
    assert scores[0] > scores[1] and scores[2] > scores[3]


def test_pair_loss_by_hand():
    better = jnp.array([[False, True], [False, False]])
    total, count, sums = pair_loss(jnp.array([1.0, 0.0]), better)
    np.testing.assert_allclose(total, np.log1p(np.exp(-1.0)), rtol=1e-6)
    assert count == 1
    assert (sums["pair_accuracy"], sums["score_margin"]) == (1.0, 1.0)
    *_, sums = pair_loss(jnp.zeros(2), better)
    assert sums["pair_accuracy"] == 0.5
    centred, *_ = pair_loss(jnp.array([1.0, 2.0]), better, center=0.1)
    np.testing.assert_allclose(centred, np.log1p(np.exp(1.0)) + 0.9, rtol=1e-6)


def test_wrong_inputs():
    with pytest.raises(DataError, match="2 texts, 1 ratings"):
        Ratings(["a", "b"], [1.0], 1.0)
    with pytest.raises(DataError, match="list of preference pairs is empty"):
        Pairs([])
    with pytest.raises(DataError, match="text 0 has 5 tokens, expected 1 … 4"):
        train_reward(
            base(), Ratings(*rated(4), 1.0), settings(max_tokens=4), quiet=True
        )
    with pytest.raises(DataError, match="layers is 3, the model has 2"):
        truncate(base(), 3)
