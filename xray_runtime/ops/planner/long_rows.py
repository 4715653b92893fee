"""A row that one Workhorse of a trained model cannot hold, by the planner's formulas, and layouts that would hold it.

Only rows longer than `micro_batch_tokens` are passes of their own: of any other the pass decides what is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.family import family_of
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.ops.planner.layout import Layout
from xray_runtime.ops.planner.plan import most_that_fits
from xray_runtime.ops.planner.splits import DEGREES
from xray_runtime.ops.planner.workload import PlannedRole, Workload, training_options

if TYPE_CHECKING:
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.models.shapes import ModelShape


def too_long(spec: ModelSpec, tokens: int, machine: Callable[[], Machine]) -> str | None:
    """Why a Workhorse of `spec` cannot train on a row of so many tokens, and with which fields it could, in words that
    follow the row's name; None: it can, or something else than the row stops it.

    Args:
        machine: the devices, which takes time to ask.
    """
    assert spec.training is not None
    engine = spec.training.engine
    if tokens <= engine.micro_batch_tokens or engine.capabilities.sharding is None:
        return None
    found = machine()
    try:
        shape = from_pretrained(PretrainedBase(model=str(spec.directory)))
    except ValueError:  # a model that cannot be planned
        return None
    need = _Need(spec, shape, found)
    if need.fits(engine, tokens) or not need.fits(engine, 1):
        return None
    most = most_that_fits(tokens, lambda fewer: need.fits(engine, fewer))

    def holds(change: Mapping[str, Any]) -> bool:
        other = _changed(engine, change)
        return other is not None and need.fits(other, tokens)

    others = _remedies(spec, engine, shape, found, holds)
    remedy = f"set {others}, or " if others else ""
    return (
        f"has {tokens:,} tokens, and a Workhorse holds rows of at most {most:,} in "
        f"{need.capacity(engine) / 1e9:.3g} GB: {remedy}lower the limits of prompts and replies"
    )


class _Need:
    """Memory of one rank of a trained model."""

    def __init__(self, spec: ModelSpec, shape: ModelShape, machine: Machine) -> None:
        self._spec, self._shape, self._machine = spec, shape, machine

    def capacity(self, engine: EngineConfig) -> int:
        """Bytes that a rank may have: all of its GPU's, or its share of a node's RAM."""
        machine = self._machine
        if machine.device == "cuda":
            return machine.memory_bytes
        return machine.memory_bytes * machine.node_size // min(engine.num_workhorses, machine.node_size)

    def fits(self, engine: EngineConfig, tokens: int) -> bool:
        """Whether a rank under `engine` holds a row of so many tokens."""
        spec, training = self._spec, self._spec.training
        assert training is not None
        width, options = training_options(training.lora, engine, self._machine.device)
        role = PlannedRole(
            name="trained",
            shape=self._shape,
            use="trained",
            weight_bytes=width,
            top_layers=spec.trainable_layers,
            branches=len(spec.branches),
            options=options,
            library=engine.library,
        )
        workload = Workload(
            roles=(role,),
            sequence_tokens=tokens,
            response_tokens=1,
            batch_size=1,
            rollout_size=1,
            micro_batch_tokens=engine.micro_batch_tokens,
            score_tokens=spec.score_tokens,
            device=self._machine.device,
        )
        layout = Layout(
            zero_stage=engine.sharding_level,
            tp=engine.tensor_parallel,
            pp=engine.pipeline_parallel,
            dp=engine.data_parallel,
            sp=engine.sequence_parallel,
            ep=engine.expert_parallel,
        )
        return workload.memory(role, layout).total <= self.capacity(engine)


def _remedies(
    spec: ModelSpec,
    engine: EngineConfig,
    shape: ModelShape,
    machine: Machine,
    holds: Callable[[Mapping[str, Any]], bool],
) -> str:
    """The changes of `engine` that hold the row, in words: one alone, or both together."""
    again: dict[str, Any] = {"activation_checkpointing": True}
    shared: list[dict[str, Any]] = []
    if spec.trainable_layers is None and family_of(shape.family).packs:
        most = machine.num_devices // engine.data_parallel
        degrees = (d for d in DEGREES if engine.sequence_parallel < d <= most and shape.num_heads % d == 0)
        shared = [{"sequence_parallel": d, "num_workhorses": engine.data_parallel * d} for d in degrees]
    found = [next(filter(holds, kind), None) for kind in ([again], shared)]
    if not any(found):
        found = [next(filter(holds, (each | again for each in shared)), None)]
    return " or ".join(" with ".join(f"{k}: {json.dumps(v)}" for k, v in change.items()) for change in found if change)


def _changed(engine: EngineConfig, change: Mapping[str, Any]) -> EngineConfig | None:
    """`engine` with other fields; None where they do not go together."""
    try:
        return type(engine).model_validate(engine.model_dump() | dict(change))
    except ValueError:
        return None
