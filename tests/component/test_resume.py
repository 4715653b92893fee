"""A snapshot of model and optimizer goes on to the same bits, under each ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from tests.component.models import RUNTIME, open_models, text
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.objectives import SFTObjective


def steps(model: Any, numbers: range) -> list[float]:
    found = []
    for step in numbers:
        rows = text(seed=step)
        tokens = float(rows.num_response_tokens())
        found.append(ray.get(model.train.remote(rows, StepTotals(tokens=tokens), 1e-2)).sums["nll"])
    return found


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(),
        pytest.param(DeepSpeedConfig(zero_stage=1, num_workhorses=2), marks=pytest.mark.long),
        pytest.param(DeepSpeedConfig(zero_stage=3, num_workhorses=2), marks=pytest.mark.long),
    ],
    ids=["alone", "ZeRO-1 on 2", "ZeRO-3 on 2"],
)
def test_going_on_gives_the_same_bits(cluster: None, tiny_model: Path, tmp_path: Path, engine: EngineConfig) -> None:
    config = SFTConfig(weight_decay=0.1, engine=engine)
    spec = ModelSpec(tiny_model, SFTObjective(), training=config, new_head=True)
    with open_models(RUNTIME, tmp_path / "logs", {"policy": spec}) as models:
        steps(models["policy"], range(2))
        ray.get(models["policy"].save_state.remote(tmp_path / "snapshot"))
        expected = steps(models["policy"], range(2, 4))
        ray.get(models["policy"].save.remote(tmp_path / "undisturbed"))
    with open_models(RUNTIME, tmp_path / "logs", {"policy": spec}) as models:
        ray.get(models["policy"].load_state.remote(tmp_path / "snapshot"))
        assert steps(models["policy"], range(2, 4)) == expected
        ray.get(models["policy"].save.remote(tmp_path / "resumed"))
    undisturbed, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in undisturbed.items())
