"""The sampler on the real model: greedy, token for token, as torch decodes it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo import decode
from jppo.config import SamplingConfig
from jppo.logprobs import token_logprobs
from jppo.models import transformer
from jppo.models.hf import load_hf
from jppo.types import Prompts

GOLDEN = Path(__file__).parents[1] / "goldens" / "smollm2.npz"


@pytest.fixture(scope="module")
def decoded(smollm2_dir, optimized):
    golden = np.load(GOLDEN)
    cfg, params = load_hf(smollm2_dir)
    b, t = golden["greedy"].shape
    prompts = Prompts(
        tokens=jnp.asarray(golden["tokens"], jnp.int32),
        mask=jnp.asarray(golden["mask"], bool),
        weight=jnp.ones(b),
        row=jnp.arange(b, dtype=jnp.int32),
    )
    settings = SamplingConfig(max_new_tokens=t, temperature=0.0)

    def run(params, prompts):
        rolled = decode.generate(
            cfg,
            params,
            prompts,
            jax.random.key(0),
            settings=settings,
            stop_ids=(2,),
            pad_id=2,
        )
        hidden = transformer.hidden_states(cfg, params, rolled.tokens, rolled.valid)
        kernel, transposed = transformer.lm_kernel(params)
        logits = transformer.head_logits(
            hidden[:, -t - 1 : -1], kernel, transposed=transposed
        )
        return rolled, token_logprobs(logits, rolled.tokens[:, -t:])

    with optimized():
        rolled, full = jax.jit(run)(params, prompts)
    return golden, jax.device_get(rolled), np.asarray(full)


def test_greedy_text_of_24_prompts_equals_torch(decoded):
    golden, rolled, _ = decoded
    assert golden["greedy"].shape[0] >= 20
    for row, length in enumerate(golden["greedy_lengths"]):
        np.testing.assert_array_equal(
            rolled.tokens[row, -golden["greedy"].shape[1] :][:length],
            golden["greedy"][row, :length],
            err_msg=str(row),
        )


def test_decoded_logprobs_equal_the_full_forward(decoded):
    _, rolled, full = decoded
    gap = np.abs(rolled.logp - full)[rolled.mask]
    assert rolled.mask.all()
    assert gap.max() < 5e-5 * max(1.0, np.abs(full).max())
