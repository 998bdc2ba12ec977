"""Four commands from a base model to a trained policy, each of which can be resumed."""

import json

import jax
import pytest
import tiny
from tokenizer_stub import make_tokenizer

from jppo import cli
from jppo.metrics import read_jsonl
from jppo.models.hf import load_hf, save_hf

TEXTS = [
    {"prompt": "red", "completion": " one"},
    {"prompt": "green", "completion": " two"},
    {"prompt": "blue", "completion": " three"},
    {"prompt": "red red", "completion": " one one"},
]
PAIRS = [
    {"prompt": "red", "chosen": " one", "rejected": " two"},
    {"prompt": "green", "chosen": " one", "rejected": " three four"},
    {"prompt": "blue", "chosen": " one one", "rejected": " four"},
    {"prompt": "red blue", "chosen": " one", "rejected": " five"},
]
QUIET = ["run.tensorboard=false", "mesh.fsdp=1", "mesh.data=1"]
FIT = [*QUIET, "fit.batch_size=4", "optim.lr=0.02", "optim.warmup=0"]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def steps_of(folder):
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl") if row["step"]]


def test_sft_reward_ppo_export(tmp_path, capsys):
    """Each command takes what the one before left, and goes on where it stopped."""
    base = tmp_path / "base"
    save_hf(base, tiny.CFG, tiny.params(), make_tokenizer(tiny.CFG.vocab_size))
    texts, pairs = tmp_path / "texts.jsonl", tmp_path / "pairs.jsonl"
    write(texts, TEXTS), write(pairs, PAIRS)
    sft, reward, ppo = (tmp_path / name for name in ("sft", "reward", "ppo"))

    def sft_command(steps):
        cli.main(["sft", f"model.path={base}", f"data.train={texts}",
                  f"data.eval={texts}", f"run.folder={sft}",
                  f"fit.steps={steps}", *FIT])  # fmt: skip

    def reward_command(steps):
        cli.main(["reward", f"model.path={sft}/model", f"data.train={pairs}",
                  f"data.eval={pairs}", f"run.folder={reward}", f"fit.steps={steps}",
                  *FIT])  # fmt: skip

    def ppo_command(steps):
        cli.main(["train", f"policy.path={sft}/model", f"reward.model={reward}/model",
                  f"data.prompts={texts}", f"run.folder={ppo}", f"run.steps={steps}",
                  "critic.init=reward", "ppo.batch_size=4", "ppo.epochs=1",
                  "sampling.max_new_tokens=3", "actor_optim.lr=0.01",
                  *QUIET])  # fmt: skip

    for command, folder in (
        (sft_command, sft),
        (reward_command, reward),
        (ppo_command, ppo),
    ):
        command(2)
        command(3)  # goes on at step 3
        assert steps_of(folder) == [1, 2, 3]
        said = capsys.readouterr().out
        assert f"{folder} is at step 2 of 3" in said and "report.html" in said
        assert (folder / "report.html").stat().st_size > 10_000

    for part in ("model", "critic"):
        out = tmp_path / f"out-{part}"
        cli.main(["export", str(ppo), str(out), "--part", part])
        assert f"the {part} of {ppo} at step 3" in capsys.readouterr().out
    policy = load_hf(tmp_path / "out-model")[1]
    tiny.close(policy, load_hf(ppo / "model")[1], tol=0)
    assert tiny.distance(policy, load_hf(sft / "model")[1]) > 1e-4
    critic, scorer = load_hf(tmp_path / "out-critic")[1], load_hf(reward / "model")[1]
    assert tiny.distance(critic["blocks"], scorer["blocks"]) > 0
    _generate_and_inspect(tmp_path, capsys)


def _generate_and_inspect(tmp_path, capsys):
    model = f"model.path={tmp_path}/ppo/model"
    greedy = ["sampling.temperature=0", "sampling.max_new_tokens=3", "mesh.fsdp=1"]
    cli.main(["generate", model, "prompt=red one", *greedy, "run.batch_size=1"])
    said = capsys.readouterr().out
    assert said.startswith("red one")
    out = tmp_path / "texts-out.jsonl"
    cli.main(["generate", model, f"data.prompts={tmp_path}/texts.jsonl",
              f"run.out={out}", "run.samples=2", *greedy])  # fmt: skip
    rows = read_jsonl(out)
    assert [row["prompt"] for row in rows[::2]] == [row["prompt"] for row in TEXTS]
    assert all(rows[2 * i]["completion"] == rows[2 * i + 1]["completion"]
               for i in range(4))  # fmt: skip
    assert f"8 texts in {out}" in capsys.readouterr().out
    for path, facts in (
        ("ppo", ("a run", "PPO", "last step", "critic.init", "reward")),
        ("ppo/checkpoints/3", ("a checkpoint", "cursor", "12", "reference_weights")),
        ("ppo/model", ("a language model", "llama", "vocab_size", "16", "F32")),
        ("reward/model", ("a reward model (one label)", "tokenizer", "WordLevel")),
    ):
        cli.main(["inspect", str(tmp_path / path), "--arrays"])
        said = capsys.readouterr().out
        assert all(fact in said for fact in facts), said


def test_samples_do_not_depend_on_the_batch(tmp_path):
    from jppo import settings
    from jppo.generate_config import GenerateConfig
    from jppo.generation import generate_texts
    from jppo.loading import Model

    model = Model(tiny.CFG, tiny.params(), make_tokenizer(tiny.CFG.vocab_size))
    prompts = ["red", "green two", "blue", "one", "two three"]

    def texts(size):
        over = {"run.batch_size": size, "sampling.max_new_tokens": 4, "mesh.fsdp": 1}
        cfg = settings.from_dict(over | {"run.samples": 2}, GenerateConfig())
        rows = list(generate_texts(cfg, model=model, prompts=prompts))
        assert len(rows) == 10 and all(row["tokens"] <= 4 for row in rows)
        return [row["completion"] for row in rows]

    found = texts(5)
    assert found == texts(2) and len(set(found)) > 3
    assert found[0::2] != found[1::2]


@pytest.mark.parametrize(
    "args, says",
    [
        (["sft", "fit.epoch=1"], "did you mean 'fit.epochs'?"),
        (["sft"], "data.train is not set: give a file of examples"),
        (["reward", "data.train=/no/such.jsonl"], "/no/such.jsonl: no such file"),
        (["dpo", "dpo.beta=0"], "dpo.beta must be positive, got 0.0"),
        (["generate", "model.path=/no/such"], "/no/such: no such directory"),
        (["generate"], "model.path is not set: give a Hugging Face directory"),
        (["generate", "run.samples=0"], "run.samples must be at least 1, got 0"),
        (["export", "/no/such", "out"], "/no/such: no config.yaml, so not a run"),
        (["inspect", "/no/such"], "/no/such: no such file or directory"),
        (["inspect", "/"], "/: no run folder (config.yaml), checkpoint, model"),
    ],
)
def test_mistakes(capsys, args, says):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    error = capsys.readouterr().err
    assert stop.value.code == 65 and error.count("\n") == 1 and says in error, error


@pytest.mark.parametrize("command", list(cli.RUNS))
def test_help_of_every_command_names_its_settings(capsys, command):
    from jppo import settings

    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    base = cli.RUNS[command][0]
    assert all(f"{key}=" in text for key in settings.keys(type(base)))
    assert f"jppo {command}" in text


def test_prompts_are_given_once(capsys, tmp_path):
    save_hf(tmp_path / "m", tiny.CFG, tiny.params(), make_tokenizer())
    with pytest.raises(SystemExit):
        cli.main(["generate", f"model.path={tmp_path}/m"])
    assert "give one of prompt (a text) and data.prompts" in capsys.readouterr().err
