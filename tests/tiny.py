"""A model small enough to test everything on, and the pieces of a run around it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jppo import ppo, programs, settings
from jppo.config import ModelConfig, Setup
from jppo.sharding import make_mesh
from jppo.state import init_state, init_trees
from jppo.types import Frozen, Prompts

B, P, T = 8, 4, 5
NO_TREES = Frozen({}, {}, {}, {}, None, None)
STOPS, PAD = (0, 3), 3  # a stop id of 0, and padding that looks like a stop token
CFG = ModelConfig(
    vocab_size=16,
    d_model=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    d_mlp=32,
    tie_embeddings=False,
    max_positions=64,
)
TIED = dataclasses.replace(CFG, tie_embeddings=True)
LEARN = {
    "ppo.batch_size": B,
    "ppo.epochs": 2,
    "sampling.max_new_tokens": T,
    "sampling.temperature": 0.7,
    "actor_optim.lr": 1e-2,
    "critic_optim.lr": 1e-2,
}
# A small ε of Adam would turn rounding at gradient 0 into whole optimizer steps.
CALM = {
    "actor_optim.eps": 1e-3,
    "critic_optim.eps": 1e-3,
    "kl.controller": "ziegler",
}


def one_device():
    return make_mesh({}, jax.devices()[:1])


def params(cfg=CFG, seed=0, *, head=False):
    """Weights far from the flat start, so that tokens differ and errors show."""
    rng = np.random.default_rng(seed)
    n, d, f = cfg.n_layers, cfg.d_model, cfg.d_mlp
    h, k, e, v = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.vocab_size

    def normal(*shape, std=0.3):
        return jnp.asarray(rng.normal(size=shape) * std, jnp.float32)

    def scale(*shape):
        return 1.0 + normal(*shape, std=0.1)

    kernels = {
        "attn": {"q": (d, h, e), "k": (d, k, e), "v": (d, k, e), "o": (h, e, d)},
        "mlp": {"gate": (d, f), "up": (d, f), "down": (f, d)},
    }
    blocks = {
        part: {name: {"kernel": normal(n, *shape)} for name, shape in shapes.items()}
        for part, shapes in kernels.items()
    }
    blocks |= {"attn_norm": {"scale": scale(n, d)}, "mlp_norm": {"scale": scale(n, d)}}
    tree = {
        "embed": {"embedding": normal(v, d, std=0.5)},
        "blocks": blocks,
        "norm": {"scale": scale(d)},
    }
    if head:
        return tree | {"head": {"kernel": normal(d, 1), "bias": normal(1)}}
    if not cfg.tie_embeddings:
        tree["lm_head"] = {"kernel": normal(d, v)}
    return tree


def chain(following, cfg=CFG):
    """A policy that says `following[token]` after `token`, whatever came before.

    Blocks add nothing, embeddings are one-hot, and the LM head is the table.
    """
    tree = jax.tree.map(jnp.zeros_like, params(cfg))
    tree["blocks"]["attn_norm"]["scale"] += 1.0
    tree["norm"]["scale"] += 1.0
    tree["embed"]["embedding"] = jnp.eye(cfg.vocab_size, cfg.d_model)
    table = np.zeros((cfg.d_model, cfg.vocab_size), np.float32)
    table[np.arange(len(following)), following] = 20.0
    tree["lm_head"]["kernel"] = jnp.asarray(table)
    return tree


def make_setup(over=None, *, cfg=CFG, reward=False, p=P, frozen=None, on_critic=False):
    return Setup(
        config=settings.from_dict(LEARN | (over or {})),
        actor=cfg,
        critic=cfg,
        reward=cfg if reward else None,
        prompt_tokens=p,
        stop_ids=STOPS,
        pad_id=PAD,
        actor_frozen=frozen,
        critic_frozen=frozen,
        reward_on_critic_base=on_critic,
    )


def first_trees(setup):
    """(state, frozen) before the first step."""
    policy = params(setup.actor)
    reward = params(setup.reward, 1, head=True) if setup.reward else None
    actor, critic, frozen = init_trees(setup, policy, reward, jax.random.key(2))
    return init_state(setup, actor, critic, jax.random.key(3)), frozen


def prompts(b=B, p=P, seed=0, *, extra=0):
    """Left-padded prompts of 1 … p tokens, with `extra` columns of padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, CFG.vocab_size, (b, p))
    mask = np.arange(p) >= (np.arange(b) % p)[:, None]
    wide = ((0, 0), (extra, 0))
    return Prompts(
        tokens=jnp.asarray(np.pad(np.where(mask, tokens, PAD), wide), jnp.int32),
        mask=jnp.asarray(np.pad(mask, wide)),
        weight=jnp.ones(b),
        row=jnp.arange(b, dtype=jnp.int32),
    )


def scores(b=B, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=b), jnp.float32)


def use_tables(patch):
    """Makes actor and critic tables [b, t] of log-probs and values, free of networks.

    What they eat is the number of the row.
    """

    def policy_outputs(setup, params, base, x, valid, tokens, *, entropy):
        logp = params["table"][x]
        return logp, 2.0 - logp if entropy else None, logp[..., None]

    def critic_values(setup, critic, x, valid, hidden):
        return critic["table"][x]

    patch.setattr(ppo, "policy_outputs", policy_outputs)
    patch.setattr(ppo, "critic_values", critic_values)


class World:
    """The programs of one setup on one mesh, and the trees to run them on."""

    def __init__(self, setup, mesh=None):
        self.setup = setup
        self.programs = programs.build(setup, mesh or one_device())

    def trees(self, reference=None):
        """Fresh (state, frozen), placed: an update donates the state."""
        state, frozen = first_trees(self.setup)
        if reference is not None:
            frozen = frozen.replace(reference=reference)
        return self.programs.place(state, frozen)

    def prompts(self, seed=0, **changes):
        """Placed prompts: an array in another place would be another compilation."""
        return self.programs.put(prompts(seed=seed).replace(**changes))

    def scores(self):
        return self.programs.put(scores())


def close(actual, expected, tol=1e-5):
    """Trees are equal to within `tol`, absolute and relative."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol),
        jax.device_get(actual),
        jax.device_get(expected),
    )


def distance(a, b):
    """Largest difference between two trees of one structure."""
    gaps = jax.tree.map(
        lambda x, y: np.abs(np.subtract(x, y, dtype=float)).max(initial=0),
        jax.device_get(a),
        jax.device_get(b),
    )
    return float(max(jax.tree.leaves(gaps)))
