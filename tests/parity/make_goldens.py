"""Writes tests/goldens/*.npz: what torch and transformers say, for tests without them.

    pip install torch
    python tests/parity/make_goldens.py --smollm2 ~/.cache/jppo/SmolLM2-135M-Instruct

Takes minutes on one core. Each `llama_*.npz` is a tiny random model with its weights
(float16 values, so float32 holds them exactly), the config.json that transformers
wrote, and its logits for a left-padded batch. `smollm2.npz` holds logits and greedy
continuations of the real model; its weights stay outside the repository. Each
`family_*.npz` is one model of `tiny_families.py`, a byte a weight.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tiny_families import FAMILIES, STEP, T, random_model

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"

# name: (d, query heads, kv heads, head dim, mlp, vocab, theta, tied, eps)
TINY = {
    "mha_tied": (16, 4, 4, 4, 24, 64, 1e4, True, 1e-5),
    "gqa_untied": (24, 4, 2, 8, 40, 96, 1e5, False, 1e-5),
    "mqa_head": (32, 4, 1, 6, 48, 64, 500.0, True, 1e-6),
    "scorer": (16, 2, 1, 8, 24, 64, 1e4, False, 1e-5),
}
PADS = (0, 7)  # left pads of the two rows
STEPS = 24

TEXTS = [
    "The movie was",
    "I have never seen such a",
    "Once upon a time, there was a little",
    "The capital of France is",
    "Water boils at 100 degrees",
    "def fibonacci(n):",
    "In 1969, the first",
    "She opened the door and",
    "The best thing about this film is",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "To be, or not to be,",
    "The acting was terrible, but",
    "Breakfast is",
    "A    wide   gap  7  and",
    "Les enfants jouent dans",
    "import numpy as np\n\n",
    "Photosynthesis is the process by which",
]
QUESTIONS = [
    "What is gravity?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Who wrote Hamlet?",
    "Say hello in Spanish.",
]


def random_llama(name: str, seed: int) -> Any:
    """A torch Llama with weights large enough that attention is far from uniform."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    d, h, k, e, f, v, theta, tied, eps = TINY[name]
    config = LlamaConfig(
        hidden_size=d,
        num_attention_heads=h,
        num_key_value_heads=k,
        head_dim=e,
        intermediate_size=f,
        vocab_size=v,
        num_hidden_layers=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
        rms_norm_eps=eps,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        num_labels=1,
        attn_implementation="eager",
    )
    scorer = name == "scorer"
    model = (LlamaForSequenceClassification if scorer else LlamaForCausalLM)(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = "norm" in key
            x = rng.normal(1.0 if norm else 0.0, 0.3, tuple(p.shape))
            p.copy_(torch.from_numpy(x.astype(np.float16).astype(np.float32)))
    return model.eval()


def padded_batch(vocab: int, seed: int, t: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask `[2, t]`; ids below 3 are special and do not occur."""
    tokens = np.random.default_rng(seed).integers(3, vocab, (len(PADS), t))
    mask = np.arange(t)[None] >= np.array(PADS)[:, None]
    return np.where(mask, tokens, 0).astype(np.int32), mask


def torch_logits(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits (or scores) with positions counted from each row's first real token."""
    import torch

    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    with torch.no_grad():
        return model(
            input_ids=torch.from_numpy(tokens.astype(np.int64)),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            position_ids=torch.from_numpy(positions),
            use_cache=False,
        ).logits.numpy()


def tiny_golden(name: str, seed: int) -> dict[str, np.ndarray]:
    model = random_llama(name, seed)
    tokens, mask = padded_batch(model.config.vocab_size, seed)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = (Path(folder) / "config.json").read_text()
    weights = {
        f"weights/{key}": value.numpy().astype(np.float16)
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    return {
        "config": np.array(config),
        "tokens": tokens,
        "mask": mask,
        "logits": torch_logits(model, tokens, mask),
        **weights,
    }


def family_golden(name: str) -> dict[str, np.ndarray]:
    """A model of any family: config.json, weights in steps, and logits."""
    model = random_model(name, 0)
    tokens, mask = padded_batch(model.config.vocab_size, 0, t=T)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = (Path(folder) / "config.json").read_text()
        stored = load_file(next(Path(folder).glob("*.safetensors")))
    weights = {
        f"weights/{key}": (x / STEP).astype(np.int8) for key, x in stored.items()
    }
    logits = torch_logits(model, tokens, mask)
    about = {"config": np.array(config), "step": np.float32(STEP)}
    return about | {"tokens": tokens, "mask": mask, "logits": logits} | weights


def greedy(model: Any, ids: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Greedy tokens until eos, and by how much each one beat the second best."""
    import torch

    out, margins = [], []
    with torch.no_grad():
        while len(out) < steps and model.config.eos_token_id not in out:
            inputs = torch.tensor([ids + out])
            top = model(input_ids=inputs, use_cache=False).logits[0, -1].topk(2)
            out.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
    return out, margins


def smollm2_golden(folder: Path) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [tok(text)["input_ids"] for text in TEXTS]
    for question in QUESTIONS:
        text = tok.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        prompts.append(tok(text, add_special_tokens=False)["input_ids"])
    width = max(map(len, prompts))
    tokens = np.full((len(prompts), width), tok.pad_token_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    greedy_tokens = np.full((len(prompts), STEPS), tok.pad_token_id, np.int32)
    margins = np.zeros((len(prompts), STEPS), np.float32)
    lengths = np.zeros(len(prompts), np.int32)
    for i, ids in enumerate(prompts):
        tokens[i, width - len(ids) :] = ids
        mask[i, width - len(ids) :] = True
        out, margin = greedy(model, ids, STEPS)
        lengths[i] = len(out)
        greedy_tokens[i, : len(out)], margins[i, : len(out)] = out, margin
    some = np.array([0, 4, 6, 14, len(TEXTS), len(TEXTS) + 3])
    logits = torch_logits(model, tokens[some], mask[some])
    return {
        "texts": np.array(TEXTS),
        "questions": np.array(QUESTIONS),
        "tokens": tokens,
        "mask": mask,
        "greedy": greedy_tokens,
        "greedy_lengths": lengths,
        "greedy_margins": margins,
        "rows": some,
        "logits_last": logits[:, -1, :64],
        "logits_first": np.stack(  # at the first 8 real positions (or all there are)
            [_first(x, m) for x, m in zip(logits, mask[some], strict=True)]
        ),
        "argmax": logits.argmax(-1).astype(np.int32),
        "logsumexp": torch.from_numpy(logits).logsumexp(-1).numpy(),
    }


def _first(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    rows = logits[mask][:8, :64]
    return np.pad(rows, ((0, 8 - len(rows)), (0, 0)), constant_values=np.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, help="directory of the real model")
    args = parser.parse_args()
    GOLDENS.mkdir(exist_ok=True)
    for seed, name in enumerate(TINY):
        file = GOLDENS / f"llama_{name}.npz"
        np.savez_compressed(file, **tiny_golden(name, seed))
        print(json.dumps({"file": file.name, "bytes": file.stat().st_size}))
    for name in FAMILIES:
        file = GOLDENS / f"family_{name.replace(' ', '_')}.npz"
        np.savez_compressed(file, **family_golden(name))
        print(json.dumps({"file": file.name, "bytes": file.stat().st_size}))
    if args.smollm2:
        file = GOLDENS / "smollm2.npz"
        np.savez_compressed(file, **smollm2_golden(args.smollm2))
        print(json.dumps({"file": file.name, "bytes": file.stat().st_size}))


if __name__ == "__main__":
    main()
