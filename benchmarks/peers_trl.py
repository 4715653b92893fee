"""TRL's side of `benchmarks.peers`, in an environment of its own, without X-ray.

Reads the path of a task from each line of standard input and trains in a forked copy of this process, which has
imported everything and computed nothing. It prints a line of JSON for each update, then `DONE` and the exit status.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import trl  # type: ignore[import-not-found]
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from benchmarks.peers_work import BETA, EPOCHS, GRPO_KL, KL, LAST_WITH_PPO, LR, PENALTY, SAMPLES, THREADS, share_of_e

if trl.__version__ == LAST_WITH_PPO:
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # type: ignore[import-not-found]
else:
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

COMMON: dict[str, Any] = {
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
}
IN_ORDER = COMMON | {"train_sampling_strategy": "sequential", "max_grad_norm": 1e6, "num_train_epochs": 1}


class Clock(TrainerCallback):
    """Prints what each update logs, with its seconds: PPO logs iterations, others optimizer steps."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.last = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "train_runtime" not in logs:
            now = time.perf_counter()
            print(json.dumps({"seconds": now - self.last, "logs": logs}), flush=True)
            self.last = now


def causal(directory: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)


def classifier(directory: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, dtype=torch.float32, trust_remote_code=False
    )


def as_given(trainer: Any) -> Any:
    """A trainer whose rows are tokens already: X-ray's, so that both sides have the same."""

    class AsGiven(trainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    return AsGiven


def ppo(task: dict[str, Any], tokenizer: Any, rows: Any, clock: Clock) -> Any:
    config = PPOConfig(
        **COMMON,
        output_dir=task["output"],
        num_sample_generations=0,
        seed=task["turn"],
        per_device_train_batch_size=task["rows"] // 2,
        gradient_accumulation_steps=1,
        num_mini_batches=2,
        local_rollout_forward_batch_size=task["rows"],
        num_ppo_epochs=EPOCHS,
        total_episodes=task["updates"] * task["rows"],
        response_length=task["new_tokens"],
        stop_token="eos",
        temperature=1.0,
        missing_eos_penalty=PENALTY,
        kl_coef=KL,
        whiten_rewards=False,
        gamma=1.0,
        lam=0.95,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=causal(task["policy"]),
        ref_model=causal(task["policy"]),
        reward_model=classifier(task["reward"]),
        value_model=classifier(task["critic"]),
        train_dataset=rows,
        callbacks=[clock],
    )


def grpo(task: dict[str, Any], tokenizer: Any, rows: Any, clock: Clock) -> Any:
    def reward(completions: list[Any], **_: Any) -> list[float]:
        return share_of_e([], [completion[0]["content"] for completion in completions])

    config = GRPOConfig(
        **COMMON | {"max_grad_norm": 1e6},
        output_dir=task["output"],
        seed=task["turn"],
        per_device_train_batch_size=task["rows"] * SAMPLES // 2,
        steps_per_generation=2,
        max_steps=2 * task["updates"],
        num_generations=SAMPLES,
        max_completion_length=task["new_tokens"],
        shuffle_dataset=False,
        temperature=1.0,
        beta=GRPO_KL,
        loss_type="grpo",
    )
    return GRPOTrainer(
        model=causal(task["policy"]),
        args=config,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=rows,
        callbacks=[clock],
    )


def supervised(task: dict[str, Any], tokenizer: Any, rows: Any, clock: Clock) -> Any:
    """SFT, reward model, DPO, KTO: an update is an optimizer step on the next rows."""
    batch = {"output_dir": task["output"], "per_device_train_batch_size": task["rows"]}
    kept = {"beta": BETA, "precompute_ref_log_probs": True, "max_length": None}
    trainer, config, model = {
        "sft": lambda: (SFTTrainer, SFTConfig(**IN_ORDER, **batch), causal),
        "reward": lambda: (RewardTrainer, RewardConfig(**IN_ORDER, **batch), classifier),
        "dpo": lambda: (DPOTrainer, DPOConfig(**IN_ORDER, **batch, **kept), causal),
        "kto": lambda: (KTOTrainer, KTOConfig(**IN_ORDER, **batch, **kept), causal),
    }[task["method"]]()
    return as_given(trainer)(
        model=model(task["policy"]), args=config, processing_class=tokenizer, train_dataset=rows, callbacks=[clock]
    )


def train(task: dict[str, Any]) -> None:
    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(task["policy"], padding_side="left", trust_remote_code=False)
    make = {"ppo": ppo, "grpo": grpo}.get(task["method"], supervised)
    make(task, tokenizer, Dataset.from_list(task["examples"]), Clock()).train()


def main() -> None:
    print("READY", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(json.loads(Path(line.strip()).read_text()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        print("DONE", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
