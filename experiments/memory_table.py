"""What the four models of PPO cost, by layout: the tables of docs/memory.md.

    python experiments/memory_table.py                    # Llama-2-7B's shape
    python experiments/memory_table.py --model runs/sft/model --dtype float32
    python experiments/memory_table.py --write            # and puts them into the page

No device and no weights: shapes alone, in a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jppo import memory, settings
from jppo.config import LoraConfig, ModelConfig, Setup
from jppo.models.hf_config import config_from_json
from jppo.state import make_roles

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- memory table -->", "<!-- end -->"
LLAMA_7B = ModelConfig(
    vocab_size=32000,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    d_mlp=11008,
    tie_embeddings=False,
)
RANK = 16
ADAPTERS = {"policy.lora.rank": RANK, "critic.lora.rank": RANK}
TOP = {"policy.train_layers": "top", "critic.train_layers": "top"}
# name, settings, the reward model ("own", "adapter" over the policy's base, or "none")
LAYOUTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("four models", {}, "own"),
    ("critic a head on the actor", {"critic.layout": "shared"}, "own"),
    ("the same, scores from Python", {"critic.layout": "shared"}, "none"),
    ("top quarter of the blocks learns", TOP, "own"),
    ("the same, critic on the reward model", TOP | {"critic.init": "reward"}, "own"),
    ("adapters for actor and critic", ADAPTERS, "own"),
    ("adapters for all three, one base", ADAPTERS, "adapter"),
)


def make_setup(model: ModelConfig, over: dict[str, Any], reward: str) -> Setup:
    """A run of this layout with four models of one shape."""
    top = -(-model.n_layers // 4)
    over = {k: top if v == "top" else v for k, v in over.items()}
    cfg = settings.from_dict(over | {"policy.dtype": model.dtype})
    return Setup(
        **make_roles(cfg, model, None if reward == "none" else model),
        prompt_tokens=1,
        stop_ids=(0,),
        pad_id=0,
        reward_lora=LoraConfig(rank=RANK if reward == "adapter" else 0),
    )


def gigabytes(n: int) -> str:
    return f"{n / memory.GB:.1f}" if n else "–"


def layout_rows(model: ModelConfig) -> list[list[str]]:
    """One row a layout: what each role owns alone, what several share, the total."""
    rows = []
    for name, over, reward in LAYOUTS:
        setup = make_setup(model, over, reward)
        found = memory.holdings(setup, one_base=reward == "adapter")
        alone = [memory.total(found, role) for role in memory.ROLES]
        everything = memory.total(found)
        policy = memory.weights_of(model)
        rows.append(
            [name]
            + [gigabytes(n) for n in (*alone, everything - sum(alone), everything)]
            + [f"{everything / policy:.1f}"]
        )
    return rows


def kind_rows(model: ModelConfig) -> list[list[str]]:
    """Bytes per parameter of a trained and of a frozen model, by kind."""
    found = memory.holdings(make_setup(model, {}, "own"))
    rows = []
    for role, what in (("actor", "a model that learns"), ("reference", "a frozen one")):
        kinds = {h.kind: h.bytes / h.weights for h in found if h.roles == (role,)}
        cells = [kinds.get(k, 0.0) for k in ("weights", "gradients", "moments")]
        rows.append([what] + [f"{c:.0f}" if c else "–" for c in (*cells, sum(cells))])
    return rows


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def textbook(weights: int) -> str:
    """The arithmetic of the textbooks: mixed-precision Adam, two of four frozen."""
    roles = [
        memory.textbook_bytes(weights, trained=t) for t in (True, True, False, False)
    ]
    terms = " + ".join(f"{n / memory.GB:.3g}" for n in roles)
    return (
        f"{weights / 1e9:.3g} B weights a role, by the textbook:"
        f" {terms} = {sum(roles) / memory.GB:.3g} GB."
    )


def tables(model: ModelConfig, name: str, told: int | None = None) -> str:
    """Both tables, as Markdown. told: the size by which the model is known."""
    size = memory.weights_of(model)
    kinds = ["bytes per parameter", "weights", "gradients", "Adam moments", "total"]
    head = [f"{name}, GB", *memory.ROLES, "shared", "total", "bytes per policy weight"]
    return (
        f"{textbook(told or size)}\n\n"
        f"{name}: {size / 1e9:.2f} B weights, computing in {model.dtype}.\n\n"
        f"{markdown(kinds, kind_rows(model))}\n\n{markdown(head, layout_rows(model))}"
    )


def written(page: str, made: str) -> str:
    """The page with the tables between its markers."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.split(END, 1)[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="Hugging Face directory (default: Llama-2-7B)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute"
    )
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    args = parser.parse_args(argv)
    if args.write and (args.model or args.dtype != "bfloat16"):
        parser.error("the page shows Llama-2-7B in bfloat16: --write takes no other")
    model, name, told = LLAMA_7B, "Llama-2-7B", 7 * 10**9
    if args.model:
        file = Path(args.model) / "config.json"
        if not file.is_file():
            parser.error(f"--model: there is no {file}")
        model, _ = config_from_json(file, dtype=args.dtype)
        name, told = Path(args.model).resolve().name, None
    made = tables(dataclasses.replace(model, dtype=args.dtype), name, told)
    print(made)
    if args.write:
        PAGE.write_text(written(PAGE.read_text("utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # ConfigError is one
        sys.exit(f"error: {error}")
