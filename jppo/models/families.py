"""Families of models: which traits each has, and how its `config.json` spells them.

A family is one entry of `FAMILIES`: names of classes and keys, the defaults that
`transformers` assumes for absent keys, the traits that all its members share, and the
keys whose value must be the one that jppo's decoder computes. `hf_layout` has the
names of its tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of `config.json`.

    keys: our key → theirs. defaults: what an absent key means there. traits: fields
    of ModelConfig. flags: boolean keys → the fields that they set. only: keys that
    must have one of these values where they are given.
    """

    name: str
    classes: str  # prefix of ForCausalLM and ForSequenceClassification
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    traits: dict[str, Any] = dataclasses.field(default_factory=dict)
    flags: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    windows: str = "none"  # how sliding layers are chosen: see hf_config._layers
    grouped: bool = True  # its config has num_key_value_heads and head_dim
    scorer: str = ""  # class with a scalar head, where it is not CLASSESForSequence…

    def key(self, name: str) -> str:
        return self.keys.get(name, name)

    @property
    def causal_class(self) -> str:
        return (
            self.classes + "ForCausalLM" if self.name != "gpt2" else "GPT2LMHeadModel"
        )

    @property
    def scorer_class(self) -> str:
        return self.scorer or self.classes + "ForSequenceClassification"


PLAIN = {"attention_bias": (False, None), "mlp_bias": (False, None)}
GEMMA = {"norm_offset": 1.0, "act": "gelu_tanh"}
GEMMA_KEYS = {"hidden_act": "hidden_activation"}
GEMMA_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
GEMMA_ONLY = {"use_bidirectional_attention": (False, None), **PLAIN}

_ALL = (
    Family("llama", "Llama", flags={
        "attention_bias": ("qkv_bias", "o_bias"), "mlp_bias": ("mlp_bias",)
    }),
    Family("mistral", "Mistral", defaults={
        "sliding_window": 4096, "num_key_value_heads": 8,
    }, windows="all"),
    Family("qwen2", "Qwen2", traits={"qkv_bias": True}, defaults={
        "sliding_window": 4096, "num_key_value_heads": 32,
    }, windows="last"),
    Family("qwen3", "Qwen3", traits={"qk_norm": "head"}, flags={
        "attention_bias": ("qkv_bias", "o_bias")
    }, defaults={
        "sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128,
    }, windows="last"),
    Family("smollm3", "SmolLM3", flags={
        "attention_bias": ("qkv_bias", "o_bias"), "mlp_bias": ("mlp_bias",)
    }, defaults={
        "rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True,
    }, windows="nope"),
    Family("phi3", "Phi3", defaults={"rms_norm_eps": 1e-5}, windows="all"),
    Family("olmo2", "Olmo2", traits={"norm_at": "post", "qk_norm": "all"}, defaults={
        "rms_norm_eps": 1e-5,
    }, flags={"attention_bias": ("qkv_bias", "o_bias")}),
    Family("gemma", "Gemma", traits=GEMMA, defaults=GEMMA_DEFAULTS | {
        "head_dim": 256, "num_key_value_heads": 16,
    }, only=GEMMA_ONLY),
    Family("gemma2", "Gemma2", keys=GEMMA_KEYS, traits=GEMMA | {"norm_at": "both"},
           defaults=GEMMA_DEFAULTS | {
        "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
    }, only=GEMMA_ONLY, windows="pattern"),
    Family("gemma3_text", "Gemma3", keys=GEMMA_KEYS,
           traits=GEMMA | {"norm_at": "both", "qk_norm": "head"},
           defaults=GEMMA_DEFAULTS | {
        "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_theta_local": 1e4,
        "sliding_window_pattern": 6,
    }, only=GEMMA_ONLY, windows="pattern",
           scorer="Gemma3TextForSequenceClassification"),
    Family("gpt2", "GPT2", keys={
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }, traits={
        "norm": "layer", "positions": "learned", "gated": False,
        "qkv_bias": True, "o_bias": True, "mlp_bias": True,
    }, defaults={
        "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }, grouped=False, only={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }),
    Family("gpt_neox", "GPTNeoX", keys={
        "rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    }, traits={
        "norm": "layer", "gated": False, "mlp_bias": True, "parallel": True,
    }, flags={
        "attention_bias": ("qkv_bias", "o_bias"),
        "use_parallel_residual": ("parallel",),
    }, defaults={
        "rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True,
        "use_parallel_residual": True, "partial_rotary_factor": 0.25,
    }, grouped=False),
)  # fmt: skip
FAMILIES = {family.name: family for family in _ALL}
