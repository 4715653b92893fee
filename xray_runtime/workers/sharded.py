"""A plain training step, written for one device, planned and sharded over many.

    @sharded
    def step(model, rows):
        logits = model(input_ids=rows["input_ids"]).logits
        ...
        return losses  # [B]

    step(model, rows)  # still the plain function
    with step.on("models/mine", TrainingConfig(lr=1e-3), batch_size=32, sequence_tokens=128) as train:
        loss = train(rows)
        train.save(Path("models/trained"))

The planner chooses the layout; each replica gets its share of the rows; gradients are those of the mean over all rows.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from xray_runtime.config.base import PretrainedBase
from xray_runtime.config.engines import EngineConfig, TrainingConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Tensors, Texts
from xray_runtime.models.padding import pad
from xray_runtime.planning.auto import choose, engine_of
from xray_runtime.planning.pretrained_shapes import from_pretrained
from xray_runtime.planning.workload import Role, Workload, training_options
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.opening import model_opener
from xray_runtime.workers.placement import cluster_machine
from xray_runtime.workers.protocols import ModelHandle, get

Step = Callable[[Any, dict[str, Tensor]], Tensor]
"""(causal LM, rows) → the loss of each row [B]. Rows: `input_ids` [B, S] right-padded, `lengths` [B], any others."""


@dataclass(frozen=True)
class StepObjective:
    """`step` as a training objective."""

    step: Step

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return Scores(losses=self.step(module.lm, _padded(rows)))

    def loss(self, module: HeadedLM, rows: Texts, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        total = self.step(module.lm, _padded(rows)).sum()
        return total / totals["rows"], {"loss": total.detach()}


def _padded(rows: Texts) -> Tensors:
    """Padded rows for a step, trimmed to the longest row of the micro-batch."""
    ids = pad(rows.input_ids.values, rows.input_ids.lengths)
    others = {name: column for name, column in rows.columns().items() if not isinstance(column, Ragged)}
    trimmed = {n: column[:, : ids.shape[1]] if n.endswith("_ids") else column for n, column in others.items()}
    return trimmed | {"input_ids": ids, "lengths": rows.input_ids.lengths}


@dataclass(frozen=True)
class Trainer:
    """A model in training; see `Sharded.on`."""

    engine: EngineConfig
    """The planned layout."""
    _model: ModelHandle
    _lr: float

    def __call__(self, rows: Mapping[str, np.ndarray], lr: float | None = None) -> float:
        """One optimizer step on the mean loss over `rows` (numpy columns as in `Step`); returns that mean."""
        texts = Ragged.of(ids[:length] for ids, length in zip(rows["input_ids"], rows["lengths"], strict=True))
        others = {name: column for name, column in rows.items() if name not in ("input_ids", "lengths")}
        batch, totals = TextBatch(input_ids=texts, others=others), {"rows": float(len(texts))}
        answer = get(self._model.train.remote(batch, totals, self._lr if lr is None else lr))
        return float(answer.sums["loss"] / totals["rows"])

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face form."""
        get(self._model.save.remote(directory))


class Sharded:
    """A step that can be called as usual, or used for training `on` a cluster."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, model: Any, rows: dict[str, Tensor]) -> Tensor:
        return self._step(model, rows)

    @contextlib.contextmanager
    def on(
        self,
        model: Path | str,
        training: TrainingConfig,
        *,
        batch_size: int,
        sequence_tokens: int,
        runtime: RuntimeConfig | None = None,
        log_dir: Path | str = "logs",
    ) -> Iterator[Trainer]:
        """Train `model` (a directory in Hugging Face form) on the Ray cluster this process is connected to.

        Args:
            training: optimizer, adapters, engine; the layout of the engine is planned.
            batch_size: smallest number of rows of a step.
            sequence_tokens: longest row.

        Raises:
            ConfigError: nothing fits, or the model cannot be planned.
        """
        runtime = runtime or RuntimeConfig()
        base, machine = PretrainedBase(model=str(model)), cluster_machine(runtime)
        weight_bytes, options = training_options(training.lora, training.engine, machine.device)
        shape = from_pretrained(base)
        workload = Workload(
            roles=(
                Role(
                    name="model",
                    shape=shape,
                    use="trained",
                    weight_bytes=weight_bytes,
                    options=options,
                    model=str(model),
                ),
            ),
            sequence_tokens=sequence_tokens,
            response_tokens=sequence_tokens,
            batch_size=batch_size,
            rollout_size=batch_size,
            micro_batch_tokens=training.engine.micro_batch_tokens,
        )
        plan = choose(workload, machine)
        engine = training.engine.model_copy(update=engine_of(plan))
        planned = training.model_copy(update={"engine": engine})
        spec = ModelSpec(Path(model), StepObjective(self._step), training=planned)
        # A run id of its own, without a worker pool.
        open_models = model_opener(runtime, Path(log_dir), f"sharded-{uuid.uuid4().hex}")
        with open_models({"model": spec}) as models:
            yield Trainer(engine, models["model"], training.lr)


def sharded(step: Step) -> Sharded:
    """Decorator: make a plain step shardable."""
    return Sharded(step)
