"""`jppo.train` with wrong inputs: one line, before the device is asked."""

import pytest
from test_loop import (
    PROMPTS,
    SMALL,
    length_reward,
    policy,
    scorer,
    train,
)
from tokenizer_stub import make_tokenizer

from jppo import programs
from jppo.config import ConfigError
from jppo.data import DataError
from jppo.job import prepare
from jppo.models.hf import save_hf
from jppo.settings import from_dict

# Tokenizers


def with_tokenizer(**kwargs):
    return policy()._replace(tokenizer=make_tokenizer(**kwargs))


def prepared(model, over=None):
    cfg = from_dict(SMALL | (over or {}))
    return prepare(cfg, policy=model, prompts=PROMPTS, reward_fn=length_reward)


@pytest.mark.parametrize(("pad", "found"), [(None, 0), ("</s>", 0), ("five", 10)])
def test_any_pad_token_or_none(pad, found):
    """Masks never look at ids, so EOS may fill where there is no other."""
    job = prepared(with_tokenizer(pad=pad))
    assert (job.setup.stop_ids, job.setup.pad_id) == ((0,), found)
    batch = job.prompts.batch([0, 1])
    assert batch.tokens.tolist() == [[found, 3, 6], [4, 7, 8]]


def test_a_tokenizer_is_left_as_it_came():
    model = policy()
    prepared(model)
    assert model.tokenizer.pad_token is None


@pytest.fixture
def no_programs(monkeypatch):
    """Fails where a wrong input gets as far as the device."""
    monkeypatch.setattr(programs, "build", lambda *_: pytest.fail("built programs"))


def one_line(error, says, folder, over=None, **inputs):
    with pytest.raises(error, match=says) as caught:
        train(folder, over, **inputs)
    assert "\n" not in str(caught.value)


def test_tokenizers_that_cannot_serve(tmp_path, no_programs):
    one_line(ConfigError, "no EOS token", tmp_path, policy=with_tokenizer(eos=None))
    bigger = with_tokenizer(size=17)
    one_line(ConfigError, "17 ids, the policy 16", tmp_path, policy=bigger)
    none = policy()._replace(tokenizer=None)
    one_line(ConfigError, "has no tokenizer", tmp_path, policy=none)


def test_a_stop_text_stands_in_for_eos():
    model = with_tokenizer(eos=None)
    setup = prepared(model, {"sampling.stop": ["blue", "red"]}).setup
    assert (setup.stop_ids, setup.pad_id) == ((5, 3), 5)


# Inputs that are wrong before the device is asked


def test_a_window_that_the_response_fills(tmp_path, no_programs):
    over = {"sampling.max_new_tokens": 64}
    one_line(DataError, "sampling.max_new_tokens leaves no room", tmp_path, over)


def test_a_string_of_prompts_is_no_list(tmp_path, no_programs):
    one_line(DataError, "must be a list of strings", tmp_path, prompts="red one")


def test_prompts_from_a_file(tmp_path, no_programs):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "red"}\n{"text": "blue"}\n')
    files = {"data.prompts": str(path)}
    one_line(
        DataError, r"prompts.jsonl:2: column 'prompt'", tmp_path, files, prompts=None
    )
    one_line(ConfigError, "data.prompts is not set", tmp_path, prompts=None)
    gone = {"data.prompts": str(tmp_path / "gone.jsonl")}
    one_line(DataError, "gone.jsonl: no such file", tmp_path, gone, prompts=None)


def test_reward_functions_and_models_by_name(tmp_path, no_programs):
    for spec, says in (
        ("gone.py:score", "no such file: gone.py"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("score", "must look like"),
    ):
        one_line(ConfigError, says, tmp_path, {"reward.function": spec}, reward_fn=None)
    one_line(OSError, "/no/such/reward", tmp_path, reward_model="/no/such/reward")
    both = {"reward.function": "jppo.rewards:call"}
    one_line(ConfigError, "exactly one source", tmp_path, both, reward_model=scorer())


def test_a_directory_without_weights(tmp_path, no_programs):
    folder = tmp_path / "model"
    model = policy()
    save_hf(folder, model.config, model.params, model.tokenizer)
    (folder / "model.safetensors").unlink()
    one_line(OSError, "neither model.safetensors nor", tmp_path / "run", policy=folder)


def test_a_reward_model_as_policy_is_refused(tmp_path, no_programs):
    says = "the policy has a scalar head"
    one_line(ConfigError, says, tmp_path, policy=scorer())


def test_a_negative_seed_is_one_line(tmp_path, no_programs):
    one_line(ConfigError, "run.seed", tmp_path, {"run.seed": -1})
