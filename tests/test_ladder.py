"""The shape of the house: imports go down only, and nothing is too long to read."""

import ast
import graphlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "jppo"
LADDER = [
    "model_config checks config fit_config generate_config types masked settings"
    " sharding",
    "logprobs advantages kl losses sampling",
    "models models.*",
    "state decode gradients",
    "rollout ppo preference sft",
    "programs fitting memory",
    "readers order tokens chat examples data rewards checkpoint metrics console assets"
    " report report.* fit_data run_folder loading",
    "text_reward job loop steplog fit_job fit_steps fit_loop reward_loop evaluation"
    " generation exporting inspection movie_reviews",
    "cli quickstart __init__",
]
# Within the vocabulary, and beside it: who may lean on a neighbour.
BASE = {k: set() for k in ("masked", "model_config", "checks", "types")} | {
    "sharding": {"checks"},
    "config": {"model_config", "checks"},
    "settings": {"config"},
    "fit_config": {"model_config", "checks", "config"},
    "generate_config": {"model_config", "checks", "config"},
}
LINES, FUNCTION, LONG = 300, 60, {"loop.run": 120, "loop.train": 120}


def module_name(path):
    """`models.hf` for jppo/models/hf.py; a package's __init__ is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inner = len(parts) > 1 and parts[-1] == "__init__"
    return ".".join(parts[:-1] if inner else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}


def level(name):
    """Step of the ladder on which a module stands; None if it has no place."""
    parent = name.rpartition(".")[0]
    for i, row in enumerate(LADDER):
        if name in row.split() or (parent and f"{parent}.*" in row.split()):
            return i
    return None


def absolute(name, node):
    """The dotted module that `from … import` names, seen from module `name`."""
    if not node.level:
        return node.module or ""
    here = f"jppo.{name}".split(".")
    is_package = FILES[name].name == "__init__.py"
    if name == "__init__":
        here = ["jppo"]
    here = here[: len(here) - node.level + is_package]
    return ".".join([*here, *([node.module] if node.module else [])])


def imported(name, tree):
    """Every dotted name that a module imports, wherever in its code it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inner_imports(name, tree, files=None):
    """The modules of jppo that a module imports, as keys of FILES."""
    files = FILES if files is None else files
    found = set()
    for dotted in imported(name, tree):
        if dotted.split(".")[0] != "jppo":
            continue
        tail = dotted.split(".")[1:]
        while tail and ".".join(tail) not in files:
            tail.pop()  # a function or a class: its module
        found.add(".".join(tail) or "__init__")
    return found - {name}


GRAPH = {name: inner_imports(name, tree) for name, tree in TREES.items()}


def test_the_reader_of_imports_sees_every_form():
    code = """
        import jppo.ppo
        from jppo import config as configs, masked
        from jppo.models import hf
        from jppo.state import init_state
        def late():
            from . import decode
            from .models.transformer import logits
    """
    tree = ast.parse(textwrap.dedent(code))
    assert inner_imports("loop", tree) == {
        "ppo",
        "config",
        "masked",
        "models.hf",
        "state",
        "decode",
        "models.transformer",
    }
    (relative,) = ast.parse("from . import figures").body
    assert absolute("report", relative) == "jppo.report"
    assert absolute("report.plots", relative) == "jppo.report"


@pytest.mark.parametrize("name", FILES)
def test_every_module_has_a_level_and_imports_down_only(name):
    here = level(name)
    assert here is not None, f"{FILES[name]} has no place on the ladder"
    for other in GRAPH[name]:
        there = level(other)
        assert there is not None and there <= here, f"{name} imports {other}"
    if name in BASE:
        assert GRAPH[name] <= BASE[name], name


def test_pure_maths_leans_on_the_vocabulary_only():
    """A formula that needs another formula's module would not stand alone."""
    for name in LADDER[1].split():
        assert GRAPH[name] <= set(LADDER[0].split()), name


def test_no_module_imports_itself_by_a_detour():
    order = list(graphlib.TopologicalSorter(GRAPH).static_order())
    assert set(order) == set(FILES)
    assert order.index("masked") < order.index("losses") < order.index("programs")


def test_flax_linen_stays_in_the_models():
    """Elsewhere params are plain trees."""
    users = {
        name
        for name, tree in TREES.items()
        for dotted in imported(name, tree)
        if dotted.startswith("flax.linen")
    }
    assert users and all(name.startswith("models.") for name in users), users


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_short(name):
    lines = len(FILES[name].read_text("utf-8").splitlines())
    assert lines <= LINES, f"{FILES[name]} has {lines} lines"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = node.end_lineno - node.lineno + 1
            most = LONG.get(f"{name}.{node.name}", FUNCTION)
            assert size <= most, f"{name}.{node.name} has {size} lines"


def test_importing_jppo_does_nothing_expensive():
    code = """
        import sys
        import jppo
        heavy = {"matplotlib", "transformers", "tensorboardX", "orbax", "torch",
                 "grain", "pyarrow", "jinja2"}
        print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
        bridge = sys.modules.get("jax._src.xla_bridge")
        print(bool(bridge and bridge._backends))
    """
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split("\n")[:2] == ["[]", "False"]
