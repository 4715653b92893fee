"""Ranks publish a checkpoint in several files, and record their digests, as they publish one in a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.component.models import RUNTIME, text
from tests.component.processes import open_models
from tests.unit.kernel.store.published import IDENTITY
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.shards import read_index
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.causal_lm import copy_model, copy_small_files, load_model
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.merging import base_of, opened_model
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


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="alone"),
        pytest.param({"zero_stage": 3, "num_workhorses": 2}, id="ZeRO-3 on 2", marks=pytest.mark.long),
    ],
)
def test_an_adapter_alone_is_the_model_that_is_published_merged(
    cluster: None, tiny_model: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """To the bit."""
    store = Store(tmp_path / "checkpoints")
    with store.building(IDENTITY.stage, IDENTITY.key) as built:
        copy_model(tiny_model, built)
        base = store.publish(built, IDENTITY, type="Model", step=0, dataset=None)
    rows, published = text(seed=0), {}
    for way in ("merged", "adapter"):
        lora = LoRAConfig.model_validate({"rank": 2, "publish": way})
        spec = ModelSpec(
            base.path, SFTObjective(), training=SFTConfig(engine=EngineConfig(**layout), lora=lora), adapter_seed=3
        )
        published[way] = store.root / way
        with open_models(RUNTIME, tmp_path / "logs", {"policy": spec}) as models:
            ray.get(models["policy"].train.remote(rows, StepTotals(tokens=float(rows.num_response_tokens())), 1e-2))
            ray.get(models["policy"].save.remote(published[way]))
    assert not weight_files(published["adapter"])
    assert base_of(published["merged"]) is None
    assert base_of(published["adapter"]) == (base.path, base.sha256)
    expected = dict(tensors(published["merged"]))
    with opened_model(published["adapter"]) as whole:
        found = dict(tensors(whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, dict(tensors(base.path))[name]) for name, tensor in found.items())
