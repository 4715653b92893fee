"""The lifecycle flow: prepare → base → SFT → preferences → reward model → PPO stages → evaluation → registration.

Each stage is one Prefect task on Ray under an explicit key (see `checkpoints.identity`). Running again computes only
what is new; a checkpoint that is missing or damaged is noticed and computed again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import getpass
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from prefect import flow
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.settings import get_current_settings
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray.flows.lineage import publish_lineage
from xray.tasks.prefect_state import crash_lost_flow_run, crash_lost_task_run
from xray.tasks.preflight import check_servers
from xray.tasks.results import PlainResults
from xray.tasks.run_summary import RunSummary, unfinished
from xray.tasks.sharing import share_result
from xray.tasks.stage import RunContext, StageResult, forwarded_variables, stage
from xray.tasks.workspace import CONFIG, LIFECYCLE_LOCK, file_lock
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import check_storage, resolved_yaml
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.credentials import bare, tracking_address
from xray_runtime.errors import is_cancelled
from xray_runtime.feedback.publication import judged_dataset
from xray_runtime.files import write_atomic
from xray_runtime.lineage.attestation import publish_card
from xray_runtime.lineage.audit.registry import Snapshot
from xray_runtime.lineage.decisions import decide
from xray_runtime.lineage.keys import exchange_keys
from xray_runtime.lineage.reference import open_place
from xray_runtime.lineage.signing import signing_key
from xray_runtime.processes import redirect_output
from xray_runtime.progress import open_progress
from xray_runtime.stages.spec import JUDGEMENTS, StagePlan, StageSpec, plan_stages
from xray_runtime.store.checkpoints import CHECKPOINTS, Store, load_manifest, verify
from xray_runtime.store.identity import stage_key
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.store.shared import open_shared
from xray_runtime.tracking.mlflow_tracker import Tracker
from xray_runtime.workers.nodes import here, is_on_all_nodes, machines
from xray_runtime.workers.placement import resolve_layouts, with_device
from xray_runtime.workers.pool import open_worker_pool
from xray_runtime.workers.whole_model import expect_models

log = logging.getLogger(__name__)

ALIAS = "candidate"
STOP_SECONDS = 60
"""How long a stage has for its last snapshot when the run is interrupted."""


@flow(
    name="lifecycle",
    flow_run_name="{config.project} seed {config.seed}",
    task_runner=RayTaskRunner(
        address=os.environ.get("RAY_ADDRESS"), init_kwargs={"log_to_driver": False, "logging_level": "ERROR"}
    ),
    persist_result=False,
)
def lifecycle(config: LifecycleConfig, output: str = "runs/lifecycle") -> dict[str, Any]:
    """Run a whole lifecycle into the directory `output`; returns what `lifecycle.json` says."""
    root = Path(output).absolute()
    root.mkdir(parents=True, exist_ok=True)
    # Of a deployment and a command line, the second must stay out.
    with file_lock(root, LIFECYCLE_LOCK):
        return _lifecycle(config, root)


def _lifecycle(config: LifecycleConfig, root: Path) -> dict[str, Any]:
    if deployment.id is not None and threading.current_thread() is threading.main_thread():
        # A worker that dies takes the pipe along that this process prints into.
        redirect_output(root / "logs" / "lifecycle.log")
        # Starting Ray put a handler in place that aborts; a run that is cancelled on its page makes a snapshot first.
        signal.signal(signal.SIGTERM, terminate)
    # What cannot work is noticed before anything is computed.
    config, _ = resolve_layouts(config)
    if deployment.id is not None:
        # Of a command, it was checked before anything was started.
        check_storage(config)
    if only_node(root) is None:
        check_servers(machines())
    # Through the board the stages hear of an interruption; it lasts as long as somebody holds it.
    stable, board = open_worker_pool(), open_progress()
    plans = plan_stages(config)
    try:
        with recorded(config, root, root, {}) as (tracker, context, summary):
            done = run_stages(plans, config, tracker, context, summary)
            policy, evaluation = done[plans[-1].parents["policy"]], done["evaluate"].checkpoint.path
            publish_card(evaluation, policy.checkpoint.path)
            name = f"{config.project}-policy"
            version = tracker.register(name, policy.checkpoint, policy.mlflow_run_id, ALIAS)
            decide(
                root,
                signing_key(root),
                action="register",
                name=name,
                alias=ALIAS,
                version=version,
                checkpoint=policy.checkpoint.sha256,
                by=context.trigger.get("by"),
                note=f"flow run {context.flow_run_id}",
            )
            summary.completed(evaluation, {"name": name, "version": version, "alias": ALIAS})
            tracker.log_files(context.parent_run_id, summary.path, summary.report)
    finally:
        ray.kill(stable)
        del board
    create_markdown_artifact(summary.markdown(tracker.page), key="lifecycle", description=f"{config.project}: {root}")
    place = open_place(root, context.tracking_uri)
    publish_lineage(place, place.graph.nodes[policy.checkpoint.sha256])
    return summary.content


@contextlib.contextmanager
def recorded(
    config: LifecycleConfig, root: Path, place: Path, tags: dict[str, str]
) -> Iterator[tuple[Tracker, RunContext, RunSummary]]:
    """What is recorded of one lifecycle in `root`: MLflow's run, and a journal in `place`. Both say how it ended.

    Where a run of the same config in `place` was cut short, its MLflow run goes on.

    Args:
        tags: of the MLflow run.
    """
    write_atomic(place / CONFIG, resolved_yaml(config))
    signing_key(root)
    exchange_keys(root, open_shared(config.runtime.storage))
    before = unfinished(place, config)
    if before is not None:
        crash_lost_flow_run(before["flow_run_id"], flow_run.id)
    tracker, context = _start(config, root, before, tags)
    summary = RunSummary(root, place, config, context.parent_run_id, flow_run.id)
    _link(tracker, context)
    try:
        yield tracker, context, summary
        tracker.finish(context.parent_run_id, "FINISHED")
    except BaseException as error:
        summary.failed()
        tracker.finish(context.parent_run_id, "KILLED" if is_cancelled(error) else "FAILED")
        raise


def run_stages(
    plans: list[StagePlan], config: LifecycleConfig, tracker: Tracker, context: RunContext, summary: RunSummary
) -> dict[str, StageResult]:
    """The results of `plans`, the first stages of `config`, by name. In a flow on Ray."""
    # Settled for good: a cluster that loses its last GPU must not go on on CPUs.
    config = with_device(config)
    judged = judged_dataset(config, Path(context.output))
    done: dict[str, StageResult] = {}
    computing = False
    for number, plan in enumerate(plans):
        parents = {role: done[name].checkpoint for role, name in plan.parents.items()}
        if plan.kind == "preferences" and judged is not None:
            parents[JUDGEMENTS] = judged.reference(Snapshot(context.tracking_uri).model_of(judged.sha256))
        start = time.perf_counter()
        if computing and number + 1 < len(plans):
            expect_models(config, plans[number + 1].name)
        result, cached = run_stage(plan, parents, context, config.seed, config.runtime)
        if cached:
            result = _link_cached(tracker, context, result, list(parents.values()))
        done[plan.name], computing = result, computing or not cached
        summary.stage_done(result, cached, time.perf_counter() - start)
    return done


def terminate(*_: Any) -> None:
    """Signal handler: end the flow as one that was cancelled."""
    # A second one must not cut the snapshot short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TerminationSignal(signal.SIGTERM)


def _start(
    config: LifecycleConfig, root: Path, before: dict[str, Any] | None, more_tags: dict[str, str]
) -> tuple[Tracker, RunContext]:
    uri = tracking_address()
    artifacts = None if uri else root / "mlartifacts"
    uri = uri or f"sqlite:///{root / 'mlflow.db'}"
    tracker = Tracker(uri, config.project, artifacts)
    flow_run_id, trigger = trigger_of_run()
    tags = prefect_tags()
    page = tags.get("prefect.flow_run")
    run_id = tracker.start_lifecycle(
        before["run_id"] if before is not None else None,
        f"{config.project} seed {config.seed}",
        config.model_dump(mode="json"),
        resolved_yaml(config),
        {"xray.output": str(root)}
        | more_tags
        | tags
        | ({"mlflow.note.content": f"[Prefect flow run]({page})"} if page else {}),
    )
    return tracker, RunContext(
        output=str(root),
        tracking_uri=uri,
        experiment=config.project,
        parent_run_id=run_id,
        flow_run_id=flow_run_id,
        trigger=trigger,
        node=only_node(root),
        tags=tags,
        variables=forwarded_variables(),
    )


@functools.cache
def only_node(root: Path) -> str | None:
    """The node that stages must run on, this one, where another does not see the output directory; else None.

    Asked once: what joins later is expected to be like the others.
    """
    if is_on_all_nodes(root):
        return None
    log.warning("%s is not on a disk that all nodes share: stages run on this node, which sends the others files", root)
    return here()


def _link(tracker: Tracker, context: RunContext) -> None:
    page = tracker.page(context.parent_run_id)
    if page is not None:
        create_link_artifact(page, link_text="this run in MLflow", key="mlflow", description=context.output)


def prefect_tags() -> dict[str, str]:
    """Tags by which an MLflow run leads to this flow run: its id, and its page where the server shows pages."""
    settings = get_current_settings()
    if not flow_run.id:
        return {}
    pages = settings.ui_url if settings.server.ui.enabled else None
    page = {"prefect.flow_run": f"{bare(pages)}/runs/flow-run/{flow_run.id}"} if pages else {}
    return {"prefect.flow_run_id": flow_run.id} | page


def trigger_of_run() -> tuple[str | None, dict[str, str]]:
    """Id of this flow run, and what started it: a schedule, a deployment (its page, the API), or a command."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None:
        return None, {}
    kind = "schedule" if run.auto_scheduled else "deployment" if run.deployment_id else "command"
    by = run.created_by.display_value if run.created_by and run.created_by.display_value else getpass.getuser()
    return str(run.id), {"kind": kind, "by": by} | ({"deployment": str(run.deployment_id)} if run.deployment_id else {})


def run_stage(
    plan: StagePlan, parents: dict[str, CheckpointRef], context: RunContext, seed: int, runtime: RuntimeConfig
) -> tuple[StageResult, bool]:
    """(result, whether it was there already) of one stage, verified byte for byte. In a flow on Ray."""
    key = stage_key(
        stage=plan.name,
        kind=plan.kind,
        sections=plan.sections,
        parents={role: ref.sha256 for role, ref in parents.items()},
    )
    spec = StageSpec(
        name=plan.name,
        kind=plan.kind,
        key=key,
        seed=seed,
        sections=plan.sections,
        parents=parents,
        runtime=runtime,
    )
    configured = stage.with_options(
        name=plan.name,
        retries=runtime.retries,
        retry_delay_seconds=runtime.retry_delay_s,
    )
    output = Path(context.output)
    store = Store(output / CHECKPOINTS, open_shared(runtime.storage))
    state = _submit(configured, spec, context, runtime.retries)
    result, findings = _verified(state, store)
    if findings and state.name == "Cached":
        log.warning("%s: cached checkpoint is not sound (%s); computing it again", plan.name, "; ".join(findings))
        state = _submit(configured.with_options(refresh_cache=True), spec, context, runtime.retries)
        result, findings = _verified(state, store)
    if findings:
        raise RuntimeError(f"{plan.name}: the checkpoint just published is not sound: {'; '.join(findings)}")
    if state.name == "Cached":
        # Computed before this store was configured, maybe.
        share_result(result, output, store)
    return result, state.name == "Cached" or result.attempts == 0


def _verified(state: State, store: Store) -> tuple[StageResult, list[str]]:
    """The result a stage's task ended with, and what is wrong with its checkpoint on this machine."""
    result = StageResult.model_validate(state.result())
    findings = verify(result.checkpoint.path, result.checkpoint.sha256)
    if findings and store.find(result.name, result.key) is not None:
        findings = verify(result.checkpoint.path, result.checkpoint.sha256)
    return result, findings


def _submit(configured: Any, spec: StageSpec, context: RunContext, retries: int) -> State:
    """Submit to Ray and wait. A lost worker is a new submission: Prefect's own retries are lost with the worker."""
    # A copy: `with_options` takes only storage that the server knows of, and the caller may make options of its own.
    configured = configured.with_options()
    configured.result_storage = PlainResults(basepath=str(Path(context.output) / "results"))
    # Spread: a controller has no device, and would else always be beside the driver.
    where = NodeAffinitySchedulingStrategy(context.node, soft=False) if context.node else "SPREAD"
    for attempt in range(1 + retries):
        with remote_options(num_cpus=0, max_retries=0, scheduling_strategy=where):
            future = configured.submit(spec, context)
        # Ray's own waiting turns the signal that interrupts it into a SystemError, which would pass for a crash.
        done = future.wrapped_future.future()
        try:
            concurrent.futures.wait([done])
        except BaseException:
            # Ctrl-C: the stage makes a snapshot first.
            ray.get(open_progress().stop.remote())
            concurrent.futures.wait([done], timeout=STOP_SECONDS)
            raise
        future.wait()
        if not future.state.is_crashed():
            break
        crash_lost_task_run(future.task_run_id)
        if attempt == retries:
            break
        log.warning("%s: its Ray worker was lost; trying again", spec.name)
    state: State = future.state
    return state


def _link_cached(
    tracker: Tracker, context: RunContext, result: StageResult, parents: list[CheckpointRef]
) -> StageResult:
    """Show a cached stage in this run's lineage; the model is logged anew where this store does not know it."""
    checkpoint = result.checkpoint
    manifest = load_manifest(checkpoint.path)
    run = tracker.stage_run(context.parent_run_id, result.name, result.key, manifest.sections, context.tags)
    if checkpoint.mlflow_model_id and tracker.has_model(checkpoint.mlflow_model_id):
        run.link_cached(checkpoint, manifest, parents)
    else:
        checkpoint = run.log_checkpoint(checkpoint, manifest, parents)
    run.finish("FINISHED")
    return result.model_copy(update={"checkpoint": checkpoint, "mlflow_run_id": run.run_id})
