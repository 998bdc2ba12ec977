"""Placement: one rule a leaf, errors that name the leaf, and layouts that are real."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from jppo import sharding as sh
from jppo.config import ConfigError
from jppo.state import abstract_trees

SETUPS = {
    "python": tiny.make_setup(),
    "reward": tiny.make_setup(reward=True),
    "tied": tiny.make_setup(cfg=tiny.TIED),
    "shared": tiny.make_setup({"critic.layout": "shared"}),
    "frozen": tiny.make_setup(
        {"critic.init": "reward"}, reward=True, frozen=1, on_critic=True
    ),
}


SIZES = {"slice": 1, "data": 1, "fsdp": 4, "tensor": 2}


def leaves(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {sh.path_name(path): leaf for path, leaf in flat}


@pytest.mark.parametrize("rules", [sh.TRAIN_RULES, sh.DECODE_RULES], ids="td")
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_every_leaf_has_exactly_one_rule(setup, rules):
    """State (moments too) and frozen trees, in every layout of the roles."""
    found = leaves(abstract_trees(setup))
    arrays = {name: leaf for name, leaf in found.items() if leaf.shape}
    for name, leaf in arrays.items():
        hits = [spec for pattern, spec in rules if re.search(pattern, name)]
        assert len(hits) == 1, name
        plain = [axis and axis.removesuffix("?") for axis in hits[0]]  # all divide
        assert sh.spec_of(name, leaf.shape, rules, SIZES) == PartitionSpec(*plain)
    assert any("mu/blocks" in name for name in arrays)
    scalars = [name for name, leaf in found.items() if not leaf.shape]
    assert {"0/beta", "0/key", "0/step"} <= set(scalars)


def test_moments_lie_where_their_params_lie():
    mesh = sh.make_mesh({"fsdp": 4, "tensor": 2})
    state, _ = sh.tree_shardings(abstract_trees(SETUPS["python"]), mesh)
    found = leaves(state)
    params = {k: v for k, v in found.items() if k.startswith("actor/")}
    assert len(params) == len(jax.tree.leaves(tiny.params()))
    for name, place in params.items():
        for moment in ("mu", "nu"):
            tail = name.removeprefix("actor")
            twin = [k for k in found if re.match(f"opt_actor.*/{moment}{tail}$", k)]
            assert [found[k] for k in twin] == [place], name


def test_every_big_leaf_is_cut_over_fsdp():
    for name, leaf in leaves(abstract_trees(SETUPS["reward"])).items():
        if leaf.ndim >= 2 and not re.search(r"norm|(^|/)head", name):
            assert "fsdp" in sh.spec_of(name, leaf.shape, sh.TRAIN_RULES, SIZES), name
            assert "fsdp" not in sh.spec_of(name, leaf.shape, sh.DECODE_RULES, SIZES), (
                name
            )


def test_no_rule_and_two_rules_are_errors_that_name_the_leaf():
    mesh = tiny.one_device()
    tree = {"blocks": {"attn": {"rotary": {"kernel": jnp.zeros((2, 3))}}}}
    with pytest.raises(ValueError, match="no sharding rule.*blocks/attn/rotary/kernel"):
        sh.tree_shardings(tree, mesh)
    twice = (*sh.TRAIN_RULES, (r"norm/scale$", (None,)))
    with pytest.raises(ValueError, match=r"several rules match 'norm/scale' \[16\]"):
        sh.tree_shardings({"norm": {"scale": jnp.zeros(16)}}, mesh, twice)
    with pytest.raises(ValueError, match="'norm/scale' 2"):
        sh.tree_shardings({"norm": {"scale": jnp.zeros((2, 16))}}, mesh)


def test_uneven_cut_names_path_dimension_and_axis():
    mesh = sh.make_mesh({"tensor": 8})
    tree = {"actor": {"embed": {"embedding": jnp.zeros((12, 16))}}}
    with pytest.raises(ConfigError) as error:
        sh.tree_shardings(tree, mesh)
    assert str(error.value) == (
        "'actor/embed/embedding' dimension 0 of size 12 does not divide over mesh axis"
        " 'tensor' of 8; 1, 2, 3, 4, 6 would do"
    )


@pytest.mark.parametrize(
    "tensor, q, k", [(2, 2, 1), (4, 1, 2), (8, 4, 2)], ids=["all", "queries", "none"]
)
def test_heads_are_cut_where_they_divide(tensor, q, k):
    """Of 4 query heads and 2 of keys and values; the MLP is cut in any case."""
    mesh = sh.make_mesh({"tensor": tensor, "fsdp": -1})
    placed = sh.tree_shardings(tiny.params(), mesh)["blocks"]
    heads = {
        name: placed["attn"][name]["kernel"].shard_shape(shape)[axis]
        for name, shape, axis in (
            ("q", (2, 16, 4, 4), 2),
            ("k", (2, 16, 2, 4), 2),
            ("v", (2, 16, 2, 4), 2),
            ("o", (2, 4, 4, 16), 1),
        )
    }
    assert heads == {"q": q, "k": k, "v": k, "o": q}
    up = placed["mlp"]["up"]["kernel"].shard_shape((2, 16, 32))
    assert up == (2, 16 * tensor // 8, 32 // tensor)


def test_a_rule_may_cut_one_dimension_over_two_axes():
    mesh = sh.make_mesh({"data": 2, "fsdp": 4})
    rules = ((r"w$", (("data", "fsdp"), None)),)
    (place,) = jax.tree.leaves(sh.tree_shardings({"w": jnp.zeros((8, 3))}, mesh, rules))
    assert place.shard_shape((8, 3)) == (1, 3)
    with pytest.raises(ValueError, match="'w' dimension 0 of size 4 does not divide"):
        sh.tree_shardings({"w": jnp.zeros((4, 3))}, mesh, rules)


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ({"fsdp": -1}, (1, 1, 8, 1)),
        ({"data": 2, "fsdp": -1}, (1, 2, 4, 1)),
        ({"slice": 2, "data": 2, "tensor": -1}, (2, 2, 1, 2)),
        ({"data": 8, "fsdp": -1}, (1, 8, 1, 1)),
        ({"slice": 2, "fsdp": 2, "tensor": 2}, (2, 1, 2, 2)),
    ],
)
def test_mesh_sizes(sizes, shape):
    mesh = sh.make_mesh(sizes)
    assert mesh.axis_names == ("slice", "data", "fsdp", "tensor")
    assert mesh.devices.shape == shape
    assert list(mesh.devices.flat) == jax.devices()  # every device once, in order


@pytest.mark.parametrize(
    "sizes, says",
    [
        ({"data": 3}, "needs 3 devices, 8 are attached"),
        ({"data": 16}, "needs 16 devices, 8 are attached"),
        ({}, "needs 1 devices, 8 are attached"),
        ({"data": 3, "fsdp": -1}, "multiple of 3 devices, 8 are attached"),
        ({"data": -1, "fsdp": -1}, "at most one −1"),
        ({"data": 0}, "must be positive"),
        ({"tensor": -2}, "must be positive"),
        ({"fdsp": 8}, "unknown mesh axes.*fdsp"),
    ],
)
def test_mesh_errors(sizes, says):
    with pytest.raises(ValueError, match=says):
        sh.make_mesh(sizes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the arrangement of devices looks at."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "H100"
    process_index: int = 0


def test_only_the_slice_axis_crosses_slices():
    chips = [Chip(i, slice_index=i % 2) for i in range(8)]  # listed in turns
    found = sh.arranged(chips, (2, 1, 2, 2))
    assert [{c.slice_index for c in part.flat} for part in found] == [{0}, {1}]
    assert sorted(chip.id for chip in found.flat) == list(range(8))
    with pytest.raises(ConfigError, match="in 2 slices, mesh.slice is 1: set mesh.sli"):
        sh.arranged(chips, (1, 1, 8, 1))


def test_constrain_demands_a_spec_for_every_dimension():
    x = jnp.zeros((8, 4, 2))
    with pytest.raises(ValueError, match="2 dims, the array 3"):
        sh.constrain(x, "data", None)
    assert sh.constrain(x, "data", None, None) is x  # free without a mesh


def test_constrain_really_places():
    mesh = sh.make_mesh({"fsdp": 4, "tensor": 2})
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: sh.constrain(x + 1, sh.BATCH, "tensor"))(
            jnp.zeros((8, 4))
        )
    assert out.sharding.shard_shape(out.shape) == (2, 2)


def test_decode_layout_gathers_fsdp_and_keeps_tensor():
    mesh = sh.make_mesh({"fsdp": 4, "tensor": 2})
    tree = {"lm_head": {"kernel": jnp.arange(64.0).reshape(16, 4)}}
    placed = jax.device_put(tree, sh.tree_shardings(tree, mesh))
    assert placed["lm_head"]["kernel"].sharding.shard_shape((16, 4)) == (4, 2)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda t: sh.constrain_tree(t, sh.DECODE_RULES))(placed)
    out = out["lm_head"]["kernel"]
    assert out.sharding.shard_shape((16, 4)) == (16, 2)
    np.testing.assert_array_equal(out, tree["lm_head"]["kernel"])
    assert sh.constrain_tree(tree, sh.DECODE_RULES) is tree


def test_batch_is_cut_over_all_batch_axes():
    mesh = sh.make_mesh({"slice": 2, "data": 2, "fsdp": 2})
    assert sh.batch_sharding(mesh).shard_shape((16, 3)) == (2, 3)
    assert sh.replicated(mesh).shard_shape((16, 3)) == (16, 3)
