"""What a run writes to disk: strict JSON, no step twice, nothing lost to a kill."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.metrics import MetricWriter, read_jsonl, scalar


def writer(folder, **kwargs):
    return MetricWriter(folder, **{"tensorboard": False} | kwargs)


def strict(path):
    """The lines of a file under a parser that refuses NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text("utf-8")
    assert text.endswith("\n")
    return [json.loads(x, parse_constant=refuse) for x in text.split("\n")[:-1]]


def test_a_step_is_one_line_of_plain_numbers(tmp_path):
    with writer(tmp_path) as w:
        w.write(1, {"kl": jnp.float32(0.1), "lengths": np.int32(7), "beta": 0.05})
        w.write(2, {"kl": jnp.ones((1,)), "up": jnp.bfloat16(1.5)}, prefix="eval/")
    assert strict(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kl": 0.1, "lengths": 7, "beta": 0.05},
        {"step": 2, "eval/kl": 1.0, "eval/up": 1.5},
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_non_finite_values_become_null(tmp_path):
    with writer(tmp_path) as w:
        w.write(1, {"a": jnp.nan, "b": np.inf, "c": -math.inf, "d": 1.0})
        w.samples(1, [{"prompt": "p", "completion": "c", "score": math.nan}])
    assert strict(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}
    ]
    assert strict(tmp_path / "samples.jsonl")[0]["score"] is None


@pytest.mark.parametrize("x", [0.1, 1 / 3, 1e-30, 16777217.0, -2.5e8])
def test_float32_survives_the_file(tmp_path, x):
    with writer(tmp_path) as w:
        w.write(1, {"x": jnp.float32(x)})
    assert np.float32(read_jsonl(tmp_path / "metrics.jsonl")[0]["x"]) == np.float32(x)


def test_each_line_is_on_disk_before_the_next(tmp_path):
    w = writer(tmp_path)
    for step in (1, 2):
        w.write(step, {"kl": 0.0})
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == step


@pytest.mark.parametrize("bad", [jnp.zeros(2), np.zeros(0), "high", None, 1j])
def test_what_is_not_one_number_is_named(tmp_path, bad):
    with writer(tmp_path) as w, pytest.raises(ValueError, match="'ppo/kl'"):
        w.write(1, {"kl": bad}, prefix="ppo/")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_step_belongs_to_the_writer(tmp_path):
    with writer(tmp_path) as w:
        with pytest.raises(ValueError, match="step"):
            w.write(1, {"step": 3})
        with pytest.raises(ValueError, match="step"):
            w.samples(1, [{"step": 3, "prompt": ""}])


def test_metrics_leave_the_device_explicitly(tmp_path):
    metrics = {"kl": jnp.float32(0.5)}
    with jax.transfer_guard("disallow"), writer(tmp_path) as w:
        w.write(1, metrics)
    assert scalar("kl", metrics["kl"]) == 0.5


def test_samples_keep_every_character(tmp_path):
    text = 'é 漢 😀 \u2028 " \\ \n \x1b[31m \udc80'
    with writer(tmp_path) as w:
        w.samples(0, [{"prompt": text, "completion": "", "score": 1.0, "gold": None}])
    (row,) = read_jsonl(tmp_path / "samples.jsonl")
    assert row == dict(step=0, prompt=text, completion="", score=1.0, gold=None)
    assert "漢".encode() in (tmp_path / "samples.jsonl").read_bytes()


def test_resuming_drops_the_steps_that_will_be_taken_again(tmp_path):
    with writer(tmp_path) as w:
        for step in range(1, 6):
            w.write(step, {"kl": float(step)})
        for step in (0, 5):
            w.samples(step, [{"prompt": "漢", "completion": "x"}])
    with writer(tmp_path, resume_step=3) as w:
        for step in (4, 5):
            w.write(step, {"kl": 10.0 * step})
    rows = strict(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5]
    assert [r["kl"] for r in rows] == [1.0, 2.0, 3.0, 40.0, 50.0]
    assert [r["step"] for r in read_jsonl(tmp_path / "samples.jsonl")] == [0]
    with writer(tmp_path, resume_step=-1):
        assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_a_run_is_never_written_over_by_accident(tmp_path):
    with writer(tmp_path) as w:
        w.write(1, {"kl": 0.0})
    with pytest.raises(FileExistsError, match="resume_step"):
        writer(tmp_path)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_a_line_cut_by_a_kill_is_forgiven_and_then_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kl": 0.5}\n' + '{"step": 2, "a": "漢'.encode()[:-1])
    assert read_jsonl(path) == [{"step": 1, "kl": 0.5}]
    with writer(tmp_path, resume_step=2) as w:
        w.write(2, {"kl": 0.25})
    assert [r["step"] for r in strict(path)] == [1, 2]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with writer(tmp_path, resume_step=2) as w:
        w.write(3, {})
    assert [r["step"] for r in strict(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{broken", "[1]", ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)


def test_tensorboard_holds_the_same_scalars_and_texts(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with MetricWriter(tmp_path) as w:
        w.write(3, {"kl": jnp.float32(0.5), "bad": math.nan})
        w.samples(3, [{"prompt": "<b>p</b>", "completion": "c\udc80"}])
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:  # a record: length, its CRC, the event, its CRC
        n = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + n]))
        data = data[16 + n :]
    values = {v.tag: (e.step, v) for e in events for v in e.summary.value}
    assert values["kl"][0] == 3 and values["kl"][1].simple_value == 0.5
    assert math.isnan(values["bad"][1].simple_value)
    text = values["samples/text_summary"][1].tensor.string_val[0].decode()
    assert "    prompt: <b>p</b>\n    completion: c?" in text
