"""A step whose loss or gradient is not finite is made by no rank of any layout, and leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.layouts import global_batches, spec_of
from benchmarks.ranks import run_ranks
from tests.component.layouts import short_of
from tests.component.processes import open_models
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import NonFiniteError, root_cause
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.objectives import ReferenceObjective

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process": {},
    "ZeRO-1, bfloat16": {"zero_stage": 1, "precision": "bfloat16"},
    "ZeRO-1 × 2": {"zero_stage": 1, "num_workhorses": 2},
    "ZeRO-2 × 2, offloaded": {"zero_stage": 2, "num_workhorses": 2, "offload": "cpu"},
    "ZeRO-3 × 2": {"zero_stage": 3, "num_workhorses": 2},
    "TP 2": {"tensor_parallel": 2, "num_workhorses": 2},
    "PP 2": {"pipeline_parallel": 2, "num_workhorses": 2},
    "TP 2 × PP 2, ZeRO-1": {"tensor_parallel": 2, "pipeline_parallel": 2, "num_workhorses": 4, "zero_stage": 1},
    "Megatron TP 2": {"library": "megatron", "tensor_parallel": 2, "num_workhorses": 2},
    "FSDP2 × 2": {"library": "fsdp2", "num_workhorses": 2},
}


@pytest.fixture(scope="module")
def batches(tiny_model: Path) -> list[TextBatch]:
    return global_batches(tiny_model, count=2, num_rows=8)


def with_value(rows: TextBatch, column: str, value: float) -> TextBatch:
    """The rows with `value` in the last place of a ragged column, which the last data-parallel rank gets."""
    old = getattr(rows, column)
    values = old.values.copy()
    values[-1] = value
    return rows.with_columns(**{column: old.like(values)})


def burst(module: torch.nn.Module, inputs: Any, out: torch.Tensor) -> None:
    """Has the gradient of a module's output be infinite."""
    out.register_hook(lambda gradient: torch.full_like(gradient, math.inf))


def steps(
    learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch], inject: bool
) -> dict[str, Any]:
    """Two steps on one rank; with `inject` others between them, that are all refused."""
    assert learner.engine is not None
    refused: dict[str, tuple[dict[str, float], bool]] = {}

    def train(rows: TextBatch) -> dict[str, float]:
        return learner.train(deal(rows), StepTotals(tokens=float(rows.num_response_tokens())), 1e-3)

    def weights() -> dict[str, np.ndarray]:
        assert learner.engine is not None
        return {name: t.detach().float().cpu().numpy().copy() for name, t in learner.engine.weights()}

    train(batches[0])
    for column, value in (("advantages", math.nan), ("returns", math.inf), ("weights", -math.inf)) if inject else ():
        before = weights()
        stats = train(with_value(batches[1], column, value))
        after = weights()
        refused[column] = stats, all(np.array_equal(before[name], after[name]) for name in before)
    if inject:
        # A finite loss whose gradient is not, on one rank alone.
        before = weights()
        trained = (m for m in learner.module.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))
        if learner.rank_info.rank == 0:
            hook = next(trained).register_forward_hook(burst)
        stats = train(batches[1])
        if learner.rank_info.rank == 0:
            hook.remove()
        refused["gradient"] = stats, all(np.array_equal(tensor, before[name]) for name, tensor in weights().items())
    stats = train(batches[1])
    return {"refused": refused, "norm": stats["grad_norm"], "weights": weights()}


@pytest.mark.parametrize("layout", short_of(LAYOUTS, "ZeRO-2 × 2, offloaded", "Megatron TP 2", "FSDP2 × 2"))
def test_no_rank_makes_a_step_that_is_not_finite(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: str
) -> None:
    spec = spec_of(tiny_model, LAYOUTS[layout], 32)
    plain = run_ranks(spec, tmp_path, steps, batches, False)
    injected = run_ranks(spec, tmp_path, steps, batches, True)
    for ours, theirs in zip(injected, plain, strict=True):
        for stats, unmoved in ours["refused"].values():
            assert not math.isfinite(stats["grad_norm"])
            assert unmoved
        # Nor moments, nor what Adam counts: the next step is that of a run without the others, to the bit.
        assert ours["norm"] == theirs["norm"]
        assert math.isfinite(ours["norm"])
        for name, tensor in theirs["weights"].items():
            np.testing.assert_array_equal(ours["weights"][name], tensor)
    # The rank that brought it says so; another rank's own sums are finite.
    wrong = [not math.isfinite(rank["refused"]["advantages"][0].get("policy_loss", 0.0)) for rank in injected]
    assert any(wrong)
    if spec.training is not None and spec.training.engine.data_parallel > 1:
        assert not all(wrong)


def broken_weight(
    learner: Learner, deal: Callable[[TextBatch], TextBatch], rows: TextBatch, directory: Path
) -> list[str]:
    """What a rank says of a model one of whose weights has become NaN: of a step, a snapshot, an export, a save."""
    with torch.no_grad():
        next(p for name, p in learner.module.named_parameters() if "layers.1" in name and p.dim() > 1)[0, 0] = math.nan
    said = []
    for act in (
        lambda: learner.train(deal(rows), StepTotals(tokens=10.0), 1e-3),
        lambda: learner.save_state(directory / "snapshot"),
        lambda: learner.export_weights(1, False),
    ):
        try:
            act()
        except NonFiniteError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("layout", short_of(("1 process", "TP 2", "Megatron TP 2"), "TP 2", "Megatron TP 2"))
def test_a_weight_that_is_not_finite_goes_nowhere(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: str
) -> None:
    spec = spec_of(tiny_model, LAYOUTS[layout], 32)
    for rank, said in enumerate(run_ranks(spec, tmp_path, broken_weight, batches[0], tmp_path)):
        assert len(said) == 3
        for text in said:
            assert text.startswith(f"'policy', rank {rank}: the weight")
            assert "model.layers.1." in text


def test_non_finite_outputs_are_refused_with_their_rank(
    cluster: None, nan_model: Path, tiny_model: Path, batches: list[TextBatch], tmp_path: Path
) -> None:
    """Scores, a step and samples, of WholeModels as a stage opens them."""
    import ray

    runtime = RuntimeConfig(device="cpu", threads=1)
    rows = TextBatch.of_columns(batches[0].pick("input_ids", "prompt_lengths"))
    specs = {
        "critic": ModelSpec(nan_model, PPOObjective(PPOStageConfig()), training=PPOStageConfig(), new_head=True),
        "reference": ModelSpec(nan_model, ReferenceObjective(1.0)),
        "policy": ModelSpec(tiny_model, PPOObjective(PPOStageConfig()), training=PPOStageConfig(), new_head=True),
    }
    with open_models(runtime, tmp_path, specs) as models:
        for role in ("critic", "reference"):
            with pytest.raises(Exception, match="not finite") as caught:
                ray.get(models[role].score.remote(rows))
            assert isinstance(root_cause(caught.value), NonFiniteError)
            assert str(root_cause(caught.value)).startswith(f"{role!r}, rank 0: ")
        wrong = with_value(batches[0], "advantages", math.nan)
        stats = ray.get(models["policy"].train.remote(wrong, StepTotals(tokens=50.0), 1e-3))
        assert stats["refused_by"] == 0.0
        assert math.isnan(stats["policy_loss"])
        with pytest.raises(Exception, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight"):
            ray.get(models["critic"].save.remote(tmp_path / "out"))
