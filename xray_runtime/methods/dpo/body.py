"""Stage `dpo`: a policy that learns from preference pairs, without reward model or sampling.

The reference scores all replies once, before the first step (`reference_logprobs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.data.heldout import draw_left_out
from xray_runtime.data.pairs import HELDOUT, TRAIN
from xray_runtime.data.replies import Replies, both_sides
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.preference_objectives import DPOObjective, PairPreference
from xray_runtime.methods.common.training.dataset import (
    check_longest,
    fitting_prompts,
    preference_tokens,
)
from xray_runtime.methods.common.training.loop import Method, Trained, training_loop
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.reference_logprobs import ReferenceLogprobs, open_policy
from xray_runtime.methods.common.training.steps import TrainingRows
from xray_runtime.methods.common.training.trained_model import trained_model
from xray_runtime.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.dpo.config import DPOConfig
    from xray_runtime.methods.dpo.kind import DPOInputs

HELDOUT_PAIRS = 256
"""Number of held-out pairs for held-out loss and accuracy."""
SUMS = {name: name for name in ("loss", "margin", "chosen_logprobs", "rejected_logprobs")} | {"correct": "accuracy"}
"""Sums of a step → names of their means among the metrics."""
PURPOSE = "dpo validation"
"""Seeds the choice of validation pairs."""


def run(stage: Stage[DPOConfig, DPOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form; `validation` adds validation.json and may keep an earlier version."""
    config, validation, dataset = stage.config, stage.config.validation, stage.inputs.preferences.path
    tokenizer = load_tokenizer(stage.inputs.policy.path)
    train, heldout = preference_tokens(stage, dataset, tokenizer, out, recorder, stage.inputs.policy.path)
    parts = {TRAIN: both_sides(train), HELDOUT: both_sides(heldout, HELDOUT_PAIRS)}
    prompts = fitting_prompts(dataset, train) if validation is not None else ()
    wanted, where = validation.num_pairs if validation is not None else 0, f"{stage.name}.validation.num_pairs"
    left_out = draw_left_out(prompts, len(train), wanted, stage.seed, PURPOSE, where)
    trained, chosen_by = np.flatnonzero(~left_out), np.flatnonzero(left_out)
    best = BestVersion(stage.kept or recorder.log_dir, validation)
    steps = max(1, config.epochs * len(trained) // config.batch_size)
    cursor = Cursor(len(trained), derive_seed(stage.seed, stage.name, "order"))
    objective = DPOObjective(config)
    check_longest(stage, trained_model(stage, stage.inputs.policy.path, objective), train.together(), train.id)
    reference = ReferenceLogprobs(stage, dataset, parts, recorder) if config.has_reference else None
    with open_policy(stage, objective, reference) as (policy, known):
        method, models = _DPO(config, policy, train, parts, known or {}, trained, chosen_by), {"policy": policy}
        training_loop(stage, recorder, method, models, cursor, steps, best)
        return best.save(models, out, steps, {"pairs": len(chosen_by)})


@dataclass(frozen=True)
class _DPO(Method):
    """Preference pairs, for `training_loop`."""

    config: DPOConfig
    policy: ModelHandle
    rows: TrainingRows
    parts: Mapping[str, Replies]
    known: Mapping[str, np.ndarray]
    """Part → log-probability of each of its replies under the reference; empty without one."""
    trained: np.ndarray
    """Numbers of the pairs to train on."""
    chosen_by: np.ndarray
    """Numbers of the pairs that `validation` leaves out."""
    name = "dpo"

    def batch(self, index: np.ndarray) -> tuple[TextBatch, StepTotals]:
        """Rows of whole pairs, so that both replies are in one micro-batch."""
        pairs = self.trained[index]
        rows = self.rows.take(pairs)
        if self.known:
            reference = self.known[TRAIN]
            rows = rows.with_columns(ref_chosen=reference[2 * pairs], ref_rejected=reference[2 * pairs + 1])
        return rows, StepTotals.of(rows)

    def metrics(self, step: Trained) -> dict[str, float]:
        return {f"dpo/{shown}": step.result.sums[name] / step.totals.rows for name, shown in SUMS.items()}

    def heldout(self) -> dict[str, float]:
        statistics = self._without_training(HELDOUT, np.arange(self.parts[HELDOUT].size // 2))
        return {f"dpo/heldout_{name}": value for name, value in statistics.items()}

    def validate(self) -> tuple[dict[str, float], float]:
        statistics = self._without_training(TRAIN, self.chosen_by)
        return {f"dpo/validation_{name}": value for name, value in statistics.items()}, -statistics["loss"]

    def summary(self, metrics: Mapping[str, float]) -> str:
        return f"accuracy {metrics['dpo/accuracy']:.2f}"

    def _without_training(self, part: str, pairs: np.ndarray) -> dict[str, float]:
        """Current loss, accuracy and margin of some pairs; replies 2i and 2i + 1 belong to pair i."""
        # All chosen replies, then all rejected ones.
        numbers = np.concatenate([2 * pairs, 2 * pairs + 1])
        rows = self.parts[part].take(numbers)
        logprobs = torch.tensor(get(self.policy.score.remote(rows)).reply_logprobs).double()
        ref_logprobs = torch.tensor(self.known[part][numbers]).double() if self.known else None
        num_tokens = torch.from_numpy(rows.input_ids.lengths - rows.prompt_lengths)
        losses, stats = PairPreference(self.config).of_pairs(logprobs, ref_logprobs, num_tokens)
        means = {"loss": losses, "accuracy": stats["correct"], "margin": stats["margin"]}
        return {name: float(values.mean()) for name, values in means.items()}
