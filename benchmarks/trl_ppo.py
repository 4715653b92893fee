"""TRL's PPO on the models and prompts of `benchmarks/ppo_peer.py`, in an environment of its own, without X-ray.

python trl_ppo.py TASK.json     # prints a JSON line an update: its seconds, its mean reward and KL
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer  # type: ignore[import-not-found]


class Clock(TrainerCallback):
    """Says after each update how long it took."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.last = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        now, logs = time.perf_counter(), logs or {}
        if "objective/scores" in logs:
            line = {"seconds": now - self.last, "reward": logs["objective/scores"], "kl": logs["objective/kl"]}
            print("UPDATE " + json.dumps(line), flush=True)
        self.last = now


def only_top_layers(model: Any, trainable_layers: int | None) -> Any:
    """Freeze everything below the top layers, as X-ray does."""
    if trainable_layers is not None:
        model.requires_grad_(False)
        layers = model.model.layers
        for module in (*layers[len(layers) - trainable_layers :], model.model.norm, getattr(model, "score", None)):
            if module is not None:
                module.requires_grad_(True)
    return model


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["policy"], padding_side="left", trust_remote_code=False)
    policy = AutoModelForCausalLM.from_pretrained(task["policy"], dtype=torch.float32, trust_remote_code=False)
    reference = AutoModelForCausalLM.from_pretrained(task["policy"], dtype=torch.float32, trust_remote_code=False)
    judge = AutoModelForSequenceClassification.from_pretrained(
        task["reward"], num_labels=1, dtype=torch.float32, trust_remote_code=False
    )
    critic = AutoModelForSequenceClassification.from_pretrained(
        task["critic"], num_labels=1, dtype=torch.float32, trust_remote_code=False
    )
    layers = task["trainable_layers"]
    config = PPOConfig(
        output_dir=task["output"],
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        num_sample_generations=0,
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        seed=task["seed"],
        per_device_train_batch_size=task["minibatch_size"],
        gradient_accumulation_steps=1,
        num_mini_batches=task["prompts_per_iteration"] // task["minibatch_size"],
        local_rollout_forward_batch_size=task["prompts_per_iteration"],
        num_ppo_epochs=task["epochs"],
        total_episodes=task["iterations"] * task["prompts_per_iteration"],
        response_length=task["max_new_tokens"],
        stop_token="eos",
        temperature=1.0,
        missing_eos_penalty=task["truncation_penalty"],
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        kl_coef=task["kl_coef"],
        whiten_rewards=False,
        gamma=1.0,
        lam=0.95,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=only_top_layers(policy, layers),
        ref_model=reference,
        reward_model=judge,
        value_model=only_top_layers(critic, layers),
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in task["prompts"]]),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
