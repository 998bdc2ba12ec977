"""Time PPO iterations of TRL's PPOTrainer on a tiny random Llama, f32, CPU.

The peer side of the `tiny` benchmark. Policy, value, reward and reference models
each have 4 layers, d 256, 4 heads of 64, mlp 1024 and a tied vocabulary of 8192
(6.29 M parameters). An iteration is 32 prompts of 32 tokens, 64 sampled tokens for
each, then 4 epochs. TRL 1.12.0 is the last release with a PPOTrainer; it runs with
its own defaults except for what this setting prescribes, and with all that is not
training (checkpoints, sample tables, reports) off. Nothing is downloaded.

Environment (apart from the package's own, because it needs torch):

    python3 -m venv .venv-trl
    .venv-trl/bin/pip install -r experiments/benchmarks/peers/requirements-trl.txt

Command:

    .venv-trl/bin/python experiments/benchmarks/peers/trl_ppo.py \\
        --minibatches 1 --iterations 3 --warmup 1 --json out.json

Expected: one JSON line on stdout per measured iteration; TRL's own messages go to
stderr. --json also writes the records as one array. An iteration takes some 13 s
(rollout 2, scoring 1, update 10) on 2 EPYC cores with little else to do, and several
times that when other processes want them, since torch's threads wait for each other
in every operation: look at load_average. All times are in seconds:

    total    from the end of one iteration to the end of the next, with fetching
             the prompts and TRL's garbage collection; models and data excluded
    rollout  generation, which also keeps the logits that give the old log-probs
    scoring  old and reference log-probs, values, scores, KL, advantages
    update   all epochs: forward, loss, backward, AdamW, statistics, log

peak_rss_gb is the process's high-water mark so far (10^9 bytes, Linux only). The
script stops with an error if a response is not 64 tokens long, or if an iteration
does not train every row once an epoch or takes other than epochs x minibatches
optimizer steps.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

VOCAB = 8192
BATCH = 32
PROMPT = 32
RESPONSE = 64
EPOCHS = 4
SEED = 0


class PhaseTimer(TrainerCallback):
    """Times the phases of each iteration, and checks that all the work was done.

    TRL calls `batch_generation` once an iteration, and `forward` on the trained
    model in the update only: their calls are the borders between the phases.
    """

    def __init__(self, minibatches: int, warmup: int):
        self.minibatches = minibatches
        self.warmup = warmup
        self.records: list[dict] = []
        self.iteration_end = 0.0
        self._reset()

    def _reset(self):
        self.rollout_start = self.rollout_end = self.update_start = 0.0
        self.rows_trained = self.optimizer_steps = 0

    def wrap_generation(self, batch_generation):
        def timed(*args, **kwargs):
            self.rollout_start = time.perf_counter()
            sequences, logits = batch_generation(*args, **kwargs)
            self.rollout_end = time.perf_counter()
            check("sequences", tuple(sequences.shape), (BATCH, PROMPT + RESPONSE))
            # A pad in a response would be masked, and so would shorten it.
            check("pads", int((sequences >= VOCAB).sum()), 0)
            return sequences, logits

        return timed

    def wrap_forward(self, forward):
        def timed(model, query_responses, pad_token_id):
            if isinstance(model, ppo_trainer.PolicyAndValueWrapper):
                if self.rows_trained == 0:
                    self.update_start = time.perf_counter()
                self.rows_trained += len(query_responses)
            return forward(model, query_responses, pad_token_id)

        return timed

    def count_optimizer_step(self, optimizer, args, kwargs):
        self.optimizer_steps += 1

    def on_train_begin(self, args, state, control, **kwargs):
        self.iteration_end = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        check("rows trained", self.rows_trained, EPOCHS * BATCH)
        check("optimizer steps", self.optimizer_steps, EPOCHS * self.minibatches)
        record = {
            "peer": "trl",
            "version": trl.__version__,
            "total": round(now - self.iteration_end, 3),
            "rollout": round(self.rollout_end - self.rollout_start, 3),
            "scoring": round(self.update_start - self.rollout_end, 3),
            "update": round(now - self.update_start, 3),
            "peak_rss_gb": round(peak_rss_gb(), 3),
            "minibatches": self.minibatches,
            "optimizer_steps": self.optimizer_steps,
            "response_tokens": BATCH * RESPONSE,
            "threads": torch.get_num_threads(),
            "load_average": round(os.getloadavg()[0], 2),
        }
        if state.global_step > self.warmup:
            self.records.append(record)
            print(json.dumps(record), file=sys.__stdout__, flush=True)
        self._reset()
        self.iteration_end = time.perf_counter()


def check(name: str, got, expected):
    if got != expected:
        raise RuntimeError(f"{name}: got {got}, expected {expected}")


def peak_rss_gb() -> float:
    # VmHWM starts afresh at exec; getrusage's maximum would include the RSS of
    # whatever process launched this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise RuntimeError("no VmHWM in /proc/self/status")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Has pad and eos beyond the models' vocabulary, so no policy can emit them."""
    words = {f"w{i}": i for i in range(VOCAB)} | {"<pad>": VOCAB, "<eos>": VOCAB + 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def make_models() -> dict:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
        num_labels=1,  # pyright: ignore[reportCallIssue]
    )
    policy, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    reference.load_state_dict(policy.state_dict())
    check("policy parameters", sum(p.numel() for p in policy.parameters()), 6_293_760)
    return {
        "model": policy,
        "ref_model": reference,
        "value_model": LlamaForSequenceClassification(config),
        "reward_model": LlamaForSequenceClassification(config),
    }


def make_config(minibatches: int, iterations: int, output_dir: str) -> PPOConfig:
    return PPOConfig(
        output_dir=output_dir,
        total_episodes=BATCH * iterations,
        # The batch goes in here whole, and the trainer cuts it into minibatches. If it
        # were built up by gradient accumulation, accelerate would mostly step once an
        # epoch, however many minibatches are asked for.
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        num_mini_batches=minibatches,
        num_ppo_epochs=EPOCHS,
        response_length=RESPONSE,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )


def make_trainer(args: argparse.Namespace, timer: PhaseTimer, output_dir: str):
    iterations = args.warmup + args.iterations
    prompts = np.random.default_rng(SEED).integers(
        VOCAB, size=(BATCH * iterations, PROMPT)
    )
    trainer = PPOTrainer(
        args=make_config(args.minibatches, iterations, output_dir),
        processing_class=make_tokenizer(),
        train_dataset=Dataset.from_dict({"input_ids": prompts.tolist()}),
        callbacks=[timer],
        **make_models(),
    )
    # The torch optimizer inside accelerate's, which passes over some calls of step.
    trainer.optimizer.optimizer.register_step_post_hook(timer.count_optimizer_step)
    return trainer


def run(args: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(args.threads)
    set_seed(SEED)
    timer = PhaseTimer(args.minibatches, args.warmup)
    generation = timer.wrap_generation(ppo_trainer.batch_generation)
    forward = timer.wrap_forward(ppo_trainer.forward)
    with (
        tempfile.TemporaryDirectory() as output_dir,
        contextlib.redirect_stdout(sys.stderr),
        mock.patch.object(ppo_trainer, "batch_generation", generation),
        mock.patch.object(ppo_trainer, "forward", forward),
    ):
        make_trainer(args, timer, output_dir).train()
    check("iterations measured", len(timer.records), args.iterations)
    return timer.records


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minibatches", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--iterations", type=int, default=3, help="measured")
    parser.add_argument("--warmup", type=int, default=1, help="not measured")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--json", type=Path, help="also write the records here")
    args = parser.parse_args()
    records = run(args)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
