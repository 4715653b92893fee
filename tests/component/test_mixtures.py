"""A mixture of experts whose tensor-parallel peers share heads and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.layouts import LayoutRun, collect, global_batches, make_model, run_layout, spec_of
from benchmarks.ranks import run_ranks
from tests.component.layouts import NUM_UPDATES, in_float64, part, same
from xray_runtime.data.batch import TextBatch
from xray_runtime.models.config import FreshBase

TP = {"tensor_parallel": 2, "num_workhorses": 2}
EP = {"library": "fsdp2", "expert_parallel": 2, "num_workhorses": 2}
BASE = FreshBase(
    **{"vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
    **{"intermediate_size": 64, "num_experts": 4, "max_positions": 64},
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: Any) -> tuple[Path, list[TextBatch], LayoutRun]:
    model = make_model(tmp_path_factory.mktemp("mixture") / "model", BASE)
    batches = global_batches(model, count=2, num_rows=9, group_size=3)
    return model, batches, run_layout(spec_of(model, {}, 32), batches, NUM_UPDATES, tmp_path_factory.mktemp("logs"))


def test_peers_compute_as_near_to_float64_as_one_process(mixture: Any, tmp_path: Path) -> None:
    model, batches, alone = mixture
    split = run_layout(spec_of(model, TP, 32), batches, NUM_UPDATES, tmp_path)
    same(split, alone)
    exact = in_float64(model, batches)
    for run in (alone, split):
        assert run.weights.keys() == exact.keys()
        assert max(np.linalg.norm(run.weights[n] - w) / np.linalg.norm(w) for n, w in exact.items()) < 5e-6


def test_each_gradient_counts_once_in_the_norm_beside_data_parallelism(mixture: Any, tmp_path: Path) -> None:
    """ZeRO 1 counts what carries no mark of tensor parallelism on the first peer alone."""
    model, batches, alone = mixture
    layout = TP | {"num_workhorses": 4, "zero_stage": 1}
    same(run_layout(spec_of(model, layout, 32), batches, NUM_UPDATES, tmp_path), alone)


def test_a_snapshot_goes_from_tensor_to_expert_parallelism(mixture: Any, tmp_path: Path) -> None:
    model, batches, alone = mixture
    run_ranks(spec_of(model, TP, 32), tmp_path, part, batches, range(2), None, tmp_path / "tp")
    for layout in (TP, EP):
        spec = spec_of(model, layout, 32)
        ranks = run_ranks(spec, tmp_path, part, batches, range(2, NUM_UPDATES), tmp_path / "tp", None)
        last = collect(spec, ranks)
        for name, whole in alone.weights.items():
            np.testing.assert_allclose(last.weights[name], whole, rtol=1e-4, atol=2e-5)
