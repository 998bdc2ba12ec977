"""The command line: `jppo quickstart`, `jppo train CONFIG.yaml key=value …`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jppo import config, settings


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


def settings_table() -> str:
    """Every key with its default and one line of help."""
    lines, section = [], ""
    for name, (_, default, doc) in settings.keys().items():
        head = name.split(".")[0]
        if head != section:
            section = head
            lines.append("")
        shown = "null" if default is None else str(default)
        lines.append(f"  {name}={shown}".ljust(38) + f"  {doc}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jppo", description="PPO for language models in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    quick = commands.add_parser(
        "quickstart",
        help="the main job: RLHF on SmolLM2 and human movie ratings, on a CPU",
        description="Trains a reward model from human ratings, then SmolLM2 against it"
        " with PPO; writes a report. Minutes on two cores, no accelerator.",
        epilog="settings, as key=value:" + settings_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    quick.add_argument(
        "--fast", action="store_true", help="two iterations, to see it run"
    )
    quick.add_argument("--seed", type=int, default=0, help="of data, weights, samples")
    train = commands.add_parser(
        "train",
        help="PPO from a config file",
        description="Trains a policy with PPO. A run that stopped goes on from its"
        " last checkpoint when it is started again.",
        epilog="settings, as key=value or in the YAML file:" + settings_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", nargs="?", help="YAML file of settings")
    report = commands.add_parser("report", help="draw report.html of a run folder")
    report.add_argument("folder", help="a run's folder (run.folder)")
    for command in (quick, train):
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="settings to change"
        )
    return parser


def run_command(args: argparse.Namespace) -> None:
    if args.command == "quickstart":
        from jppo.movie_reviews import FAST, FULL
        from jppo.quickstart import quickstart

        overrides = parse_overrides(args.overrides)
        quickstart(overrides, size=FAST if args.fast else FULL, seed=args.seed)
        return
    from jppo.report import write_report

    if args.command == "report":
        if not (Path(args.folder) / "metrics.jsonl").is_file():
            raise config.ConfigError(f"{args.folder}: no metrics.jsonl, so not a run")
        print(write_report(args.folder))
        return
    from jppo.loop import train

    sys.path.insert(0, os.getcwd())  # reward functions are found as by `python -m`
    pairs = list(args.overrides)
    if args.config and "=" in args.config:  # no file, only settings
        pairs, args.config = [args.config, *pairs], None
    tree = settings.flatten(read_config(args.config)) if args.config else {}
    result = train(settings.from_dict(tree | parse_overrides(pairs)))
    print(f"report: {write_report(result.folder)}")


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
        run_command(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except USER_ERRORS as error:
        if type(error).__module__.split(".")[0] not in ("jppo", "builtins"):
            raise
        print(f"jppo: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(65)


if __name__ == "__main__":
    main()
