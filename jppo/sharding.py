"""Where arrays live: one mesh, one table of rules, one helper for activations.

A rule is (regex, spec): the regex is searched in the `/`-joined path of a leaf, and
the spec names a mesh axis (or a tuple of them, or None) for each of its dimensions.
Every leaf that is not a scalar must match exactly one rule. Optimizer moments carry
the path of their param at the end, so the same table places both. An axis written with
a question mark cuts where it divides, and leaves the dimension whole where it does not:
attention heads over `tensor`, of which a model may have 14, or 2 for keys and values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jppo.checks import ConfigError

AXES = ("slice", "data", "fsdp", "tensor")
BATCH = ("slice", "data", "fsdp")  # the axes that cut the batch
HEADS = "tensor?"

Rules = tuple[tuple[str, tuple[Any, ...]], ...]

TRAIN_RULES: Rules = (
    (r"embed/embedding$", ("tensor", "fsdp")),
    (r"embed/positions$", (None, "fsdp")),
    (r"blocks/(attn|mlp)_(norm|post)/(scale|bias)$", (None, None)),
    (r"blocks/attn/[qk]_norm/scale$", (None, None)),
    (r"blocks/attn/[qkv]/kernel$", (None, "fsdp", HEADS, None)),
    (r"blocks/attn/[qkv]/bias$", (None, HEADS, None)),
    (r"blocks/attn/o/kernel$", (None, HEADS, None, "fsdp")),
    (r"blocks/mlp/(gate|up)/kernel$", (None, "fsdp", "tensor")),
    (r"blocks/mlp/(gate|up)/bias$", (None, "tensor")),
    (r"blocks/mlp/down/kernel$", (None, "tensor", "fsdp")),
    (r"blocks/(attn/o|mlp/down)/bias$", (None, None)),
    (r"blocks/attn/[qkv]/lora_a$", (None, "fsdp", None)),
    (r"blocks/attn/[qkv]/lora_b$", (None, None, HEADS, None)),
    (r"blocks/attn/o/lora_a$", (None, HEADS, None, None)),
    (r"blocks/mlp/(gate|up)/lora_a$", (None, "fsdp", None)),
    (r"blocks/mlp/(gate|up)/lora_b$", (None, None, "tensor")),
    (r"blocks/mlp/down/lora_a$", (None, "tensor", None)),
    (r"blocks/(attn/o|mlp/down)/lora_b$", (None, None, "fsdp")),
    (r"(^|/)norm/(scale|bias)$", (None,)),
    (r"lm_head/kernel$", ("fsdp", "tensor")),
    (r"(^|/)head/kernel$", (None, None)),
    (r"(^|/)head/bias$", (None,)),
)

# Decoding reads every weight once a token: gather the fsdp cut once a rollout instead.
DECODE_RULES: Rules = tuple(
    (pattern, tuple(None if axis == "fsdp" else axis for axis in spec))
    for pattern, spec in TRAIN_RULES
)


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over axes `slice, data, fsdp, tensor`; one size may be −1 (the rest).

    The network of the devices decides where each stands: `tensor` neighbours are
    close, and only `slice` crosses from one pod slice to another.
    Raises ConfigError for an unknown axis, when the sizes do not multiply to the
    number of devices, and when `slice` is not the number of slices.
    """
    if unknown := sorted(set(sizes) - set(AXES)):
        raise ConfigError(f"unknown mesh axes {unknown}; known: {AXES}")
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes.get(axis, 1) for axis in AXES]
    known = math.prod(s for s in shape if s != -1)
    if shape.count(-1) > 1 or any(s < 1 and s != -1 for s in shape):
        raise ConfigError(f"mesh sizes must be positive, with at most one −1: {sizes}")
    if -1 in shape and len(devices) % known == 0:
        shape[shape.index(-1)] = len(devices) // known
    if math.prod(shape) != len(devices):
        needs = f"a multiple of {known}" if -1 in shape else known
        raise ConfigError(
            f"mesh {dict(zip(AXES, shape, strict=True))} needs {needs} devices,"
            f" {len(devices)} are attached"
        )
    # Auto, spelled out: jax.make_mesh defaults to Explicit, under which Linen fails.
    return Mesh(arranged(devices, shape), AXES, axis_types=(AxisType.Auto,) * 4)


def arranged(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """The devices as an array of this shape, by where they stand in the network."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1 and shape[0] != len(slices):
        raise ConfigError(
            f"the devices are in {len(slices)} slices, mesh.slice is {shape[0]}: set"
            f" mesh.slice={len(slices)}, so that no other axis crosses between slices"
        )
    try:
        if len(slices) > 1:
            inner, outer = (1, *shape[1:]), (shape[0], 1, 1, 1)
            return mesh_utils.create_hybrid_device_mesh(
                inner, outer, devices, allow_split_physical_axes=True
            )
        if devices[0].platform == "tpu":
            return mesh_utils.create_device_mesh(
                shape, devices, allow_split_physical_axes=True
            )
    except NotImplementedError:  # no assignment to the torus is known for this shape
        pass
    by_slice = sorted(devices, key=lambda device: getattr(device, "slice_index", 0))
    return np.asarray(by_slice).reshape(shape)


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks/attn/q/kernel` from a jax key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _cut(axis: Any, sizes: Mapping[str, int]) -> int:
    """Into how many parts an axis, or several together, cut a dimension."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    return math.prod(sizes[a] for a in axes if a is not None)


def resolved(
    spec: Sequence[Any], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """A spec without question marks: such an axis cuts only where it divides."""

    def one(axis: Any, size: int) -> Any:
        if not isinstance(axis, str) or not axis.endswith("?"):
            return axis
        axis = axis.removesuffix("?")
        return None if size % sizes[axis] else axis

    return PartitionSpec(*(one(a, n) for a, n in zip(spec, shape, strict=True)))


def spec_of(
    name: str, shape: tuple[int, ...], rules: Rules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """The one rule that matches `name`; scalars are replicated without a rule.

    sizes: of the mesh axes.
    """
    if not shape:
        return PartitionSpec()
    found = [(p, spec) for p, spec in rules if re.search(p, name)]
    if len(found) != 1:
        what = "no sharding rule matches" if not found else "several rules match"
        raise ValueError(f"{what} {name!r} {list(shape)}: {[p for p, _ in found]}")
    spec = found[0][1]
    if len(spec) != len(shape):
        raise ValueError(f"rule {found[0]} has {len(spec)} dims, {name!r} {len(shape)}")
    return resolved(spec, shape, sizes)


def tree_shardings(tree: Any, mesh: Mesh, rules: Rules = TRAIN_RULES) -> Any:
    """A NamedSharding for every leaf of a tree of arrays or ShapeDtypeStructs.

    Raises ConfigError naming path, dimension and axis where the cut is uneven, and
    the sizes of the axis that would do.
    """

    def place(path, leaf):
        name = path_name(path)
        spec = spec_of(name, leaf.shape, rules, mesh.shape)
        for dim, (size, axis) in enumerate(zip(leaf.shape, spec, strict=True)):
            cut = _cut(axis, mesh.shape)
            if size % cut:
                would = [n for n in range(1, mesh.size + 1) if size % n == 0]
                raise ConfigError(
                    f"{name!r} dimension {dim} of size {size} does not divide over mesh"
                    f" axis {axis!r} of {cut}; {', '.join(map(str, would))} would do"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first dimension cut over all batch axes, the others whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *spec: Any) -> jax.Array:
    """Pins the layout of an activation; free when no mesh is set.

    The spec must name every dimension: a short one would leave the rest to chance.
    As in a rule, an axis with a question mark cuts where it divides.
    """
    if len(spec) != x.ndim:
        raise ValueError(f"spec {spec} has {len(spec)} dims, the array {x.ndim}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, resolved(spec, x.shape, mesh.shape))


def constrain_tree(tree: Any, rules: Rules) -> Any:
    """Moves a param tree to another layout inside a compiled program."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: constrain(
            leaf, *spec_of(path_name(path), leaf.shape, rules, mesh.shape)
        ),
        tree,
    )
