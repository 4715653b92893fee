"""What tests of promotion, retention and bundles do with a synthetic lifecycle."""

from __future__ import annotations

from pathlib import Path

import mlflow

from tests.unit.trust.synthetic import NAME, Lifecycle
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.promotion import promote, review


def aliases(output: Path) -> dict[str, str]:
    uri = f"sqlite:///{output / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    return {alias: str(version) for alias, version in client.get_registered_model(NAME).aliases.items()}


def broken(output: Path) -> list[str]:
    return [f"{f.code} {f.subject} {f.detail}" for f in audit(open_lineage_store(output, None)).findings if f.is_broken]


def promoted(output: Path, stage: str, comparison: str | None = None, **gates: float | None) -> None:
    place, node = resolve(stage, output, None)
    other = resolve(comparison, output, None)[1] if comparison else None
    seen = review(place, node, name=NAME, gates=PromotionConfig(**gates), comparison=other)
    promote(place, seen, by="a person", note="looks good")


def second_candidate(output: Path, win_rate: float = 0.5) -> str:
    """Another policy, evaluated, compared with the first one and registered; returns its stage."""
    lifecycle = Lifecycle.resumed(output)
    roles = {"policy": "ppo-2", "prompts": "prepare", "reference": "sft", "rewards.0": "reward"}
    lifecycle.add("ppo-3", "ppo", {"config.json": b"{}", "model.safetensors": b"third"}, roles)
    lifecycle.evaluate([f"question {i}" for i in range(50, 56)], policy="ppo-3", stage="evaluate-3", win_rate=0.62)
    lifecycle.compare("ppo-3", "ppo-2", [f"question {i}" for i in range(51, 57)], win_rate)
    lifecycle.register("ppo-3")
    return "ppo-3"
