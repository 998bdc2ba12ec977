"""Supervised runs from rows to a model: each learns, stops, goes on, is exported."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from tokenizer_stub import make_tokenizer

from jppo import settings
from jppo.checkpoint import CheckpointError
from jppo.config import ConfigError
from jppo.exporting import export, open_run
from jppo.fit_config import DPOConfig, RewardFitConfig, SFTConfig
from jppo.fit_job import prepare_fit
from jppo.fit_loop import calibration, fit
from jppo.loading import Model, load_model
from jppo.models.hf import load_hf, save_hf
from jppo.models.peft import load_adapter
from jppo.readers import DataError
from jppo.reward_loop import score_texts

TEXTS = [
    {"prompt": "red", "completion": " one"},
    {"prompt": "green", "completion": " two"},
    {"prompt": "blue blue", "completion": " three"},
    {"prompt": "red red", "completion": " one one"},
]
PAIRS = [
    {"prompt": "red", "chosen": " one", "rejected": " two"},
    {"prompt": "green", "chosen": " one", "rejected": " three four"},
    {"prompt": "blue", "chosen": " one one", "rejected": " four"},
    {"prompt": "red blue", "chosen": " one", "rejected": " five"},
]
SMALL = {
    "fit.batch_size": 4,
    "fit.steps": 6,
    "optim.lr": 2e-2,
    "optim.warmup": 0,
    "mesh.fsdp": 1,
    "run.tensorboard": False,
    "run.quiet": True,
}
KINDS = {SFTConfig: TEXTS, RewardFitConfig: PAIRS, DPOConfig: PAIRS}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Meshes have their own tests; here every run is on one device."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def model(**changes):
    cfg = dataclasses.replace(tiny.CFG, **changes)
    return Model(cfg, tiny.params(cfg), make_tokenizer(cfg.vocab_size))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    save_hf(folder, *model())
    return folder


def run(kind, folder, over=None, **inputs):
    cfg = settings.from_dict(SMALL | {"run.folder": str(folder)} | (over or {}), kind())
    inputs = {"model": model(), "rows": KINDS[kind]} | inputs
    if cfg.model.path and inputs["model"] is None:
        del inputs["model"]
    return fit(cfg, **inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_and_leaves_a_model_that_is_the_same_when_read(kind, tmp_path):
    result = run(kind, tmp_path, held_out=KINDS[kind])
    losses = [row["loss"] for row in result.history if "loss" in row]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    first, last = result.history[0], result.history[-1]
    assert first["step"] == 0 and last["step"] == 6
    np.testing.assert_allclose(first["eval_loss"], losses[0], rtol=1e-5)
    assert last["eval_loss"] < losses[0] and last["lr"] < 2e-2 and last["epoch"] == 6
    cfg, params = load_hf(tmp_path / "model")
    tiny.close(params, result.model.params, tol=0)
    assert cfg == dataclasses.replace(result.model.config, lora_scale=cfg.lora_scale)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stopped_goes_on_as_if_it_had_not(kind, tmp_path):
    whole = run(kind, tmp_path / "whole")

    def stop(step, _):
        if step == 3:
            raise KeyboardInterrupt

    cfg = settings.from_dict(SMALL | {"run.folder": str(tmp_path / "cut")}, kind())
    with pytest.raises(KeyboardInterrupt):
        fit(cfg, model=model(), rows=KINDS[kind], on_step=stop)
    again = fit(cfg, model=model(), rows=KINDS[kind])
    assert [row["step"] for row in again.history] == [1, 2, 3, 4, 5, 6]
    assert tiny.distance(again.state, whole.state) == 0
    losses = [[row["loss"] for row in r.history] for r in (again, whole)]
    assert losses[0] == losses[1]


def test_a_finished_run_is_not_run_again(tmp_path):
    first = run(SFTConfig, tmp_path)
    again = run(SFTConfig, tmp_path)
    assert tiny.distance(first.state, again.state) == 0
    assert again.history == first.history


def test_runs_of_another_kind_or_model_are_refused(tmp_path):
    run(SFTConfig, tmp_path, {"fit.steps": 1})
    with pytest.raises(CheckpointError, match="kind is SFT there, DPO here"):
        run(DPOConfig, tmp_path)
    other = model()._replace(params=tiny.params(seed=5))
    with pytest.raises(CheckpointError, match="weights is .* there"):
        run(SFTConfig, tmp_path, model=other)
    with pytest.raises(ConfigError, match="already holds a run: set run.resume=true"):
        run(SFTConfig, tmp_path, {"run.resume": False})


# Layouts


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_learns_alone_and_is_merged_on_the_way_out(kind, tmp_path):
    over = {"model.lora.rank": 2, "model.lora.alpha": 4.0, "optim.lr": 5e-2}
    result = run(kind, tmp_path, over)
    losses = [row["loss"] for row in result.history]
    assert losses[-1] < losses[0]
    adapter = load_adapter(tmp_path / "adapter", tiny.CFG)
    assert adapter.scale == 2.0
    tree = adapter.params | {"blocks": adapter.params["blocks"]}
    tiny.close(tree["blocks"], result.state.params["blocks"], tol=1e-6)
    base = tiny.params()
    tiny.close(result.model.params["embed"], base["embed"], tol=0)
    merged = load_hf(tmp_path / "model")[1]
    assert tiny.distance(merged["blocks"], base["blocks"]) > 1e-3


def test_only_the_top_learns_where_that_is_asked_for(tmp_path):
    result = run(SFTConfig, tmp_path, {"model.train_layers": 1})
    base, after = tiny.params(), result.model.params
    low, high = (jax.tree.map(lambda a, i=i: a[i], after["blocks"]) for i in (0, 1))
    was = jax.tree.map(lambda a: a[0], base["blocks"])
    assert tiny.distance(low, was) == 0
    top = jax.tree.map(lambda a: a[1], base["blocks"])
    assert tiny.distance(high, top) > 1e-3


def test_packing_needs_fewer_rows(tmp_path):
    cfg = settings.from_dict(SMALL | {"sft.packing": True}, SFTConfig())
    packed = prepare_fit(cfg, model=model(), rows=TEXTS)
    assert len(packed.data) == 1
    result = run(SFTConfig, tmp_path, {"sft.packing": True, "fit.batch_size": 1})
    assert result.history[-1]["loss"] < result.history[0]["loss"]


# Reward models


def test_a_normalised_reward_model_scores_chosen_texts_0_on_average(tmp_path):
    result = run(RewardFitConfig, tmp_path, {"reward.normalize": True})
    texts = [(row["prompt"], row["chosen"] + " </s>") for row in PAIRS]
    scores = score_texts(result.model, texts)
    assert abs(scores.mean()) < 1e-5 and scores.std() > 0
    back = load_model(tmp_path / "model")
    np.testing.assert_allclose(score_texts(back, texts), scores, atol=1e-6)
    again = run(RewardFitConfig, tmp_path, {"reward.normalize": True})
    assert tiny.distance(again.model.params, result.model.params) < 1e-6


def test_centring_learns_without_the_bias_that_files_lack(tmp_path):
    result = run(RewardFitConfig, tmp_path, {"reward.center": 0.1})
    assert float(result.model.params["head"]["bias"][0]) == 0


def test_calibration_groups_pairs_by_confidence():
    gaps = np.array([0.1, -0.1, 2.0, 2.0, -2.0, 2.0, 0.0, 0.05, 3.0, 3.0, 3.0, 3.0])
    groups = calibration(gaps)
    assert sum(g["pairs"] for g in groups) == 12
    sure = [g["confidence"] for g in groups]
    assert sure == sorted(sure) and 0.5 <= sure[0] < sure[-1] < 1
    assert groups[-1]["accuracy"] == 1.0
    right = sum(g["accuracy"] * g["pairs"] for g in groups)
    assert right == pytest.approx(9 + 0.5)  # the tie counts half


def test_a_reward_model_is_fitted_further(tmp_path):
    first = run(RewardFitConfig, tmp_path / "a")
    head = first.model.params["head"]["kernel"]
    cfg = settings.from_dict(SMALL, RewardFitConfig())
    job = prepare_fit(cfg, model=first.model, rows=PAIRS)
    assert tiny.distance(job.state.params["head"]["kernel"], head) == 0


# Export


def test_a_run_is_opened_again_from_its_folder_alone(model_dir, tmp_path):
    over = {"model.path": str(model_dir), "run.checkpoint_every": 2, "run.keep": 5}
    result = run(SFTConfig, tmp_path / "run", over, model=None)
    tiny.close(open_run(tmp_path / "run").model.params, result.model.params, tol=0)
    found = export(tmp_path / "run", tmp_path / "early", step=2, dtype="bfloat16")
    assert found.step == 2
    early = load_hf(tmp_path / "early")[1]
    assert tiny.distance(early, result.model.params) > 1e-3
    with pytest.raises(CheckpointError, match=r"no checkpoint 3, have \[2, 4, 6\]"):
        export(tmp_path / "run", tmp_path / "none", step=3)
    with pytest.raises(ConfigError, match="only a PPO run has a critic"):
        export(tmp_path / "run", tmp_path / "none", part="critic")
    with pytest.raises(ConfigError, match="the run has no adapter"):
        export(tmp_path / "run", tmp_path / "none", part="adapter")


def test_a_run_on_a_model_in_memory_says_so(tmp_path):
    run(SFTConfig, tmp_path, {"fit.steps": 1})
    with pytest.raises(ConfigError, match="began with a model in memory"):
        open_run(tmp_path)


# Mistakes


@pytest.mark.parametrize(
    "kind, over, inputs, error, says",
    [
        (SFTConfig, {}, {"rows": []}, DataError, "the list of examples is empty"),
        (SFTConfig, {}, {"rows": ["red"]}, DataError, "a dict of columns, got 'red'"),
        (SFTConfig, {}, {"rows": PAIRS}, DataError, "row 0: column 'completion'"),
        (DPOConfig, {}, {"rows": TEXTS}, DataError, "row 0: column 'chosen'"),
        (
            SFTConfig,
            {"data.max_tokens": 3},
            {},
            DataError,
            "row 2 has 4 tokens, the limit is 3: raise data.max_tokens",
        ),
        (
            SFTConfig,
            {"model.train_layers": 9},
            {},
            ConfigError,
            "model.train_layers is 9, the model has 2 blocks",
        ),
        (SFTConfig, {}, {"model": ""}, ConfigError, "model.path is not set"),
        (
            SFTConfig,
            {},
            {"model": model()._replace(tokenizer=None)},
            ConfigError,
            "the model has no tokenizer",
        ),
        (
            DPOConfig,
            {},
            {"model": Model(tiny.CFG, tiny.params(head=True), make_tokenizer())},
            ConfigError,
            "the model has a scalar head: that is a reward model",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, kind, over, inputs, error, says):
    with pytest.raises(error) as caught:
        run(kind, tmp_path, over, **inputs)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_batch_that_the_mesh_does_not_divide_is_named(monkeypatch):
    monkeypatch.undo()
    cfg = settings.from_dict(SMALL | {"mesh.fsdp": -1}, SFTConfig())
    with pytest.raises(ConfigError, match="of 4 rows does not divide over the 8 dev"):
        prepare_fit(cfg, model=model(), rows=TEXTS)
