"""`jppo.train` on chats, on columns and with stop strings, from end to end."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_chat import chat, chatty
from test_loop import SMALL, length_reward, policy, scorer
from test_loop_inputs import no_programs, one_line

from jppo import loop, programs
from jppo.config import ConfigError
from jppo.evaluation import evaluate
from jppo.job import Job, prepare
from jppo.metrics import read_jsonl
from jppo.programs import Programs
from jppo.settings import from_dict
from jppo.steplog import completions, ended
from jppo.types import Rollout

assert no_programs  # a fixture that the tests here use

TABLE = [
    {"prompt": chat("user red"), "answer": 3},
    {"prompt": chat("system one", "user blue"), "answer": None},
]


class World(NamedTuple):
    """A job on chats from a Parquet file, compiled once, and its first batch."""

    job: Job
    progs: Programs
    drawn: Rollout
    texts: list[str]
    stop: str  # two words that some response begins with

    def cut(self, folder):
        """The same job with the stop string, which changes no program."""
        setup = dataclasses.replace(self.job.setup, stop_strings=(self.stop,))
        return into(self.job._replace(setup=setup), folder), dataclasses.replace(
            self.progs, setup=setup
        )


def into(job, folder):
    cfg = from_dict({"run.folder": str(folder)}, job.setup.config)
    return job._replace(setup=dataclasses.replace(job.setup, config=cfg))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(TABLE), path)
    over = {"data.prompts": str(path), "sampling.max_new_tokens": 5, "run.steps": 1}
    model = policy()._replace(tokenizer=chatty())
    job = prepare(from_dict(SMALL | over), policy=model, reward_fn=reward)
    progs = programs.build(job.setup)
    state, frozen = progs.place(job.state, job.frozen)
    batch = progs.put(job.prompts.batch(job.prompts.order(0, 8)))
    drawn = progs.generate(state, frozen, batch)
    texts = completions(model.tokenizer, drawn)
    words = next(text.split() for text in texts if len(text.split()) >= 4)
    return World(job, progs, drawn, texts, " ".join(words[:2]))


SEEN = []


def reward(prompts, completions, answer):
    SEEN.append((prompts, completions, answer))
    return length_reward(prompts, completions)


# Chats and columns


def test_chats_reach_the_reward_function_as_they_are(world, tmp_path):
    SEEN.clear()
    loop.run(into(world.job, tmp_path), world.progs)
    ((prompts, texts, answers),) = SEEN
    known = [(row["prompt"], row["answer"]) for row in TABLE]
    assert all(pair in known for pair in zip(prompts, answers, strict=True))
    assert len(prompts) == 8 and texts == world.texts
    samples = read_jsonl(tmp_path / "samples.jsonl")  # for people: what the policy read
    assert "<user> red </s>\n<assistant> " in {s["prompt"] for s in samples}


def test_columns_that_the_reward_function_cannot_take(tmp_path, no_programs):
    rows = [{"prompt": "red", "answer": 1, "level": 2}]

    def strict(prompts, completions, answer):
        pytest.fail("asked")

    says = r"strict\(prompts, completions, answer\) does not take .* level of the"
    one_line(ConfigError, says, tmp_path, prompts=rows, reward_fn=strict)
    says = "the column.s. level: missing a required argument: 'answer'"
    less = [{"prompt": "red", "level": 2}]

    def open_ended(prompts, completions, answer, **columns):
        pytest.fail("asked")

    one_line(ConfigError, says, tmp_path, prompts=less, reward_fn=open_ended)
    gold = {"gold": lambda prompts, completions: [0.0]}
    inputs = {"prompts": rows, "yardsticks": gold}
    one_line(ConfigError, "does not take .* answer, level", tmp_path, **inputs)


# Stop strings


def test_stop_strings_need_the_host(tmp_path, no_programs):
    over = {"sampling.stop": ["red blue"], "run.fused": True}
    says = "'red blue' is several tokens.* run.fused=false"
    models = {"policy": policy(), "reward_fn": None, "reward_model": scorer()}
    one_line(ConfigError, says, tmp_path, over, **models)


def test_one_token_stops_on_the_device_and_several_on_the_host():
    cfg = from_dict(SMALL | {"sampling.stop": ["red blue", "five"]})
    setup = prepare(
        cfg, policy=policy(), prompts=["red"], reward_fn=length_reward
    ).setup
    assert (setup.stop_ids, setup.stop_strings) == ((0, 10), ("red blue",))


def test_nothing_after_a_stop_string_is_scored_or_trained_on(world, tmp_path):
    whole = loop.run(into(world.job, tmp_path / "whole"), world.progs).history[0]
    SEEN.clear()
    job, progs = world.cut(tmp_path / "cut")
    cut = loop.run(job, progs).history[0]
    stop, texts = world.stop, world.texts
    # The draws are the same; each text ends where the string does.
    short = [t[: t.find(stop) + len(stop)] if stop in t else t for t in texts]
    assert SEEN[0][1] == short != texts
    gone = sum(
        len(a.split()) - len(b.split()) for a, b in zip(texts, short, strict=True)
    )
    assert whole["tokens"] - cut["tokens"] >= gone > 0
    assert cut["lengths"] == pytest.approx(cut["tokens"] / 8)
    assert cut["stopped_frac"] > whole["stopped_frac"] and cut["skipped"] == 0


def test_the_experience_is_of_the_cut_rollout(world, tmp_path):
    job, progs = world.cut(tmp_path)
    state, frozen = progs.place(job.state, job.frozen)
    rolled = ended(progs, job.policy.tokenizer, world.drawn)
    places = lambda tree: [leaf.sharding for leaf in jax.tree.leaves(tree)]  # noqa: E731
    assert places(rolled) == places(world.drawn)
    made, _ = progs.score(state, frozen, rolled, progs.put(np.ones(8, np.float32)))
    np.testing.assert_array_equal(made.mask, rolled.mask)
    assert np.asarray(rolled.mask).sum() < np.asarray(world.drawn.mask).sum()
    assert (np.asarray(rolled.stop_index) == len(job.setup.stop_ids)).any()
    assert not np.asarray(made.advantages)[~np.asarray(made.mask)].any()
    assert ended(world.progs, job.policy.tokenizer, world.drawn) is world.drawn


def test_an_evaluation_cuts_too(world, tmp_path):
    job, progs = world.cut(tmp_path)
    state, frozen = progs.place(job.state, job.frozen)
    tokenizer = job.policy.tokenizer
    args = (state, frozen, job.prompts, tokenizer)
    whole = evaluate(world.progs, *args, reward_fn=reward)
    stop = " ".join(whole.completions[0].split()[1:3])
    job, progs = world._replace(stop=stop).cut(tmp_path)
    cut = evaluate(progs, *args, reward_fn=reward)
    assert cut.columns["length"].sum() < whole.columns["length"].sum()
    assert cut.completions[0] == whole.completions[0].partition(stop)[0] + stop
