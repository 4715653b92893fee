"""The identity of a stage: what its key digests, by content and by what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.graph.kind import StageKind
from xray_runtime.store.code_digest import callable_digests, callable_libraries, library_versions_of, module_digests
from xray_runtime.store.content_digest import Outside, outside_digest
from xray_runtime.store.digest_memory import DigestMemory
from xray_runtime.store.hub import check_on_hub
from xray_runtime.store.identity import Identity

OWN_PACKAGE = "xray_runtime"
DECLARATIONS = (
    "xray_runtime.stages",
    "xray_runtime.planning",
    *(f"xray_runtime.graph.{name}" for name in ("binding", "current", "graph", "handles", "inputs", "kind")),
)
"""They say which stages there are and compute none: a body that imports them to register itself depends on no more."""


def identify(
    kind: StageKind,
    name: str,
    config: Any,
    seed: int,
    runtime: RuntimeConfig,
    parents: Mapping[str, str],
    functions: Mapping[str, Callable[..., Any]],
    memory: DigestMemory,
) -> tuple[Identity, list[Outside]]:
    """The identity of a stage, and what it reads from outside.

    Args:
        runtime: its device must not be `auto`.
        parents: role → checkpoint sha256.
        functions: those that were handed over as objects, by name.
        memory: of digests of files that did not change.

    Raises:
        ValueError: a file, a name or a function cannot be read; one line.
    """
    outside = [
        outside_digest(value, memory, field=f"{name}.{field}", holds="model" if field == "model" else "dataset")
        for field, value in kind.outside(config).items()
    ]
    values: dict[str, Any] = config.model_dump(mode="json")
    for field, found in zip(kind.outside(config), outside, strict=True):
        *above, last = field.split(".")
        place: Any = values
        for part in above:
            place = place[int(part) if isinstance(place, list) else part]
        place[last] = f"{found.kind}:{found.digest}"
    if kind.computes:
        values["runtime"] = {"device": runtime.device, "threads": runtime.threads}
    code, versions = _code(kind.module)
    called = {function: functions.get(function, function) for function in kind.functions(config)}
    for function in called.values():
        versions = versions | callable_libraries(function, {OWN_PACKAGE}, DECLARATIONS)
    identity = Identity(
        stage=name,
        kind=kind.name,
        config=values,
        seed=seed,
        parents=dict(parents),
        functions={name: callable_digests(target, {OWN_PACKAGE}, DECLARATIONS) for name, target in called.items()},
        code=code,
        versions=versions,
    )
    return identity, outside


def check_hub_names(kind: StageKind, name: str, config: Any) -> None:
    """Raises ConfigError where a stage names something on a hub that is not there, or that cannot be asked for."""
    for field, value in kind.outside(config).items():
        check_on_hub(value, f"{name}.{field}", "model" if field == "model" else "dataset")


def code_of(kind: StageKind) -> dict[str, str]:
    """Module that computes a kind → digest of its syntax tree."""
    return _code(kind.module)[0]


@cache
def _code(module: str) -> tuple[dict[str, str], dict[str, str]]:
    # Once a process: what is imported does not change any more.
    packages = {OWN_PACKAGE, module.partition(".")[0]}
    return module_digests([module], packages, DECLARATIONS), library_versions_of([module], packages, DECLARATIONS)
