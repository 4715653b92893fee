"""What MLflow's pages say about a registered model: a description and tags, generated from signed records alone.

MLflow lets anybody edit both without a trace, so the audit generates them again and names a difference
(`audit/pages.py`). They therefore hold nothing that depends on the machine, the directory or the process.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from xray_runtime.lineage.card import result_rows
from xray_runtime.lineage.decisions import current, decide, decisions_by_version
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.log import Decision, mark
from xray_runtime.lineage.signing import signer_of, signing_key
from xray_runtime.store.checkpoints import read_bounded, read_manifest, statement_sha256
from xray_runtime.store.manifest import SIGNATURE
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.tracking.registry import LOG_TAG, TRAINING, Registry

CANDIDATE, CHAMPION = "candidate", "champion"
PROMOTE_TAG = "xray.promote"
FORM = 1
"""Of these pages, in the signed registration. A release that words them otherwise counts on: the audit generates again
only what it can word the same."""
PREFIX = "xray."
"""Tags of ours; users may add others."""
BY_HAND = "with `xray promote` only: an alias moved by hand is a finding of `xray audit`"


class Page(NamedTuple):
    """What a page of MLflow shows."""

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
        decisions: all that were taken about this version, in order.
        find: sha256 → checkpoint.
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
    signer = signer_of(policy.directory / SIGNATURE)
    tags = {
        "xray.statement": evidence["statement"],
        "xray.signed_by": signer,
        "xray.evaluation": evaluation.sha256 if evaluation is not None else "none",
        PROMOTE_TAG: BY_HAND,
    }
    lines = [f"**{_code(policy.manifest.stage)}**, a checkpoint of kind {_code(policy.manifest.kind)}, made by X-ray."]
    lines += ["", f"**Promote {BY_HAND}.**"]
    lines += ["", "### Made from", *_parents(policy)]
    lines += ["", "### Evaluation", *_evaluation(evaluation)]
    lines += ["", "### Gates", *_gates(evaluation, decisions)]
    lines += ["", "### Records", *_records(policy, name, registration.version, signer, experiment_of)]
    return Page("\n".join(lines), tags)


def registration_of(decisions: Sequence[Decision]) -> Decision | None:
    """The last registration among the decisions about a version."""
    return next((decision for decision in reversed(decisions) if decision.action == "register"), None)


def _found(sha256: str, find: Callable[[str], Node | None]) -> Node:
    node = find(sha256)
    if node is None:
        raise ValueError(f"checkpoint {sha256[:12]} is not in the store")
    return node


def _parents(policy: Node) -> list[str]:
    assert policy.statement is not None
    build = policy.statement.predicate.build
    stages = {d.name: (d.uri or "").removeprefix("xray:") for d in build.dependencies}
    lines = ["| input | stage | checkpoint |", "|---|---|---|"]
    for role, sha256 in sorted(policy.manifest.parents.items()):
        lines.append(f"| {_code(role)} | {_code(stages.get(role, ''))} | `{sha256[:12]}` |")
    for what, title in (("base_models", "Base models"), ("datasets", "Datasets")):
        named = ", ".join(map(_code, build.internal.origins.get(what, []))) or "none"
        lines += ["", f"{title}: {named}"]
    return lines


def _evaluation(evaluation: Node | None) -> list[str]:
    if evaluation is None:
        return ["It was registered without an evaluation, and cannot be promoted."]
    results: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        results = json.loads(read_bounded(evaluation.directory / "evaluation.json"))
    rows = result_rows(results) if isinstance(results, dict) else []
    return [f"By {_code(evaluation.name)}, on held-out prompts.", "", "| result | value |", "|---|---|", *rows]


def _gates(evaluation: Node | None, decisions: Sequence[Decision]) -> list[str]:
    """What people decided about this version, and the bounds it has to meet until then."""
    taken = [d for d in decisions if d.alias == CHAMPION and d.action in ("promote", "decline", "rollback")]
    lines = []
    for decision in taken:
        lines.append(f"- {decision.action}, {_plain(decision.at)}, by {_plain(decision.by)}: {_plain(decision.note)}")
        for gate in decision.gates:
            passed = "passed" if gate.get("passed") else "failed"
            lines.append(f"    - {_code(str(gate.get('name')))} {passed}: {_plain(str(gate.get('reason')))}")
    if taken:
        return lines
    bounds = evaluation.statement.predicate.details.run.gates if evaluation and evaluation.statement else None
    if not bounds:
        return ["Not decided yet. `xray promote` checks the default gates."]
    lines = ["Not decided yet. `xray promote` checks:", "", "| gate | bound |", "|---|---|"]
    return lines + [f"| {_code(name)} | {_bound(bound)} |" for name, bound in sorted(bounds.items())]


def _bound(value: Any) -> str:
    return "off" if value is None else _code(json.dumps(value))


def _records(
    policy: Node, name: str, version: str, signer: str, experiment_of: Callable[[str], str | None]
) -> list[str]:
    assert policy.statement is not None
    run_id = policy.statement.predicate.details.run.mlflow_parent_run_id
    experiment_id = experiment_of(run_id) if run_id is not None else None
    lines = []
    if experiment_id is not None:
        page = f"#/experiments/{experiment_id}/runs/{run_id}"
        lines.append(f"- [Run]({page}{TRAINING}) that made it, [its report and record]({page}/artifacts{TRAINING})")
    lines += [
        f"- Checkpoint `{policy.sha256}`",
        f"- Signed with key `{signer}`. MLflow does not check the signature; this does: "
        f"`xray audit {name}/{version} --output DIR`",
    ]
    return lines


def _code(text: str) -> str:
    """`text` as code, also inside a table."""
    return "`" + re.sub(r"\s+", " ", text.replace("`", "'").replace("|", "\\|")) + "`"


def _plain(text: str) -> str:
    """What a person typed, without Markdown or HTML in it."""
    return re.sub(r"([\\`*_\[\]<>|#!])", r"\\\1", re.sub(r"\s+", " ", text))


def register_policy(
    output: Path,
    registry: Registry,
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
    evidence = {"statement": statement_sha256(policy.path)}
    if evaluation is not None:
        evidence["evaluation"] = evaluation.sha256
    decide(
        output,
        signing_key(output),
        action="register",
        name=name,
        alias=CANDIDATE,
        version=version,
        checkpoint=policy.sha256,
        by=by,
        note=note,
        page=FORM,
        evidence={what: sha256 for what, sha256 in evidence.items() if sha256 is not None},
    )
    refs = [policy, *([evaluation] if evaluation is not None else [])]
    nodes = {ref.sha256: Node(ref.sha256, ref.path, read_manifest(ref.path)[0]) for ref in refs}
    write_pages(registry, output, name, [version], nodes)
    return version


def model_addresses(output: Path, checkpoints: Collection[str] | None) -> list[str]:
    """Where MLflow shows the versions that aliases were put to; what follows the address of its server.

    Args:
        checkpoints: of these alone.
    """
    moves = current(output).values()
    versions = {(m.name, m.version) for m in moves if checkpoints is None or m.checkpoint in checkpoints}
    return [f"#/models/{quote(name)}/versions/{quote(version)}" for name, version in sorted(versions)]


def write_pages(
    registry: Registry, output: Path, name: str, versions: Iterable[str], nodes: Mapping[str, Node]
) -> None:
    """Write the pages of a registered model and of some of its versions."""
    registry.describe_model(name, *model_page(name))
    decisions = decisions_by_version(output)
    for version in versions:
        # A page that cannot be made stays as it is: the audit names it, and says why.
        with contextlib.suppress(ValueError):
            page = version_page(name, decisions[name, version], nodes.get, registry.experiment_of)
            if page is not None:
                tags = page.tags | {LOG_TAG: mark(output)}
                registry.describe_version(name, version, page.description, tags)
