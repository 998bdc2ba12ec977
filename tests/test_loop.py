"""`jppo.train` from end to end on a tiny model, and every wrong input in one line."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from tokenizer_stub import make_tokenizer

import jppo
from jppo import programs
from jppo.checkpoint import CheckpointError
from jppo.config import ConfigError, RunConfig
from jppo.data import DataError
from jppo.evaluation import distinct
from jppo.loading import Model
from jppo.metrics import read_jsonl
from jppo.rewards import RewardError

PROMPTS = ["red one", "green two three", "blue", "one two", "four five", "red red"]
SMALL = {
    "ppo.batch_size": 8,
    "ppo.epochs": 1,
    "sampling.max_new_tokens": 3,
    "actor_optim.lr": 1e-2,
    "run.steps": 2,
    "run.samples_every": 1,
    "run.tensorboard": False,
    "run.quiet": True,
}


COMPILED = {}


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Runs that differ only in length, folder or weights share their programs.

    Scores from Python: on the default mesh, all eight devices. Others: on one.
    """
    build = programs.build

    def cached(setup):
        assert setup.config.actor_optim.schedule == "constant"
        same = dataclasses.replace(setup.config, run=RunConfig())
        key = dataclasses.replace(setup, config=same)
        if key not in COMPILED:
            mesh = tiny.one_device() if setup.reward else None
            COMPILED[key] = build(setup, mesh)
        return dataclasses.replace(COMPILED[key], setup=setup)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "build", cached)
        yield


def policy(**changes):
    cfg = dataclasses.replace(tiny.CFG, **changes)
    return Model(cfg, tiny.params(cfg), make_tokenizer(cfg.vocab_size))


def scorer(**changes):
    cfg = dataclasses.replace(tiny.CFG, **changes)
    return Model(cfg, tiny.params(cfg, 1, head=True), make_tokenizer(cfg.vocab_size))


def length_reward(prompts, completions, **columns):
    return [float(len(text.split())) for text in completions]


def train(folder, over=None, **inputs):
    inputs = {"policy": policy(), "prompts": PROMPTS} | inputs
    if not {"reward_fn", "reward_model"} & set(inputs):
        inputs["reward_fn"] = length_reward
    return jppo.train(SMALL | {"run.folder": str(folder)} | (over or {}), **inputs)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    gold = {"gold": lambda prompts, completions, **_: [0.25] * len(prompts)}
    return train(tmp_path_factory.mktemp("run"), {"run.steps": 4}, yardsticks=gold)


def test_history_holds_every_metric(result):
    assert [row["step"] for row in result.history] == [1, 2, 3, 4]
    names = """scores gold kl kl_token entropy lengths rewards policy_loss value_loss
        approx_kl approx_kl_k3 clip_frac value_clip_frac explained_variance ratio_max
        grad_norm_actor grad_norm_critic skipped beta stopped_frac seconds
        tokens_per_second sampler_gap_max""".split()
    assert not set(names) - set(result.history[-1])
    assert {row["gold"] for row in result.history} == {0.25}
    assert (result.folder / "config.yaml").is_file()
    samples = read_jsonl(result.folder / "samples.jsonl")
    assert {s["prompt"] for s in samples} <= set(PROMPTS)


def test_result_is_a_whole_policy_that_moved(result):
    assert jax.tree.structure(result.policy.params) == jax.tree.structure(tiny.params())
    assert tiny.distance(result.policy.params, tiny.params()) > 1e-3
    assert int(result.state.step) == 4


def test_resumed_run_equals_the_whole_one(result, tmp_path):
    train(tmp_path, {"run.steps": 2})
    again = train(tmp_path, {"run.steps": 4})
    assert [row["step"] for row in again.history] == [1, 2, 3, 4]
    assert tiny.distance(again.policy.params, result.policy.params) == 0
    assert [r["scores"] for r in again.history] == [r["scores"] for r in result.history]


def test_a_finished_run_is_not_run_again(result):
    again = train(result.folder, {"run.steps": 4})
    assert tiny.distance(again.policy.params, result.policy.params) == 0
    assert len(again.history) == 4


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"run.fused": True},
        {"critic.init": "reward"},
        {"critic.init": "reward", "critic.train_layers": 0, "policy.train_layers": 1},
        {"critic.layout": "shared"},
    ],
    ids=str,
)
def test_reward_model_runs_inside_the_programs(over, tmp_path):
    result = train(tmp_path, over, reward_model=scorer(), prompts=PROMPTS)
    assert len(result.history) == 2
    assert all(np.isfinite(list(row.values())).all() for row in result.history)
    moved = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(),
        result.policy.params["blocks"]["mlp"],
        tiny.params()["blocks"]["mlp"],
    )
    assert max(jax.tree.leaves(moved)) > 1e-3
    if over.get("policy.train_layers"):
        frozen = result.policy.params["blocks"]["mlp"]["up"]["kernel"][0]
        np.testing.assert_array_equal(
            frozen, tiny.params()["blocks"]["mlp"]["up"]["kernel"][0]
        )


def test_columns_reach_the_reward_function(tmp_path):
    seen = []

    def reward(prompts, completions, answer):
        seen.extend(zip(prompts, answer, strict=True))
        return [1.0] * len(prompts)

    rows = [{"prompt": p, "answer": p.upper()} for p in PROMPTS]
    train(tmp_path, {"run.steps": 1}, prompts=rows, reward_fn=reward)
    assert len(seen) == 8
    assert all(answer == prompt.upper() for prompt, answer in seen)


def test_reward_that_fails_loses_no_step(tmp_path):
    calls = []

    def reward(prompts, completions):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("boom")
        return [1.0] * len(prompts)

    with pytest.raises(RewardError, match="reward raised KeyError: 'boom'"):
        train(tmp_path, {"run.steps": 5}, reward_fn=reward)
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    again = train(tmp_path, {"run.steps": 3})  # goes on from the step that was saved
    assert [row["step"] for row in again.history] == [1, 2, 3]


def test_quiet_prints_nothing(tmp_path, capfd):
    train(tmp_path, {"run.steps": 1})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "over, inputs, error, says",
    [
        ({}, {"prompts": []}, DataError, "list of prompts is empty"),
        ({}, {"prompts": ["red", ""]}, DataError, "prompt 1 is empty"),
        ({}, {"prompts": ["red " * 70]}, DataError, "prompt 0 has 70 tokens.* is 61"),
        ({"ppo.epoch": 2}, {}, ConfigError, "did you mean 'ppo.epochs'"),
        ({"ppo.minibatches": 3}, {}, ConfigError, "8 does not divide .* 3"),
        ({"policy.path": "/no/such"}, {"policy": None}, OSError, "/no/such"),
        ({}, {"policy": None}, ConfigError, "policy.path is not set"),
        ({}, {"reward_fn": None}, ConfigError, "exactly one source of scores"),
        (
            {},
            {"reward_fn": min, "reward_model": "a"},
            ConfigError,
            "exactly one source",
        ),
        ({"run.fused": True}, {}, ConfigError, "run.fused=true needs a reward model"),
        ({"critic.init": "reward"}, {}, ConfigError, "needs a reward model"),
        ({"policy.train_layers": 3}, {}, ConfigError, "is 3, the model has 2 blocks"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_wrong_input_is_one_line_before_any_program(
    over, inputs, error, says, tmp_path, monkeypatch
):
    monkeypatch.setattr(programs, "build", lambda *_: pytest.fail("built programs"))
    with pytest.raises(error, match=says) as caught:
        train(tmp_path, over, **inputs)
    assert "\n" not in str(caught.value)


def test_reward_model_that_is_a_policy(tmp_path):
    with pytest.raises(ConfigError, match="no scalar head"):
        train(tmp_path, reward_model=policy())


def test_batch_that_the_mesh_does_not_divide(tmp_path):
    with pytest.raises(
        ConfigError, match="micro-batch of 4 rows .* over the 8 devices"
    ):
        train(tmp_path, {"ppo.minibatches": 2})


@pytest.mark.parametrize(
    "value, says",
    [
        ([1.0], "returned 1 scores for 8 completions"),
        ([float("nan")] * 8, "returned nan for sample 0"),
        (["good"] * 8, "returned 'good' for sample 0"),
        (None, "returned NoneType"),
    ],
)
def test_reward_functions_that_break_the_contract(value, says, tmp_path):
    with pytest.raises(RewardError, match=says):
        train(tmp_path, reward_fn=lambda prompts, completions: value)


def test_checkpoint_of_another_model(result):
    with pytest.raises(CheckpointError, match="belongs to another model: actor.d_mlp"):
        train(result.folder, {"run.steps": 6}, policy=policy(d_mlp=64))


def test_a_folder_in_use_is_not_overwritten(result):
    with pytest.raises(ConfigError, match="already holds a run"):
        train(result.folder, {"run.resume": False})
    assert len(read_jsonl(result.folder / "metrics.jsonl")) == 4


def test_metrics_are_strict_json(result):
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_distinct_counts_bigrams():
    assert distinct(["a b c", "a b"], 2) == pytest.approx(2 / 3)
    assert distinct(["a", ""], 2) == 0
