"""One whole update against a second implementation of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import plain
import reference
import tiny

B, P, T = tiny.B, tiny.P, tiny.T


def right_padded(rolled):
    """Rows with the padding moved to the right, and each row's prompt length."""
    valid = np.asarray(rolled.valid)
    rows = np.zeros(valid.shape, np.int32)
    for i, keep in enumerate(valid):
        rows[i, : keep.sum()] = np.asarray(rolled.tokens)[i, keep]
    return rows, valid[:, :P].sum(-1)


def plain_outputs(cfg, actor, critic, rows, at, labels, temperature):
    """(log-probs of all tokens [b, t, v], of the labels, values) without padding."""

    def one(row, at, label):
        logits = plain.logits(jnp, cfg, actor, row)[at] / temperature
        logs = plain.log_softmax(jnp, logits)
        return (
            logs,
            logs[jnp.arange(T), label],
            plain.scalars(jnp, cfg, critic, row)[at],
        )

    return jax.vmap(one)(rows, at, labels)


def adam(params, grads, mean, square, step, lr):
    """One step of Adam behind a clip of the gradient's norm to 1, in numpy."""
    norm = np.sqrt(sum(float((g**2).sum()) for g in grads))
    grads = [g / max(norm, 1.0) for g in grads]
    mean = [0.9 * m + 0.1 * g for m, g in zip(mean, grads, strict=True)]
    square = [0.999 * s + 0.001 * g**2 for s, g in zip(square, grads, strict=True)]

    def step_of(m, s):
        unbiased = np.sqrt(s / (1 - 0.999**step))
        return lr * (m / (1 - 0.9**step)) / (unbiased + 1e-5)

    params = [p - step_of(m, s) for p, m, s in zip(params, mean, square, strict=True)]
    return params, mean, square


def test_golden_update(py):
    """Two epochs on three ragged rows, by a second implementation of everything.

    The other rows have weight 0. Model, losses, GAE and optimizer share no line
    with the library.
    """
    cfg = py.setup.config
    prompts = py.prompts(weight=jnp.float32(jnp.arange(B) % 3 == 1))
    state, frozen = py.trees(reference=tiny.params(seed=5))
    rolled = py.programs.generate(state, frozen, prompts)
    scored = py.programs.score(state, frozen, rolled, py.scores())
    trees = [plain.float64(t) for t in (state.actor, state.critic)]
    reference_tree = frozen.reference
    new, metrics = py.programs.update(state, frozen, *scored)

    rows, length = right_padded(rolled)
    mask = np.asarray(rolled.mask)
    at = np.minimum(length[:, None] - 1 + np.arange(T), P + T - 1)
    labels = np.asarray(rolled.tokens)[:, P:]
    outputs = jax.jit(lambda a, c: plain_outputs(tiny.CFG, a, c, rows, at, labels, 0.7))
    logs, old, values = map(np.asarray, outputs(*trees))
    ref = np.asarray(outputs(reference_tree, trees[1])[1])
    entropy = -(np.exp(logs) * logs).sum(-1)
    roles = dict(logp=old, logp_ref=ref, values=values, entropy=entropy)
    args = rolled.logp, tiny.scores(), mask, np.asarray(rolled.stopped), 0.05
    expected, fields = reference.experience(cfg, roles, *args)

    def loss(trees):
        _, logp, v = plain_outputs(tiny.CFG, *trees, rows, at, labels, 0.7)
        adv, ret = fields["advantages"], fields["returns"]
        ratio = jnp.exp(jnp.where(mask, logp - old, 0.0))
        policy = -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
        near = jnp.clip(v, values - 0.2, values + 0.2)
        value = 0.5 * jnp.maximum((v - ret) ** 2, (near - ret) ** 2)
        n = mask.sum()
        policy, value = (jnp.where(mask, x, 0.0).sum() / n for x in (policy, value))
        kl = jnp.where(mask, 0.5 * (logp - old) ** 2, 0.0).sum() / n
        return policy + 0.5 * value, (policy, value, kl)

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    flat, structure = jax.tree.flatten(trees)
    size = len(jax.tree.leaves(trees[0]))
    parts = [flat[:size], flat[size:]]
    moments = [[[0.0] * len(p), [0.0] * len(p)] for p in parts]
    history = []
    for step in (1, 2):
        grads, aux = gradient(structure.unflatten(parts[0] + parts[1]))
        history.append(aux)
        grads = [np.asarray(g, float) for g in jax.tree.leaves(grads)]
        for i, g in enumerate((grads[:size], grads[size:])):
            parts[i], *moments[i] = adam(parts[i], g, *moments[i], step, 1e-2)
    got = [jax.tree.leaves(new.actor), jax.tree.leaves(new.critic)]
    for mine, theirs in zip(parts, got, strict=True):
        tiny.close(theirs, mine, 1e-4)
    for name, i in (("policy_loss", 0), ("value_loss", 1), ("approx_kl", 2)):
        steps = [float(aux[i]) for aux in history]
        np.testing.assert_allclose(
            metrics[f"steps/{name}"], steps, rtol=1e-3, atol=1e-6, err_msg=name
        )
    for name in ("kl", "rewards", "scores", "explained_variance"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4)
