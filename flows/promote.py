"""Promotion as a flow: audit, comparison with the champion, gates, a person's approval, signed decision.

`xray promote` asks at the terminal. A deployment suspends itself with a form on its page in Prefect, for days if need
be. When it is resumed, it repeats everything but the comparison, so that it promotes what it has just audited, and asks
again if the review has changed. `rollback` undoes the last promotion.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import Flow, flow
from prefect.artifacts import create_markdown_artifact
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment
from pydantic import Field

from xray.tasks.output_directory import saved_config
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import Workspace
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.handles import Handle, RewardSource, reward
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store, resolve
from xray_runtime.kernel.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.tracking.registry_view import RegistryView
from xray_runtime.methods.compare.kind import COMPARE
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.rewards.config import reward_term
from xray_runtime.trust import promotion
from xray_runtime.trust.gates import NotPromoted, gates_for
from xray_runtime.trust.promotion import PromotionReview

STAGE = "compare"
MAX_SAMPLES = 6


class ApprovalInput(RunInput):
    """A person's answer."""

    approve: bool
    name: str = Field(min_length=1, description="Your name; it is recorded, not checked.")
    note: str = Field(min_length=1, description="Your reason; it is recorded with the decision.")


Ask = Callable[[PromotionReview, LineageStore], ApprovalInput]
"""Asks a person about a review."""


@flow(name="promote", flow_run_name="promote {name}", persist_result=False)
def promote(
    output: str,
    name: str,
    candidate: str | None = None,
    gates: PromotionConfig | None = None,
    tracking_uri: str | None = None,
    public_key: str | None = None,
    verdicts: str | None = None,
) -> dict[str, Any]:
    """Make a candidate champion of the registered model `name`, if it passes and a person approves.

    Args:
        output: output directory of the lifecycle.
        candidate: as in `xray lineage`; by default the version with the alias `candidate`.
        gates: bounds set by hand; all others come from the record of the candidate's evaluation.
        verdicts: human verdicts on candidate and champion, as `xray preferences` published them, for the
            comparison.

    Raises:
        NotPromoted: the audit, a gate or a person refused.
    """
    return _promote(_ask_on_page, output, name, candidate, gates, tracking_uri, public_key, verdicts)


def promote_flow(ask: Callable[[str], ApprovalInput]) -> Flow[..., dict[str, Any]]:
    """The flow `promote`, for a process in which `ask` asks the person, given the review as text."""

    @flow(name=promote.name, flow_run_name=promote.flow_run_name, persist_result=False)
    @functools.wraps(promote.fn)
    def asking(*parameters: Any) -> dict[str, Any]:
        return _promote(lambda seen, store: ask(review_markdown(seen, store)), *parameters)

    return asking


def _promote(
    ask: Ask,
    output: str,
    name: str,
    candidate: str | None,
    gates: PromotionConfig | None,
    tracking_uri: str | None,
    public_key: str | None,
    verdicts: str | None,
) -> dict[str, Any]:
    root = Path(output).absolute()
    public = Path(public_key) if public_key else None
    store, node = resolve(candidate or f"{name}@candidate", root, tracking_uri)
    judged = resolve(verdicts, root, tracking_uri)[1].sha256 if verdicts is not None else None
    try:
        store, comparison = _comparison(root, store, node, name, gates, public, judged)
        seen = promotion.review(store, node, name=name, gates=gates, comparison=comparison, public=public)
        answer = ask(seen, store)
        if not answer.approve:
            promotion.decline(store, seen, by=answer.name, note=answer.note)
            raise NotPromoted([f"{answer.name} declined: {answer.note}"])
        promotion.promote(store, seen, by=answer.name, note=answer.note)
    except NotPromoted as error:
        reasons = "\n".join(f"- {_escape(reason)}" for reason in error.reasons)
        _publish(f"**{_escape(node.name)} is not promoted**\n\n{reasons}", root)
        raise
    review = review_markdown(seen, store, samples=False)
    _publish(f"**{_escape(answer.name)} promoted it:** {_escape(answer.note)}\n\n{review}", root)
    return {
        "name": name,
        "version": seen.version,
        "checkpoint": node.sha256,
        "gates": [gate.model_dump() for gate in seen.gates],
        "gates_from": seen.gates_from,
        "evidence": seen.evidence,
        "by": answer.name,
        "note": answer.note,
    }


def _comparison(
    root: Path,
    store: LineageStore,
    node: Node,
    name: str,
    gates: PromotionConfig | None,
    public: Path | None,
    verdicts: str | None,
) -> tuple[LineageStore, Node | None]:
    """The store with the comparison of the candidate with the champion; None if no gate needs one."""
    champion = promotion.champion_of(store, name)
    if (
        champion is None
        or champion.checkpoint == node.sha256
        or gates_for(store, node, gates, public).config.max_regression is None
    ):
        if verdicts is not None:
            raise ConfigError("verdicts: are not allowed without a comparison (promotion.max_regression, a champion)")
        return store, None
    comparison = find_comparison(store, node, champion.checkpoint, verdicts)
    if comparison is None:
        # Compute nothing for a candidate that cannot pass.
        alone = (gates or PromotionConfig()).model_copy(update={"max_regression": None})
        promotion.review(store, node, name=name, gates=alone, public=public)
        compare(str(root), name, node.sha256, champion.checkpoint, store.tracking_uri, verdicts)
        store = open_lineage_store(root, store.tracking_uri)
        comparison = find_comparison(store, node, champion.checkpoint, verdicts)
    return store, comparison


@flow(name="rollback", flow_run_name="rollback {name}", persist_result=False)
def rollback(
    output: str, name: str, by: str, note: str, tracking_uri: str | None = None, public_key: str | None = None
) -> dict[str, Any]:
    """Make the previous champion of `name` champion again, if its audit is sound, and record by whom and why."""
    root = Path(output).absolute()
    public = Path(public_key) if public_key else None
    decision = promotion.roll_back(open_lineage_store(root, tracking_uri), name=name, by=by, note=note, public=public)
    _publish(f"**{_escape(by)} rolled {name} back to version {decision.version}:** {_escape(note)}", root)
    return {"name": name, "version": decision.version, "checkpoint": decision.checkpoint}


@flow(name="compare", flow_run_name="compare {name}", task_runner=task_runner(), persist_result=False)
def compare(
    output: str, name: str, candidate: str, champion: str, tracking_uri: str | None = None, verdicts: str | None = None
) -> str:
    """Let candidate and champion (their sha256s) answer the same held-out prompts; returns the comparison's sha256.

    It is a checkpoint like any other: signed, recorded in MLflow, never computed twice.
    """
    root = Path(output).absolute()
    store = open_lineage_store(root, tracking_uri)
    spec = promotion.comparison_spec(store.graph, store.graph.nodes[candidate], champion, verdicts)
    judged = f"-{verdicts[:12]}" if verdicts is not None else ""
    directory = root / "comparisons" / f"{candidate[:12]}-{champion[:12]}{judged}"
    directory.mkdir(parents=True, exist_ok=True)
    with Workspace(
        root,
        project=name.removesuffix("-policy"),
        seed=spec.seed,
        runtime=saved_config(root).runtime.model_copy(update=spec.runtime),
        record={"compare": candidate, "with": champion},
        run_directory=directory,
        tracking_uri=store.tracking_uri,
    ) as workspace:
        roles = {role: workspace.checkpoint(sha256) for role, sha256 in spec.parents.items()}
        config = dict(spec.config)
        sources = {of: [_source(term, roles) for term in config.pop(of)] for of in ("rewards", "judges")}
        seen = [handle for role, handle in roles.items() if role.partition(".")[0] == promotion.SEEN]
        people = {role: handle for role, handle in roles.items() if role == promotion.VERDICTS}
        compared = COMPARE(
            roles["policy"], roles["champion"], roles["prompts"], seen=seen, name=STAGE, **people, **sources, **config
        )
    return str(compared.result().sha256)


def _source(term: dict[str, Any], roles: dict[str, Handle]) -> RewardSource | dict[str, Any]:
    """A recorded reward source, with handles for its models."""
    read = reward_term(**term)
    fields = {name: value for name, value in term.items() if name != read.field}
    return reward([roles[role] for role in read.roles], **fields) if read.roles else term


def review_markdown(seen: PromotionReview, store: LineageStore, *, samples: bool = True) -> str:
    """The review for the person who decides, as Markdown.

    Args:
        samples: whether to show texts. Prefect keeps what it shows, where no withdrawal reaches: it gets their path.
    """
    champion = f"version {seen.champion.version} `{seen.champion.checkpoint[:12]}`" if seen.champion else "none yet"
    lines = [
        f"Promote version {seen.version} of `{seen.name}` (`{seen.candidate.sha256[:12]}`) to champion? "
        f"The current champion: {champion}. The audit is sound and every gate passes:",
        "",
        *(f"- {gate.name}: {_escape(gate.reason)}" for gate in seen.gates),
        "",
        f"The gates are {_escape(seen.gates_from)}.",
    ]
    shown = store.graph.nodes[seen.evidence.get("comparison", seen.evidence["evaluation"])]
    path = shown.directory / "samples.json"
    if not samples:
        return "\n".join([*lines, "", f"Samples: `{path}`, and `xray studio`."])
    for sample in json.loads(path.read_text(encoding="utf-8"))[:MAX_SAMPLES]:
        lines += ["", f"**{_escape(str(sample['prompt']))}**", ""]
        sides = [key for key, value in sample.items() if key != "prompt" and isinstance(value, str)]
        lines += [f"- {side}: {_escape(str(sample[side]))}" for side in sides]
    return "\n".join(lines)


def _ask_on_page(seen: PromotionReview, store: LineageStore) -> ApprovalInput:
    if deployment.id is None:
        raise ConfigError("promote: needs a person to approve: run it as a deployment, or with `xray promote`")
    # The key binds the answer to this review, samples included: after a change, the person is asked again.
    key = digest({"asked": review_markdown(seen, store)})[:16]
    text = review_markdown(seen, store, samples=False)
    answer: ApprovalInput = suspend_flow_run(wait_for_input=ApprovalInput.with_initial_data(description=text), key=key)
    return answer


def find_comparison(store: LineageStore, candidate: Node, champion: str, verdicts: str | None) -> Node | None:
    """The comparison of these two under the current code, if it is in the store and in MLflow."""
    assert store.tracking_uri is not None
    spec = promotion.comparison_spec(store.graph, candidate, champion, verdicts)
    config = COMPARE.validated(spec.config)
    runtime = RuntimeConfig.model_validate(spec.runtime)
    memory = DigestMemory(store.output / DIGESTS)
    identity, _ = identify(COMPARE, STAGE, config, spec.seed, runtime, spec.parents, {}, memory)
    node = next((n for n in store.graph.nodes.values() if n.manifest.key == identity.key), None)
    return node if node is not None and RegistryView(store.tracking_uri).by_sha.get(node.sha256) else None


def _publish(text: str, root: Path) -> None:
    create_markdown_artifact(text, key="promotion", description=str(root))


def _escape(text: str) -> str:
    return re.sub(r"([\\*`])", r"\\\1", text).replace("\n", " ").replace("<", "&lt;")
