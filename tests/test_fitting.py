"""The programs of a fit: cut as one likes, each loss by hand, no bad step taken."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jppo.examples import Example, PairExample
from jppo.fit_config import DPOLossConfig, PairLossConfig
from jppo.fit_data import PairSource, RankedSource, TextSource, fitting, pack
from jppo.fitting import build_fit
from jppo.losses import dpo_loss
from jppo.models import lora
from jppo.models import transformer as tf
from jppo.preference import dpo_objective, reward_objective
from jppo.readers import DataError
from jppo.sft import sft_objective
from jppo.sharding import make_mesh
from jppo.state import init_fit
from jppo.types import FitFrozen

CFG = tiny.CFG
LENGTHS = [3, 7, 2, 5, 4, 6, 2, 3]
TX = optax.sgd(0.5)


def examples(seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(4, 16, n).tolist() for n in LENGTHS]
    return [Example(ids, [i >= 1 for i in range(len(ids))]) for ids in rows]


def stacked(source, parts, rows=8):
    size = rows // parts
    made = [
        source.batch(range(i * size, (i + 1) * size), size, 1) for i in range(parts)
    ]
    return jax.tree.map(lambda *a: np.stack(a), *made)


def one_step(objective, params, source, *, parts=1, mesh=None, under=None, tx=TX):
    state, frozen = init_fit(tx, params), FitFrozen(base={}, under=under or {})
    mesh = mesh or tiny.one_device()
    run = build_fit(objective, tx, mesh, state, frozen)
    state, frozen = run.place(state, frozen)
    batch = run.put(stacked(source, parts), parts=True)
    state, metrics = run.step(state, frozen, batch)
    return jax.device_get(state.params), jax.device_get(metrics)


def texts(packing=False, width=8):
    return TextSource(examples(), width=width, pad_id=3, packing=packing)


SFT = partial(sft_objective, CFG, 4096)


def test_sft_loss_is_the_mean_of_trained_tokens():
    params = tiny.params()
    _, metrics = one_step(SFT, params, texts())
    logp = []
    for ids, trained in examples():
        x = jnp.asarray([ids])
        table = jax.nn.log_softmax(tf.logits(CFG, params, x, x >= 0))[0]
        logp += [table[i - 1, ids[i]] for i in range(1, len(ids)) if trained[i]]
    assert metrics["count"] == len(logp) == sum(LENGTHS) - len(LENGTHS)
    np.testing.assert_allclose(metrics["loss"], -np.mean(logp), rtol=1e-5)


def test_packed_texts_do_not_see_each_other():
    """Fewer rows, the same step: what stands before a text in its row is not there."""
    plain, packed = texts(), texts(packing=True, width=12)
    assert len(packed) < len(plain)
    rows = list(packed.batch(range(len(packed)), 8, 0).segments.max(-1))
    assert max(rows) > 1
    params = tiny.params()
    want = one_step(SFT, params, plain)

    class Whole:
        batch = staticmethod(lambda rows, size, draw: packed.batch(
            range(len(packed)), size, draw))  # fmt: skip

    tiny.close(one_step(SFT, params, Whole), want)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_change_nothing(parts):
    params = tiny.params()
    tiny.close(
        one_step(SFT, params, texts(), parts=parts), one_step(SFT, params, texts())
    )


def test_a_mesh_changes_nothing():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    params = tiny.params()
    tiny.close(
        one_step(SFT, params, texts(), mesh=mesh), one_step(SFT, params, texts())
    )


def test_a_bad_step_is_not_taken():
    params = tiny.params()
    params["norm"]["scale"] = params["norm"]["scale"].at[0].set(jnp.inf)
    after, metrics = one_step(SFT, params, texts())
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after, jax.device_get(params))


def test_packing_fills_rows():
    bins = pack(LENGTHS, 8)
    assert sorted(i for row in bins for i in row) == list(range(8))
    assert all(sum(LENGTHS[i] for i in row) <= 8 for row in bins)
    assert len(bins) == 5  # 32 tokens, 4 rows at best


def test_overlong_rows_are_named_or_dropped():
    places = [f"f.jsonl:{i + 1}" for i in range(3)]
    with pytest.raises(DataError, match=r"f.jsonl:2 has 9 tokens, the limit is 5"):
        fitting([3, 9, 4], 5, "error", places)
    assert fitting([3, 9, 4], 5, "drop", places) == [0, 2]
    with pytest.raises(DataError, match="all 3 rows are longer than 2 tokens"):
        fitting([3, 9, 4], 2, "drop", places)


# Preferences


def pairs():
    made = examples()
    others = [Example(ids[::-1], marks) for ids, marks in made]
    return [PairExample(a, b, 0.5) for a, b in zip(made, others, strict=True)]


def test_dpo_loss_by_hand():
    h = 0.4  # (−1 + 1.5) − (−2 + 2.1)
    given = [jnp.array([x]) for x in (-1.0, -2.0, -1.5, -2.1)]
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    np.testing.assert_allclose(
        dpo_loss(*given, beta=0.5), [-np.log(sigmoid(0.5 * h))], rtol=1e-5
    )
    np.testing.assert_allclose(
        dpo_loss(*given, beta=0.5, label_smoothing=0.1),
        [-0.9 * np.log(sigmoid(0.5 * h)) - 0.1 * np.log(sigmoid(-0.5 * h))],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        dpo_loss(*given, beta=0.5, kind="ipo"), [(h - 1) ** 2], rtol=1e-5
    )
    with pytest.raises(ValueError, match="unknown DPO loss 'hinge'"):
        dpo_loss(*given, kind="hinge")
    with pytest.raises(ValueError, match=r"must lie in \[0, 0.5\); got 0.5"):
        dpo_loss(*given, label_smoothing=0.5)


def test_dpo_begins_at_the_reference():
    """log 2 and no margin before the first step; then chosen beats rejected."""
    params = tiny.params()
    objective = partial(dpo_objective, CFG, DPOLossConfig(beta=1.0))
    source = PairSource(pairs(), pad_id=3)
    step = {"under": params, "tx": optax.sgd(0.02)}
    after, metrics = one_step(objective, params, source, **step)
    np.testing.assert_allclose(metrics["loss"], np.log(2), rtol=1e-5)
    assert abs(metrics["reward_margin"]) < 1e-5 and metrics["count"] == 8
    batch = source.batch(range(6), 8, 0)
    total, count, sums = jax.jit(objective)(after, FitFrozen({}, params), batch)
    assert count == 6
    assert total / count < np.log(2) and sums["reward_margin"] > 0.1


def test_dpo_on_an_adapter_has_its_base_for_reference():
    cfg = dataclasses.replace(CFG, lora_scale=2.0)
    params = tiny.params()
    adapter = lora.init_adapter(params, jax.random.key(0), rank=2)
    objective = partial(dpo_objective, cfg, DPOLossConfig())
    source = PairSource(pairs(), pad_id=3)
    after, metrics = one_step(objective, adapter, source, under=params)
    np.testing.assert_allclose(metrics["loss"], np.log(2), rtol=1e-5)
    assert tiny.distance(after, adapter) > 1e-4


def test_reward_pairs_keep_to_themselves():
    """Only a pair's own texts meet; padding rows count nowhere."""
    params = tiny.params(head=True)
    objective = partial(reward_objective, CFG, PairLossConfig())
    source = RankedSource(pairs(), pad_id=3)
    total, count, sums = jax.jit(objective)(
        params, FitFrozen({}, {}), source.batch(range(3), 4, 0)
    )
    assert count == 3
    batch = source.batch(range(3), 3, 0)
    hidden = tf.hidden_states(
        CFG, params, jnp.asarray(batch.x), jnp.asarray(batch.valid)
    )
    scores = tf.scalar_head(params, hidden)[np.arange(6), batch.at[:, 0]]
    gap = np.asarray(scores[0::2] - scores[1::2])
    np.testing.assert_allclose(total, np.log1p(np.exp(0.5 - gap)).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["score_margin"], gap.sum(), rtol=1e-4)
