"""Models from adapters, and reward models that share a base or read other tokens."""

import json

import jax
import numpy as np
import pytest
import tiny
from test_loop import PROMPTS, compiled_once, train
from tokenizer_stub import make_tokenizer

from jppo.config import ConfigError
from jppo.exporting import open_run
from jppo.loading import Model, base_of, load_adapted, load_model, merged
from jppo.models import lora
from jppo.models.hf import save_hf
from jppo.models.peft import save_adapter
from jppo.reward_loop import score_texts
from jppo.rewards import RewardError
from jppo.sharding import make_mesh
from jppo.text_reward import TextReward

assert compiled_once  # a fixture that every test here uses
TEXTS = [("red", "one"), ("green two", "three"), ("blue", "four five")]


def noisy_adapter(head=False, seed=0):
    base = tiny.params()
    adapter = lora.init_adapter(base, jax.random.key(seed), rank=2, targets="attn/[qv]")
    adapter = jax.tree.map(lambda a: a + 0.2 * np.cos(np.arange(a.size)).reshape(
        a.shape).astype(np.float32), adapter)  # fmt: skip
    return adapter | ({"head": tiny.params(head=True)["head"]} if head else {})


@pytest.fixture
def dirs(tmp_path):
    """A base, an adapter of it that writes, and one that judges."""
    base = tmp_path / "base"
    save_hf(base, tiny.CFG, tiny.params(), make_tokenizer())
    cfg = tiny.dataclasses.replace(tiny.CFG, lora_scale=2.0)
    save_adapter(tmp_path / "writer", cfg, noisy_adapter(), base=str(base))
    judge = noisy_adapter(head=True, seed=1)
    judge["head"]["bias"] = judge["head"]["bias"] * 0
    save_adapter(tmp_path / "judge", cfg, judge, base="../base")
    return tmp_path


def test_an_adapter_directory_is_its_merged_model(dirs):
    found = load_model(dirs / "writer")
    want = lora.merge_adapter(lora.overlay(tiny.params(), noisy_adapter()), 2.0)
    tiny.close(found.params, want, tol=1e-6)
    assert found.config == tiny.CFG
    assert found.tokenizer.get_vocab() == make_tokenizer().get_vocab()
    tree = load_adapted(dirs / "writer")
    tiny.close(merged(tree).params, found.params, tol=0)


def test_a_base_is_found_beside_its_adapter_or_named_as_missing(dirs):
    assert base_of(dirs / "judge") == (dirs / "base").resolve()
    assert base_of(dirs / "base") is None
    file = dirs / "judge" / "adapter_config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"base_model_name_or_path": "org/name"}))
    with pytest.raises(FileNotFoundError, match="its base model 'org/name' is no dir"):
        load_model(dirs / "judge")


def test_a_reward_adapter_stands_on_the_policys_own_arrays(dirs):
    """One base for all roles, and the scores of the merged reward model."""
    from jppo import settings
    from jppo.job import prepare

    over = {"policy.lora.rank": 2, "critic.lora.rank": 2, "sampling.max_new_tokens": 3}
    cfg = settings.from_dict(over)
    where = {"policy": dirs / "base", "reward_model": dirs / "judge"}
    job = prepare(cfg, prompts=PROMPTS, **where)
    shared = job.frozen.reward["embed"]["embedding"]
    assert shared is job.frozen.reference["embed"]["embedding"]
    unlike = {k for k in lora.flatten(job.frozen.reward) if lora.is_factor(k)}
    assert len(unlike) == 4 and job.setup.reward_lora.rank == 2
    scorer = load_model(dirs / "judge")
    adapted = load_adapted(dirs / "judge")
    np.testing.assert_allclose(
        score_texts(adapted, TEXTS), score_texts(scorer, TEXTS), atol=1e-5
    )


def test_training_against_a_shared_adapter_equals_training_against_its_merge(dirs):
    over = {"run.steps": 1, "policy.lora.rank": 2}
    save_hf(dirs / "merged", *load_model(dirs / "judge"))
    kept = []
    for name in ("judge", "merged"):
        result = train(
            dirs / f"run-{name}",
            over
            | {
                "policy.path": str(dirs / "base"),
                "reward.model": str(dirs / name),
            },  # fmt: skip
            policy=None,
            reward_model=str(dirs / name),
        )
        kept.append(result)
    assert kept[0].history[0]["scores"] == pytest.approx(
        kept[1].history[0]["scores"], abs=1e-5
    )
    tiny.close(kept[0].state.actor, kept[1].state.actor, tol=1e-4)
    again = open_run(dirs / "run-judge")
    tiny.close(again.model.params, kept[0].policy.params, tol=0)


# Another tokenizer


def other_scorer():
    """The same words under other ids, and weights that go with them."""
    cfg = tiny.dataclasses.replace(tiny.CFG, vocab_size=20)
    return Model(cfg, tiny.params(cfg, 4, head=True), make_tokenizer(20))


def test_a_reward_model_with_another_tokenizer_reads_texts(tmp_path, capfd):
    scorer = other_scorer()
    asked = TextReward(scorer, make_mesh({}, jax.devices()[:1]), 2)
    prompts, answers = zip(*TEXTS, strict=True)
    found = asked(prompts, [" " + a for a in answers])
    with_end = [(p, f" {a} </s>") for p, a in TEXTS]
    np.testing.assert_allclose(found, score_texts(scorer, with_end), atol=1e-5)
    over = {"run.steps": 1, "run.quiet": False, "mesh.fsdp": 8}
    result = train(tmp_path, over, reward_model=scorer)
    assert np.isfinite(result.history[0]["scores"])
    assert "the reward model has a tokenizer of its own" in capfd.readouterr().out


def test_an_empty_answer_is_an_end_alone():
    asked = TextReward(other_scorer(), make_mesh({}, jax.devices()[:1]), 2)
    assert asked.encode("red", "") == [3, 0]
    assert asked.encode("red", " one") == [3, 6, 0]


@pytest.mark.parametrize(
    "over, says",
    [
        ({"run.fused": True}, "run.fused=true needs one tokenizer, but policy and"),
        ({"critic.init": "reward"}, "critic.init=reward needs one tokenizer, but"),
    ],
)
def test_layouts_that_need_one_tokenizer(tmp_path, over, says):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path, over, reward_model=other_scorer())


def test_a_tokenizer_that_is_not_the_reward_models_own(tmp_path):
    cfg = tiny.dataclasses.replace(tiny.CFG, vocab_size=12)
    scorer = Model(cfg, tiny.params(cfg, head=True), make_tokenizer(20))
    with pytest.raises(ConfigError, match="tokenizer has 20 ids, the model 12: they"):
        train(tmp_path, reward_model=scorer)


def test_a_text_that_the_reward_model_has_no_room_for():
    scorer = other_scorer()
    short = tiny.dataclasses.replace(scorer.config, max_positions=4)
    mesh = make_mesh({}, jax.devices()[:1])
    asked = TextReward(scorer._replace(config=short), mesh, 2)
    from jppo import rewards

    with pytest.raises(RewardError, match="sample 1: prompt and response are 5 tokens"):
        rewards.call(asked, ["red", "red red"], [" one", " one two"], timeout=None)
