"""Start all models of a stage, and end them whatever happens."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.handles import ModelProxy
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pictures import with_pictures
from xray_runtime.cluster.pool.acquisition import AcquireRequest, Acquisition
from xray_runtime.cluster.pool.demand import demand
from xray_runtime.cluster.pool.libraries import worker_options
from xray_runtime.cluster.pool.liveness import answered
from xray_runtime.cluster.pool.nodes import note_placement, same_node
from xray_runtime.cluster.pool.placement import device
from xray_runtime.cluster.pool.pool import find_worker_pool
from xray_runtime.cluster.protocols import ModelHandle, WholeModelHandle, get_all
from xray_runtime.cluster.stepped_model import AHEAD
from xray_runtime.cluster.types import WorkerInfo
from xray_runtime.cluster.whole_model import WholeModel
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.store.identity import environment_digest

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels
    from xray_runtime.engines.roles import ModelRole

WORKHORSES: dict[type[Any], type[Workhorse]] = {ModelSpec: Learner, GeneratorSpec: Generator}
"""Type of a spec → the Workhorses that hold such a model."""
PING_SECONDS = 5.0
UNLOAD_SECONDS = 20.0
"""Time for a model to unload before its Workhorses are killed."""


def model_opener(runtime: RuntimeConfig, log_dir: Path, run_id: str, pictures: tuple[Path, ...] = ()) -> OpenModels:
    """The function with which a stage body opens its models.

    Args:
        log_dir: directory of the Workhorses' logs, named after the stage.
        run_id: of the run whose worker pool and progress actor are used, if it has them.
        pictures: folders of the pictures that the stage's rows may have.
    """
    is_open = False

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, ModelSpec | GeneratorSpec]) -> Iterator[dict[str, ModelHandle]]:
        nonlocal is_open
        if is_open:
            # Stages that hold resources while they wait for more could deadlock.
            raise RuntimeError(f"{log_dir.name}: a stage must open all models it uses together in one call")
        is_open = True
        try:
            with _open(with_pictures(specs, pictures), runtime, log_dir, run_id) as models:
                yield models
        finally:
            is_open = False

    return open_models


def prestart_models(roles: Mapping[str, ModelRole], runtime: RuntimeConfig, run_id: str) -> None:
    """Start processes in the run's pool for the next stage's models, so that they load libraries now. `roles`
    are `StageKind.models` of that stage's config."""
    pool = find_worker_pool(run_id)
    if pool is None:
        return
    where = device(runtime)
    wanted: Counter[tuple[type[Workhorse], str]] = Counter()
    for name, role in roles.items():
        needed = demand(name, role.layout, runtime, where)
        if not needed.grouped():
            kind: type[Workhorse] = Generator if isinstance(role.layout, GeneratorConfig) else Learner
            wanted[kind, role.layout.libraries] += needed.num_ranks
    for (kind, libraries), count in wanted.items():
        pool.prestart.remote(kind, runtime, count, libraries)


@contextlib.contextmanager
def _open(
    specs: Mapping[str, ModelSpec | GeneratorSpec], runtime: RuntimeConfig, log_dir: Path, run_id: str
) -> Iterator[dict[str, ModelHandle]]:
    where = device(runtime)
    if runtime.weight_transfer in ("nccl", "ipc") and where == "cpu":
        raise ValueError(f"runtime.weight_transfer: {runtime.weight_transfer!r} needs GPUs, and this cluster has none")
    if not specs:
        yield {}
        return
    models = {role: _proxy(spec) for role, spec in specs.items()}
    requests = {
        role: AcquireRequest(
            demand(role, spec.layout, runtime, where), WORKHORSES[type(spec)], models[role], spec.libraries
        )
        for role, spec in specs.items()
    }
    acquisition = Acquisition(list(requests.values()), runtime, log_dir, run_id)
    unloaded: list[WholeModelHandle] = []
    try:
        workhorses = acquisition.acquire()
        workers: dict[str, list[WorkerInfo]] = {}
        for roles in _build_order(specs, where):
            builds = [
                models[role].build.remote(
                    role,
                    runtime,
                    log_dir,
                    specs[role],
                    workhorses[role],
                    requests[role].demand.num_replicas,
                    environment_digest(),
                    run_id,
                )
                for role in roles
            ]
            workers |= zip(roles, get_all(builds), strict=True)
        note_placement(log_dir, workers)
        yield {role: _handle(model, role, specs[role], requests[role]) for role, model in models.items()}
        unloaded = _unload(models, requests)
    finally:
        # Proxies are kept between the stages of a run, not after a script's only model.
        kept = unloaded if find_worker_pool(run_id) is not None else []
        for model in models.values():
            if model not in kept:
                ray.kill(model)
        acquisition.release(unloaded)
        _idle_proxies.extend(kept)


def _handle(
    model: WholeModelHandle, role: str, spec: ModelSpec | GeneratorSpec, request: AcquireRequest
) -> ModelHandle:
    return cast("ModelHandle", ModelProxy(model, role, spec.layout, request.demand.num_replicas))


def _build_order(specs: Mapping[str, ModelSpec | GeneratorSpec], where: str) -> list[list[str]]:
    """The roles in the order of their builds; those in one list are built at the same time.

    vLLM counts all memory of its GPU that is taken while it starts as its own. So on GPUs generators are built first,
    one by one.
    """
    if where == "cpu":
        return [list(specs)]
    first = [role for role, spec in specs.items() if isinstance(spec, GeneratorSpec)]
    return [*([role] for role in first), [role for role in specs if role not in first]]


_idle_proxies: list[WholeModelHandle] = []
"""WholeModels without a model, for the next stage in this process. They end with it."""


def _proxy(spec: ModelSpec | GeneratorSpec) -> WholeModelHandle:
    """A WholeModel without a model: an idle or a new one."""
    while _idle_proxies:
        # Ray raises for dead actors, and for actors of another cluster.
        with contextlib.suppress(Exception):
            idle = _idle_proxies.pop()
            if answered(idle.ping.remote(), PING_SECONDS * load()):
                return idle
            ray.kill(idle)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": same_node()}
    if isinstance(spec, ModelSpec):
        # The objective in it brings torch and transformers: 2 CPU seconds, which a fork has behind it.
        options |= worker_options(spec.libraries)
    model: WholeModelHandle = ray.remote(concurrency_groups={AHEAD: 1})(WholeModel).options(**options).remote()
    return model


def _unload(models: Mapping[str, WholeModelHandle], requests: Mapping[str, AcquireRequest]) -> list[WholeModelHandle]:
    """Unload the models; returns those that did so in time."""
    calls = {role: model.unload.remote(not requests[role].demand.grouped()) for role, model in models.items()}
    done = set(ray.wait(list(calls.values()), num_returns=len(calls), timeout=UNLOAD_SECONDS * load())[0])
    return [models[role] for role, call in calls.items() if call in done and answered(call)]
