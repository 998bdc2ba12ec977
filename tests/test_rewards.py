"""User code: found, given a time limit, and never believed without a look."""

import functools
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jppo.config import ConfigError
from jppo.rewards import RewardError, call, check_columns, find_function

PROMPTS = ["first prompt", "second prompt", "third prompt"]
TEXTS = ["alpha", "beta", "gamma"]


def scored(fn, **kwargs):
    return call(fn, PROMPTS, TEXTS, **kwargs)


def returning(value):
    def score(prompts, completions):
        return value

    return score


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.5, -3],
        (1, 2.5, -3),
        np.array([1, 2.5, -3]),
        np.array([1, 2.5, -3], np.float16),
        jnp.array([1, 2.5, -3]),
        [np.float64(1), jnp.float32(2.5), np.int8(-3)],
        {"a": 1, "b": 2.5, "c": -3}.values(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_ordered_row_of_numbers_is_taken(value):
    scores = scored(returning(value))
    assert scores.dtype == np.float32 and scores.tolist() == [1, 2.5, -3]


def test_true_and_false_are_one_and_nought():
    assert scored(returning([True, False, True])).tolist() == [1, 0, 1]


def test_the_function_gets_prompts_completions_and_columns():
    seen = []

    def score(prompts, completions, *, answer, **rest):
        seen.append((prompts, completions, answer, rest))
        return [0.0, 1.0, 2.0]

    scored(score, columns={"answer": [1, 2, 3], "id": ["a", "b", "c"]})
    assert seen == [(PROMPTS, TEXTS, [1, 2, 3], {"id": ["a", "b", "c"]})]


def test_what_the_function_does_to_its_lists_stays_there():
    def score(prompts, completions):
        completions.clear()
        return [0.0, float("nan"), 0.0]

    with pytest.raises(RewardError, match="sample 1.*'beta'"):
        scored(score)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "NoneType 'None', expected a list of 3 numbers"),
        ("abc", "str 'abc', expected a list of 3 numbers"),
        (b"abc", "bytes"),
        ({"a": 1, "b": 2, "c": 3}, "dict"),
        ({1.0, 2.0, 3.0}, "set"),
        (0.5, "float '0.5'"),
        (np.float32(0.5), "float32"),
        (np.array(0.5), "ndarray"),
        (jnp.array(0.5), "Array"),
        ((x for x in (1, 2, 3)), "generator"),
        ([], "0 scores for 3 completions"),
        ([1.0, 2.0], "2 scores for 3 completions"),
        ([1.0] * 4, "4 scores for 3 completions"),
        (np.ones((1, 3)), "1 scores for 3 completions"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_is_no_row_of_numbers_is_described(value, says):
    with pytest.raises(RewardError, match=f"score returned {says}") as caught:
        scored(returning(value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "item",
    [
        float("nan"),
        float("inf"),
        -np.inf,
        1e39,  # infinite in float32
        10**400,
        None,
        "1.0",
        b"1.0",
        "x" * 500,
        1j,
        [2.0],
        [1.0, [2.0]],
        np.ones(1),
        jnp.nan,
    ],
    ids=lambda item: str(item)[:8],
)
def test_one_bad_score_names_its_sample(item):
    with pytest.raises(RewardError) as caught:
        scored(returning([1.0, item, 2.0]))
    says = str(caught.value)
    for part in ("score returned", "sample 1", "'second prompt'", "'beta'"):
        assert part in says
    assert "first" not in says and "\n" not in says and len(says) < 300


def test_a_column_of_scores_is_not_flattened_in_silence():
    with pytest.raises(RewardError, match="sample 0"):
        scored(returning(np.ones((3, 1))))


def test_long_texts_are_shown_by_their_beginning():
    with pytest.raises(RewardError) as caught:
        call(returning([None]), ["p\n" * 999], ["c" * 999])
    assert "c" * 60 in str(caught.value) and len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_an_exception_is_named_and_kept_as_the_cause():
    def score(prompts, completions):
        raise KeyError("no such\nthing")

    with pytest.raises(RewardError, match="score raised KeyError: .*no such") as caught:
        scored(score)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_cannot_end_the_run_unseen(error):
    def score(prompts, completions):
        raise error

    with pytest.raises(RewardError, match=f"raised {type(error).__name__}"):
        scored(score)


def test_a_function_of_the_wrong_signature():
    with pytest.raises(RewardError, match="raised TypeError: .*argument"):
        scored(lambda completions: [1.0] * 3)
    with pytest.raises(RewardError, match="raised TypeError: .*'answer'"):
        scored(returning([1.0] * 3), columns={"answer": [1, 2, 3]})


def test_a_function_that_hangs_is_left_behind():
    def sleeper(prompts, completions):
        time.sleep(20)

    start = time.monotonic()
    with pytest.raises(
        RewardError, match="sleeper took longer than .* 0.3 s"
    ) as caught:
        scored(sleeper, timeout=0.3)
    assert time.monotonic() - start < 2.3
    assert "3 completions" in str(caught.value) and "'alpha'" in str(caught.value)


def test_a_function_without_a_name_has_one():
    class Judge:
        def __call__(self, prompts, completions):
            return None

    with pytest.raises(RewardError, match="Judge"):
        scored(Judge())


# Where functions are found


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Writes a module into a folder of its own; returns its path."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, name="user_rewards_for_test"):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return path

    yield write
    for name in [n for n in sys.modules if n.endswith("_for_test")]:
        del sys.modules[name]


def test_a_function_in_a_module_or_a_file(code):
    path = code("def score(prompts, completions): return [len(c) for c in completions]")
    for where in ("user_rewards_for_test", path):
        assert scored(find_function(f"{where}:score")).tolist() == [5, 4, 5]
    assert find_function("jppo.rewards:call") is call


def test_a_file_with_dataclasses(code):
    """`dataclasses` looks its class up in sys.modules."""
    path = code(
        """
        from __future__ import annotations
        import dataclasses

        @dataclasses.dataclass
        class Weights:
            length: float = 2.0

        def score(prompts, completions):
            return [Weights().length * len(c) for c in completions]
        """
    )
    assert scored(find_function(f"{path}:score")).tolist() == [10, 8, 10]


def test_a_file_does_not_hide_a_module_of_its_name(code):
    path = code("def score(p, c): return [1.0] * 3", name="json")
    find_function(f"{path}:score")
    import json

    assert json.loads("[1]") == [1]


@pytest.mark.parametrize("spec", ["score", ":score", "module:", "", ":"])
def test_a_spec_of_another_form_shows_the_form(spec):
    with pytest.raises(ConfigError, match="'package.module:function' or 'file.py"):
        find_function(spec)


def test_what_is_not_there_is_named(code):
    path = code("def length(p, c): ...\ndef brevity(p, c): ...\nWEIGHT = 3\n_x = len")
    for where in (path, "user_rewards_for_test"):
        for name in ("score", "WEIGHT"):
            with pytest.raises(ConfigError) as caught:
                find_function(f"{where}:{name}")
            assert f"no function {name!r}" in str(caught.value)
            assert "['brevity', 'length']" in str(caught.value)
    with pytest.raises(ConfigError, match="no such file: gone.py"):
        find_function("gone.py:score")
    with pytest.raises(ConfigError, match="No module named 'gone_for_test'"):
        find_function("gone_for_test:score")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import gone_too", "No module named 'gone_too'"),
        ("def score(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_code_that_cannot_be_imported_is_one_line(code, text, says):
    path = code(text)
    for where in (path, "user_rewards_for_test"):
        with pytest.raises(ConfigError, match=says) as caught:
            find_function(f"{where}:score")
        assert "reward.function" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_relative_module_is_one_line():
    with pytest.raises(ConfigError, match="reward.function"):
        find_function(".rewards:score")


# Columns


def test_columns_are_compared_with_the_parameters():
    class Judge:
        def __call__(self, prompts, completions, *, answer=None):
            return []

    for fn, columns in (
        (lambda prompts, completions: [], []),
        (lambda prompts, completions, answer: [], ["answer"]),
        (lambda prompts, completions, **columns: [], ["answer", "id"]),
        (lambda *everything, **columns: [], ["prompts"]),
        (lambda p, c, /, **columns: [], ["p"]),
        (Judge(), ["answer"]),
        (functools.partial(lambda x, prompts, completions: [], 1), []),
        (max, ["anything"]),  # a function of C, whose parameters are unknown
    ):
        check_columns(fn, columns)


@pytest.mark.parametrize(
    ("fn", "columns", "says"),
    [
        (lambda prompts, completions: [], ["a", "b"], "take the column.* a, b of the"),
        (lambda prompts, completions, a: [], ["a", "b"], "take the column.s. b of"),
        (lambda prompts, completions, a: [], [], r"\(none\).*missing .* argument: 'a'"),
        (lambda prompts, **columns: [], [], "too many positional arguments"),
        (lambda p, c, **columns: [], ["c"], r"lambda>\(p, c, .* take the .* c of the"),
    ],
)
def test_columns_that_do_not_fit_are_named(fn, columns, says):
    with pytest.raises(ConfigError, match=says) as caught:
        check_columns(fn, columns)
    assert "\n" not in str(caught.value)
