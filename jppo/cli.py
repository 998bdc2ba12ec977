"""The command line: `jppo quickstart`, `jppo train CONFIG.yaml key=value …`, and more.

Every command that takes settings takes them as a YAML file, as key=value, or both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from jppo import config, console, settings
from jppo.fit_config import DPOConfig, RewardFitConfig, SFTConfig
from jppo.generate_config import GenerateConfig


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """{"ppo.eps": 0.1} from ["ppo.eps=0.1"]; values are read as YAML."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise config.ConfigError(f"expected key=value, got {pair!r}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise config.ConfigError(f"{key}: cannot read {value!r} as YAML") from None
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings of a YAML file. Raises ConfigError naming file and line."""
    path = Path(path)
    if not path.is_file():
        raise config.ConfigError(f"{path}: no such config file")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise config.ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if tree is not None and not isinstance(tree, dict):
        raise config.ConfigError(
            f"{path}: expected 'section: key: value', got {tree!r}"
        )
    return tree or {}


def settings_table(base: Any) -> str:
    """Every key with its default and one line of help."""
    lines, section = [], ""
    values = settings.flatten(settings.to_dict(base))
    for name, (_, _, doc) in settings.keys(type(base)).items():
        head = name.split(".")[0]
        if head != section:
            section = head
            lines.append("")
        value = values[name]
        shown = "null" if value is None else "''" if value == "" else str(value)
        lines.append(f"  {name}={shown}".ljust(38) + f"  {doc}")
    return "\n".join(lines)


# name: (settings, one line of help, what it does and an example)
RUNS: dict[str, tuple[Any, str, str]] = {
    "train": (
        config.Config(),
        "PPO from a config file",
        "Trains a policy with PPO against a reward model or a Python function. A run"
        " that stopped goes on from its last checkpoint when it is started again.\n\n"
        "  jppo train policy.path=runs/sft/model reward.model=runs/reward/model \\\n"
        "      data.prompts=prompts.jsonl run.folder=runs/ppo",
    ),
    "sft": (
        SFTConfig(),
        "supervised fine-tuning",
        "Fine-tunes a model on rows of prompt and completion, messages, or text; the"
        " loss is over completions only. The result is in FOLDER/model.\n\n"
        "  jppo sft model.path=DIRECTORY data.train=train.jsonl data.eval=test.jsonl",
    ),
    "reward": (
        RewardFitConfig(),
        "a reward model from preference pairs",
        "Fits a scalar head, and the model under it, to rows of prompt, chosen and"
        " rejected (Bradley-Terry). The result, in FOLDER/model, is what reward.model"
        " of jppo train takes.\n\n"
        "  jppo reward model.path=runs/sft/model data.train=pairs.jsonl",
    ),
    "dpo": (
        DPOConfig(),
        "direct preference optimisation",
        "Fits a policy to rows of prompt, chosen and rejected, without a reward model;"
        " the reference is the model as it began. The result is in FOLDER/model.\n\n"
        "  jppo dpo model.path=runs/sft/model data.train=pairs.jsonl dpo.beta=0.1",
    ),
    "generate": (
        GenerateConfig(),
        "texts from a model",
        "Completes one prompt or a file of them.\n\n"
        "  jppo generate model.path=runs/ppo/model prompt='The movie was'\n"
        "  jppo generate model.path=runs/ppo/model data.prompts=test.jsonl \\\n"
        "      sampling.temperature=0 run.out=texts.jsonl",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jppo", description="PPO for language models in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    quick = commands.add_parser(
        "quickstart",
        help="the main job: RLHF on SmolLM2 and human movie ratings, on a CPU",
        description="Trains a reward model from human ratings, then SmolLM2 against it"
        " with PPO; writes a report. Minutes on two cores, no accelerator.",
        epilog="settings, as key=value:" + settings_table(config.Config()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    quick.add_argument(
        "--fast", action="store_true", help="two iterations, to see it run"
    )
    quick.add_argument("--seed", type=int, default=0, help="of data, weights, samples")
    quick.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    for name, (base, line, text) in RUNS.items():
        command = commands.add_parser(
            name,
            help=line,
            description=text,
            epilog="settings, as key=value or in the YAML file:" + settings_table(base),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("config", nargs="?", help="YAML file of settings")
        command.add_argument("overrides", nargs="*", metavar="key=value")
    _add_tools(commands)
    return parser


def _add_tools(commands: Any) -> None:
    """The commands that have no settings."""
    export = commands.add_parser(
        "export",
        help="a model out of a run, for transformers or peft",
        description="Writes what a run's checkpoint holds as a directory that"
        " transformers (or peft) opens. A run's last model is already in FOLDER/model;"
        " this is for its critic, its adapter, an earlier step or another dtype.",
    )
    export.add_argument("run", help="a run's folder (run.folder)")
    export.add_argument("out", help="a new directory")
    export.add_argument(
        "--part", choices=("model", "critic", "adapter"), default="model",
        help="the model with its adapter merged in (default), PPO's critic, or the"
        " adapter alone in PEFT's format",
    )  # fmt: skip
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    export.add_argument("--step", type=int, help="of the checkpoint; default: the last")
    look = commands.add_parser(
        "inspect",
        help="what a run, checkpoint, model, adapter or GGUF file holds",
        description="Reads headers only: facts, numbers of weights, bytes.",
    )
    look.add_argument("path", help="a folder, runs/ppo/checkpoints/50, or a .gguf file")
    look.add_argument("--arrays", action="store_true", help="list every array")
    report = commands.add_parser("report", help="draw report.html of a run folder")
    report.add_argument("folder", help="a run's folder (run.folder)")


# Commands


def _settings(args: argparse.Namespace) -> Any:
    """The settings of a command: defaults, then its file, then its key=value."""
    pairs = list(args.overrides)
    if args.config and "=" in args.config:  # no file, only settings
        pairs, args.config = [args.config, *pairs], None
    tree = settings.flatten(read_config(args.config)) if args.config else {}
    return settings.from_dict(tree | parse_overrides(pairs), RUNS[args.command][0])


def _quickstart(args: argparse.Namespace) -> None:
    from jppo.movie_reviews import FAST, FULL
    from jppo.quickstart import quickstart

    overrides = parse_overrides(args.overrides)
    quickstart(overrides, size=FAST if args.fast else FULL, seed=args.seed)


def _train(args: argparse.Namespace) -> None:
    from jppo.loop import train
    from jppo.report import write_report

    sys.path.insert(0, os.getcwd())  # reward functions are found as by `python -m`
    result = train(_settings(args))
    print(f"report: {write_report(result.folder)}")


def _fit(args: argparse.Namespace) -> None:
    from jppo.fit_loop import fit
    from jppo.report import write_report

    result = fit(_settings(args))
    print(f"report: {write_report(result.folder)}")


def _generate(args: argparse.Namespace) -> None:
    from jppo.generation import generate_texts

    cfg = _settings(args)
    rows = generate_texts(cfg)
    if not cfg.run.out:
        for row in rows:
            console.show(f"{row['prompt']}{row['completion']}\n")
        return
    count = 0
    Path(cfg.run.out).parent.mkdir(parents=True, exist_ok=True)
    with open(cfg.run.out, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            count += 1
    if not cfg.run.quiet:
        print(f"{count} texts in {cfg.run.out}")


def _export(args: argparse.Namespace) -> None:
    from jppo.exporting import export

    found = export(args.run, args.out, part=args.part, dtype=args.dtype, step=args.step)
    print(f"{args.out}: the {args.part} of {args.run} at step {found.step}")


def _inspect(args: argparse.Namespace) -> None:
    from jppo.inspection import inspect, size

    found = inspect(args.path)
    console.table(found.title, found.facts, ["", ""])
    if args.arrays:
        rows = [[n, str(list(s)), k, size(b)] for n, s, k, b in found.arrays]
        console.table(f"{len(rows)} arrays", rows, ["name", "shape", "dtype", "bytes"])


def _report(args: argparse.Namespace) -> None:
    from jppo.report import write_report

    if not (Path(args.folder) / "metrics.jsonl").is_file():
        raise config.ConfigError(f"{args.folder}: no metrics.jsonl, so not a run")
    print(write_report(args.folder))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "quickstart": _quickstart,
    "train": _train,
    "sft": _fit,
    "reward": _fit,
    "dpo": _fit,
    "generate": _generate,
    "export": _export,
    "inspect": _inspect,
    "report": _report,
}

# What a user can cause and mend: one line, no traceback.
USER_ERRORS = (
    ValueError,
    RuntimeError,
    FileNotFoundError,
    FileExistsError,
    ImportError,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 65 bad config or data, 130 interrupted."""
    args = make_parser().parse_args(argv)
    try:
        COMMANDS[args.command](args)
    except KeyboardInterrupt:
        sys.exit(130)
    except USER_ERRORS as error:
        if type(error).__module__.split(".")[0] not in ("jppo", "builtins"):
            raise
        print(f"jppo: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(65)


if __name__ == "__main__":
    main()
