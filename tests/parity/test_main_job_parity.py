"""The main job ends with directories that transformers opens and agrees with."""

import jax
import numpy as np
import pytest

from jppo import settings
from jppo.generate_config import GenerateConfig
from jppo.generation import generate_texts
from jppo.loading import load_model
from jppo.movie_reviews import Size
from jppo.quickstart import quickstart
from jppo.reward_loop import score_texts

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
PROMPTS = ["The movie was", "I have never", "A film that", "Despite the", "My cat"]


@pytest.fixture(scope="module", autouse=True)
def one_device():
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        yield


@pytest.fixture(scope="module")
def folder(smollm2_dir, tmp_path_factory):
    """The quick start at the smallest size that still trains everything."""
    path = tmp_path_factory.mktemp("main") / "run"
    over = {"run.folder": str(path), "ppo.batch_size": 8, "run.quiet": True}
    quickstart(
        over | {"run.tensorboard": False, "actor_optim.warmup": 0},
        size=Size(sentences=64, judged=40, openings=8, steps=1),
    )
    return path


def test_the_policy_writes_the_same_text(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(
        folder / "model", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    over = {"model.path": str(folder / "model"), "sampling.temperature": 0.0}
    over |= {"sampling.max_new_tokens": 16, "run.batch_size": 5, "mesh.fsdp": 1}
    cfg = settings.from_dict(over, GenerateConfig())
    ours = [row["completion"] for row in generate_texts(cfg, prompts=PROMPTS)]
    for prompt, text in zip(PROMPTS, ours, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=16, do_sample=False)
        new = out[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == text


def test_the_reward_model_gives_the_same_scores(folder):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "reward_model", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys"))
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward_model")
    ours = score_texts(load_model(folder / "reward_model"), [("", t) for t in PROMPTS])
    for text, score in zip(PROMPTS, ours, strict=True):
        with torch.no_grad():
            theirs = model(**tokenizer(text, return_tensors="pt")).logits[0, 0]
        np.testing.assert_allclose(score, theirs, atol=2e-4)
