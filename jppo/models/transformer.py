"""One decoder for many families, as plain functions over param trees.

A param tree *is* the part of the model that it holds: `{"embed", "blocks"}` is a
trunk, `{"blocks", "norm"}` the layers above it, and all the keys a whole model.
`hidden_states` runs what the tree holds, so a frozen trunk is evaluated once and
several roles go on from its output.

Blocks are stored stacked on a leading layer axis and run by `lax.scan`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jppo.config import ModelConfig
from jppo.logprobs import head_logits
from jppo.models.layers import Block, View, layer_kinds, make_norm, view
from jppo.models.lora import flatten, overlay, unflatten
from jppo.sharding import BATCH, constrain

Params = dict[str, Any]
SHALLOW = 4  # blocks; a stack of no more is unrolled whole unless told otherwise


def positions_of(
    mask: Bool[Array, "b t"], segments: Int[Array, "b t"] | None = None
) -> Int[Array, "b t"]:
    """Position of each token among the valid ones (of its segment): cumsum − mask."""
    m = mask.astype(jnp.int32)
    count = jnp.cumsum(m, axis=-1) - m
    if segments is None:
        return count
    new = jnp.diff(segments, axis=-1, prepend=segments[:, :1] - 1) != 0
    start = jax.lax.cummax(jnp.where(new, count, 0), axis=1)
    return count - start


def views(
    cfg: ModelConfig,
    positions: Int[Array, "b t"],
    mask: Bool[Array, "b t s"],
    distance: Int[Array, "t s"],
) -> dict[str, View]:
    """The view of every kind of layer that the model has, by kind.

    mask: keys that a query may see in a full layer. distance: columns from key to
    query, which sliding layers bound.
    """
    kinds = dict.fromkeys(layer_kinds(cfg))
    return {kind: view(cfg, kind, positions, mask, distance) for kind in kinds}


def init_params(cfg: ModelConfig, key: Array, *, scalar_head: bool = False) -> Params:
    """Fresh f32 params of a whole decoder: N(0, .02) weights, unit norms.

    With `scalar_head` a value or reward head takes the place of the LM head.
    """
    k_embed, k_blocks, k_head = jax.random.split(key, 3)
    x = jnp.zeros((1, 1, cfg.d_model), jnp.float32)
    zero = jnp.zeros((1, 1), jnp.int32)
    at = view(cfg, layer_kinds(cfg)[0], zero, jnp.ones((1, 1, 1), bool), zero)
    init = lambda k: Block(cfg).init(k, x, at)["params"]  # noqa: E731
    normal = jax.random.normal(k_embed, (cfg.vocab_size, cfg.d_model), jnp.float32)
    params: Params = {
        "embed": {"embedding": 0.02 * normal},
        "blocks": jax.vmap(init)(jax.random.split(k_blocks, cfg.n_layers)),
        "norm": make_norm(cfg).init(k_embed, x)["params"],
    }
    if cfg.positions == "learned":
        shape = (cfg.max_positions, cfg.d_model)
        key = jax.random.fold_in(k_embed, 1)
        params["embed"]["positions"] = 0.02 * jax.random.normal(key, shape)
    if scalar_head:
        params["head"] = init_head(k_head, cfg.d_model)
    elif not cfg.tie_embeddings:
        kernel = jax.random.normal(k_head, (cfg.d_model, cfg.vocab_size), jnp.float32)
        params["lm_head"] = {"kernel": 0.02 * kernel}
    return params


def init_head(key: Array, d_model: int) -> Params:
    """Scalar head, weights N(0, 1/√(d+1)), bias 0 (arXiv 2403.17031, detail 11)."""
    std = (d_model + 1) ** -0.5
    kernel = std * jax.random.normal(key, (d_model, 1), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros((1,), jnp.float32)}


def depth(params: Params) -> int:
    """Number of blocks that this tree holds."""
    return len(jax.tree.leaves(params.get("blocks"))[0]) if "blocks" in params else 0


def first_layers(cfg: ModelConfig, n: int) -> ModelConfig:
    """The config of a model that ends after block n."""
    return dataclasses.replace(cfg, n_layers=n, layers=cfg.layers[:n])


def split_params(params: Params, layers: int | None) -> tuple[Params, Params]:
    """Cuts a whole model above block `layers`: (trunk with embedding, the rest).

    `None` gives an empty trunk: everything, embedding included, is in the rest. With
    `layers` equal to the depth the rest is the final norm and the head alone.
    """
    if layers is None:
        return {}, params
    if not 0 <= layers <= depth(params):
        raise ValueError(f"cannot cut {layers} layers off a model of {depth(params)}")
    trunk = {"embed": params["embed"]}
    rest = {k: v for k, v in params.items() if k not in ("embed", "blocks")}
    if layers > 0:
        trunk["blocks"] = jax.tree.map(lambda a: a[:layers], params["blocks"])
    if layers < depth(params):
        rest["blocks"] = jax.tree.map(lambda a: a[layers:], params["blocks"])
    return trunk, rest


def merge_params(trunk: Params, rest: Params) -> Params:
    """The inverse of `split_params`. Factors of adapters, which only the rest may
    have, are 0 in the trunk."""
    if not trunk:
        return rest
    parts = [tree["blocks"] for tree in (trunk, rest) if "blocks" in tree]
    if len(parts) == 1:
        return {**rest, **trunk}
    low, high = (flatten(part) for part in parts)
    n = depth(trunk)
    for key in high.keys() - low.keys():
        low[key] = jnp.zeros((n, *high[key].shape[1:]), high[key].dtype)
    blocks = unflatten({k: jnp.concatenate([low[k], high[k]]) for k in high})
    return {**rest, "embed": trunk["embed"], "blocks": blocks}


def policy_params(base: Params, reference: Params, actor: Params) -> Params:
    """The policy as a whole model: the actor over what it began as, on its trunk."""
    return merge_params(base, overlay(reference, actor))


def as_frozen(tree: Any, dtype: str) -> Any:
    """A tree as it is kept while it does not learn: matrices in the compute dtype.

    Exact, because every product casts them to it anyway. An array that occurs twice
    is cast once, so that it stays one array.
    """
    cast: dict[int, Any] = {}

    def keep(path: Any, leaf: Any) -> Any:
        matrix = path[-1].key in ("kernel", "embedding", "positions")
        if not matrix or _is_head(path) or leaf.dtype == jnp.dtype(dtype):
            return leaf
        if id(leaf) not in cast:
            cast[id(leaf)] = leaf.astype(jnp.dtype(dtype))
        return cast[id(leaf)]

    return jax.tree_util.tree_map_with_path(keep, tree)


def _is_head(path: Any) -> bool:
    """The scalar head works in float32."""
    return len(path) > 1 and getattr(path[-2], "key", None) == "head"


def embed(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
) -> Array:
    """Embedded tokens, and positions where those are learned: `[b, t, d]`."""
    dtype = jnp.dtype(cfg.dtype)
    x = params["embed"]["embedding"][tokens].astype(dtype)
    if cfg.embed_scale != 1.0:
        x = x * jnp.asarray(cfg.embed_scale, dtype)
    if cfg.positions == "learned":
        x = x + params["embed"]["positions"][positions].astype(dtype)
    return constrain(x, BATCH, None, None)


def run_blocks(
    cfg: ModelConfig, blocks: Params, x: Array, at: dict[str, View], first: int
) -> Float[Array, "b t d"]:
    """Stacked blocks over hidden states, one after another by `lax.scan`.

    first: number of the lowest of these blocks in the model. A scan stacks what each
    block keeps for the backward pass. A shallow stack runs faster without, unrolled
    whole; in a deep one the time to compile would not pay.
    """
    n = depth({"blocks": blocks})
    unroll = cfg.unroll or (n if n <= SHALLOW else 1)
    names = layer_kinds(cfg)[first : first + n]
    kinds = list(dict.fromkeys(names))
    # Layers of several kinds pick theirs by number; one kind needs no picking.
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *(at[kind] for kind in kinds))
    which = jnp.asarray([kinds.index(kind) for kind in names], jnp.int32)

    def body(h, layer_and_kind):
        layer, k = layer_and_kind
        mine = at[kinds[0]]
        if len(kinds) > 1:
            mine = jax.tree.map(lambda a: a[k], stacked)
        return Block(cfg).apply({"params": layer}, h, mine)[0], None

    if cfg.remat:
        body = jax.checkpoint(body, prevent_cse=False)
    return jax.lax.scan(body, x, (blocks, which), unroll=unroll)[0]


def final_norm(cfg: ModelConfig, params: Params, x: Array) -> Array:
    """The last norm, which the heads read."""
    return jnp.asarray(make_norm(cfg).apply({"params": params["norm"]}, x))


def hidden_states(
    cfg: ModelConfig,
    params: Params,
    x: Array,
    mask: Bool[Array, "b t"],
    segments: Int[Array, "b t"] | None = None,
) -> Float[Array, "b t d"]:
    """Runs the part of the model that `params` holds, causally, over valid tokens.

    x: token ids `[b, t]` where the tree has an embedding, else the output `[b, t, d]`
    of the trunk below. mask: False at padding, on either side. Texts that share a row
    have a number each in `segments`: none sees another, positions begin anew. The
    result is normalised when the tree has the final norm.
    """
    if ("embed" in params) != (x.ndim == 2):
        raise ValueError(
            "a tree with an embedding takes token ids [b, t], one without takes hidden"
            f" states [b, t, d]; got keys {sorted(params)} and shape {x.shape}"
        )
    positions, n = positions_of(mask, segments), depth(params)
    first = 0 if "embed" in params else cfg.n_layers - n
    if "embed" in params:
        x = embed(cfg, params, x, positions)
    if n:
        column = jnp.arange(mask.shape[1])
        distance = column[:, None] - column[None, :]
        seen = (distance >= 0) & mask[:, None]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segments[:, None, :])
        at = views(cfg, positions, seen, distance)
        x = run_blocks(cfg, params["blocks"], x, at, first)
    return final_norm(cfg, params, x) if "norm" in params else x


def lm_kernel(*trees: Params) -> tuple[Array, bool]:
    """(kernel, transposed): `[d, v]` of an own head, or the tied embedding `[v, d]`."""
    for tree in trees:
        if "lm_head" in tree:
            return tree["lm_head"]["kernel"], False
    for tree in trees:
        if "embed" in tree:
            return tree["embed"]["embedding"], True
    raise ValueError("no LM head and no embedding in these trees")


def logits(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
) -> Float[Array, "b t v"]:
    """f32 logits of a whole model at every position (for evaluation and tests)."""
    kernel, transposed = lm_kernel(params)
    hidden = hidden_states(cfg, params, tokens, mask)
    return head_logits(hidden, kernel, transposed=transposed, softcap=cfg.final_softcap)


def scalar_head(params: Params, hidden: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """hidden · w + bias in f32: a value or a reward a position."""
    head = params["head"]
    return (hidden.astype(jnp.float32) @ head["kernel"] + head["bias"])[..., 0]
