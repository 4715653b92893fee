"""Checkpoints that are adapters alone: read as the whole models that merging at publication would have written."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.conftest import TINY
from tests.unit.kernel.store.published import IDENTITY
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import copy_model, copy_small_files, fresh_llama, load_model, save_model
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.merging import base_of, full_model, opened_model, write_model
from xray_runtime.models.weight_files import overwrite

LORA = LoRAConfig(rank=2, alpha=6.0, dora=True, target_modules=["down_proj", "q_proj"])


@pytest.fixture
def store(tmp_path: Path, tiny_tokenizer: Any) -> Store:
    store = Store(tmp_path / "checkpoints")
    with store.building("base", IDENTITY.key) as built:
        save_model(fresh_llama(TINY, tiny_tokenizer, seed=1), tiny_tokenizer, built)
        identity = IDENTITY.model_copy(update={"stage": "base"})
        store.publish(built, identity, type="Model", step=0, dataset=None)
    return store


def trained(store: Store, stage: str, base: CheckpointRef, weights: Path, merged: Path) -> CheckpointRef:
    """An adapter of `base`, whose weights are in `weights`; `merged` gets what a merged publication would have."""
    adapters, random = Adapters(load_model(weights), LORA, weights, seed=3), torch.Generator().manual_seed(len(stage))
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.weight.normal_(std=0.1, generator=random)
            layer.magnitude.mul_(1.1)  # type: ignore[union-attr]
    copy_model(weights, merged)
    overwrite(merged, adapters.merged(lambda name, parameter: parameter.detach()), 0, 1)
    identity = IDENTITY.model_copy(update={"stage": stage})
    with store.building(stage, identity.key) as built:
        copy_small_files(weights, built)
        own = dict(adapters.unmerged(lambda name, parameter: parameter.detach()))
        write_adapter(built / ADAPTER, LORA, own, base.path.name, base.sha256)
        return store.publish(built, identity, type="Model", step=1, dataset=None)


def refs(store: Store, tmp_path: Path) -> list[CheckpointRef]:
    base = store.find("base", IDENTITY.model_copy(update={"stage": "base"}).key)
    assert base is not None
    one = trained(store, "one", base, base.path, tmp_path / "one")
    two = trained(store, "second", one, tmp_path / "one", tmp_path / "two")
    return [base, one, two]


def same(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_whole_model_is_the_one_that_was_not_written(store: Store, tmp_path: Path) -> None:
    base, one, two = refs(store, tmp_path)
    assert not list(two.path.glob("*.safetensors"))
    assert base_of(base.path) is None
    assert full_model(base.path, tmp_path) == base.path
    with opened_model(two.path) as found:
        assert found.name == two.path.name
        assert same(found, tmp_path / "two")
        assert (found / "manifest.json").read_bytes() == (two.path / "manifest.json").read_bytes()
    assert not found.exists()
    write_model(one.path, one.sha256, tmp_path / "exported")
    assert same(tmp_path / "exported", tmp_path / "one")
    assert not (tmp_path / "exported" / ADAPTER).exists()
    with pytest.raises(FileExistsError):
        write_model(one.path, one.sha256, tmp_path / "exported")


def test_a_base_that_is_not_the_named_one_is_refused(store: Store, tmp_path: Path) -> None:
    base, one, two = refs(store, tmp_path)
    with pytest.raises(ValueError, match=f"^{one.path.name}: manifest.json is not the one"):
        write_model(one.path, "0" * 64, tmp_path / "exported")
    weights = base.path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    why = rf"^{one.path.name}: it is an adapter of {base.path.name}, which cannot be read: .*model\.safetensors"
    for ref in (one, two):
        with pytest.raises(ValueError, match=why), opened_model(ref.path):
            pass
    base.path.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"cannot be read: .* is missing"), opened_model(one.path):
        pass


def _open_and_die(adapter: Path) -> None:
    with opened_model(adapter):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_whole_models_of_killed_processes_are_removed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, one, _ = refs(store, tmp_path)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    process = multiprocessing.get_context("fork").Process(target=_open_and_die, args=(one.path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    [left] = place.iterdir()
    with opened_model(base.path):
        assert left.is_dir()  # so young that its process might not have locked it yet
    with opened_model(one.path) as held:
        for each in (left, held.parent):
            os.utime(each, (0, 0))
        with opened_model(base.path):
            assert (left.exists(), held.is_dir()) == (False, True)
    assert not list(place.iterdir())
