"""What a run says of itself, and reward models that only seem to fit."""

import dataclasses

import pytest
import tiny
from test_loop import compiled_once, policy, scorer, train
from tokenizer_stub import make_tokenizer

from jppo.config import ConfigError
from jppo.loading import Model
from jppo.steplog import StepLog
from jppo.types import Rollout

assert compiled_once  # a fixture that every test here uses
LOUD = {"run.quiet": False, "run.steps": 1}


def test_a_resumed_run_says_where_it_is_and_what_changed(tmp_path, capfd):
    train(tmp_path, LOUD)
    assert "is at step" not in capfd.readouterr().out
    train(tmp_path, LOUD | {"kl.beta": 0.5})
    said = capfd.readouterr().out
    assert "is at step 1 of 1: nothing to do, raise run.steps" in said
    assert "kl.beta 0.05 → 0.5" in said and "actor_optim.lr" not in said


def test_dropped_prompts_are_counted_aloud(tmp_path, capfd):
    rows = ["red one", "red " * 70, "blue " * 70]
    train(tmp_path, LOUD | {"data.overlong": "drop"}, prompts=rows)
    assert "dropped 2 prompts that are too long" in capfd.readouterr().out


@pytest.mark.parametrize("kl, warned", [(-1.5, True), (-0.9, False), (2.0, False)])
def test_a_negative_kl_is_named(kl, warned):
    class Bar(list):
        note = list.append

        def step(self, *_):
            pass

    class Writer:
        def write(self, *_):
            pass

    @dataclasses.dataclass
    class Part:
        samples_every: int = 0

    job = type("J", (), {})()
    job.setup = type("S", (), {"config": type("C", (), {"run": Part()})})
    bar = Bar()
    log, rolled = StepLog(job, Writer(), bar, {}, None), object.__new__(Rollout)
    log._write(3, {"kl": kl, "tokens": 1.0}, [], rolled)
    assert bool(bar) == warned
    assert not warned or "step 3: mean sequence KL is -1.50" in bar[0]


def test_the_note_names_the_first_token_that_differs(tmp_path, capfd):
    other = Model(*scorer()[:2], make_tokenizer(tiny.CFG.vocab_size, eos="red"))
    shuffled = scorer().tokenizer.get_vocab()
    shuffled["red"], shuffled["one"] = shuffled["one"], shuffled["red"]
    other.tokenizer.get_vocab = lambda: shuffled
    over = {"run.steps": 1, "run.quiet": False}
    train(tmp_path, over, policy=policy(), reward_model=other)
    assert "a tokenizer of its own ('one' is 6 and 3)" in capfd.readouterr().out


def test_reward_model_with_a_shorter_window(tmp_path):
    short = scorer(max_positions=4)
    with pytest.raises(ConfigError, match=r"take 6 tokens, the reward model reads 4"):
        train(tmp_path, reward_model=short)
