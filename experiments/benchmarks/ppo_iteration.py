"""A whole PPO iteration, timed beside its roofline and, in the same session, TRL.

Purpose: seconds of rollout, scoring and update for four models of one size (actor,
critic, reward, reference; all weights train), against two bounds measured in the same
process: the best f32 matrix product and the memory bandwidth of this machine.

    python experiments/benchmarks/ppo_iteration.py                     # jppo alone
    python experiments/benchmarks/ppo_iteration.py --size smollm2 --epochs 1
    python experiments/benchmarks/ppo_iteration.py --peer PYTHON_WITH_TRL

`--peer` takes the Python of an environment with peers/requirements-trl.txt and runs
peers/trl_ppo.py in turns with jppo, a round each, so that both see the same machine.
Wall time: half a minute alone at the size `tiny`, some two minutes a round with TRL.
Expected: update dominates; TRL/jppo well above 1. Quote ratios of one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jppo
from jppo import programs
from jppo.config import ModelConfig, Setup
from jppo.models import transformer
from jppo.state import init_state, init_trees
from jppo.types import Prompts

SIZES = {
    "tiny": ModelConfig(8192, 256, 4, 4, 4, 64, 1024),
    "smollm2": ModelConfig(49152, 576, 30, 9, 3, 64, 1536),
}
PHASES = ("rollout", "scoring", "update", "total")


def best_seconds(fn, *args, tries: int = 5) -> float:
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def machine_bounds() -> tuple[float, float]:
    """(FLOP/s of a 2048³ product, bytes/s of a copy), the best of five."""
    a = jnp.ones((2048, 2048))
    flops = 2 * 2048**3 / best_seconds(jax.jit(lambda x: x @ x), a)
    big = jnp.ones(2**26)
    moved = 2 * big.nbytes / best_seconds(jax.jit(lambda x: x + 1), big)
    return flops, moved


def roofline(cfg: ModelConfig, b: int, p: int, t: int, epochs: int) -> dict[str, float]:
    """Seconds a phase if every matrix product ran at the measured peak.

    Attention scores are left out. A decoding step takes the longer of its products
    and one reading of the weights.
    """
    peak, bandwidth = machine_bounds()
    heads = cfg.n_heads + cfg.n_kv_heads
    block = 2 * cfg.d_model * cfg.head_dim * heads + 3 * cfg.d_model * cfg.d_mlp
    layers, head = cfg.n_layers * block, cfg.d_model * cfg.vocab_size
    body, top = 2 * layers * b * (p + t), 2 * head * b * t  # FLOPs of one forward
    step = max(2 * b * (layers + head) / peak, 4 * (layers + head) / bandwidth)
    found = {
        "rollout": (2 * b * (layers * p + head)) / peak + (t - 1) * step,
        "scoring": (4 * body + 2 * top) / peak,
        "update": epochs * 3 * (2 * body + top) / peak,
    }
    return found | {"total": sum(found.values()), "peak_gflops": peak / 1e9}


def make_run(cfg: ModelConfig, args: argparse.Namespace):
    """A function that runs one iteration and returns its seconds a phase."""
    b, p, t = args.batch, args.prompt, args.response
    config = jppo.from_dict(
        {
            "ppo.batch_size": b,
            "ppo.epochs": args.epochs,
            "ppo.minibatches": args.minibatches,
            "sampling.max_new_tokens": t,
            "actor_optim.lr": 3e-6,
            "critic_optim.lr": 3e-6,
        }
    )
    setup = Setup(config, cfg, cfg, cfg, p, stop_ids=(-1,), pad_id=0)  # never stops
    keys = jax.random.split(jax.random.key(0), 4)
    actor, critic, frozen = init_trees(
        setup,
        transformer.init_params(cfg, keys[0]),
        transformer.init_params(cfg, keys[1], scalar_head=True),
        keys[2],
    )
    progs = programs.build(setup)
    state, frozen = progs.place(init_state(setup, actor, critic, keys[3]), frozen)
    tokens = jax.random.randint(keys[3], (b, p), 0, cfg.vocab_size)
    whole = jnp.ones((b, p), bool)
    prompts = progs.put(Prompts(tokens, whole, jnp.ones(b), jnp.arange(b)))

    def once() -> dict[str, float]:
        nonlocal state
        clock = [time.perf_counter()]
        rolled = jax.block_until_ready(progs.generate(state, frozen, prompts))
        clock.append(time.perf_counter())
        scored = jax.block_until_ready(progs.score(state, frozen, rolled))
        clock.append(time.perf_counter())
        state, metrics = jax.block_until_ready(progs.update(state, frozen, *scored))
        clock.append(time.perf_counter())
        if int(rolled.lengths.min()) != t or float(metrics["skipped"]):
            raise RuntimeError("a response ended early or a step was skipped")
        steps = [b - a for a, b in zip(clock, clock[1:], strict=False)]
        return dict(zip(PHASES, [*steps, clock[-1] - clock[0]], strict=True))

    return once


def run_peer(python: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """Iterations of TRL's PPOTrainer, after one to warm up."""
    script = Path(__file__).parent / "peers" / "trl_ppo.py"
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "peer.json"
        command = [python, str(script), "--iterations", str(args.iterations)]
        command += ["--minibatches", str(args.minibatches), "--warmup", "1"]
        subprocess.run(
            [*command, "--json", str(out)], check=True, stdout=sys.stderr, stderr=None
        )
        return json.loads(out.read_text())


def show(name: str, rows: list[dict[str, float]]) -> dict[str, float]:
    """Prints median and range a phase; returns the medians."""
    medians = {k: statistics.median(r[k] for r in rows) for k in PHASES}
    cells = [
        f"{medians[k]:6.2f} ({min(times):.2f}–{max(times):.2f})"
        for k, times in ((k, [row[k] for row in rows]) for k in PHASES)
    ]
    print(f"{name:10s}" + "  ".join(f"{c:>22s}" for c in cells), flush=True)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=3, help="measured, a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", help="Python of an environment with TRL")
    args = parser.parse_args()
    fixed = (args.size, args.batch, args.prompt, args.response, args.epochs)
    if args.peer and fixed != ("tiny", 32, 32, 64, 4):
        parser.error(
            "the peer script runs size tiny, batch 32, 32 + 64 tokens, 4 epochs"
        )
    cfg = SIZES[args.size]
    once = make_run(cfg, args)
    start = time.perf_counter()
    first = once()
    print(f"first iteration with compilation {time.perf_counter() - start:.1f} s")
    print(f"{'seconds':10s}" + "  ".join(f"{k:>22s}" for k in PHASES))
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours += [once() for _ in range(args.iterations)]
        theirs += run_peer(args.peer, args) if args.peer else []
    medians = show("jppo", ours)
    bound = roofline(cfg, args.batch, args.prompt, args.response, args.epochs)
    show("roofline", [bound])
    print(f"measured peak {bound['peak_gflops']:.0f} GFLOP/s;", end=" ")
    print(f"jppo at {bound['total'] / medians['total']:.0%} of the roofline")
    record = {"jppo": medians, "roofline": bound, "first": first, "args": vars(args)}
    if theirs:
        record["trl"] = show("TRL", theirs)
        print(f"TRL / jppo = {record['trl']['total'] / medians['total']:.2f}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
