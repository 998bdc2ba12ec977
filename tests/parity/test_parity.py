"""jppo against torch, live: `pytest -m parity` where torch is installed."""

import json
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_goldens import (
    GOLDENS,
    QUESTIONS,
    TEXTS,
    TINY,
    greedy,
    padded_batch,
    random_llama,
    torch_logits,
)

from jppo.models import transformer
from jppo.models.hf import load_hf, save_hf

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' own
]
LMS = [name for name in TINY if name != "scorer"]


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


def jppo_logits(cfg, params, tokens, mask) -> np.ndarray:
    run = jax.jit(transformer.logits, static_argnums=0)
    return np.asarray(run(cfg, params, tokens, mask))


def open_in_torch(folder, kind: str):
    """The model as transformers opens it, with no key missing or unexpected."""
    import transformers

    model, info = getattr(transformers, kind).from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype="float32",  # of a model cast later, the rotary table stays rounded
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[what], (what, info[what])
    return model.eval()


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("name", LMS)
def test_logits_of_random_models(torch, tmp_path, name, seed):
    model = random_llama(name, seed)
    model.save_pretrained(tmp_path)
    cfg, params = load_hf(tmp_path)
    tokens, mask = padded_batch(cfg.vocab_size, seed, t=21)
    want = torch_logits(model, tokens, mask)
    got = jppo_logits(cfg, params, tokens, mask)
    assert want[mask].std() > 0.5
    np.testing.assert_allclose(got[mask], want[mask], atol=3e-5)


@pytest.mark.parametrize("name", LMS)
def test_transformers_opens_what_jppo_saves(torch, tmp_path, name):
    random_llama(name, 5).save_pretrained(tmp_path / "theirs")
    cfg, params = load_hf(tmp_path / "theirs")
    # weights that torch has not seen yet, so that nothing can be left over
    params = jax.tree.map(
        lambda x: x + 0.01 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )
    save_hf(tmp_path / "ours", cfg, params)
    model = open_in_torch(tmp_path / "ours", "AutoModelForCausalLM")
    assert model.config.rope_parameters["rope_theta"] == cfg.rope_theta
    tokens, mask = padded_batch(cfg.vocab_size, 5)
    want = torch_logits(model, tokens, mask)
    got = jppo_logits(cfg, params, tokens, mask)
    np.testing.assert_allclose(got[mask], want[mask], atol=3e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scorer_both_ways(torch, tmp_path, dtype):
    theirs = random_llama("scorer", 6)
    theirs.save_pretrained(tmp_path / "theirs")
    cfg, params = load_hf(tmp_path / "theirs")
    save_hf(tmp_path / "ours", cfg, params, dtype=dtype)
    model = open_in_torch(tmp_path / "ours", "AutoModelForSequenceClassification")
    assert model.config.num_labels == 1
    cfg, params = load_hf(tmp_path / "ours")
    tokens, mask = padded_batch(cfg.vocab_size, 6)
    model.config.pad_token_id = 0  # saved without a tokenizer; torch asks for one
    want = torch_logits(model, tokens, mask)[:, 0]
    run = jax.jit(transformer.hidden_states, static_argnums=0)
    hidden = run(cfg, params, tokens, mask)
    got = transformer.scalar_head(params, hidden[:, -1])
    np.testing.assert_allclose(got, want, atol=3e-5)


def test_sharded_and_bfloat16_from_transformers(torch, tmp_path):
    rounded = random_llama("gqa_untied", 7).to(torch.bfloat16)
    rounded.save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    cfg, params = load_hf(tmp_path)
    tokens, mask = padded_batch(cfg.vocab_size, 7)
    model = open_in_torch(tmp_path, "AutoModelForCausalLM")
    want = torch_logits(model, tokens, mask)
    got = jppo_logits(cfg, params, tokens, mask)
    np.testing.assert_allclose(got[mask], want[mask], atol=3e-5)


def test_unknown_rope_is_refused_as_transformers_writes_it(torch, tmp_path):
    model = random_llama("mha_tied", 8)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.config.rope_parameters = rope
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rope_parameters .* is not supported"):
        load_hf(tmp_path)


@pytest.fixture(scope="module")
def real(torch, smollm2_dir):
    return open_in_torch(smollm2_dir, "AutoModelForCausalLM")


def test_smollm2_logits(real, smollm2_dir):
    golden = np.load(GOLDENS / "smollm2.npz")
    rows = golden["rows"][:3]
    tokens, mask = golden["tokens"][rows], golden["mask"][rows]
    want = torch_logits(real, tokens, mask)
    cfg, params = load_hf(smollm2_dir)
    got = jppo_logits(cfg, params, tokens, mask)
    np.testing.assert_allclose(got[mask], want[mask], atol=2e-3)


def test_golden_greedy_tokens_are_torchs(real):
    golden = np.load(GOLDENS / "smollm2.npz")
    for i in (0, len(TEXTS) - 1, len(TEXTS) + 1):
        ids = golden["tokens"][i][golden["mask"][i]].tolist()
        n = int(golden["greedy_lengths"][i])
        assert greedy(real, ids, n)[0] == golden["greedy"][i, :n].tolist()


def test_smollm2_ids_are_auto_tokenizers(torch, smollm2_dir):
    from transformers import AutoTokenizer

    from jppo.models.tokenizer import load_tokenizer

    ours = load_tokenizer(smollm2_dir)
    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in [*TEXTS, *QUESTIONS]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
