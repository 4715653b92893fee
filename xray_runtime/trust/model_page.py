"""MLflow's pages of a registered model: descriptions and tags, generated from signed records alone.

MLflow lets anybody edit them without a trace, so the audit generates them again and reports differences
(`audit/registry.py`). Nothing in them depends on the machine, the directory or the process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from xray_runtime.kernel.evidence.log import read_object, view
from xray_runtime.kernel.evidence.statement import signer_of
from xray_runtime.kernel.evidence.view import Decision
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import CANDIDATE, CHAMPION
from xray_runtime.kernel.report.rendering import template
from xray_runtime.kernel.store.checkpoints import read_manifest, statement_sha256
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.tracking.registry import LOG_TAG, TRAINING, ModelRegistry
from xray_runtime.trust.card import result_rows
from xray_runtime.trust.log import decide

PROMOTE_TAG = "xray.promote"
FORM = 1
"""Number of this wording, in the signed registration. A release that changes the wording counts it up: the audit
regenerates only pages whose wording it has."""
PREFIX = "xray."
"""Begins the tags that X-ray writes; users may add others."""
BY_HAND = "with `xray promote` only: an alias moved by hand is a finding of `xray audit`"


class Page(NamedTuple):
    """A page of MLflow."""

    description: str
    tags: dict[str, str]


def model_page(name: str) -> Page:
    """The page of a registered model."""
    text = (
        f"Policies registered by X-ray. `{CANDIDATE}` is the newest one; `{CHAMPION}` is the one that was promoted.\n\n"
        f"**Promote {BY_HAND}.** `xray promote --output DIR --name {name}` audits the candidate, checks its gates and "
        "signs the decision."
    )
    return Page(text, {PROMOTE_TAG: BY_HAND})


def version_page(
    name: str,
    decisions: Sequence[Decision],
    find: Callable[[str], Node | None],
    experiment_of: Callable[[str], str | None],
) -> Page | None:
    """The page of one version; None where its signed registration asks for none of this form.

    Args:
        decisions: all decisions about this version, in order.
        experiment_of: run → its experiment, for the link to the run that made the policy; None where it is unknown.

    Raises:
        ValueError: a checkpoint that the registration names is missing, or its statement is another one.
    """
    registration = registration_of(decisions)
    if registration is None or registration.page != FORM:
        return None
    evidence = registration.evidence
    policy = _found(registration.checkpoint, find)
    evaluation = _found(evidence["evaluation"], find) if "evaluation" in evidence else None
    if policy.statement is None or statement_sha256(policy.directory) != evidence.get("statement"):
        raise ValueError(f"{policy.name} has another statement than it was registered with")
    signer, build = signer_of(policy.directory), policy.statement.predicate.build
    stages = {d.name: (d.uri or "").removeprefix("xray:") for d in build.dependencies}
    run_id = policy.statement.predicate.details.run.mlflow_parent_run_id
    experiment = experiment_of(run_id) if run_id is not None else None
    bounds = evaluation.statement.predicate.details.run.gates if evaluation and evaluation.statement else None
    text = template("model_page.md").render(
        stage=policy.manifest.stage,
        kind=policy.manifest.kind,
        by_hand=BY_HAND,
        parents=[(role, stages.get(role, ""), sha256) for role, sha256 in sorted(policy.manifest.parents.items())],
        origins=build.internal.origins,
        evaluation=evaluation.name if evaluation is not None else None,
        results=result_rows(read_object(evaluation.directory / "evaluation.json")) if evaluation is not None else [],
        decided=[d for d in decisions if d.alias == CHAMPION and d.action in ("promote", "decline", "rollback")],
        bounds=sorted((gate, json.dumps(bound)) for gate, bound in (bounds or {}).items()),
        run=f"#/experiments/{experiment}/runs/{run_id}" if experiment is not None else None,
        training=TRAINING,
        checkpoint=policy.sha256,
        signer=signer,
        version=f"{name}/{registration.version}",
    )
    tags = {
        "xray.statement": evidence["statement"],
        "xray.signed_by": signer,
        "xray.evaluation": evaluation.sha256 if evaluation is not None else "none",
        PROMOTE_TAG: BY_HAND,
    }
    return Page(text, tags)


def registration_of(decisions: Sequence[Decision]) -> Decision | None:
    """The last registration among the decisions about a version."""
    return next((decision for decision in reversed(decisions) if decision.action == "register"), None)


def _found(sha256: str, find: Callable[[str], Node | None]) -> Node:
    node = find(sha256)
    if node is None:
        raise ValueError(f"checkpoint {sha256[:12]} is not in the store")
    return node


def register_policy(
    output: Path,
    registry: ModelRegistry,
    name: str,
    policy: CheckpointRef,
    run_id: str,
    evaluation: CheckpointRef | None,
    *,
    by: str | None = None,
    note: str = "",
) -> str:
    """Make `policy` the newest version of the registered model `name`; returns the version.

    The caller holds a lock: when two runs register at the same time, the one that moves the alias last must also
    decide last.
    """
    version = registry.register(name, policy, run_id, CANDIDATE)
    evidence = {"statement": statement_sha256(policy.path), "evaluation": evaluation and evaluation.sha256}
    evidence = {what: sha256 for what, sha256 in evidence.items() if sha256 is not None}
    fields: dict[str, Any] = {"name": name, "alias": CANDIDATE, "version": version, "checkpoint": policy.sha256}
    decide(output, by=by, note=note, action="register", evidence=evidence, page=FORM, **fields)
    refs = [ref for ref in (policy, evaluation) if ref is not None]
    nodes = {ref.sha256: Node(ref.sha256, ref.path, read_manifest(ref.path)[0]) for ref in refs}
    write_pages(registry, output, name, [version], nodes)
    return version


def model_addresses(output: Path, checkpoints: Collection[str] | None) -> list[str]:
    """Addresses below MLflow's of the versions that aliases point to; of `checkpoints` alone, unless it is None."""
    moves = view(output).decided.values()
    versions = {(m.name, m.version) for m in moves if checkpoints is None or m.checkpoint in checkpoints}
    return [f"#/models/{quote(name)}/versions/{quote(version)}" for name, version in sorted(versions)]


def write_pages(
    registry: ModelRegistry, output: Path, name: str, versions: Iterable[str], nodes: Mapping[str, Node]
) -> None:
    """Write the pages of a registered model and of some of its versions."""
    registry.describe_model(name, *model_page(name))
    decisions = view(output).decisions_by_version
    for version in versions:
        # A page that cannot be made stays as it is; the audit reports it with the reason.
        with contextlib.suppress(ValueError):
            page = version_page(name, decisions[name, version], nodes.get, registry.experiment_of)
            if page is not None:
                tags = page.tags | {LOG_TAG: view(output).mark}
                registry.describe_version(name, version, page.description, tags)
