"""The console: quiet when told, plain in a pipe, unbroken on a narrow terminal."""

import io
import re
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jppo.console import Progress, number, table

STEP = {"scores": 0.5, "kl": jnp.float32(1.25), "entropy": np.float32(2.0), "other": 9}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    # Called inside the test, where pytest has set its own stdout.
    def show(term, what=run, **kwargs):
        screen = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            patch.setenv("TERM", term)
            patch.setenv("COLUMNS", "60")
            what(**kwargs)
        return screen.getvalue()

    return show


def run(steps=3, **kwargs):
    with Progress(steps, title="PPO", **kwargs) as bar:
        for step in range(1, steps + 1):
            bar.phase("generate")
            bar.phase("update", total=4)
            bar.advance(2)
            bar.step(step, STEP)
        bar.note("saved [to] \x1b[31mdisk")


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"), (0.0, "0.000"), (0.12345, "0.123"), (-1.239, "-1.24"),
        (9.9951, "10.0"), (0.99951, "1.00"), (99.96, "100"), (41.26, "41.3"),
        (12345.6, "12,346"), (12000, "12,000"), (1.5e-5, "1.5e-05"), (3e9, "3.00e+09"),
        (float("nan"), "nan"), (None, "–"), (np.float32(0.5), "0.500"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_steady(value, text):
    assert number(value) == text


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_a_pipe_gets_one_plain_line_a_step(capsys, monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    run()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "PPO  update, 4 to do"  # a long phase is announced
    lines = [line for line in printed if line != printed[0]]
    assert lines[0] == "PPO 1/3  score 0.500  kl 1.25  entropy 2.00"
    assert lines[1].startswith(lines[0].replace("1/3", "2/3"))
    assert lines[1].endswith(" left") and not lines[2].endswith(" left")
    assert lines[3] == r"saved [to] \x1b[31mdisk" and len(lines) == 4
    assert all(line.isprintable() for line in lines)


def test_quiet_prints_nothing(capsys):
    run(quiet=True)
    assert capsys.readouterr() == ("", "")


def test_time_left_leaves_out_the_step_that_compiles(capsys, monkeypatch):
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress(500, done=7) as bar:
        for step in (8, 9, 10):
            bar.step(step, {"kl": 0.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == [
        "kl 0.000",
        "1:21:50 left",  # 491 steps of 10 s
        "1:21:40 left",
    ]


def test_a_long_phase_shows_its_time_left(terminal, monkeypatch):
    clock = iter([100.0, 110.0])
    own = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("jppo.console.time", own)

    def features():
        with Progress(2, title="reward model") as bar:
            bar.phase("features", total=100)
            bar.advance(10)
            bar.advance(40)
            bar._live.refresh()

    screen = terminal("xterm-256color", what=features)
    assert "50/100" in screen and "0:00:12 left" in screen


def test_metrics_that_are_not_key_ones_are_shown_when_alone(capsys):
    with Progress(2) as bar:
        bar.step(1, {"loss": 0.25, "accuracy": 0.5})
        bar.step(2, {"kl": 1.0, "skipped": 1, "other": 3.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1/2  loss 0.250  accuracy 0.500"
    assert lines[1] == "2/2  kl 1.00  skipped 1"


def test_a_narrow_terminal_keeps_its_lines_whole(terminal):
    screen = terminal("xterm-256color")
    assert "\x1b[" in screen  # drawn in place
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    lines = plain.replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 60
    assert "3/3" in plain and "score 0.500" in plain and "update" in plain
    assert "\x1b[31m" not in screen.split("saved")[1].split("disk")[0]


def test_a_dumb_or_quiet_terminal_gets_no_codes(terminal):
    screen = terminal("dumb")
    assert "PPO 3/3" in screen and "\x1b" not in screen
    assert terminal("xterm-256color", quiet=True) == ""


def test_a_piped_table_is_plain_and_complete(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = [("a [b]film[/b] \x1b[31m", "word " * 30 + "end", 0.5), ("q", "short", None)]
    table("Samples [x]", rows, ("prompt", "after", "score"))
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"[b]film[/b] \x1b[31m" in out
    assert "Samples [x]" in out and "end" in out and "0.500" in out and "–" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_ragged_table_is_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table("t", [("a",)], ("x", "y"))


def test_a_stream_without_unicode_still_gets_its_table(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    table("t", [("漢 \udc80", 1.0)], ("text", "n"))
    assert b"| ? " in raw.getvalue() and b"1.00" in raw.getvalue()
