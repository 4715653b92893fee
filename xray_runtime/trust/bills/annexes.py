"""A draft of the technical documentation that Annexes XI and XII of the EU AI Act ask for (Regulation (EU) 2024/1689).

What the lineage knows is filled in; what a person has to write is marked.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import Example, Pairs, PreferenceExample
from xray_runtime.kernel.evidence.log import read_object
from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.report.rendering import template
from xray_runtime.kernel.tracking.recorder import METRICS, records_directory
from xray_runtime.trust.bills.history import History, is_model
from xray_runtime.trust.card import RESULTS

COMPUTED = "speed/computed_tokens"
"""Metric: tokens that went through the trained model's layers in an iteration's updates."""
FLOPS_A_TOKEN = 6
"""Floating-point operations of a forward and a backward pass, for each parameter and token (Kaplan et al. 2020)."""
LIBRARIES = ("torch", "transformers", "vllm", "deepspeed", "ray")
"""Those whose versions matter to somebody who integrates the model."""


def write(history: History) -> bytes:
    node = history.node
    config = read_object(node.directory / "config.json")
    packages = history.environment.get("packages", {})
    machine = history.environment
    text = template("annexes.md").render(
        node=node,
        architecture=", ".join(config.get("architectures") or []),
        parameters=num_parameters(node.directory),
        context=config.get("max_position_embeddings"),
        pictures="vision_config" in config,
        licences=sorted({f"{s.name}: {s.terms.license or 'not stated'}" for s in history.sources}),
        libraries=[(name, packages[name]) for name in LIBRARIES if name in packages],
        machine=f"{machine.get('cpus', '?')} cores ({machine.get('cpu', '?')}), GPUs: "
        f"{', '.join(machine.get('gpus', [])) or 'none'}",
        stages=[_stage(history, one) for one in history.nodes],
        datasets=[_dataset(history, one) for one in history.parts if one.is_data],
        results=[
            (evaluation.manifest.stage, RESULTS[name], f"{value:.4g}")
            for evaluation, name, value in history.results(node)
        ],
    )
    return text.encode() + b"\n"


def num_parameters(directory: Path) -> int | None:
    """Numbers in the safetensors files of a directory, by their headers; None where one cannot be read."""
    from safetensors import SafetensorError, safe_open

    count = 0
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "numpy") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return count


def _stage(history: History, node: Node) -> dict[str, Any]:
    times = history.statements[node.sha256].predicate.details.metadata
    seconds = datetime.fromisoformat(times.finished) - datetime.fromisoformat(times.started)
    metrics = read_metrics(records_directory(history.output, node.manifest.stage, node.manifest.key) / METRICS)
    tokens = sum(value for _, value in metrics.get(COMPUTED, []))
    flops = FLOPS_A_TOKEN * tokens * (num_parameters(node.directory) or 0) if tokens and is_model(node) else 0
    settings = {name: node.manifest.config[name] for name in ("method", "lr") if name in node.manifest.config}
    settings["seed"] = node.manifest.seed
    return {
        "name": node.manifest.stage,
        "kind": node.manifest.kind,
        "settings": ", ".join(f"{name} = {value}" for name, value in settings.items()),
        "updates": node.manifest.step,
        "seconds": f"{seconds.total_seconds():.0f}",
        "flops": f"{flops:.2e}" if flops else "not recorded" if node.manifest.step else "–",
    }


def _dataset(history: History, node: Node) -> dict[str, Any]:
    of: Any = Example if node.is_a(Dataset) else PreferenceExample
    sources = [s for s in history.statements[node.sha256].predicate.build.internal.sources if not s.is_model]
    rows = {path.stem: len(Pairs(path, of)) for path in sorted(node.directory.glob("*.arrow"))}
    dropped = {name: count for name, count in node.results.items() if name.startswith("dropped") and count}
    return {"name": node.manifest.stage, "sources": sources, "rows": rows, "dropped": dropped}
