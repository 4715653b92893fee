"""The flywheel: collect feedback → audit → curate → train → evaluate beside the champion → gates → canary.

A canary outlives its cycle: the next call of the flow continues it, and begins a new cycle once it is decided. A person
promotes the candidate, with the flow `promote`. The recorder may go on meanwhile. What a cycle works with is
written down when it begins (`flywheel/CYCLE/cycle.json`): a cycle that was killed continues with the same feedback and
the same policy, and finds its stages in the store.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect import flow

from xray.flows.cycles import (
    CANARY,
    DONE,
    FILE,
    Cycle,
    cycle_directory,
    cycle_markdown,
    read_cycles,
    restore_files,
    write_cycle,
)
from xray.flows.lifecycle_graph import evaluation_fields, fields_of, scoring_fields
from xray.flows.lifecycle_run import open_workspace, prepare_deployment
from xray.flows.retraining import is_due, is_touched, sound_start, without_withdrawn
from xray.tasks.output_directory import saved_config
from xray.tasks.prefect_run import show
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import Workspace
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.canary import Canaries
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.graph import CheckpointGraph
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store, require_language_model, resolve
from xray_runtime.live import canary
from xray_runtime.live.feedback.canary import decide
from xray_runtime.live.feedback.collection import collect, sound_chain
from xray_runtime.live.feedback.publication import publish
from xray_runtime.live.feedback.session import read_sessions
from xray_runtime.live.flywheel import FlywheelConfig
from xray_runtime.methods.curate.kind import CURATE, RECORDED_PROMPTS
from xray_runtime.methods.dpo.kind import DPO
from xray_runtime.methods.evaluate.kind import EVALUATE
from xray_runtime.methods.kto.kind import KTO
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.ppo.kind import PPO
from xray_runtime.methods.preferences.kind import PREFERENCES
from xray_runtime.methods.reward_model.kind import REWARD_MODEL
from xray_runtime.trust import promotion
from xray_runtime.trust.gates import check_gates

BY = "flywheel"
"""Publishes a cycle's feedback, on record."""


def begin_cycle(output: Path, config: FlywheelConfig, release: bool, tracking_uri: str | None = None) -> Cycle | None:
    """The cycle to work on: one that was not finished, the held one that is released, or a new one; None if nothing was
    recorded since the last.

    Raises:
        ConfigError: what was recorded is not sound, or there is no policy to start from, or nothing to release.
    """
    cycles, store = _sound_cycles(output), open_lineage_store(output, tracking_uri)
    last = cycles[-1] if cycles else None
    if release:
        if last is None or last.state != "held":
            raise ConfigError("--release: is not allowed: the last cycle is not held")
        return last
    if last is not None and last.state == CANARY and not _canary_ended(output, store, last):
        return last
    project = saved_config(output).project
    if last is not None and last.state not in DONE:
        if not any(is_touched(store, sha) for sha in _of(last)):
            return last
        # Somebody withdrew meanwhile: it begins again.
        cycles = cycles[:-1]
        last = cycles[-1] if cycles else None
    chain, after = sound_chain(store), last.last if last is not None else 0
    if chain.last <= after and not is_due(store, f"{project}-policy", _of(last)):
        return None
    start, data = _start(store, project, config)
    collected = collect(store, project, BY, after + 1, chain.last).sha256
    judged = any(session.judgements for session in read_sessions(output))
    verdicts = publish(store, project, BY).checkpoint.sha256 if judged else None
    if verdicts is not None and is_touched(open_lineage_store(output, tracking_uri), verdicts):
        verdicts = None
    # A held cycle is one that nobody looked at: no later cycle may learn from it either.
    usable = [cycle for cycle in cycles if cycle.state != "held" and cycle.feedback[-1] in store.graph.nodes]
    window = usable[len(usable) - config.cycles + 1 :] if config.cycles > 1 else []
    before = [without_withdrawn(store, project, BY, cycle) for cycle in window]
    cycle = Cycle(
        number=last.number + 1 if last is not None else 1,
        first=after + 1,
        last=chain.last,
        feedback=[*before, collected],
        verdicts=verdicts,
        start=start,
        data=data,
    )
    write_cycle(output, cycle)
    return cycle


def _sound_cycles(output: Path) -> list[Cycle]:
    try:
        evidence().sound_view(output)
    except ValueError as error:
        raise ConfigError(f"--output: {error}; see `xray audit`") from None
    cycles = read_cycles(output)
    restore_files(output, cycles)
    return cycles


def _of(cycle: Cycle | None) -> list[str]:
    """The checkpoints that a cycle worked with, and the one that it made."""
    return [sha for sha in (*cycle.feedback, cycle.start, cycle.policy) if sha] if cycle is not None else []


def _canary_ended(output: Path, store: LineageStore, cycle: Cycle) -> bool:
    """Whether the canary of a cycle is decided; the cycle then says how."""
    canary = view(output).state(Canaries).get(cycle.canary or "")
    if canary is None:
        raise ConfigError(
            f"{cycle_directory(output, cycle) / FILE}: its canary is not in the signed log; see `xray audit`"
        )
    ended = decide(store, canary)
    if ended is not None:
        cycle.state = "candidate" if ended.outcome == "passed" else ended.outcome
        cycle.reasons = [f"canary: {ended.reason}"]
        write_cycle(output, cycle)
    return ended is not None


def _begin_canary(output: Path, store: LineageStore, project: str, config: FlywheelConfig, cycle: Cycle) -> None:
    """Let the candidate answer its share of the requests; without a champion nobody is served yet."""
    name = f"{project}-policy"
    champion = promotion.champion_of(store, name)
    if config.canary is None or champion is None or cycle.policy in (None, champion.checkpoint):
        return
    assert cycle.policy is not None
    first = sound_chain(store).last + 1
    cycle.canary = canary.begin(output, name, cycle.policy, champion.checkpoint, first, config.canary).id
    cycle.state = CANARY


def _start(store: LineageStore, project: str, config: FlywheelConfig) -> tuple[str, str]:
    """sha256 of (the champion, or the policy that `start` names; the dataset of the fixed set)."""
    champion = promotion.champion_of(store, f"{project}-policy")
    if champion is None and config.start is None:
        raise ConfigError(f"start: is required: {project}-policy has no champion; promote one, or name a policy")
    reference = champion.checkpoint if champion is not None else str(config.start)
    node = resolve(reference, store.output, store.tracking_uri)[1]
    require_language_model(node)
    node = sound_start(store, node)
    if config.data is not None:
        return node.sha256, resolve(config.data, store.output, store.tracking_uri)[1].sha256
    behind = [store.graph.nodes[sha] for sha in store.graph.ancestors([node.sha256]) if sha in store.graph.nodes]
    datasets = sorted(n.sha256 for n in behind if n.is_a(Dataset) and n.manifest.kind == "prepare")
    if not datasets:
        raise ConfigError(f"data: is required: {node.name} has no dataset among its ancestors")
    return node.sha256, datasets[0]


@flow(name="flywheel", flow_run_name="flywheel {output}", task_runner=task_runner(), persist_result=False)
def flywheel(
    output: str, config: FlywheelConfig, release: str | None = None, tracking_uri: str | None = None
) -> dict[str, Any]:
    """Make a candidate from the feedback since the last cycle; returns the record of the cycle.

    Args:
        output: output directory of a lifecycle that was served with `--record`.
        release: who releases the last cycle, which is held, and why.

    Raises:
        ConfigError: as `begin_cycle`.
    """
    root = Path(output).absolute()
    prepare_deployment(root)
    cycle = begin_cycle(root, config, release is not None, tracking_uri)
    if cycle is None:
        return {"state": "nothing new"}
    if cycle.state == CANARY:
        return cycle.model_dump(mode="json")
    if release is not None:
        config = config.model_copy(update={"rules": config.rules.model_copy(update={"released": release})})
    lifecycle = saved_config(root)
    record = {"cycle": cycle.number, "feedback": cycle.feedback, "flywheel": config.model_dump(mode="json")}
    directory = cycle_directory(root, cycle)
    with open_workspace(
        lifecycle, root, run_directory=directory, tracking_uri=tracking_uri, record=record
    ) as workspace:
        _work(workspace, lifecycle, config, cycle)
    if cycle.state == "candidate":
        _begin_canary(root, open_lineage_store(root, tracking_uri), lifecycle.project, config, cycle)
    write_cycle(root, cycle)
    show("flywheel", f"cycle {cycle.number}: {cycle.state}", cycle_markdown(cycle))
    return cycle.model_dump(mode="json")


def _work(workspace: Workspace, lifecycle: LifecycleConfig, config: FlywheelConfig, cycle: Cycle) -> None:
    """All stages of a cycle; fills in how it ended."""
    feedback = [workspace.checkpoint(sha) for sha in cycle.feedback]
    verdicts = [workspace.checkpoint(cycle.verdicts)] if cycle.verdicts is not None else []
    start, data = workspace.checkpoint(cycle.start), workspace.checkpoint(cycle.data)
    curated = CURATE(feedback=feedback, verdicts=verdicts, name="curate", **fields_of(config.rules))
    share = {"heldout_fraction": config.rules.heldout_fraction, "max_share": config.rules.max_share}
    seen = [workspace.checkpoint(sha) for sha in _trained_on(workspace, cycle)]
    prompts = RECORDED_PROMPTS(feedback=feedback, seen=seen, name="recorded-prompts", **share)
    cycle.numbers = _stats(curated)
    if cycle.numbers["held"]:
        cycle.state, cycle.reasons = "held", cycle.numbers["held"]
        return
    cycle.reasons = _too_little(config, cycle.numbers, _stats(prompts))
    if cycle.reasons:
        cycle.state = "too little"
        return
    policy = _trained(lifecycle, config, curated, start, data)
    # Without the rewards that a policy was trained on, the gates are the same whatever it learned from.
    fields = evaluation_fields(lifecycle) | {"judges": _judges(lifecycle)}
    recorded = EVALUATE(policy, start, prompts, name="evaluate-recorded", **fields)
    # The gates of a promotion read the last evaluation: the one on the fixed set.
    recorded.result()
    fixed = EVALUATE(policy, start, data, name="evaluate", **fields)
    cycle.policy = str(policy.result().sha256)
    evaluations = {name: e.result().sha256 for name, e in (("fixed", fixed), ("recorded", recorded))}
    graph = _graph(workspace)
    candidate, gates = graph.nodes[cycle.policy], lifecycle.promotion
    cycle.gates = {
        name: check_gates(graph, candidate, graph.nodes[sha], None, None, gates) for name, sha in evaluations.items()
    }
    failed = [f"{name}: {gate.reason}" for name, found in cycle.gates.items() for gate in found if not gate.passed]
    cycle.state, cycle.reasons = ("refused", failed) if failed else ("candidate", [])
    if not failed:
        workspace.register(policy, fixed)


def _trained(
    lifecycle: LifecycleConfig, config: FlywheelConfig, curated: Handle, start: Handle, data: Handle
) -> Handle:
    if config.kto is not None:
        return KTO(start, verdicts=curated, data=data, name="kto", **fields_of(config.kto))
    pairs = PREFERENCES(judgements=curated, data=data, name="preferences", source="curated")
    if config.dpo is not None:
        return DPO(start, pairs, name="dpo", **fields_of(config.dpo))
    assert config.ppo is not None
    fields = fields_of(config.ppo) | scoring_fields(lifecycle)
    reward = REWARD_MODEL(start, pairs, name="reward", **fields_of(fields.pop("reward")))
    rewards = [reward, *(term.model_dump() for term in lifecycle.rewards)]
    if config.ppo.validation is not None:
        fields["judges"] = _judges(lifecycle)
    return PPO(start, data, reference=start, rewards=rewards, name="ppo", **fields)


def _judges(lifecycle: LifecycleConfig) -> list[dict[str, Any]]:
    return [term.model_dump() for term in lifecycle.evaluate.judges]


def _trained_on(workspace: Workspace, cycle: Cycle) -> list[str]:
    """The data in the policy's past."""
    graph = _graph(workspace)
    behind = [*graph.ancestors([cycle.start]), cycle.data]
    return sorted({sha for sha in behind if sha in graph.nodes and graph.nodes[sha].is_data})


def _graph(workspace: Workspace) -> CheckpointGraph:
    return open_lineage_store(workspace.output, workspace.run_record.tracking_uri).graph


def _stats(handle: Handle) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((handle.result().path / "stats.json").read_text(encoding="utf-8"))
    return content


def _too_little(config: FlywheelConfig, counts: dict[str, Any], prompts: dict[str, Any]) -> list[str]:
    kind = "pairs" if config.kto is None else "labels"
    missing = []
    if counts[f"{kind}_train"] < config.min_rows:
        missing.append(f"{counts[f'{kind}_train']} {kind} to train on; at least {config.min_rows} (min_rows)")
    if config.kto is None and not counts["pairs_heldout"]:
        missing.append("no pair of a held-out user (rules.heldout_fraction)")
    if prompts["heldout_pairs"] < config.min_prompts:
        missing.append(f"{prompts['heldout_pairs']} recorded prompts; at least {config.min_prompts} (min_prompts)")
    return missing
