"""The sampler against teacher forcing, and its edges on a scripted policy."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jppo import decode
from jppo.config import SamplingConfig
from jppo.logprobs import token_logprobs
from jppo.models import transformer

B, P, T = 6, tiny.P, 5
HOT = 0.7


def sampler(*, stop_ids=tiny.STOPS, t=T, temperature=HOT, **settings):
    """decode.generate of the tiny model as (params, prompts, key) → rollout."""
    settings = SamplingConfig(max_new_tokens=t, temperature=temperature, **settings)
    static = dict(settings=settings, stop_ids=stop_ids, pad_id=tiny.PAD)
    return jax.jit(partial(decode.generate, tiny.CFG, **static))


@pytest.fixture(scope="module")
def generate():
    """The sampler that most tests share: T = .7, stops 0 and 3, pad = 3."""
    return sampler()


@pytest.fixture(scope="module")
def greedy():
    return sampler(temperature=0.0, stop_ids=(0,))


@pytest.fixture(scope="module")
def one_slot():
    return sampler(t=1)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


@pytest.fixture(scope="module")
def forced():
    """Log-probs of responses [b, t] by one full forward, labels shifted by one."""

    def logits(params, tokens, valid):
        return transformer.logits(tiny.CFG, params, tokens, valid)[:, P - 1 : -1]

    return jax.jit(logits)


@pytest.fixture(scope="module")
def drawn(generate, params):
    return generate(params, tiny.prompts(B), jax.random.key(7))


def responses(rollout):
    """The valid tokens of each response, as lists."""
    tokens = np.asarray(rollout.tokens)[:, -rollout.mask.shape[1] :]
    return [row[m].tolist() for row, m in zip(tokens, rollout.mask, strict=True)]


def check_form(rollout, prompts, stops=tiny.STOPS):
    """What holds for every rollout, whatever was drawn."""
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.mask)
    b, t = mask.shape
    np.testing.assert_array_equal(tokens[:, :-t], prompts.tokens)
    np.testing.assert_array_equal(rollout.valid[:, :-t], prompts.mask)
    np.testing.assert_array_equal(rollout.valid[:, -t:], mask)
    np.testing.assert_array_equal(mask, np.arange(t) < mask.sum(-1)[:, None])
    np.testing.assert_array_equal(rollout.lengths, mask.sum(-1))
    out = tokens[:, -t:]
    assert (out[~mask] == tiny.PAD).all()
    assert (np.asarray(rollout.logp)[~mask] == 0).all()
    assert (np.asarray(rollout.logp)[mask] <= 0).all()
    for row, length, stopped, which in zip(
        out, rollout.lengths, rollout.stopped, rollout.stop_index, strict=True
    ):
        chosen = row[:length].tolist()
        assert not set(chosen[:-1]) & set(stops)  # nothing after a stop token
        assert bool(stopped) == bool(chosen and chosen[-1] in stops)
        assert which == (stops.index(chosen[-1]) if stopped else -1)
        assert stopped or length in (0, t)


def test_form(drawn):
    check_form(drawn, tiny.prompts(B))
    assert 1 < len(set(np.asarray(drawn.lengths).tolist()))  # ragged: both ends occur
    assert drawn.stopped.any() and not drawn.stopped.all()


def test_logp_equals_the_full_forward(drawn, params, forced):
    logits = forced(params, drawn.tokens, drawn.valid)
    labels = drawn.tokens[:, P:]
    expected = token_logprobs(logits, labels, temperature=HOT)
    gap = jnp.where(drawn.mask, drawn.logp - expected, 0.0)
    assert jnp.abs(gap).max() < 5e-5
    # The tolerance is not what makes it pass: another temperature is far away.
    other = token_logprobs(logits, labels, temperature=1.0)
    assert jnp.abs(jnp.where(drawn.mask, drawn.logp - other, 0.0)).max() > 0.1


def test_greedy_is_argmax_at_every_step(greedy, params, forced):
    prompts = tiny.prompts(B)
    out = greedy(params, prompts, jax.random.key(0))
    check_form(out, prompts, stops=(0,))
    logits = forced(params, out.tokens, out.valid)
    best = jnp.where(out.mask, jnp.argmax(logits, -1), tiny.PAD)
    np.testing.assert_array_equal(out.tokens[:, P:], best)
    expected = token_logprobs(logits, out.tokens[:, P:])
    assert jnp.abs(jnp.where(out.mask, out.logp - expected, 0.0)).max() < 5e-5
    again = greedy(params, prompts, jax.random.key(1))
    np.testing.assert_array_equal(again.tokens, out.tokens)  # the key plays no part


def test_top_k_of_one_is_greedy(greedy, params):
    only = sampler(top_k=1, stop_ids=(0,), temperature=1.0)
    prompts, key = tiny.prompts(B), jax.random.key(3)
    a, b = only(params, prompts, key), greedy(params, prompts, key)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    tiny.close(a.logp, b.logp)  # of the full vocabulary, so not 0
    assert (a.logp[a.mask] < -1e-3).any()


def test_a_row_alone_draws_what_it_draws_in_a_batch(generate, drawn, params):
    """Batch 1, and the key follows the row id, not the slot."""
    prompts = tiny.prompts(B)
    for i in (0, 3):
        one = jax.tree.map(lambda a, i=i: a[i : i + 1], prompts)
        alone = generate(params, one, jax.random.key(7))
        check_form(alone, one)
        assert responses(alone)[0] == responses(drawn)[i]
        tiny.close(alone.logp[0], drawn.logp[i])


def test_batch_order_and_neighbours_do_not_matter(generate, drawn, params):
    prompts, key = tiny.prompts(B), jax.random.key(7)
    order = np.array([4, 2, 0, 5, 1, 3])
    shuffled = generate(params, jax.tree.map(lambda a: a[order], prompts), key)
    assert responses(shuffled) == [responses(drawn)[i] for i in order]
    others = tiny.prompts(B, seed=1)
    mixed = jax.tree.map(lambda a, b: a.at[1:].set(b[1:]), prompts, others)
    mixed = generate(params, mixed, key)
    assert responses(mixed)[0] == responses(drawn)[0]
    assert responses(mixed) != responses(drawn)


def test_keys(generate, drawn, params):
    """Same key, same samples; another step, another row id: others."""
    prompts = tiny.prompts(B)
    again = generate(params, prompts, jax.random.key(7))
    assert responses(again) == responses(drawn)
    later = generate(params, prompts, jax.random.key(8))
    assert responses(later) != responses(drawn)
    same = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), prompts)
    twins = generate(params, same, jax.random.key(7))
    assert len(set(map(tuple, responses(twins)))) == 1  # one row id, one sample
    own = generate(params, same.replace(row=prompts.row), jax.random.key(7))
    assert len(set(map(tuple, responses(own)))) > 2


def test_tokens_of_one_row_are_independent_draws(generate):
    """A policy without preference must not repeat itself slot after slot."""
    flat = tiny.chain([5] * 16)
    flat["lm_head"]["kernel"] *= 0.0
    out = generate(flat, tiny.prompts(B), jax.random.key(0))
    assert max(len(set(row)) for row in responses(out)) > 2


SCRIPTS = {  # last prompt token → what a chain of 4 → 5 → 6 → … → stop says
    "immediate stop": (9, [0]),
    "immediate stop that is pad": (10, [3]),
    "stop in the last slot": (4, [5, 6, 7, 8, 0]),
    "one slot short of it": (5, [6, 7, 8, 0]),
    "stop that is pad": (11, [12, 3]),
    "never": (13, [14, 13, 14, 13, 14]),
}


@pytest.fixture(scope="module")
def script():
    following = list(range(16))
    following[4:15] = [5, 6, 7, 8, 0, 0, 3, 12, 3, 14, 13]
    return tiny.chain(following)


def say(generate, script, names):
    prompts = tiny.prompts(B)
    last = [SCRIPTS[name][0] for name in names] + [9] * (B - len(names))
    prompts = prompts.replace(tokens=prompts.tokens.at[:, -1].set(jnp.array(last)))
    return generate(script, prompts, jax.random.key(0)), prompts


def test_stop_tokens(generate, script):
    """Several stop ids, id 0, pad = stop, first and last slot; all in one batch."""
    out, prompts = say(generate, script, list(SCRIPTS))
    check_form(out, prompts)
    assert responses(out) == [said for _, said in SCRIPTS.values()]
    np.testing.assert_array_equal(out.stopped, [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(out.stop_index, [0, 1, 0, 0, 1, -1])
    np.testing.assert_array_equal(out.lengths, [1, 1, 5, 4, 2, 5])
    assert out.mask[:, 0].all()  # an immediate stop is a token that was chosen


def test_ends_when_all_rows_have_stopped(script, monkeypatch):
    """Counts the cached forwards: one for the prompt, one a further token."""
    calls, cached = [], decode.forward_cached

    def counted(*args):
        jax.debug.callback(lambda: calls.append(1))
        return cached(*args)

    monkeypatch.setattr(decode, "forward_cached", counted)
    generate = sampler()
    for name, steps in (("immediate stop", 0), ("stop that is pad", 1), ("never", 4)):
        calls.clear()
        say(generate, script, [name])[0].tokens.block_until_ready()
        jax.effects_barrier()
        assert len(calls) == 1 + steps, name


def test_one_new_token(one_slot, params, forced):
    prompts = tiny.prompts(B)
    out = one_slot(params, prompts, jax.random.key(7))
    check_form(out, prompts)
    assert out.tokens.shape == (B, P + 1)
    np.testing.assert_array_equal(out.lengths, 1)
    logits = forced(params, out.tokens, out.valid)
    tiny.close(out.logp, token_logprobs(logits, out.tokens[:, P:], temperature=HOT))


def test_first_slot_does_not_depend_on_the_number_of_slots(one_slot, drawn, params):
    out = one_slot(params, tiny.prompts(B), jax.random.key(7))
    np.testing.assert_array_equal(out.tokens[:, P], drawn.tokens[:, P])


def test_no_stop_tokens_at_all(params):
    """Allowed: every row then fills its slots. (Traced only.)"""
    args = params, tiny.prompts(B), jax.random.key(0)
    out = jax.eval_shape(sampler(stop_ids=()), *args)
    assert out.stop_index.shape == (B,) and out.mask.shape == (B, T)


def test_rows_that_never_start(generate, drawn, params):
    """Weight 0, or no prompt token: length 0, and no trace in the other rows."""
    prompts = tiny.prompts(B)
    prompts = prompts.replace(
        weight=prompts.weight.at[1].set(0.0), mask=prompts.mask.at[4].set(False)
    )
    out = generate(params, prompts, jax.random.key(7))
    check_form(out, prompts)
    expected = responses(drawn)
    expected[1] = expected[4] = []
    assert responses(out) == expected
    np.testing.assert_array_equal(out.stopped[np.array([1, 4])], False)
    assert np.isfinite(out.logp).all()


def test_no_row_starts(generate, params):
    prompts = tiny.prompts(B)
    none = prompts.replace(weight=jnp.zeros(B))
    out = generate(params, none, jax.random.key(7))
    np.testing.assert_array_equal(out.lengths, 0)
    check_form(out, none)


def test_pads_of_the_prompt_are_not_read(generate, drawn, params):
    prompts = tiny.prompts(B)
    other = prompts.replace(tokens=jnp.where(prompts.mask, prompts.tokens, 11))
    out = generate(params, other, jax.random.key(7))
    assert responses(out) == responses(drawn)


def test_no_copy_of_a_cache_inside_the_loop(generate, params):
    """Each token updates the caches in place: O(1) writes, not O(length)."""
    lowered = generate.lower(params, tiny.prompts(B), jax.random.key(0))
    hlo = lowered.compile().as_text()
    cache = f"f32[{B},{P + T - 1},{tiny.CFG.n_kv_heads},{tiny.CFG.head_dim}]"
    computations = dict(re.findall(r"^%?(\S+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S))
    bodies = re.findall(r"while\(.*body=%?([\w.\-]+)", hlo)
    loops = [computations[name] for name in bodies if cache in computations[name]]
    assert len(loops) == 1, "the decode loop was not found"
    inside = loops[0]
    for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", loops[0]):
        inside += computations[called]
    written = rf"{re.escape(cache)}\S* dynamic-update-slice\("
    assert len(re.findall(written, inside)) == 2 * tiny.CFG.n_layers
    assert not re.findall(rf"{re.escape(cache)}\S* copy\(", inside)
