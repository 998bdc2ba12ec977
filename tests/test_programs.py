"""The compiled programs: one truth, compiled once, donated, and never talking home."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jppo import programs
from jppo.config import ConfigError
from jppo.sharding import make_mesh
from jppo.state import abstract_trees, make_optimizers

B = tiny.B
WIDE = tiny.dataclasses.replace(tiny.CFG, d_model=128, head_dim=32, d_mlp=256)


def staged(world, state, frozen, prompts, *scores):
    """One iteration as three programs."""
    run = world.programs
    rolled = run.generate(state, frozen, prompts)
    experience, metrics = run.score(state, frozen, rolled, *scores)
    return *run.update(state, frozen, experience, metrics), rolled


@pytest.fixture(scope="module")
def fused(rm):
    return rm.programs.iteration(*rm.trees(), rm.prompts())


def test_fused_iteration_is_its_three_stages(rm, fused):
    state, metrics, rolled = fused
    expected = staged(rm, *rm.trees(), rm.prompts())
    np.testing.assert_array_equal(rolled.tokens, expected[2].tokens)
    tiny.close((metrics, rolled.logp), (expected[1], expected[2].logp), 1e-5)
    for name in ("actor", "critic", "opt_actor", "opt_critic", "beta", "step"):
        tiny.close(getattr(state, name), getattr(expected[0], name), 1e-6)
    assert jnp.array_equal(*map(jax.random.key_data, (state.key, expected[0].key)))
    assert tiny.distance(state.actor, rm.trees()[0].actor) > 1e-3


def test_compiled_once_over_many_steps(py, rm, fused):
    """Outputs are fed back as inputs: another shape or layout would recompile."""
    for world, scores in ((py, (py.scores(),)), (rm, ())):
        state, frozen = world.trees()
        for step in range(4):
            prompts = world.prompts(seed=step)
            state, _, _ = staged(world, state, frozen, prompts, *scores)
        assert state.step == 4
        assert counts(world) == [1, 1, 1]
    assert rm.programs.iteration.cache_size() == 1


def counts(world):
    run = world.programs
    return [p.cache_size() for p in (run.generate, run.score, run.update)]


def test_samples_follow_the_key_of_the_state(py):
    """One key, one sample; the key moves with every update."""
    state, frozen = py.trees()
    seen = []
    after, *_ = staged(py, *py.trees(), py.prompts(), py.scores())
    for key in (state.key, after.key, state.key):
        now = state.replace(key=key)
        rolled = py.programs.generate(now, frozen, py.prompts())
        seen.append(np.asarray(rolled.tokens))
    assert not np.array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])
    assert not jnp.array_equal(*map(jax.random.key_data, (state.key, after.key)))


def test_no_key_is_used_twice(monkeypatch, py):
    """Sampling, shuffling and the next step's state draw from three keys."""
    setup = tiny.make_setup({"ppo.minibatches": 2})
    tx, (state, frozen) = make_optimizers(setup), tiny.first_trees(setup)
    used = []

    class Stop(Exception):
        pass

    def note(*args, **kwargs):
        used.extend(filter(is_key, args))
        raise Stop

    monkeypatch.setattr(programs.decode, "generate", note)
    monkeypatch.setattr(programs.ppo, "minibatch_rows", note)
    with pytest.raises(Stop):
        programs.generate(setup, state, frozen, tiny.prompts())
    with pytest.raises(Stop):
        programs.ppo.update(setup, tx, state, frozen, py.scored[0])
    assert len(used) == 2
    (next_state, *_) = staged(py, *py.trees(), py.prompts(), py.scores())
    used += [state.key, next_state.key]
    assert len({tuple(jax.random.key_data(k).tolist()) for k in used}) == 4


def is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_state_is_donated_and_the_rest_is_not(py):
    """An update reuses the state's memory; the reference it came from survives."""
    first, frozen_first = tiny.first_trees(py.setup)
    state, frozen = py.programs.place(first, frozen_first)
    staged(py, state, frozen, py.prompts(), py.scores())
    gone = [a.is_deleted() for a in jax.tree.leaves((state.actor, state.opt_critic))]
    assert all(gone)
    assert not any(a.is_deleted() for a in jax.tree.leaves((frozen, first)))
    assert tiny.distance(frozen.reference, first.actor) == 0


def test_no_transfer_once_inputs_are_placed(py, rm, fused):
    """Nothing moves between host and device inside a step."""
    for world, scores in ((py, (py.scores(),)), (rm, ())):
        state, frozen = world.trees()
        prompts = world.prompts()
        state, *_ = staged(world, state, frozen, prompts, *scores)
        with jax.transfer_guard("disallow"):
            with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
                jnp.sin(np.ones(3))  # the guard works here
            state, *_ = staged(world, state, frozen, prompts, *scores)
        if world is rm:
            rm.programs.iteration(*rm.trees(), prompts)
            state, frozen = rm.trees()
            with jax.transfer_guard("disallow"):
                rm.programs.iteration(state, frozen, prompts)


def test_python_scores_are_the_scores(py, rolled):
    scores = py.scores()
    experience, metrics = py.programs.score(*py.trees(), rolled, scores)
    np.testing.assert_array_equal(experience.scores, scores)
    np.testing.assert_allclose(metrics["scores"], scores.mean(), rtol=1e-6)
    other, _ = py.programs.score(*py.trees(), rolled, py.programs.put(scores[::-1]))
    assert tiny.distance(other.advantages, experience.advantages) > 0.1


def test_no_scores_and_no_reward_model(py):
    with pytest.raises(ValueError, match="no reward model: scores must be given"):
        py.programs.iteration(*py.trees(), py.prompts())


@pytest.mark.parametrize(
    "batch, minibatches, micro, mesh, says",
    [
        (12, 1, 1, {"fsdp": 8}, r"12 rows .*over the 8 devices"),
        (16, 2, 2, {"data": 8}, r"4 rows .*16 / minibatches 2 / micro_batches 2.* 8 "),
        (8, 2, 1, {"data": 2, "fsdp": 4}, r"4 rows .*over the 8 devices"),
        (8, 4, 1, {"slice": 2, "data": 2, "tensor": 2}, r"2 rows .*over the 4 devices"),
    ],
)
def test_uneven_batches_name_both_numbers(batch, minibatches, micro, mesh, says):
    setup = tiny.make_setup(
        {
            "ppo.batch_size": batch,
            "ppo.minibatches": minibatches,
            "ppo.micro_batches": micro,
        }
    )
    with pytest.raises(ConfigError, match=says):
        programs.build(setup, make_mesh(mesh))


def test_build_refuses_a_mesh_that_does_not_fit():
    with pytest.raises(ValueError, match="needs 3 devices, 8 are attached"):
        programs.build(tiny.make_setup({"mesh.fsdp": 3}))
    odd = tiny.dataclasses.replace(tiny.CFG, vocab_size=12)
    with pytest.raises(ConfigError, match="size 12 does not divide.*'tensor' of 8"):
        programs.build(tiny.make_setup(cfg=odd), make_mesh({"tensor": 8}))
    assert programs.build(tiny.make_setup()).mesh.shape["fsdp"] == 8  # the default: −1


def test_abstract_arguments_are_the_real_ones(rm):
    """What a planner lowers is what the loop runs."""

    def forms(tree):
        return jax.tree.map(lambda a: (a.shape, a.dtype), tree)

    assert forms(abstract_trees(rm.setup)) == forms(rm.trees())
    assert forms(programs.abstract_prompts(rm.setup)) == forms(tiny.prompts())


def test_lowering_keeps_the_layout_of_activations():
    """`lower` needs no context of its own: constraints are in the program."""
    setup = tiny.make_setup(reward=True)
    run = programs.build(setup, make_mesh({"fsdp": 4, "tensor": 2}))
    args = *abstract_trees(setup), programs.abstract_prompts(setup)
    text = run.generate.lower(*args).as_text()
    pinned = re.findall(r"sharding_constraint|@Sharding", text)
    assert len(pinned) > 2 * setup.actor.n_layers


def computations(text):
    """Name → lines of every computation in a compiled program."""
    found, lines = {}, []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = found.setdefault(head[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def inside_loops(text):
    """Lines of all computations that some while loop runs, directly or not."""
    found = computations(text)
    calls = {
        name: set(re.findall(r"%([\w.\-]+)", "\n".join(lines))) & found.keys()
        for name, lines in found.items()
    }
    todo = {
        body
        for lines in found.values()
        for line in lines
        for body in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
    }
    seen = set()
    while todo:
        seen.add(name := todo.pop())
        todo |= calls[name] - seen
    return [line for name in seen for line in found[name]]


def gathers(lines):
    """Elements of every array that an all-gather makes."""
    found = []
    for line in lines:
        if re.search(r" all-gather(-start)?\(", line):
            shape = re.findall(r"\[([\d,]*)\]", line.split(" all-gather")[0])[-1]
            found.append(math.prod(int(n) for n in shape.split(",") if n))
    return found


def test_weights_are_gathered_once_a_rollout():
    """Before prefill and loop, all layers of a projection at once; never inside.

    Left to itself the compiler gathers each layer for the prefill and for the loop.
    """
    setup = tiny.make_setup(cfg=WIDE)
    run = programs.build(setup, make_mesh({"fsdp": 4, "tensor": 2}))
    args = *abstract_trees(setup), programs.abstract_prompts(setup)
    text = run.generate.lower(*args).compile().as_text()
    part = WIDE.d_model * WIDE.head_dim  # of k or v in one layer, over tensor=2
    big = [n for n in gathers(text.splitlines()) if n >= part]
    assert len(big) == len(("q", "k", "v", "o", "gate", "up", "down"))
    assert min(big) == WIDE.n_layers * part
    inside = gathers(inside_loops(text))
    assert inside and max(inside) < part  # samples and masks alone


def test_weights_are_cast_before_they_are_gathered():
    setup = tiny.make_setup(cfg=tiny.dataclasses.replace(WIDE, dtype="bfloat16"))
    run = programs.build(setup, make_mesh({"fsdp": 4, "tensor": 2}))
    args = *abstract_trees(setup), programs.abstract_prompts(setup)
    text = run.generate.lower(*args).as_text()
    pinned = [
        x for x in text.splitlines() if re.search("sharding_constraint|@Shard", x)
    ]
    up = {kind for x in pinned for kind in re.findall(r"tensor<2x128x256x(\w+)>", x)}
    assert up == {"bf16"}


def test_placed_trees_lie_as_the_rules_say():
    setup = tiny.make_setup(reward=True)
    run = programs.build(setup, make_mesh({"fsdp": 4, "tensor": 2}))
    state, frozen = run.place(*tiny.first_trees(setup))
    q = state.actor["blocks"]["attn"]["q"]["kernel"]
    assert q.sharding.shard_shape(q.shape) == (2, 4, 2, 4)
    kernel = frozen.reward["blocks"]["mlp"]["down"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 4)
    prompts = run.put(tiny.prompts())
    assert prompts.tokens.sharding.shard_shape(prompts.tokens.shape) == (2, tiny.P)
