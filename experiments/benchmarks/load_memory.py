"""Host memory while a checkpoint is read: straight onto a mesh, and by way of the host.

    python experiments/benchmarks/load_memory.py [--layers 24] [--shards 8] [--rounds 3]

Writes a random Llama in bf16 shards to a temporary folder, loads it in a fresh process
each time, and samples that process's resident memory without the pages of mapped files.
On a CPU the device arrays live in the same memory: from the peak above the start the
model's bytes (8 fake devices hold it once) are taken off. What is left is what a host
needs beside its accelerators; the allocator's and the compiler's share is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MB = 10**6


def resident() -> int:
    """Anonymous bytes of this process: without the pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux")


class Peak:
    """Largest resident memory above the start."""

    def __init__(self):
        self.start, self.peak, self._stop = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, resident() - self.start)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def load(folder: str, how: str) -> None:
    """One load in this process; prints a JSON line."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from jppo.models.hf import load_hf
    from jppo.sharding import make_mesh, tree_shardings

    mesh = make_mesh({"fsdp": 8})
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the runtime's own memory
    began = time.monotonic()
    with Peak() as peak:
        if how == "mesh":
            _, params = load_hf(folder, mesh=mesh)
        else:
            _, params = load_hf(folder, host=True)
            params = jax.device_put(params, tree_shardings(params, mesh))
        jax.block_until_ready(params)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    seconds = time.monotonic() - began
    beside = peak.peak - total
    print(json.dumps({"beside": beside, "model": total, "seconds": seconds}))


def write(folder: Path, layers: int, shards: int) -> int:
    """A random checkpoint; returns the bytes of its largest shard."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jppo.model_config import ModelConfig
    from jppo.models.hf import save_hf
    from jppo.models.transformer import init_params

    cfg = ModelConfig(8192, 1024, layers, 16, 8, 64, 2816)
    params = init_params(cfg, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(params)) * 2
    save_hf(folder, cfg, params, dtype="bfloat16", max_shard_bytes=-(-size // shards))
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=positive, default=24)
    parser.add_argument("--shards", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load(*args.load)
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "model"
        shard = write(folder, args.layers, args.shards)
        command = [sys.executable, __file__, "--load", str(folder)]
        found: dict[str, list[dict[str, float]]] = {"mesh": [], "host": []}
        for _ in range(args.rounds):
            for how, rows in found.items():
                out = subprocess.run(
                    [*command, how], check=True, stdout=subprocess.PIPE
                )
                rows.append(json.loads(out.stdout.splitlines()[-1]))
    model = found["mesh"][0]["model"]
    print(
        f"model {model / MB:.0f} MB in float32; {args.shards} shards in bfloat16, the"
        f" largest {shard / MB:.0f} MB\n\n"
        "| MB of host memory beside the arrays | median | least–most | of a shard |"
        " seconds |\n|---|--:|--:|--:|--:|"
    )
    names = {"mesh": "straight onto the mesh", "host": "by way of the host"}
    for how, rows in found.items():
        peaks = sorted(row["beside"] for row in rows)
        middle = statistics.median(peaks)
        seconds = statistics.median(row["seconds"] for row in rows)
        print(
            f"| {names[how]} | {middle / MB:.0f} | {peaks[0] / MB:.0f}–"
            f"{peaks[-1] / MB:.0f} | {middle / shard:.2f} | {seconds:.1f} |"
        )


if __name__ == "__main__":
    main()
