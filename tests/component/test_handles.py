"""Rows go past a WholeModel: it hands references on, and no row enters its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from tests.component.models import RUNTIME, text
from tests.component.processes import open_models
from tests.message_texts import Messages
from xray_runtime.cluster.handles import INLINE_BYTES
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.columnar import ColumnBatch
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.models.objectives import ReferenceObjective


def watch(actor: Any) -> None:
    """Note the rows of every batch of texts that this process reads."""
    actor.rows_read = []

    def restore(batch: ColumnBatch, state: dict[str, Any]) -> None:
        vars(batch).update(state)
        if isinstance(batch, TextBatch):
            actor.rows_read.append(len(batch))

    ColumnBatch.__setstate__ = restore  # type: ignore[attr-defined]


def rows_read(actor: Any) -> list[int]:
    found, actor.rows_read = actor.rows_read, []
    return found


def of_workhorses(model: Any, call: Any) -> list[Any]:
    return ray.get([workhorse.__ray_call__.remote(call) for workhorse in model._workhorses])


def test_rows_are_read_by_workhorses_alone(
    cluster: None, tiny_model: Path, tmp_path: Path, message_texts: Messages
) -> None:
    few, many = text(num_rows=6), text(num_rows=3000)
    assert few.num_bytes < INLINE_BYTES < many.num_bytes / 2
    reference = ModelSpec(tiny_model, ReferenceObjective(1.0), frozen=FrozenConfig(num_workhorses=2))
    with open_models(RUNTIME, tmp_path, {"reference": reference}) as models:
        model = models["reference"]
        ray.get(model.__ray_call__.remote(watch))
        ray.get(model.__ray_call__.remote(lambda self: of_workhorses(self, watch)))
        scores = ray.get(model.score.remote(many))
        assert ray.get(model.__ray_call__.remote(rows_read)) == []
        of_ranks = ray.get(model.__ray_call__.remote(lambda self: of_workhorses(self, rows_read)))
        assert of_ranks == [[1500], [1500]]
        # Small shards travel inside the call, where a WholeModel reads them.
        some = ray.get(model.score.remote(few))
        assert ray.get(model.__ray_call__.remote(rows_read)) == [3, 3]
        with message_texts.raises(ValueError):
            model.score.remote(few.take([0]))
    # In the order of the batch.
    assert scores.ref_logprobs.lengths.tolist() == (many.input_ids.lengths - many.prompt_lengths).tolist()
    assert some.ref_logprobs.lengths.tolist() == (few.input_ids.lengths - few.prompt_lengths).tolist()
