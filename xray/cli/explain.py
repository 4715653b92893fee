"""`xray run --explain`: for each stage, why it is cached, or what changed since it was computed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from xray.flows.subject import Subject
from xray_runtime.cluster.device import local_device
from xray_runtime.cluster.pool.machine import local_node, this_machine
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import Graph, StageCall
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_manifest
from xray_runtime.kernel.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.kernel.store.identity import Identity
from xray_runtime.kernel.store.manifest import MANIFEST, Manifest
from xray_runtime.kernel.store.shared import open_shared
from xray_runtime.kernel.terminal import print_table
from xray_runtime.trust.attestation import open_store
from xray_runtime.trust.diff import changed

MAX_SHOWN = 6


def explain(subject: Subject, graph: Graph | None, output: Path, console: Console, *, replace_output: bool) -> None:
    """Print one line per stage. Raises ConfigError if the graph cannot be built.

    Args:
        graph: of a config; None: a flow's are recorded here.
        replace_output: whether `output` replaces the directory of a flow's own workspace.
    """
    waits_for = None
    if graph is not None:
        graphs = [(output, graph)]
    else:
        graphs, waits_for = subject.recorded_graphs()
    for directory, graph in graphs:
        print_table(console, ("stage", "", "why"), explained(graph, output if replace_output else directory))
    if waits_for is not None:
        text = f"the flow reads the result of {waits_for}: stages that it calls afterwards are unknown until it runs"
        console.print(text, highlight=False)


def explained(graph: Graph, output: Path) -> list[tuple[str, str, str]]:
    """(stage, "cached" or "compute", reason) in the order of the calls.

    Raises:
        ConfigError: an input, a file or a function cannot be read.
    """
    known: dict[str, str] = {}
    calls = list(graph.calls.values())
    if graph.runtime.parallel == "auto":
        from xray_runtime.ops.planner.auto import choose_layouts

        machine = this_machine(graph.runtime.device, graph.runtime.threads)
        calls = [choose_layouts(call, machine, [local_node(machine)])[0] for call in calls]
    return [(call.name, *_explain_stage(call, graph, output, known)) for call in calls]


def _explain_stage(call: StageCall, graph: Graph, output: Path, known: dict[str, str]) -> tuple[str, str]:
    """("cached" or "compute", reason). Adds the sha256 of a cached stage to `known`."""
    unknown = [h.name for h in call.parents.values() if h.call is not None and h.name not in known]
    if unknown:
        return "compute", f"parent {unknown[0]} is computed again"
    parents = {role: known[h.name] if h.call else _existing(h.name, output) for role, h in call.parents.items()}
    runtime = graph.runtime.model_copy(update={"device": local_device(graph.runtime.device)})
    memory = DigestMemory(output / DIGESTS)
    try:
        identity, _ = identify(call.kind, call.name, call.config, call.seed, runtime, parents, call.functions, memory)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    cached = open_store(output, open_shared(graph.runtime.storage)).find(call.name, identity.key)
    if cached is not None:
        known[call.name] = cached.sha256
        return "cached", f"key {identity.key[:12]}, checkpoint {cached.sha256[:12]}"
    before = _newest(output / CHECKPOINTS, call.name)
    if before is None:
        return "compute", "never computed in this directory"
    changes = differences(before.identity, identity)
    more = [f"and {len(changes) - MAX_SHOWN} more"] if len(changes) > MAX_SHOWN else []
    return "compute", "; ".join([*changes[:MAX_SHOWN], *more]) or "its checkpoint is missing or damaged"


def _existing(ref: str, output: Path) -> str:
    """The sha256 of a checkpoint that the graph did not make."""
    from xray_runtime.trust.adopt import sha256_of

    return sha256_of(ref, output)


def _newest(store: Path, stage: str) -> Manifest | None:
    """The manifest of the newest checkpoint of `stage`."""
    paths = sorted(store.glob(f"{stage}-*/{MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        with contextlib.suppress(ValueError):
            manifest = read_manifest(path.parent)[0]
            if manifest.stage == stage:
                return manifest
    return None


def differences(before: Identity, after: Identity) -> list[str]:
    """The changes from one identity to another, one phrase each."""
    plain = [("kind", before.kind, after.kind), ("seed", before.seed, after.seed)]
    changes = [f"{name} {old} → {new}" for name, old, new in plain if old != new]
    fields = changed(_flat(before.config), _flat(after.config))
    changes += [f"{field} {_show(old)} → {_show(new)}" for field, (old, new) in fields.items()]
    parents = changed(before.parents, after.parents)
    changes += [f"parent {role} {_short(old)} → {_short(new)}" for role, (old, new) in parents.items()]
    for function in sorted(before.functions.keys() | after.functions.keys()):
        modules = changed(before.functions.get(function, {}), after.functions.get(function, {}))
        changes += [f"function {function}: module {module}" for module in modules]
    changes += [f"code {module}" for module in changed(before.code, after.code)]
    libraries = changed(before.versions, after.versions)
    changes += [f"library {name} {old} → {new}" for name, (old, new) in libraries.items()]
    return changes


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted path → value."""
    if not isinstance(value, Mapping | list) or not value:
        return {path: value} if path else {}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {k: v for name, item in items for k, v in _flat(item, f"{path}.{name}" if path else str(name)).items()}


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    kind, colon, digest = text.strip('"').partition(":")
    if colon and kind in ("file", "directory", "hub"):
        return f"{kind} {digest[:12]}"
    if colon and kind == "package":
        return digest
    return text if len(text) <= 40 else text[:37] + "..."


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "none"
