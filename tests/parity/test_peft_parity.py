"""Adapters against `peft`, live: ours open there, theirs open here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_goldens import padded_batch, torch_logits
from tiny_families import random_model

from jppo.models import lora, transformer
from jppo.models.hf import load_hf
from jppo.models.peft import load_adapter, save_adapter

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
FAMILIES = ["llama", "gpt2", "gpt_neox", "phi3"]  # plain, and fused in three ways
MODULES = {
    "llama": ["q_proj", "o_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    pytest.importorskip("peft")
    made = random_model(request.param, 4)
    made.save_pretrained(tmp_path / "base")
    return request.param, made, tmp_path


def logits(cfg, params, tokens, mask):
    return np.asarray(
        jax.jit(transformer.logits, static_argnums=0)(cfg, params, tokens, mask)
    )


def test_peft_opens_ours(model):
    from peft import PeftModel

    _, base, folder = model
    cfg, params = load_hf(folder / "base")
    cfg = dataclasses.replace(cfg, lora_scale=2.0)
    fresh = lora.init_adapter(params, jax.random.key(0), rank=3, targets="attn/|mlp/up")
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda a: jnp.asarray(0.2 * rng.normal(size=a.shape), jnp.float32), fresh
    )
    save_adapter(folder / "ours", cfg, adapter, base=str(folder / "base"))
    tokens, mask = padded_batch(cfg.vocab_size, 4)
    plain = torch_logits(base, tokens, mask)
    want = torch_logits(
        PeftModel.from_pretrained(base, folder / "ours").eval(), tokens, mask
    )
    got = logits(cfg, lora.overlay(params, adapter), tokens, mask)
    assert np.abs(want - plain)[mask].max() > 0.1
    np.testing.assert_allclose(got[mask], want[mask], atol=1e-4)


def test_jppo_opens_theirs(model):
    import torch
    from peft import LoraConfig, get_peft_model

    name, base, folder = model
    settings = LoraConfig(
        r=4, lora_alpha=6, target_modules=MODULES[name], task_type="CAUSAL_LM",
        use_rslora=True,
    )  # fmt: skip
    theirs = get_peft_model(base, settings)
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            if "lora_" in key:
                p.copy_(0.2 * torch.randn(p.shape))
    theirs.save_pretrained(folder / "theirs")
    cfg, params = load_hf(folder / "base")
    found = load_adapter(folder / "theirs", cfg)
    cfg = dataclasses.replace(cfg, lora_scale=found.scale)
    tokens, mask = padded_batch(cfg.vocab_size, 4)
    want = torch_logits(theirs.eval(), tokens, mask)
    got = logits(cfg, lora.overlay(params, found.params), tokens, mask)
    np.testing.assert_allclose(got[mask], want[mask], atol=1e-4)
