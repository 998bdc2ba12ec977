"""Settings: one door in, which names the key that is wrong and loses nothing."""

import dataclasses
import re
import typing

import pytest
import yaml

from jppo import settings
from jppo.config import (
    Config,
    ConfigError,
    ModelConfig,
    PPOConfig,
    RewardTrainConfig,
    Setup,
)
from jppo.settings import from_dict, keys, to_dict

KNOWN = keys()


def of_kind(name):
    return [k for k, (kind, _, _) in KNOWN.items() if name(kind)]


def is_literal(kind):
    return typing.get_origin(kind) is typing.Literal


def other(key):
    """A value that is not the default, for a key of any type."""
    kind, default, _ = KNOWN[key]
    if is_literal(kind):
        return next(v for v in typing.get_args(kind) if v != default)
    if kind is bool:
        return not default
    if kind is str:
        return f"{default} é ✓"
    if kind == tuple[str, ...]:
        return ("\n", "#: a", "")
    if type(None) in typing.get_args(kind):
        return 0.25 if default is None and float in typing.get_args(kind) else None
    return (default / 2 or 0.125) if kind is float else default + 1


CHANGED = {key: other(key) for key in KNOWN} | {
    "policy.train_layers": 1,
    "critic.train_layers": 1,
    "policy.unroll": 1,
    "ppo.batch_size": 128,
}
# Not both may be changed: these three contradict others.
EVERY = CHANGED | {"sampling.top_k": 0, "sampling.min_p": 0.0, "sampling.top_p": 1.0}
EVERY |= {"critic.init": "policy", "ppo.tis_cap": None, "critic.lora.rank": 0}


def test_the_default_is_the_default():
    assert from_dict({}) == Config() == from_dict(to_dict(Config()))
    assert {k: d for k, (_, d, _) in KNOWN.items()} == {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in settings.flatten(to_dict(Config())).items()
    }


def test_every_value_survives_yaml():
    """Each key away from its default, through text and back."""
    cfg = from_dict(EVERY)
    text = yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)
    back = from_dict(yaml.safe_load(text))
    assert back == cfg and hash(back) == hash(cfg)
    flat = settings.flatten(to_dict(cfg))
    for key, value in EVERY.items():
        assert flat[key] == (list(value) if isinstance(value, tuple) else value), key
    assert sum(flat[key] != default for key, (_, default, _) in KNOWN.items()) > 60


@pytest.mark.parametrize("key", CHANGED)
def test_one_changed_value_is_another_config(key):
    """Equality and hash see every key: a jit cache must not mix two runs."""
    cfg, before = from_dict({key: CHANGED[key]}), Config()
    assert cfg != before and hash(cfg) != hash(before)
    assert from_dict({}, base=cfg) == cfg


def test_nested_and_dotted_keys_mean_the_same():
    nested = {"ppo": {"eps": 0.1}, "sampling": {"stop": ["a", "b"]}}
    dotted = {"ppo.eps": 0.1, "sampling.stop": ("a", "b")}
    assert from_dict(nested) == from_dict(dotted) != Config()
    assert from_dict({"ppo.eps": 0.1, "ppo": {"lam": 0.5}}).ppo == dataclasses.replace(
        Config().ppo, eps=0.1, lam=0.5
    )
    assert from_dict(nested).sampling.stop == ("a", "b")


def test_a_base_keeps_what_is_not_said():
    base = from_dict({"ppo.eps": 0.1, "run.steps": 7})
    over = from_dict({"run.steps": 9}, base)
    assert (over.ppo.eps, over.run.steps, base.run.steps) == (0.1, 9, 7)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().ppo.eps = 0.3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("ppo.minibatch", "ppo.minibatches"),
        ("batch_size", "ppo.batch_size"),
        ("lr", "actor_optim.lr"),
        ("kl.coef.beta", "kl.beta"),
        ("run.seeds", "run.seed"),
        ("actor_optim.learning_rate", "actor_optim"),
        ("sampling.max_tokens", "sampling.max_new_tokens"),
        ("data.promts", "data.prompts"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(wrong, meant):
    with pytest.raises(ConfigError) as caught:
        from_dict({wrong: 1})
    says = str(caught.value)
    assert repr(wrong) in says and "did you mean" in says and "\n" not in says
    assert re.search(rf"did you mean '{re.escape(meant)}", says), says


@pytest.mark.parametrize("tree", [{"ppo": 3}, {"ppo": None}, {"": 1}])
def test_a_section_is_not_a_value(tree):
    with pytest.raises(ConfigError, match="unknown config key"):
        from_dict(tree)


WRONG = {
    int: [1.5, "four", [1], True, float("nan")],
    float: ["much", [0.1], True, False],
    bool: ["maybe", 2, None],
    str: [3, None, ["a"], True],
    tuple[str, ...]: ["\n", None, [1], 3],
}


@pytest.mark.parametrize("key", KNOWN)
def test_a_value_of_the_wrong_type_names_its_key(key):
    kind = KNOWN[key][0]
    if is_literal(kind):
        values = ["no-such-choice", 1, None, typing.get_args(kind)[0].upper()]
    else:
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        optional = type(None) in typing.get_args(kind)
        values = WRONG[inner[0] if optional else kind]
        values = values if optional else [*values, None]
    for value in values:
        with pytest.raises(ConfigError) as caught:
            from_dict({key: value})
        assert f"{key!r} is {value!r}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_wrong_choice_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'k1', 'k2' or 'k3'"):
        from_dict({"kl.estimator": "k4"})


def test_numbers_written_as_text_are_numbers():
    """YAML reads 1e-5 as a string; a number read so must not stay one."""
    assert yaml.safe_load("1e-5") == "1e-5"
    cfg = from_dict({"actor_optim.lr": "1e-5", "run.steps": "7", "kl.beta": 1})
    assert (cfg.actor_optim.lr, cfg.run.steps, cfg.kl.beta) == (1e-5, 7, 1.0)
    assert isinstance(cfg.kl.beta, float) and isinstance(cfg.run.steps, int)
    assert hash(cfg) == hash(from_dict(to_dict(cfg)))


@pytest.mark.parametrize(
    "key", of_kind(lambda kind: type(None) in typing.get_args(kind))
)
def test_null_switches_off_what_may_be_off(key):
    section, name = key.split(".")
    assert getattr(getattr(from_dict({key: None}), section), name) is None
    on = from_dict({key: 2})
    assert getattr(getattr(on, section), name) == 2
    assert to_dict(from_dict({key: None}, on))[section][name] is None


RULES = [
    ({"ppo.batch_size": 0}, "ppo.batch_size must be at least 1, got 0"),
    ({"ppo.epochs": 0}, "ppo.epochs must be at least 1"),
    ({"ppo.minibatches": -1}, "ppo.minibatches must be at least 1"),
    ({"ppo.micro_batches": 0}, "ppo.micro_batches must be at least 1"),
    ({"ppo.head_chunk": 0}, "ppo.head_chunk must be at least 1"),
    ({"ppo.batch_size": 10, "ppo.minibatches": 4}, "10 does not divide .* 4"),
    (
        {"ppo.batch_size": 8, "ppo.minibatches": 4, "ppo.micro_batches": 4},
        "ppo.minibatches 4 × ppo.micro_batches 4 = 16",
    ),
    ({"ppo.lam": 1.1}, r"ppo.lam must lie in \[0, 1\], got 1.1"),
    ({"ppo.lam": -0.1}, "ppo.lam"),
    ({"ppo.lam": "nan"}, "ppo.lam"),
    ({"ppo.gamma": 1.1}, "ppo.gamma"),
    ({"ppo.gamma": -0.1}, "ppo.gamma"),
    ({"ppo.eps": 0.0}, "ppo.eps"),
    ({"ppo.eps": 1.0}, "ppo.eps"),
    ({"kl.beta": -0.1}, "kl.beta must not be negative"),
    ({"kl.target": 0.0}, "kl.target must be positive"),
    ({"sampling.max_new_tokens": 0}, "sampling.max_new_tokens"),
    ({"sampling.temperature": 0.0}, "sampling.temperature must be positive"),
    ({"ppo.logp_old": "sampler", "sampling.top_k": 3}, "full-vocabulary"),
    ({"ppo.logp_old": "sampler", "sampling.top_p": 0.9}, "full-vocabulary"),
    ({"ppo.logp_old": "sampler", "sampling.min_p": 0.1}, "full-vocabulary"),
    ({"critic.layout": "shared", "critic.init": "reward"}, "critic.init=reward"),
    ({"ppo.logp_old": "sampler", "ppo.tis_cap": 2.0}, "would correct twice"),
    ({"kl.horizon": 0.0}, "kl.horizon must be positive"),
    ({"actor_optim.lr": -1e-6}, "actor_optim.lr must not be negative"),
    ({"critic_optim.lr": "nan"}, "critic_optim.lr"),
    ({"critic_optim.lr": "inf"}, "critic_optim.lr"),
    ({"policy.unroll": 0}, "policy.unroll must be at least 1 or null, got 0"),
    ({"run.seed": -1}, "run.seed must not be negative"),
    ({"run.steps": 0}, "run.steps must be at least 1"),
]


@pytest.mark.parametrize(("tree", "says"), RULES)
def test_relations_between_settings_are_checked(tree, says):
    with pytest.raises(ConfigError, match=says) as caught:
        from_dict(tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"ppo.lam": 0.0, "ppo.gamma": 0.0, "kl.beta": 0.0},
        {"ppo.lam": 1, "ppo.gamma": 1, "ppo.eps": 0.999},
        {"ppo.logp_old": "sampler"},
        {"ppo.batch_size": 1, "ppo.minibatches": 1, "run.steps": 1},
        {"critic.init": "reward"},
        {"critic.layout": "shared"},
    ],
)
def test_the_edges_of_the_rules_are_allowed(tree):
    from_dict(tree)


def test_a_config_built_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match="ppo.eps"):
        Config(ppo=PPOConfig(eps=2.0))


@pytest.mark.parametrize("cls", [Config, RewardTrainConfig])
def test_every_key_has_one_line_of_help(cls):
    found = keys(cls)
    assert len(found) > 5
    for key, (_, _, doc) in found.items():
        assert doc and "\n" not in doc and doc == doc.strip(), key
        assert not doc.endswith("."), key


def test_a_setup_is_a_jit_key():
    """Equal setups are one key, so a run compiles once."""
    model = ModelConfig(16, 16, 2, 4, 2, 4, 32)

    def make(**over):
        parts = {"config": from_dict(over), "actor": model, "critic": model}
        return Setup(**parts, reward=None, prompt_tokens=4, stop_ids=(0,), pad_id=0)

    stop = {"sampling.stop": ["a"]}
    assert make(**stop) == make(**stop) and hash(make(**stop)) == hash(make(**stop))
    assert make() != make(**stop)
