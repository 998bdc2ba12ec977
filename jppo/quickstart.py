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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jppo import assets, console, programs, settings
from jppo.config import Config, OptimConfig, RewardTrainConfig
from jppo.data import PromptData
from jppo.evaluation import Evaluation, evaluate
from jppo.job import Job, prepare
from jppo.loading import Model, load_model
from jppo.loop import run
from jppo.metrics import MetricWriter
from jppo.movie_reviews import (
    FULL,
    GAP,
    MAX_TOKENS,
    Sentences,
    Size,
    better_than,
    split,
    tfidf_accuracy,
    vader,
)
from jppo.report import write_report
from jppo.reward_loop import Ratings, pair_accuracy, score_texts, train_reward
from jppo.run_folder import write_model

SETTINGS: dict[str, Any] = {
    "policy.train_layers": 6,
    "critic.init": "reward",
    "critic.train_layers": 0,
    "sampling.max_new_tokens": 14,
    "sampling.temperature": 0.7,
    "sampling.stop": ["."],
    "ppo.batch_size": 48,
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
    max_tokens=MAX_TOKENS,
    batch_size=64,
    epochs=6,
    reads=4,
    first_read=2,
    optim=OptimConfig(lr=1e-2, schedule="cosine", warmup=9, b2=0.98, weight_decay=0.05),
)


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
    better = better_than(data.judged)
    return model, {
        "pair_accuracy": pair_accuracy(scores, better),
        "tfidf_pair_accuracy": tfidf_accuracy(rows, data),
        "training_pair_accuracy": history[-1]["pair_accuracy"],
        "sentences": len(data.training),
        "tfidf_sentences": len(rows) - len(data.judged),
        "pairs": int(better.sum()),
        "seconds": seconds,
    }


def arithmetic(job: Job, held_out: PromptData) -> str:
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
        f"{len(job.prompts)} openings to train on, {len(held_out)} held out"
    )


def held_out_prompts(job: Job, texts: list[str], tokenizer: Any) -> PromptData:
    """Openings to evaluate on, in slots as wide as those that are trained on."""
    cfg, width = job.setup.config, job.setup.prompt_tokens
    return PromptData(
        texts,
        tokenizer,
        dataclasses.replace(cfg.data, max_prompt_tokens=width, shuffle=False),
        pad_id=job.setup.pad_id,
        room=width,
        seed=cfg.run.seed,
    )


def fetch() -> tuple[Model, list[tuple[str, float]]]:
    """SmolLM2 and the rated sentences, both at once where they are downloaded."""
    with ThreadPoolExecutor() as pool:
        ratings = pool.submit(assets.movie_ratings)
        return load_model(assets.smollm2()), ratings.result()


def quickstart(
    overrides: dict[str, Any] | None = None, *, size: Size = FULL, seed: int = 0
) -> Path:
    """Runs the main job; returns the path of report.html."""
    clocks = {"start": time.monotonic()}
    tick = lambda name: clocks.__setitem__(name, time.monotonic())  # noqa: E731
    cfg = settings.from_dict(
        SETTINGS | {"run.steps": size.steps, "run.seed": seed} | (overrides or {})
    )
    seed = cfg.run.seed
    say = (lambda _: None) if cfg.run.quiet else print
    set_aside(Path(cfg.run.folder))
    say("Fetching SmolLM2-135M-Instruct and the movie ratings (once) …")
    base, rows = fetch()
    tick("model and data")
    data = split(rows, base.tokenizer, size, seed)
    reward, card = train_reward_model(base, rows, data, seed, cfg.run.quiet)
    tick("reward model")
    say(
        f"reward model: {card['pair_accuracy']:.3f} of {card['pairs']} held-out pairs"
        f" right (tf-idf + ridge on all {card['tfidf_sentences']} sentences:"
        f" {card['tfidf_pair_accuracy']:.3f})\n"
    )
    job = prepare(cfg, policy=base, prompts=data.openings, reward_model=reward)
    held_out = held_out_prompts(job, data.held_out_openings, base.tokenizer)
    say(arithmetic(job, held_out))
    progs = programs.build(job.setup)
    state, frozen = progs.place(job.state, job.frozen)
    gold = {"gold": vader()}
    judge = partial(
        evaluate,
        progs,
        frozen=frozen,
        prompts=held_out,
        tokenizer=base.tokenizer,
        yardsticks=gold,
        seed=seed,
    )
    say("\nContinuing the held-out openings before training (compiles first) …")
    before = judge(state)
    tick("before")
    result = run(job._replace(state=state, frozen=frozen), progs, yardsticks=gold)
    tick("PPO")
    say("Continuing them after training …")
    after = judge(result.state)
    tick("after")
    write_model(result.folder / "reward_model", *reward)
    report = finish(result.folder, cfg, before, after, card, _durations(clocks))
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
