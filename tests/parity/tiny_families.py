"""One tiny random model a family (or more), each with the traits that set it apart.

Windows are shorter than the sequences that the tests run, head dimensions are not
d / heads where the family allows it, and scaled rotary embeddings have an original
length that the sequences pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_labels": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
STEP = 1 / 64  # weights are −127 … 127 of these: exact in bfloat16, a byte in a golden
T = 21  # tokens a row: longer than the windows, and than the scaled lengths
SLIDE, FULL = "sliding_attention", "full_attention"
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 64,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_labels": 1,
}

# name: (config class, what differs from BASE); the first word of a name is the family
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 6, "tie_word_embeddings": True}),
    "llama scaled": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 500.0,
                "factor": 2.0,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "mistral unbounded": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2 windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 10}),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "smollm3 windows": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 4},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 10, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 10, "sliding_window": 4, "query_pre_attn_scalar": 24,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 10, "sliding_window": 4, "query_pre_attn_scalar": 24,
         "layer_types": [SLIDE, FULL, SLIDE], "rope_parameters": LOCAL},
    ),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {"sliding_window": 5}),
    "phi3 partial": (
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "partial_rotary_factor": 0.75}},
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 inner": ("GPT2Config", GPT2 | {"n_inner": 40, "activation_function": "gelu"}),
    "gpt_neox": ("GPTNeoXConfig", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    "gpt_neox serial": (
        "GPTNeoXConfig",
        {"use_parallel_residual": False, "attention_bias": False},
    ),
}  # fmt: skip


def random_model(name: str, seed: int, *, scorer: bool = False) -> Any:
    """A torch model with weights large enough that attention is far from uniform."""
    import torch
    import transformers

    kind, changes = FAMILIES[name]
    config = getattr(transformers, kind)(
        **(changes if kind == "GPT2Config" else BASE | changes),
        attn_implementation="eager",
    )
    auto = (
        transformers.AutoModelForSequenceClassification
        if scorer
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config, attn_implementation="eager")
    rng = np.random.default_rng(seed)
    offset = 0.0 if "gemma" in name else 1.0  # Gemma stores scales less one
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = key.endswith(".weight") and ("norm" in key or ".ln_" in key)
            x = rng.normal(offset if norm else 0.0, 0.3, tuple(p.shape))
            steps = np.clip(np.round(x / STEP), -127, 127)
            p.copy_(torch.from_numpy((steps * STEP).astype(np.float32)))
    return model.eval()
