"""Checks of `routing: replay`, made before anything is computed as far as the answer is known then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xray_runtime.engines.layouts import GENERATORS, EngineConfig, GeneratorConfig
from xray_runtime.engines.roles import shape_input
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.plugs import able, unsupported
from xray_runtime.models.config import FreshBase
from xray_runtime.models.family import FAMILIES, family_of
from xray_runtime.models.shapes import KNOWN_CONFIGS, from_fresh

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.handles import Handle

RoutingName = Literal["own", "replay"]
REPLAY = "routing = 'replay'"


def check_routing(
    routing: RoutingName,
    engine: EngineConfig,
    generator: GeneratorConfig,
    environment: object | None,
    trainable_layers: int | None,
) -> None:
    """Raises ValueError if the routes cannot be replayed with the stage's other fields."""
    if routing == "own":
        return
    if environment is not None:
        why = "a turn that is read again would take other routes than when it was sampled"
        raise ValueError(unsupported(REPLAY, "environment", why=why))
    if trainable_layers is not None:
        why = "the reference shares the frozen layers, and has routes of its own"
        raise ValueError(unsupported(REPLAY, f"trainable_layers = {trainable_layers}", why=why))
    if not generator.capabilities.routes:
        where = f"generator.engine = {generator.engine!r}"
        raise ValueError(unsupported(REPLAY, where, able(GENERATORS, "routes", "cpu")))
    engine.require("routes", REPLAY, "engine")
    for field in ("tensor_parallel", "pipeline_parallel"):
        if (degree := getattr(engine, field)) > 1:
            raise ValueError(unsupported(REPLAY, f"engine.{field} = {degree}", why="its ranks do not pass routes on"))


def check_routing_device(routing: RoutingName, generator: GeneratorConfig, runtime: RuntimeConfig) -> None:
    """Raises ValueError if the generator says its routes on other devices alone."""
    if routing == "replay" and (device := runtime.device) != "auto" and device not in generator.capabilities.routes:
        where = f"generator.engine = {generator.engine!r} and runtime.device = {device!r}"
        raise ValueError(unsupported(REPLAY, where, able(GENERATORS, "routes", device)))


def check_routed_policy(routing: RoutingName, policy: Handle) -> None:
    """Raises ValueError if the policy's routes cannot be replayed, where its family is known before it is there."""
    if routing == "replay" and (found := _model_type(policy)) is not None:
        _check(found)


def check_family(directory: Path) -> None:
    """Raises ValueError if the routes of the model in `directory` cannot be replayed."""
    _check(json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"])


def _check(model_type: str) -> None:
    if family_of(model_type).routing is None:
        families = (FAMILIES.get(name) for name in FAMILIES)
        others = [kind for family in families if family.routing for kind in family.model_types]
        raise ValueError(unsupported(REPLAY, f"a model of the type {model_type!r}", others))


def _model_type(policy: Handle) -> str | None:
    """The type of the base model, as far as it is known without a network."""
    handle: Handle | None = policy
    base: object = None
    while handle is not None and base is None:
        if handle.call is None:
            directory = handle.graph.directory_of(handle)
            base, handle = str(directory), None
        else:
            base = handle.call.kind.base_model(handle.call.config)
            handle = handle.call.parents.get(shape_input(handle.call) or "")
    if isinstance(base, FreshBase):
        return from_fresh(base).family
    if not isinstance(base, str):
        return None
    written = Path(base) / "config.json"
    known = KNOWN_CONFIGS.get(base, {}) if not written.is_file() else json.loads(written.read_text(encoding="utf-8"))
    found: str | None = known.get("model_type")
    return found
