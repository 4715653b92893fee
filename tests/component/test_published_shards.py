"""Ranks publish a checkpoint in several files, and record their digests, as they publish one in a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.component.models import RUNTIME, open_models, text
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.shards import read_index
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.causal_lm import copy_small_files, load_model
from xray_runtime.models.objectives import SFTObjective
from xray_runtime.models.weight_files import tensors, weight_files


def trained(model: Path, engine: EngineConfig, out: Path) -> dict[str, torch.Tensor]:
    spec = ModelSpec(model, SFTObjective(), training=SFTConfig(engine=engine))
    with open_models(RUNTIME, out / "logs", {"policy": spec}) as models:
        rows = text(seed=0)
        ray.get(models["policy"].train.remote(rows, StepTotals(tokens=float(rows.num_response_tokens())), 1e-2))
        ray.get(models["policy"].save.remote(out / "model"))
    return dict(tensors(out / "model"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="alone", marks=pytest.mark.long),
        pytest.param({"zero_stage": 3, "num_workhorses": 2}, id="ZeRO-3 on 2"),
    ],
)
def test_several_files_hold_what_one_does(
    cluster: None, tiny_model: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    source = tmp_path / "source"
    lm: Any = load_model(tiny_model)
    lm.save_pretrained(source, max_shard_size="100KB")
    copy_small_files(tiny_model, source)
    files = set(weight_files(source).values())
    assert len(files) > 2
    engine = EngineConfig(**layout)
    one, several = trained(tiny_model, engine, tmp_path / "one"), trained(source, engine, tmp_path / "several")
    assert one.keys() == several.keys()
    assert all(torch.equal(several[name], tensor) for name, tensor in one.items())
    assert any(not torch.equal(tensor, dict(tensors(source))[name]) for name, tensor in several.items())
    published = tmp_path / "several" / "model"
    index = read_index(published)
    assert index is not None
    assert index.sha256 == {file.name: file_sha256(published / file.name) for file in files}
