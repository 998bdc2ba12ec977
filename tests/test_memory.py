"""The arithmetic of memory: the textbook's, and the bytes of real arrays."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tiny

from jppo import memory
from jppo.config import LoraConfig
from jppo.models.hf import save_hf
from jppo.models.lora import init_adapter, overlay
from jppo.state import init_state, init_trees

ROOT = Path(__file__).parents[1]
LORA = {"policy.lora.rank": 2, "critic.lora.rank": 2}
TOP = {"policy.train_layers": 1, "critic.train_layers": 1}


def test_the_textbook_counts_252_gigabytes_for_four_7b_models():
    trained, frozen = (
        memory.textbook_bytes(7 * 10**9, trained=t) / memory.GB for t in (True, False)
    )
    assert (trained, frozen, 2 * trained + 2 * frozen) == (112, 14, 252)


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def placed_bytes(state, frozen):
    """Bytes on the device, arrays that roles share counted once."""
    kept = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(frozen)}
    trained = (state.actor, state.critic, state.opt_actor, state.opt_critic)
    return bytes_of(trained) + sum(kept.values())


def real_trees(setup, one_base):
    policy = tiny.params(setup.actor)
    reward = None
    if setup.reward:
        reward = tiny.params(setup.reward, 1, head=True)
        if one_base:
            reward |= {k: policy[k] for k in ("embed", "blocks", "norm")}
            factors = init_adapter(reward, jax.random.key(0), rank=2)
            reward = overlay(reward, factors)
    actor, critic, frozen = init_trees(setup, policy, reward, jax.random.key(2))
    return init_state(setup, actor, critic, jax.random.key(3)), frozen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "over, how",
    [
        ({}, {}),
        ({}, {"reward": True}),
        ({"critic.layout": "shared"}, {"reward": True}),
        (TOP, {"reward": True, "frozen": 1}),
        (TOP | {"critic.init": "reward"}, {"reward": True, "frozen": 1}),
        (LORA, {"reward": True}),
        (LORA, {"reward": True, "one_base": True}),
        (LORA | {"critic.lora.rank": 0, "critic.layout": "shared"}, {}),
    ],
    ids=str,
)
def test_arithmetic_is_the_bytes_of_real_arrays(over, how, dtype):
    how = dict(how)
    one_base = how.pop("one_base", False)
    on_critic = over.get("critic.init") == "reward"
    cfg = tiny.dataclasses.replace(tiny.CFG, dtype=dtype)
    setup = tiny.make_setup(over, cfg=cfg, on_critic=on_critic, **how)
    if one_base:
        setup = tiny.dataclasses.replace(setup, reward_lora=LoraConfig(rank=2))
    found = memory.holdings(setup, one_base=one_base)
    state, frozen = real_trees(setup, one_base)
    kept = [h for h in found if h.kind != "gradients"]
    assert sum(h.bytes for h in kept) == placed_bytes(state, frozen)
    assert {h.roles: h.bytes for h in found if h.kind == "gradients"} == {
        ("actor",): bytes_of(state.actor),
        ("critic",): bytes_of(state.critic),
    }
    assert {h.roles: h.bytes for h in found if h.kind == "moments"} == {
        ("actor",): bytes_of(state.opt_actor),
        ("critic",): bytes_of(state.opt_critic),
    }


def owners(setup, **how):
    return {h.roles for h in memory.holdings(setup, **how) if h.kind == "weights"}


def test_who_stands_on_what():
    four = {("actor",), ("critic",), ("reference",), ("reward",)}
    assert owners(tiny.make_setup(reward=True)) == four
    trunk = owners(tiny.make_setup(TOP, reward=True, frozen=1))
    assert trunk == four | {("actor", "critic", "reference")}
    on = TOP | {"critic.init": "reward"}
    on_reward = owners(tiny.make_setup(on, reward=True, frozen=1, on_critic=True))
    assert on_reward == four | {("actor", "reference"), ("critic", "reward")}
    setup = tiny.dataclasses.replace(
        tiny.make_setup(LORA, reward=True), reward_lora=LoraConfig(rank=2)
    )
    assert memory.ROLES in owners(setup, one_base=True)
    assert memory.ROLES not in owners(setup)


def test_an_adapter_for_every_role_costs_one_base():
    wide = tiny.dataclasses.replace(tiny.CFG, d_model=256, d_mlp=1024, vocab_size=512)
    four = memory.holdings(tiny.make_setup(cfg=wide, reward=True))
    setup = tiny.make_setup(LORA, cfg=wide, reward=True)
    setup = tiny.dataclasses.replace(setup, reward_lora=LoraConfig(rank=2))
    one = memory.holdings(setup, one_base=True)
    base = 4 * memory.weights_of(wide)
    assert base < memory.total(one) < 1.2 * base
    assert memory.total(four) > 8 * memory.total(one)


# The command and its page


def table(*args):
    command = [sys.executable, str(ROOT / "experiments" / "memory_table.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_page_shows_what_the_command_prints():
    page = (ROOT / "docs" / "memory.md").read_text("utf-8")
    printed = table()
    assert printed.returncode == 0, printed.stderr
    assert "112 + 112 + 14 + 14 = 252 GB" in printed.stdout
    assert page.split("<!-- memory table -->\n")[1].split("<!-- end -->")[0] == (
        printed.stdout
    )


def test_a_model_of_ones_own_is_told_by_its_size(tmp_path):
    save_hf(tmp_path / "mine", tiny.CFG, tiny.params())
    size = memory.weights_of(tiny.CFG)
    out = table("--model", str(tmp_path / "mine"), "--dtype", "float32").stdout
    first, second = out.splitlines()[0], out.splitlines()[2]
    assert first.startswith(f"{size / 1e9:.3g} B weights a role")
    assert second == f"mine: {size / 1e9:.2f} B weights, computing in float32."
    assert "| a frozen one | 4 | – | – | 4 |" in out


@pytest.mark.parametrize(
    "args, says",
    [
        (["--model", "nowhere"], "there is no nowhere/config.json"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--dtype", "float32", "--write"], "--write takes no other"),
    ],
)
def test_wrong_arguments(args, says):
    failed = table(*args)
    assert failed.returncode == 2
    assert says in failed.stderr.splitlines()[-1]
