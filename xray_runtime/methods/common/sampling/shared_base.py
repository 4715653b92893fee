"""One base below several policies: each is its adapter, so that one generator and one scoring model hold them all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.training_config import unserved
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.models.adapter_files import read_fields
from xray_runtime.models.lora import LoRAConfig


@dataclass(frozen=True)
class SharedBase:
    """A base, and the fields of the adapters on it."""

    directory: Path
    lora: LoRAConfig


def shared_base(models: Collection[Path]) -> SharedBase | None:
    """The base, by digest, that each of `models` (checkpoints, verified) is or has an adapter for; None: they have none
    in common, none of them needs it, or their adapters have different fields.

    One generator rounds otherwise than two. So that the result depends on the lineage alone, and not on whether the
    base of two merged policies is still in the store, the base must be one of `models`, or one of them was published
    as an adapter alone: beside its merged copy there is a link to its base (`merging.full_model`).
    """
    fields = {model: read_fields(model / ADAPTER) for model in models if (model / ADAPTER).is_dir()}
    ours = next(iter(fields.values()), None)
    if ours is None or not ours.base_sha256 or any(each != ours for each in fields.values()):
        return None
    for model in models:
        if model not in fields and file_sha256(model / MANIFEST) != ours.base_sha256:
            return None
    known = next((model for model in models if model not in fields), None)
    if known is None:
        link = next((link for model in models if (link := model.parent / ours.base).is_symlink()), None)
        if link is None:
            return None
        known = link.resolve()
    return SharedBase(known, ours.lora)


def shared_generator(shared: SharedBase | None, max_length: int, config: GeneratorConfig) -> GeneratorSpec | None:
    """A generator of the base that takes any of the adapters; None where `config` cannot compute them."""
    if shared is None or unserved(shared.lora, config) is not None:
        return None
    return GeneratorSpec(shared.directory, max_length, config, adapter=shared.lora)
