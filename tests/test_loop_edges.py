"""`jppo.train` stopped, failing halfway, and taken up again."""

import time

import jax
import numpy as np
import pytest
import yaml
from test_loop import (
    PROMPTS,
    compiled_once,
    length_reward,
    policy,
    train,
)

from jppo.config import ConfigError
from jppo.metrics import read_jsonl
from jppo.models.hf import save_hf
from jppo.rewards import RewardError
from jppo.settings import from_dict

assert compiled_once  # a fixture that every test here uses

# Resuming, and what a failure leaves


def on_disk(folder):
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]


def bits(state):
    state = jax.device_get(state.replace(key=jax.random.key_data(state.key)))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps without a stop, with a checkpoint at the second."""
    folder = tmp_path_factory.mktemp("straight")
    return train(folder, {"run.steps": 4, "run.checkpoint_every": 2})


def drop_newest(folder):
    newest = max((folder / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    for path in sorted(newest.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    newest.rmdir()


def same_numbers(a, b):
    clock = {"seconds", "tokens_per_second"}
    strip = lambda rows: [{k: r[k] for k in r.keys() - clock} for r in rows]  # noqa: E731
    return strip(a) == strip(b)


def test_a_killed_run_goes_on_bit_for_bit(straight, tmp_path):
    """Killed after step 3 was logged; the last checkpoint is of step 2.

    Random key, data cursor, Adam's moments and β all count here, and step 3 is
    logged once.
    """
    train(tmp_path, {"run.steps": 4, "run.checkpoint_every": 2})
    drop_newest(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    again = train(tmp_path, {"run.steps": 4, "run.checkpoint_every": 2})
    assert on_disk(tmp_path) == [1, 2, 3, 4]
    assert bits(again.state) == bits(straight.state)
    assert same_numbers(again.history, straight.history)


def test_every_step_saw_other_prompts_in_the_order_of_the_seed(straight, tmp_path):
    """Six prompts, batches of eight: each pass holds every prompt once."""
    seen = []

    def reward(prompts, completions):
        seen.extend(prompts)
        return length_reward(prompts, completions)

    again = train(tmp_path, {"run.steps": 3}, reward_fn=reward)
    for at in range(0, 24, 6):
        assert sorted(seen[at : at + 6]) == sorted(PROMPTS)
    assert same_numbers(again.history, straight.history[:3])


def test_another_seed_is_another_run(straight, tmp_path):
    other = train(tmp_path, {"run.steps": 1, "run.seed": 1})
    assert other.history[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert not same_numbers(other.history, straight.history[:1])


def fails_at(call, error):
    calls = []

    def reward(prompts, completions):
        calls.append(1)
        if len(calls) == call:
            raise error
        return length_reward(prompts, completions)

    return reward


@pytest.mark.parametrize("cause", ["reward", "on_step", "yardstick"])
def test_a_failure_costs_no_finished_step(straight, tmp_path, cause):
    """Whoever fails, steps that were computed are logged, and taken up again."""
    over = {"run.steps": 4, "run.checkpoint_every": 0}
    if cause == "reward":
        inputs, error = {"reward_fn": fails_at(3, ValueError("bad"))}, RewardError
    elif cause == "yardstick":
        gold = {"gold": fails_at(2, ValueError("bad"))}
        inputs, error = {"yardsticks": gold}, RewardError
    else:

        def stop(step, values):
            if step == 2:
                raise KeyboardInterrupt

        inputs, error = {"on_step": stop}, KeyboardInterrupt
    with pytest.raises(error):
        train(tmp_path, over, **inputs)
    done = on_disk(tmp_path)
    assert done == ([1, 2] if cause == "reward" else [1, 2, 3])
    again = train(tmp_path, over)
    assert on_disk(tmp_path) == [1, 2, 3, 4]
    assert bits(again.state) == bits(straight.state)


def test_a_first_step_that_fails_leaves_a_folder_to_start_in(tmp_path):
    with pytest.raises(RewardError):
        train(tmp_path, reward_fn=fails_at(1, ValueError("bad")))
    assert train(tmp_path, {"run.steps": 1}).history[0]["step"] == 1


def test_a_hanging_reward_function_ends_the_run(tmp_path):
    def sleeper(prompts, completions):
        time.sleep(30)

    start = time.monotonic()
    with pytest.raises(RewardError, match="reward.timeout 0.3 s"):
        train(tmp_path, {"reward.timeout": 0.3}, reward_fn=sleeper)
    assert time.monotonic() - start < 10


# Yardsticks and callbacks


def test_yardsticks_are_logged_and_not_trained_on(straight, tmp_path):
    """They get what the reward function gets, and change no bit of the state."""
    seen = []

    def gold(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [3.0 * len(text) for text in completions]

    rows = [{"prompt": p, "id": i} for i, p in enumerate(PROMPTS)]
    result = train(
        tmp_path,
        {"run.steps": 4},
        prompts=rows,
        reward_fn=lambda prompts, texts, **_: length_reward(prompts, texts),
        yardsticks={"gold": gold},
    )
    assert bits(result.state) == bits(straight.state)
    for row, (prompts, texts, columns) in zip(result.history, seen, strict=True):
        assert row["gold"] == pytest.approx(3 * np.mean([len(t) for t in texts]))
        assert row["scores"] == pytest.approx(np.mean([len(t.split()) for t in texts]))
        assert [PROMPTS[i] for i in columns["id"]] == prompts


def test_a_yardstick_may_not_take_a_metrics_name(tmp_path):
    for name in ("kl", "scores", "step", "seconds"):
        with pytest.raises(ConfigError, match=f"yardstick {name!r}"):
            train(tmp_path / name, yardsticks={name: length_reward})


def test_on_step_sees_every_step_in_order(straight, tmp_path):
    seen = []
    result = train(
        tmp_path,
        {"run.steps": 3},
        on_step=lambda step, values: seen.append((step, values)),
    )
    assert [step for step, _ in seen] == [1, 2, 3]
    for (_, values), row in zip(seen, result.history, strict=True):
        assert values["scores"] == pytest.approx(row["scores"])


# What is on disk


def test_a_policy_from_a_directory_is_the_same_run(straight, tmp_path):
    folder = tmp_path / "model"
    model = policy()
    save_hf(folder, model.config, model.params, model.tokenizer)
    result = train(tmp_path / "run", {"run.steps": 1}, policy=str(folder))
    assert same_numbers(result.history, straight.history[:1])


def test_the_config_on_disk_is_the_whole_config(straight):
    read = from_dict(yaml.safe_load((straight.folder / "config.yaml").read_text()))
    assert (read.run.steps, read.ppo.batch_size) == (4, 8)
    assert read.run.folder == str(straight.folder)


def test_nothing_of_a_quiet_run_reaches_the_console(tmp_path, capfd):
    loud = train(tmp_path / "loud", {"run.steps": 2, "run.quiet": False})
    out, _ = capfd.readouterr()
    assert len(loud.history) == 2 and "1/2" in out and "2/2" in out
    train(tmp_path / "quiet", {"run.steps": 2})
    assert capfd.readouterr() == ("", "")
