"""The model card beside the weights, in Hugging Face form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.kernel.evidence.statement import Statement
from xray_runtime.kernel.graph.artifacts import Model, is_a
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.report.rendering import template
from xray_runtime.kernel.store.manifest import Manifest

CHECKPOINT_LINE = "| what | |\n|---|---|\n| checkpoint | `{}` |"
"""Names the checkpoint that a card describes."""

RESULTS = {
    "win_rate": "win rate over the model before",
    "gold_delta": "difference in gold score to the model before",
    "reward_after": "learned reward, in deviations",
    "kl": "KL to the model before, nats a reply",
    "length_after": "length, tokens",
}
"""Fields of an evaluation that the card shows. Audits compare pages of registered models with these words."""


def model_card(manifest: Manifest, sha256: str, statement: Statement, evaluation: dict[str, Any] | None) -> str:
    """README.md of a model: front matter for the Hugging Face hub, then the same for people.

    `evaluation` is the content of evaluation.json, where this policy has been evaluated.
    """
    internal, found = statement.predicate.build.internal, evaluation or {}
    base_models = [name for name in internal.origins["base_models"] if name != f"fresh-{sha256[:12]}"]
    datasets = internal.origins["datasets"]
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["x-ray", "rlhf", manifest.kind]}
    if is_a(manifest.type, Model):
        front["pipeline_tag"] = "text-generation"
    front |= {name: names for name, names in {"base_model": base_models, "datasets": datasets}.items() if names}
    metrics = [
        {"type": name, "name": title, "value": found[name]}
        for name, title in RESULTS.items()
        if found.get(name) is not None
    ]
    if metrics:
        data = {"name": "held-out prompts", "type": (datasets or ["own"])[0]}
        results = [{"task": {"type": "text-generation"}, "dataset": data, "metrics": metrics}]
        front["model-index"] = [{"name": manifest.stage, "results": results}]
    kind = find_kind(manifest.kind)
    import yaml

    return template("model_card.md").render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(),
        manifest=manifest,
        title=kind.title if kind is not None and kind.title else f"a checkpoint of kind `{manifest.kind}`",
        checkpoint=CHECKPOINT_LINE.format(sha256),
        parents=sorted(manifest.parents.items()),
        results=result_rows(found),
        sources=[
            [
                f"`{source.name}` ({source.field})",
                *(_cell(text) for text in (source.terms.license, source.terms.origin, source.terms.personal_data)),
            ]
            for source in internal.sources
        ],
    )


def result_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, value with its interval) of the results of an evaluation that pages show."""
    rows = []
    for name, title in RESULTS.items():
        if evaluation.get(name) is not None:
            interval = evaluation.get(f"{name}_ci95")
            text = f"{evaluation[name]:.4g}"
            rows.append((title, f"{text} (95%: {interval[0]:.4g} to {interval[1]:.4g})" if interval else text))
    return rows


def _cell(text: str | None) -> str:
    return " ".join((text or "not stated").replace("|", "\\|").split())
