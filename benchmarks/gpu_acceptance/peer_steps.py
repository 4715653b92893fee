"""Steps beside TRL, on the same tokens with the same model: SFT by its trainer, GRPO by its loss."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.gpu_acceptance.setting import SEED, Setting, check
from benchmarks.gpu_acceptance.training_steps import NUM_STEPS, run_steps
from xray_runtime.data.batch import PolicyBatch, StepTotals
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import KLConfig, PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective

LR = 1e-4
PADDED_ROWS = 8
"""Rows of one of TRL's micro-batches."""
LIMIT = 3e-2
"""Largest difference of the two losses: bfloat16 rounds a loss near 10 to three digits."""


def _arguments(setting: Setting) -> dict[str, Any]:
    """Fields of TRL's configs that make its step ours: constant learning rate, AdamW, bfloat16 on a GPU."""
    on_gpu = setting.device == "cuda"
    rows = min(PADDED_ROWS, setting.size.num_rows)
    return {
        "output_dir": str(setting.folder / "trl"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": setting.size.num_rows // rows,
        "max_steps": NUM_STEPS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": SEED,
    }


def _precision(setting: Setting) -> str:
    return "bfloat16" if setting.device == "cuda" else "float32"


def _model(setting: Setting) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        setting.model, dtype=torch.float32, trust_remote_code=False
    )


class _Clock(transformers.TrainerCallback):
    """Seconds and loss of each of TRL's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append((logs or {})["loss"])


def _compared(setting: Setting, ours: tuple[float, float], theirs: tuple[float, float]) -> dict[str, Any]:
    """(seconds a step, first loss) of both."""
    check(abs(ours[1] - theirs[1]) < LIMIT, f"the first loss {ours[1]:.5g} is not TRL's, {theirs[1]:.5g}")
    tokens = int(setting.rows.input_ids.lengths.sum())
    return {
        "loss": ours[1],
        "trl_loss": theirs[1],
        "tokens_per_s": tokens / ours[0],
        "trl_tokens_per_s": tokens / theirs[0],
        "trl_seconds_over_ours": theirs[0] / ours[0],
    }


def sft(setting: Setting) -> dict[str, Any]:
    """SFT: loss of the first step and tokens a second."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    with setting.learner(setting.spec(precision=_precision(setting))) as learner:
        steps = run_steps(learner, lambda rows: rows, setting.rows)
    rows, clock = setting.rows, _Clock()
    texts = [
        {"input_ids": ids.tolist(), "completion_mask": [0] * start + [1] * (len(ids) - start)}
        for ids, start in zip(rows.input_ids, rows.prompt_lengths.tolist(), strict=True)
    ]
    SFTTrainer(
        model=_model(setting),
        args=SFTConfig(**_arguments(setting), packing=False, max_length=None, completion_only_loss=True),
        train_dataset=Dataset.from_list(texts),
        processing_class=transformers.AutoTokenizer.from_pretrained(setting.model, trust_remote_code=False),
        callbacks=[clock],
    ).train()
    return _compared(setting, (steps.seconds, steps.losses[0]), (min(clock.seconds[1:]), clock.losses[0]))


def grpo_rows(setting: Setting) -> PolicyBatch:
    """The batch with seeded advantages, and old log-probabilities near those of a uniform distribution."""
    rng, rows = np.random.default_rng(SEED), setting.rows
    starts = zip(rows.input_ids, rows.prompt_lengths, strict=True)
    counts = [len(ids) - start for ids, start in starts]
    uniform = -np.log(setting.size.config["vocab_size"])

    def column(values: list[np.ndarray]) -> Ragged:
        return Ragged.of(values, np.float32)

    advantages = rng.normal(size=len(counts))
    return rows.as_kind(
        PolicyBatch,
        old_logprobs=column([uniform + 0.1 * rng.normal(size=n) for n in counts]),
        advantages=column([np.full(n, a) for n, a in zip(counts, advantages, strict=True)]),
        weights=column([np.ones(n) for n in counts]),
    )


def grpo(setting: Setting) -> dict[str, Any]:
    """GRPO's clipped update with given advantages: loss and tokens a second."""
    rows = grpo_rows(setting)
    totals, tokens = StepTotals(tokens=float(rows.num_response_tokens())), rows.num_response_tokens()
    config = PPOStageConfig(method="grpo", dual_clip=None, kl=KLConfig(place="reward"))
    spec = setting.spec(objective=PPOObjective(config), precision=_precision(setting))
    seconds, losses = [], []
    with setting.learner(spec) as learner:
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            losses.append(learner.train(rows, totals, LR)["policy_loss"] / tokens)
            seconds.append(time.perf_counter() - start)
    return _compared(setting, (min(seconds[1:]), losses[0]), _trl_grpo(setting, rows))


def _trl_grpo(setting: Setting, rows: PolicyBatch) -> tuple[float, float]:
    """Seconds of the fastest step and the first loss, of TRL's loss in micro-batches with torch's fused AdamW."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = _arguments(setting) | {"per_device_train_batch_size": setting.size.num_rows}
    arguments["gradient_accumulation_steps"] = 1
    trainer = GRPOTrainer(
        model=_model(setting),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**arguments, num_generations=2, loss_type="bnpo", beta=0.0, epsilon=0.2),
        train_dataset=Dataset.from_list([{"prompt": "hello there"}] * setting.size.num_rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(setting.model, trust_remote_code=False),
    )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.to(setting.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=setting.device == "cuda")
    seconds, first = [], 0.0
    for number in range(NUM_STEPS):
        start = time.perf_counter()
        total = 0.0
        for begin in range(0, setting.size.num_rows, PADDED_ROWS):
            part = rows.take(range(begin, min(begin + PADDED_ROWS, setting.size.num_rows)))
            share = part.num_response_tokens() / rows.num_response_tokens()
            with torch.autocast(setting.device, torch.bfloat16, enabled=setting.device == "cuda"):
                loss = trainer._compute_loss(model, _trl_inputs(setting, part)) * share
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        first = first if number else total
    return min(seconds[1:]), first


def _trl_inputs(setting: Setting, rows: PolicyBatch) -> dict[str, Any]:
    """TRL's padded inputs: prompts on the left, replies on the right."""
    starts = rows.prompt_lengths
    prompts = rows.input_ids.heads(starts)
    replies = Ragged.of(ids[start:] for ids, start in zip(rows.input_ids, starts, strict=True))
    width = starts.max()
    left = (np.arange(width) - (width - starts)[:, None]) % width
    columns = {
        "prompt_ids": np.take_along_axis(prompts.dense(), left, axis=1),
        "prompt_mask": np.take_along_axis(prompts.mask(), left, axis=1).astype(np.int64),
        "completion_ids": replies.dense(),
        "completion_mask": replies.mask().astype(np.int64),
        "old_per_token_logps": rows.old_logprobs.dense(),
        "advantages": rows.advantages.dense()[:, 0],
    }
    return {name: torch.from_numpy(column).to(setting.device) for name, column in columns.items()}
