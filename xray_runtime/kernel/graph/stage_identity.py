"""The identity of a stage, which its key digests: its content and its code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from xray_runtime.kernel.config.paths import section
from xray_runtime.kernel.config.section import RuntimeConfig, Section, sections
from xray_runtime.kernel.graph.kind import KINDS, StageKind
from xray_runtime.kernel.plugs import Registry
from xray_runtime.kernel.store.code_digest import Code, code_reached, function_code
from xray_runtime.kernel.store.content_digest import Outside, outside_digest
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.kernel.store.identity import Identity

OWN_PACKAGE = "xray_runtime"
BY_CONTENT = {"xray_runtime.models.family": "FAMILIES"}
"""Module → its registry of plugs, among which a model's own files choose, and no config."""
USES: tuple[str, ...] = ()
"""None of the modules imported by name here."""
DECLARATIONS = (
    "xray_runtime.cluster.pool.demand",
    "xray_runtime.cluster.pool.machine",
    "xray_runtime.cluster.stage",
    "xray_runtime.engines.roles",
    *(
        f"xray_runtime.kernel.graph.{name}"
        for name in ("binding", "current", "graph", "handles", "kind", "kinds", "planning")
    ),
    *(f"xray_runtime.methods.common.{name}" for name in ("checks", "findings")),
    "xray_runtime.ops",
)
"""Modules that declare stages, beside those that register X-ray's own kinds."""


def identify(
    kind: StageKind,
    name: str,
    config: Section,
    seed: int,
    runtime: RuntimeConfig,
    parents: Mapping[str, str],
    functions: Mapping[str, Callable[..., Any]],
    memory: DigestMemory,
) -> tuple[Identity, list[Outside]]:
    """The identity of a stage, and its external files.

    Args:
        runtime: its device must not be `auto`.
        parents: role → checkpoint sha256.
        functions: functions that were passed as objects, by name.
        memory: remembered digests of unchanged files.

    Raises:
        ValueError: a file, hub name or function cannot be read; one line.
    """
    fields = kind.outside_of(config)
    outside = [
        outside_digest(value, memory, field=f"{name}.{field}", holds="model" if field == "model" else "dataset")
        for field, value in fields.items()
    ]
    values: dict[str, Any] = config.resolved(runtime.device).model_dump(mode="json")
    chosen = list(sections(config))
    for path, part in chosen:
        for field in part.not_in_key:
            section(values, path).pop(field)
    for field, content in zip(fields, outside, strict=True):
        above, _, last = field.rpartition(".")
        section(values, above)[last] = f"{content.kind}:{content.digest}"
    if kind.computes:
        values["runtime"] = runtime.in_keys()
    code = _code(kind.module, frozenset(module for _, part in chosen for module in part.plugs()))
    called = {
        function: function_code(functions.get(function, function), {OWN_PACKAGE}, declarations())
        for function in kind.functions_of(config)
    }
    identity = Identity(
        stage=name,
        kind=kind.name,
        config=values,
        seed=seed,
        parents=dict(parents),
        functions={name: content.modules for name, content in called.items()},
        code=code.modules,
        versions={name: version for content in (code, *called.values()) for name, version in content.libraries.items()},
    )
    return identity, outside


def declarations() -> tuple[str, ...]:
    """Modules that only declare stages. A body imports them to register itself and does not depend on them."""
    kinds = {k.registered_in for k in KINDS.values() if k.registered_in != k.module}
    return (*DECLARATIONS, *sorted(name for name in kinds if name.startswith(f"{OWN_PACKAGE}.")))


def code_of(kind: StageKind) -> dict[str, str]:
    """Module of the kind's code → digest of its syntax tree; without the plugs that a config chooses."""
    return _code(kind.module, frozenset()).modules


@cache
def _code(module: str, plugs: frozenset[str]) -> Code:
    # Cached for the process: imported code does not change.
    def reached(roots: set[str]) -> Code:
        followed = {OWN_PACKAGE, *(root.partition(".")[0] for root in roots)}
        return code_reached(sorted(roots), followed, declarations())

    code = reached({module, *plugs})
    # Each of these plugs may compute.
    declared = [getattr(importlib.import_module(m), name) for m, name in BY_CONTENT.items() if m in code.modules]
    registries: list[Registry[object]] = declared
    chosen = {registry.module(name) for registry in registries for name in registry}
    return reached({module, *plugs, *chosen}) if chosen else code
