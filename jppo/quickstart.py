"""The main job in one command: RLHF in miniature, on a real model and real judgements.

1. SmolLM2-135M-Instruct and 10,603 rated sentences of movie reviews, from packages.
2. A reward model: the first 16 blocks of SmolLM2, frozen, under a head that learns by
   Bradley–Terry which of two sentences people rated higher.
3. PPO with all four roles: actor and reference share a frozen trunk of 24 blocks,
   critic and reward model share the trunk of 16, so each trunk runs once a rollout.
4. Held-out review openings, continued before and after, scored by the reward model
   and by the VADER lexicon, which nothing here was trained on (gold).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo import assets, console, programs, settings
from jppo.config import Config, OptimConfig, RewardTrainConfig
from jppo.data import PromptData, encode
from jppo.evaluation import Evaluation, evaluate
from jppo.loop import Job, Model, Result, load_model, prepare, run
from jppo.metrics import MetricWriter
from jppo.models.hf import save_hf
from jppo.report import write_report
from jppo.reward_loop import Ratings, pair_accuracy, score_texts, train_reward

GAP = 1.0  # ratings at least this far apart make a pair


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything: the full run, or a smaller one that shows it works."""

    sentences: int = 1000  # the reward model learns from
    judged: int = 300  # held-out sentences, all pairs among which are judged
    openings: int = 128  # held-out openings, continued before and after
    steps: int = 22


FULL, FAST = Size(), Size(sentences=256, judged=100, openings=32, steps=2)

SETTINGS: dict[str, Any] = {
    "policy.train_layers": 6,
    "critic.init": "reward",
    "critic.train_layers": 0,
    "sampling.max_new_tokens": 14,
    "sampling.temperature": 0.7,
    "sampling.stop": ["."],
    "ppo.batch_size": 32,
    "ppo.epochs": 2,
    "ppo.minibatches": 2,
    "ppo.lam": 0.9,
    "ppo.value_eps": None,
    "actor_optim.lr": 3e-4,
    "actor_optim.schedule": "linear",  # to 0: less of the KL is noise at the end
    "actor_optim.warmup": 4,
    "critic_optim.lr": 1e-3,
    "kl.beta": 0.05,
    "data.max_prompt_tokens": 6,
    "data.overlong": "drop",
    "run.folder": "runs/quickstart",
    "run.resume": False,
    "run.checkpoint_every": 0,
    "run.samples_every": 4,
    "mesh.fsdp": 1,
    "mesh.data": -1,
}

REWARD = RewardTrainConfig(
    layers=16,
    train_layers=0,
    max_tokens=24,
    batch_size=64,
    epochs=6,
    reads=4,
    first_read=2,
    optim=OptimConfig(lr=1e-2, schedule="cosine", warmup=9, b2=0.98, weight_decay=0.05),
)


class Sentences(NamedTuple):
    """Disjoint parts of the rated sentences."""

    judged: list[tuple[str, float]]
    training: list[tuple[str, float]]
    held_out_openings: list[str]
    openings: list[str]


def opening(sentence: str) -> str:
    """The first three words of a review sentence, which the policy continues."""
    return " ".join(sentence.split()[:3])


def split(rows: list[tuple[str, float]], tokenizer: Any, size: Size, seed: int):
    """Held-out first, then what the reward model learns from, then openings."""
    order = np.random.default_rng(seed).permutation(len(rows))
    rows = [rows[i] for i in order]
    lengths = [len(ids) for ids in encode(tokenizer, [text for text, _ in rows])]
    short = [n <= REWARD.max_tokens for n in lengths]
    start = 1000
    training = [r for r, ok in zip(rows[start:], short[start:], strict=True) if ok]
    chosen = training[: size.sentences]
    used = {text for text, _ in chosen}
    long = [text for text, _ in rows if len(text.split()) >= 10 and text not in used]
    held = {text for text, _ in rows[:start]}
    seen = {opening(t) for t in long if t not in held}
    unseen = [opening(t) for t in long if t in held and opening(t) not in seen]
    return Sentences(
        judged=rows[: size.judged],
        training=chosen,
        held_out_openings=list(dict.fromkeys(unseen))[: size.openings],
        openings=sorted(seen),
    )


def tfidf_accuracy(rows: list[tuple[str, float]], data: Sentences) -> float:
    """The yardstick: tf-idf + ridge on *all* sentences that are not judged."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    judged = {text for text, _ in data.judged}
    rest = [row for row in rows if row[0] not in judged]
    words = TfidfVectorizer(sublinear_tf=True)
    model = Ridge(alpha=1.0).fit(
        words.fit_transform([t for t, _ in rest]), [r for _, r in rest]
    )
    scores = model.predict(words.transform([t for t, _ in data.judged]))
    return pair_accuracy(scores, _better(data.judged))


def _better(rows: Sequence[tuple[str, float]]) -> np.ndarray:
    ratings = np.array([rating for _, rating in rows])
    return ratings[:, None] - ratings[None, :] >= GAP


def vader() -> Callable[..., list[float]]:
    """Gold: VADER's compound score of opening and continuation, from −1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    judge = SentimentIntensityAnalyzer()

    def gold(prompts, completions, **_):
        whole = map("".join, zip(prompts, completions, strict=True))
        return [judge.polarity_scores(text)["compound"] for text in whole]

    return gold


def train_reward_model(
    base: Model, rows: list[tuple[str, float]], data: Sentences, seed: int, quiet: bool
) -> tuple[Model, dict[str, float]]:
    """The reward model, and how well it judges pairs that it never saw."""
    clock = time.monotonic()
    settings = dataclasses.replace(REWARD, seed=seed)
    texts, ratings = zip(*data.training, strict=True)
    model, history = train_reward(
        base, Ratings(texts, ratings, GAP), settings, quiet=quiet
    )
    seconds = time.monotonic() - clock
    scores = score_texts(model, [("", text) for text, _ in data.judged])
    better = _better(data.judged)
    return model, {
        "pair_accuracy": pair_accuracy(scores, better),
        "tfidf_pair_accuracy": tfidf_accuracy(rows, data),
        "training_pair_accuracy": history[-1]["pair_accuracy"],
        "sentences": len(data.training),
        "tfidf_sentences": len(rows) - len(data.judged),
        "pairs": int(better.sum()),
        "seconds": seconds,
    }


def arithmetic(job: Job, data: Sentences) -> str:
    """What the run will do, in numbers, before it does it."""
    c, n = job.setup.config, jax.tree.leaves
    millions = [
        sum(x.size for x in n(tree)) / 1e6
        for tree in (job.state.actor, job.frozen.actor_base, job.frozen.critic_base)
    ]
    ppo, steps = c.ppo, c.run.steps
    return (
        f"{steps} iterations × {ppo.batch_size} responses of ≤"
        f" {c.sampling.max_new_tokens} tokens to openings of ≤"
        f" {job.setup.prompt_tokens} = {steps * ppo.batch_size} samples\n"
        f"{ppo.epochs} epochs × {ppo.minibatches} minibatches of"
        f" {ppo.batch_size // ppo.minibatches} ="
        f" {steps * ppo.epochs * ppo.minibatches} optimizer steps\n"
        f"actor: {millions[0]:.1f} M weights learn on a frozen trunk of"
        f" {millions[1]:.1f} M, shared with the reference; critic and reward model"
        f" share one of {millions[2]:.1f} M\n"
        f"{len(data.openings)} openings to train on,"
        f" {len(data.held_out_openings)} held out"
    )


def quickstart(
    overrides: dict[str, Any] | None = None, *, size: Size = FULL, seed: int = 0
) -> Path:
    """Runs the main job; returns the path of report.html."""
    clocks = {"start": time.monotonic()}
    base_cfg = settings.from_dict(
        SETTINGS | {"run.steps": size.steps, "run.seed": seed} | (overrides or {})
    )
    say = (lambda _: None) if base_cfg.run.quiet else print
    set_aside(Path(base_cfg.run.folder))
    say("Fetching SmolLM2-135M-Instruct and the movie ratings (once) …")
    with ThreadPoolExecutor() as pool:
        ratings = pool.submit(assets.movie_ratings)
        base = load_model(assets.smollm2())
        rows = ratings.result()
    clocks["model and data"] = time.monotonic()
    data = split(rows, base.tokenizer, size, seed)
    reward, card = train_reward_model(base, rows, data, seed, base_cfg.run.quiet)
    clocks["reward model"] = time.monotonic()
    say(
        f"reward model: {card['pair_accuracy']:.3f} of {card['pairs']} held-out pairs"
        f" right (tf-idf + ridge on all {card['tfidf_sentences']} sentences:"
        f" {card['tfidf_pair_accuracy']:.3f})\n"
    )
    job = prepare(base_cfg, policy=base, prompts=data.openings, reward_model=reward)
    say(arithmetic(job, data))
    progs = programs.build(job.setup)
    state, frozen = progs.place(job.state, job.frozen)
    held_out = PromptData(
        data.held_out_openings,
        base.tokenizer,
        dataclasses.replace(
            base_cfg.data, max_prompt_tokens=job.setup.prompt_tokens, shuffle=False
        ),
        pad_id=job.setup.pad_id,
        room=job.setup.prompt_tokens,
        seed=seed,
    )
    gold = {"gold": vader()}

    def judge(state) -> Evaluation:
        return evaluate(
            progs, state, frozen, held_out, base.tokenizer, yardsticks=gold, seed=seed
        )

    say("\nContinuing the held-out openings before training (compiles first) …")
    before = judge(state)
    clocks["before"] = time.monotonic()
    result = run(job._replace(state=state, frozen=frozen), progs, yardsticks=gold)
    clocks["PPO"] = time.monotonic()
    say("Continuing them after training …")
    after = judge(result.state)
    clocks["after"] = time.monotonic()
    save_model(result, reward)
    seconds = _durations(clocks)
    report = finish(result.folder, base_cfg, before, after, card, seconds)
    say(f"\nreport: {report}")
    return report


def set_aside(folder: Path) -> None:
    """Renames an earlier run's folder to the next free `folder.N`."""
    if not folder.exists():
        return
    n = 1
    while (aside := folder.with_name(f"{folder.name}.{n}")).exists():
        n += 1
    folder.rename(aside)
    print(f"{folder} holds an earlier run: moved to {aside}")


def save_model(result: Result, reward: Model) -> None:
    """Policy and reward model as Hugging Face directories, beside the checkpoint."""
    import shutil

    for name, model in (("policy", result.policy), ("reward_model", reward)):
        shutil.rmtree(result.folder / name, ignore_errors=True)
        save_hf(result.folder / name, model.config, model.params, model.tokenizer)


def _durations(clocks: dict[str, float]) -> dict[str, float]:
    names, times = list(clocks), list(clocks.values())
    parts = {n: b - a for n, a, b in zip(names[1:], times, times[1:], strict=False)}
    return parts | {"total": times[-1] - times[0]}


def finish(
    folder: Path,
    cfg: Config,
    before: Evaluation,
    after: Evaluation,
    card: dict[str, float],
    seconds: dict[str, float],
) -> Path:
    """Writes summary and samples, prints both, and draws the report."""
    summary = {
        "before": before.summary(),
        "after": after.summary(),
        "reward_model": card,
        "seconds": seconds,
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    with MetricWriter(folder, resume_step=cfg.run.steps, tensorboard=False) as writer:
        writer.samples(0, before.samples(24))
        writer.samples(cfg.run.steps, after.samples(24))
    if not cfg.run.quiet:
        _print_tables(before, after)
    return write_report(folder)


def _print_tables(before: Evaluation, after: Evaluation) -> None:
    old, new = before.summary(), after.summary()
    names = {
        "reward": "reward model",
        "gold": "gold (VADER, −1…1)",
        "kl": "KL to reference, nats",
        "length": "length, tokens",
        "distinct_2": "distinct-2",
    }
    rows = [[label, old[k], new[k], new[k] - old[k]] for k, label in names.items()]
    title = f"{len(before.prompts)} held-out openings"
    console.table(title, rows, ["", "before", "after", "change"])
    texts = zip(before.prompts, before.completions, after.completions, strict=True)
    shown = [[p, a.strip(), b.strip()] for p, a, b in list(texts)[:8]]
    console.table("Samples", shown, ["opening", "before", "after"])
