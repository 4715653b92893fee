"""The model card beside the weights, in Hugging Face form."""

from __future__ import annotations

from typing import Any

import yaml

from xray_runtime.graph.artifacts import Model, is_a
from xray_runtime.lineage.statement import Statement
from xray_runtime.stages.kinds import find_kind
from xray_runtime.store.manifest import Manifest

CHECKPOINT_LINE = "| what | |\n|---|---|\n| checkpoint | `{}` |"
"""By which a card says whose it is."""

RESULTS = {
    "win_rate": "win rate over the model before",
    "gold_delta": "difference in gold score to the model before",
    "reward_after": "learned reward, in deviations",
    "kl": "KL to the model before, nats a reply",
    "length_after": "length, tokens",
}
"""Fields of an evaluation that stand on the card."""


def model_card(manifest: Manifest, sha256: str, statement: Statement, evaluation: dict[str, Any] | None) -> str:
    """README.md of a model: front matter as the Hugging Face hub reads it, then the same for people.

    Args:
        evaluation: the content of evaluation.json, where this policy has been evaluated.
    """
    origins = statement.predicate.build.internal.origins
    results = {name: evaluation[name] for name in RESULTS if evaluation and evaluation.get(name) is not None}
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["x-ray", "rlhf", manifest.kind]}
    if is_a(manifest.type, Model):
        front["pipeline_tag"] = "text-generation"
    ancestors = [name for name in origins["base_models"] if name != f"fresh-{sha256[:12]}"]
    if ancestors:
        front["base_model"] = ancestors
    if origins["datasets"]:
        front["datasets"] = origins["datasets"]
    if results:
        metrics = [{"type": name, "name": RESULTS[name], "value": value} for name, value in results.items()]
        task = {"type": "text-generation"}
        data = {"name": "held-out prompts", "type": (origins["datasets"] or ["own"])[0]}
        front["model-index"] = [
            {"name": manifest.stage, "results": [{"task": task, "dataset": data, "metrics": metrics}]}
        ]
    lines = ["---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(), "---", ""]
    kind = find_kind(manifest.kind)
    title = kind.title if kind is not None and kind.title else f"a checkpoint of kind `{manifest.kind}`"
    lines += [f"# {manifest.stage}", "", f"Made by X-ray: {title}.", ""]
    lines += [CHECKPOINT_LINE.format(sha256)]
    lines += [f"| {role} | `{parent}` |" for role, parent in sorted(manifest.parents.items())]
    lines += [f"| seed | {manifest.seed} |", f"| updates | {manifest.step} |"]
    lines += result_rows(evaluation or {})
    lines += _sources(statement)
    lines += [
        "",
        "`manifest.json` lists every file and its sha256; `attestation/statement.json` says how it was made, and",
        "`attestation.sig` signs it. `xray audit` checks all of it, back to the first dataset.",
        "",
    ]
    return "\n".join(lines)


def result_rows(evaluation: dict[str, Any]) -> list[str]:
    """The results of an evaluation that stand on pages, as rows of a table."""
    return [
        f"| {title} | {_number(evaluation, name)} |"
        for name, title in RESULTS.items()
        if evaluation.get(name) is not None
    ]


def _number(evaluation: dict[str, Any], name: str) -> str:
    interval = evaluation.get(f"{name}_ci95")
    text = f"{evaluation[name]:.4g}"
    return f"{text} (95%: {interval[0]:.4g} to {interval[1]:.4g})" if interval else text


def _sources(statement: Statement) -> list[str]:
    sources = statement.predicate.build.internal.sources
    if not sources:
        return []
    lines = ["", "| made from | licence | origin | personal data |", "|---|---|---|---|"]
    for found in sources:
        said = [found.terms.license, found.terms.origin, found.terms.personal_data]
        cells = [f"`{found.name}` ({found.field})", *(text or "not stated" for text in said)]
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return lines
