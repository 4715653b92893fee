"""Stage `sft`: supervised fine-tuning of the base model on human replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.data.conversations import ConversationTokens
from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import HELDOUT, TRAIN
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.training.dataset import (
    check_longest,
    is_in_order,
    max_prompt_tokens,
    max_reply_tokens,
    tokenizing,
    validation_file,
)
from xray_runtime.methods.common.training.loop import Method, Trained, training_loop
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.steps import TrainingRows, router_metrics
from xray_runtime.methods.common.training.trained_model import trained_model
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.objectives import SFTObjective

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.sft.config import SFTConfig
    from xray_runtime.methods.sft.kind import SFTInputs

HELDOUT_ROWS = 256
"""Number of held-out conversations for the held-out loss."""


def run(stage: Stage[SFTConfig, SFTInputs], out: Path, recorder: Recorder) -> int:
    """Writes the tuned model in Hugging Face form, and dropped.jsonl, which lists replies that were too long.
    `validation` adds validation.json and may keep an earlier version."""
    config, validation = stage.config, stage.config.validation
    base, dataset = stage.inputs.base.path, stage.inputs.data.path
    tokenizer = load_tokenizer(base)
    longest = max_reply_tokens(config.max_response_tokens, base)
    limits = (max_prompt_tokens(dataset, base, longest), longest)
    train, heldout_rows, validation_rows = _data(stage, tokenizer, limits, recorder)
    best = BestVersion(stage.kept or recorder.log_dir, validation)
    cursor = Cursor(len(train), derive_seed(stage.seed, stage.name, "order"), shuffled=not is_in_order(dataset))

    model = trained_model(stage, base, SFTObjective())
    check_longest(stage, model, train.ends, train.id)

    with stage.open_models({"policy": model}) as models:
        method = _SFT(stage, models["policy"], train, heldout_rows, validation_rows, _data_metrics(train, limits))
        training_loop(stage, recorder, method, models, cursor, config.steps, best)
        record = {} if validation_rows is None else {"conversations": len(validation_rows)}
        done = best.save(models, out, config.steps, record)
    with DroppedRows(out) as dropped:
        train.list_dropped(dropped)
    return done


@dataclass(frozen=True)
class _SFT(Method):
    """Supervised fine-tuning, for `training_loop`."""

    stage: Stage[SFTConfig, SFTInputs]
    policy: ModelHandle
    rows: TrainingRows
    heldout_rows: TextBatch
    validation_rows: TextBatch | None
    of_data: dict[str, float]
    name = "sft"
    evaluations = 5

    def batch(self, index: np.ndarray) -> tuple[TextBatch, StepTotals]:
        rows = self.rows.take(index)
        return rows, StepTotals.of(rows)

    def metrics(self, step: Trained) -> dict[str, float]:
        loss = step.result.sums["nll"] / step.totals.tokens
        speed = {"speed/train_tokens_per_s": step.rows.num_tokens() / step.seconds}
        return {"sft/loss": loss} | speed | router_metrics([step.result.sums])

    def first_metrics(self) -> dict[str, float]:
        return self.of_data

    def heldout(self) -> dict[str, float]:
        return {"sft/heldout_loss": _loss(self.policy, self.heldout_rows)}

    def validate(self) -> tuple[dict[str, float], float]:
        assert self.validation_rows is not None
        loss = _loss(self.policy, self.validation_rows)
        return {"sft/validation_loss": loss}, -loss

    def summary(self, metrics: Mapping[str, float]) -> str:
        return f"loss {metrics['sft/loss']:.3f}"


def _data(
    stage: Stage[SFTConfig, SFTInputs], tokenizer: Tokenizer, limits: tuple[int, int], recorder: Recorder
) -> tuple[ConversationTokens, TextBatch, TextBatch | None]:
    """(training rows, first held-out rows, rows for `validation`). Raises ValueError if no row of one side fits."""

    def tokens(file: Path) -> ConversationTokens:
        return ConversationTokens(file, tokenizer, *limits, stage.seal, tokenizing(recorder))

    dataset, validation = stage.inputs.data.path, stage.config.validation
    train, heldout = tokens(dataset / TRAIN), tokens(dataset / HELDOUT)
    if not train.num_all or not heldout.num_all:
        raise ValueError(
            f"{stage.name}: the {'held-out' if train.num_all else 'training'} rows of the dataset are prompts without "
            "replies: add rows with replies; data.rename_columns maps other names of columns"
        )
    if not len(train) or not len(heldout):
        raise ValueError(
            f"{stage.name}: no pairs fit max_prompt_tokens = {limits[0]} and max_response_tokens = {limits[1]}"
        )
    heldout_rows = heldout.take(range(min(HELDOUT_ROWS, len(heldout))))
    if validation is None:
        return train, heldout_rows, None
    found = tokens(validation_file(stage.name, dataset))
    if not len(found):
        raise ValueError(f"{stage.name}.validation: no validation row fits: raise data.validation_fraction")
    return train, heldout_rows, found.take(range(min(validation.num_conversations, len(found))))


def _data_metrics(train: ConversationTokens, limits: tuple[int, int]) -> dict[str, float]:
    """Number of training rows, length limits, and number of dropped rows by reason."""
    metrics: dict[str, float] = {"sft/pairs": train.num_replies, "sft/conversations": len(train)}
    metrics |= {"sft/max_prompt_tokens": limits[0], "sft/max_response_tokens": limits[1]}
    return metrics | {f"sft/dropped_{reason}": count for reason, count in train.num_dropped.items()}


def _loss(policy: ModelHandle, rows: TextBatch) -> float:
    """Nats per response token of `rows`."""
    return float(get(policy.score.remote(rows)).nll.sum()) / rows.num_response_tokens()
