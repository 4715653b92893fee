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
from xray_runtime.kernel.graph.artifacts import ADAPTER, Dataset
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.report.rendering import template
from xray_runtime.kernel.tracking.recorder import METRICS, records_directory
from xray_runtime.models.merging import base_of
from xray_runtime.trust.bills.history import History, is_model
from xray_runtime.trust.card import RESULTS

COMPUTED = ("speed/computed_tokens", "speed/critic_computed_tokens")
"""Metrics: tokens that went through the layers of the trained model, and of its critic, in a step's updates."""
FLOPS_A_TOKEN, FROZEN_FLOPS_A_TOKEN = 6, 4
"""Floating-point operations of a forward and a backward pass, for each parameter and token (Kaplan et al. 2020); the
base of an adapter has no gradients of its own."""
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
        stages=(stages := [_stage(history, one) for one in history.nodes]),
        is_energy_known=all(one["kilowatt_hours"] != "–" for one in stages),
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


def flops_a_token(directory: Path) -> float:
    """Floating-point operations that an update takes a token; 0 where the model's weights cannot be read."""
    base = base_of(directory)
    if base is None:
        return FLOPS_A_TOKEN * (num_parameters(directory) or 0)
    frozen = num_parameters(base.directory) or 0
    return FROZEN_FLOPS_A_TOKEN * frozen + FLOPS_A_TOKEN * (num_parameters(directory / ADAPTER) or 0) if frozen else 0


def _stage(history: History, node: Node) -> dict[str, Any]:
    details = history.statements[node.sha256].predicate.details
    times, run = details.metadata, details.run
    seconds = datetime.fromisoformat(times.finished) - datetime.fromisoformat(times.started)
    metrics = read_metrics(records_directory(history.output, node.manifest.stage, node.manifest.key) / METRICS)
    tokens = sum(value for name in COMPUTED for _, value in metrics.get(name, []))
    flops = tokens * flops_a_token(node.directory) if is_model(node) else 0
    settings = {name: node.manifest.config[name] for name in ("method", "lr") if name in node.manifest.config}
    settings["seed"] = node.manifest.seed
    return {
        "name": node.manifest.stage,
        "kind": node.manifest.kind,
        "settings": ", ".join(f"{name} = {value}" for name, value in settings.items()),
        "updates": node.manifest.step,
        "seconds": f"{seconds.total_seconds():.0f}",
        "device_hours": f"{run.device_seconds / 3600:.3g}" if run.device_seconds else "–",
        "kilowatt_hours": f"{sum(run.energy_joules.values()) / 3.6e6:.3g}" if run.energy_joules else "–",
        "flops": f"{flops:.2e}" if flops else "not recorded" if node.manifest.step else "–",
    }


def _dataset(history: History, node: Node) -> dict[str, Any]:
    of: Any = Example if node.is_a(Dataset) else PreferenceExample
    sources = [s for s in history.statements[node.sha256].predicate.build.internal.sources if not s.is_model]
    rows = {path.stem: len(Pairs(path, of)) for path in sorted(node.directory.glob("*.arrow"))}
    dropped = {name: count for name, count in node.results.items() if name.startswith("dropped") and count}
    return {"name": node.manifest.stage, "sources": sources, "rows": rows, "dropped": dropped}
