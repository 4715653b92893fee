"""Which models of a stage read pictures, and what they may not be combined with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.pictures import FOLDER
from xray_runtime.engines.layouts import GENERATORS, TRAINERS, EngineConfig
from xray_runtime.kernel.graph.artifacts import Artifact
from xray_runtime.kernel.plugs import able, unsupported
from xray_runtime.models.family import family_of

ALONE = ("tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel")
"""Fields that must be 1 for a model that reads pictures."""


def picture_folders(inputs: Any) -> tuple[Path, ...]:
    """The folders of pictures among a stage's inputs."""
    values: list[Any] = [getattr(inputs, each.name) for each in fields(inputs)]
    return tuple(folder for one in _artifacts(values) if (folder := one.path / FOLDER).is_dir())


def _artifacts(value: Any) -> Iterable[Artifact]:
    if isinstance(value, Artifact):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _artifacts(each)


def with_pictures(
    specs: Mapping[str, ModelSpec | GeneratorSpec], folders: tuple[Path, ...]
) -> dict[str, ModelSpec | GeneratorSpec]:
    """`specs`, with `folders` added to those of models that read pictures.

    Raises:
        ValueError: a layout does not support such a model; one line.
    """
    return {role: _with_pictures(role, spec, folders) for role, spec in specs.items()}


def _with_pictures(role: str, spec: ModelSpec | GeneratorSpec, folders: tuple[Path, ...]) -> ModelSpec | GeneratorSpec:
    config = spec.directory / "config.json"
    model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.is_file() else None
    if family_of(model_type).pictures is None:
        return spec
    if isinstance(spec, GeneratorSpec):
        if folders and not spec.config.capabilities.pictures:
            feature, where = "a prompt with pictures", f"generator.engine = {spec.config.engine!r}"
            raise ValueError(f"{role}: {unsupported(feature, where, able(GENERATORS, 'pictures'))}")
        return replace(spec, pictures=folders)
    problem = _problem(spec)
    if problem is not None:
        raise ValueError(f"{role}: {unsupported(problem, f'a {model_type!r} model, which reads pictures')}")
    return replace(spec, pictures=folders)


def _problem(spec: ModelSpec) -> str | None:
    """The first setting that pictures do not go with; None: there is none."""
    layout, training = spec.layout, spec.training
    section = "frozen" if training is None else "engine"
    found = [f"{section}.{name} = {size}" for name in ALONE if (size := getattr(layout, name, 1)) > 1]
    if isinstance(layout, EngineConfig) and not layout.capabilities.pictures:
        others = ", ".join(able(TRAINERS, "pictures"))
        found.append(f"engine.library = {layout.library!r} ({others} can)")
    level = layout.sharding_level if isinstance(layout, EngineConfig) else layout.zero_stage
    if level == 3:
        # A rank without pictures would miss the collectives of the tower.
        found.append(f"{section}.zero_stage = 3")
    if training is not None and training.lora is not None:
        found.append("lora")
    if spec.trainable_layers is not None:
        found.append(f"trainable_layers = {spec.trainable_layers}")
    return next(iter(found), None)
