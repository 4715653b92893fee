"""Stage `reward_model`: a pairwise Bradley–Terry reward model on the SFT model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xray_runtime.algorithms.statistics import wins
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.data.length_baseline import length_baseline_accuracy
from xray_runtime.data.pairs import HELDOUT, TRAIN, Pairs, PreferenceExample
from xray_runtime.data.replies import both_sides
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.training.dataset import check_longest, preference_tokens
from xray_runtime.methods.common.training.loop import Method, Trained, training_loop
from xray_runtime.methods.common.training.steps import TrainingRows
from xray_runtime.methods.common.training.trained_model import trained_model
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.reward_objective import RewardObjective

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.reward_model.config import RewardConfig
    from xray_runtime.methods.reward_model.kind import RewardModelInputs


def run(stage: Stage[RewardConfig, RewardModelInputs], out: Path, recorder: Recorder) -> int:
    """Writes the model, its head, and reward.json: mean and deviation of its scores, held-out accuracy, baseline."""
    config = stage.config
    start, dataset = stage.inputs.policy.path, stage.inputs.data.path
    tokenizer = load_tokenizer(start)
    train, heldout = preference_tokens(stage, dataset, tokenizer, out, recorder, start, "answers")
    # All chosen replies, then all rejected ones.
    numbers = np.arange(2 * len(heldout)).reshape(-1, 2).T.flatten()
    heldout_rows = both_sides(heldout).take(numbers)
    steps = max(1, config.epochs * len(train) // config.batch_size)
    cursor = Cursor(len(train), derive_seed(stage.seed, stage.name, "order"))
    model = trained_model(stage, start, RewardObjective(), new_head=True)
    check_longest(stage, model, train.together(), train.id)
    baseline = length_baseline_accuracy(*(Pairs(dataset / side, PreferenceExample) for side in (TRAIN, HELDOUT)))

    with stage.open_models({"reward": model}) as models:
        reward = models["reward"]
        method = _RewardModel(reward, train, heldout_rows, baseline)
        training_loop(stage, recorder, method, models, cursor, steps)
        summary = _summary(stage.name, *method.scores) | {"length_baseline_accuracy": baseline}
        get(reward.save.remote(out, REWARD_HEAD))
    (out / "reward.json").write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")
    return steps


@dataclass
class _RewardModel(Method):
    """A reward model, for `training_loop`."""

    model: ModelHandle
    rows: TrainingRows
    heldout_rows: TextBatch
    """All chosen replies, then all rejected ones."""
    baseline: float
    scores: tuple[np.ndarray, np.ndarray] = field(init=False)
    """Last scores of the held-out chosen and rejected replies."""
    name = "reward_model"

    def batch(self, index: np.ndarray) -> tuple[TextBatch, StepTotals]:
        rows = self.rows.take(index)
        return rows, StepTotals.of(rows)

    def metrics(self, step: Trained) -> dict[str, float]:
        return {
            "reward_model/loss": step.result.sums["loss"] / step.totals.rows,
            "reward_model/accuracy": step.result.sums["correct"] / step.totals.rows,
            "reward_model/length_baseline_accuracy": self.baseline,
        }

    def heldout(self) -> dict[str, float]:
        # One call: both sides share their prompts, and a model caches only the trunk states of the last call.
        chosen, rejected = np.split(get(self.model.score.remote(self.heldout_rows)).scores, 2)
        self.scores = chosen, rejected
        return {"reward_model/heldout_accuracy": _accuracy(chosen, rejected)}

    def summary(self, metrics: Mapping[str, float]) -> str:
        return f"accuracy {metrics['reward_model/accuracy']:.2f}"


def _summary(stage: str, chosen: np.ndarray, rejected: np.ndarray) -> dict[str, float]:
    """Summary of the held-out pairs' scores [P]. Raises RuntimeError if all are the same."""
    scores = np.concatenate([chosen, rejected])
    if not scores.std() > 0:
        raise RuntimeError(
            f"{stage}: all {len(scores)} held-out replies have the score {scores[0]:g}: it is not informative"
        )
    return {
        "mean": float(scores.mean()),
        "std": float(scores.std()),
        "accuracy": _accuracy(chosen, rejected),
        "heldout_pairs": len(chosen),
    }


def _accuracy(chosen: np.ndarray, rejected: np.ndarray) -> float:
    return float(wins(torch.from_numpy(chosen), torch.from_numpy(rejected)).mean())
