"""WholeModel: a Ray actor that stands for one whole model, however it is spread over Workhorses.

A call is dealt to the Workhorses and their answers are put together again; whoever calls sees one model. Calls to
different WholeModels run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from xray_runtime.actors.placement import (
    START_SECONDS,
    BusyClusterError,
    bundle_of,
    device,
    holders,
    make_room,
    reserved,
)
from xray_runtime.actors.rows import Rows, merge, num_rows, split
from xray_runtime.actors.stable import find_stable, start
from xray_runtime.actors.watch import Watch, WorkhorseError
from xray_runtime.actors.workhorse import Generator, GeneratorSpec, Learner, ModelSpec, Rank, Workhorse
from xray_runtime.config import RuntimeConfig
from xray_runtime.planning.demand import Demand, demand

if TYPE_CHECKING:
    from xray_runtime.engines.vllm_generator import Sampling
    from xray_runtime.weights.plasma import WeightUpdate

STOP_SECONDS, LEAVE_SECONDS = 20.0, 3.0
"""How long a model has to part with its Workhorses: in good order, and after a failure."""


class WholeModel:
    """The proxy of one model. Start it through `open_models`."""

    def __init__(
        self, kind: type[Workhorse], demand: Demand, runtime: RuntimeConfig, log_dir: Path, group: Any = None
    ) -> None:
        self._role, self._kind, self._runtime, self._log_dir = demand.role, kind, runtime, log_dir
        self._stable = find_stable() if demand.num_ranks == 1 and not demand.gpus else None
        if self._stable is not None:
            me = ray.get_runtime_context().current_actor
            what_for = f"{log_dir} {demand.role}"
            self._workhorses = [ray.get(self._stable.lend.remote(kind, runtime, me, what_for))]
        else:
            bundles = [0 if group is None else bundle_of(demand, group, rank) for rank in range(demand.num_ranks)]
            self._workhorses = [start(kind, runtime, demand.gpus, group, bundle) for bundle in bundles]
        timeouts = (runtime.hang_timeout_s, runtime.collective_timeout_s)
        self._watch = Watch(demand.role, self._workhorses, log_dir, *timeouts)

    def ping(self) -> None:
        """Answers where this WholeModel lives."""

    def build(self, spec: ModelSpec | GeneratorSpec) -> None:
        """Load the model on every Workhorse and join them to one process group."""
        host, port = self._meet()
        size = len(self._workhorses)
        places = [Rank(self._role, rank, size, host, port, self._log_dir) for rank in range(size)]
        self._get([w.build.remote(spec, place) for w, place in zip(self._workhorses, places, strict=True)])

    def _meet(self) -> tuple[str, int]:
        """Where the process group meets, as soon as every Workhorse is up."""
        up = [w.rendezvous.remote() for w in self._workhorses]
        if not self._are_up(up, START_SECONDS):
            # What Ray says of free CPUs lags behind what was just started, so the stable may have kept too many.
            make_room()
            if not self._are_up(up, self._runtime.wait_timeout_s):
                raise BusyClusterError(
                    f"{self._role}: waited {self._runtime.wait_timeout_s:g} s (runtime.wait_timeout_s) for CPUs which "
                    f"others hold: {holders()}"
                )
        self._watch.begin()
        place: tuple[str, int] = self._get(up)[0]
        return place

    def _are_up(self, up: list[Any], timeout_s: float) -> bool:
        return len(ray.wait(up, num_returns=len(up), timeout=timeout_s)[0]) == len(up)

    def score(self, rows: Rows, width: int = 0) -> Rows:
        """`Learner.score` of all rows, in order."""
        return merge(self._deal("score", rows, width))

    def train(self, rows: Rows, totals: dict[str, float], lr: float) -> dict[str, float]:
        """One optimizer step over all rows; sums over the Workhorses."""
        parts = self._deal("train", rows, totals, lr)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in {n for part in parts for n in part}}

    def generate(self, rows: Rows, sampling: Sampling, version: int) -> Rows:
        """`Generator.generate` over all replicas."""
        return merge(self._deal("generate", rows, sampling, version))

    def export_weights(self, version: int) -> WeightUpdate:
        """The policy's trainable weights as version `version`, in the object store."""
        update: WeightUpdate = self._call("export_weights", version)[0]
        return update

    def load_weights(self, update: WeightUpdate) -> int:
        """Bring every replica to `update`; returns the version they all hold."""
        versions = set(self._call("load_weights", update))
        if versions != {update.version}:
            raise RuntimeError(f"{self._role}: replicas hold versions {sorted(versions)} after update {update.version}")
        return update.version

    def save(self, directory: Path, head_file: str | None = None) -> None:
        """Write the model in Hugging Face form."""
        self._call("save", directory, head_file)

    def save_state(self, directory: Path) -> None:
        """Write a snapshot of model and optimizer into `directory`, every rank its part."""
        self._call("save_state", directory)

    def load_state(self, directory: Path) -> None:
        """Go on from a snapshot."""
        self._call("load_state", directory)

    def stop(self, *, sound: bool = False) -> None:
        """Part with the Workhorses: `sound` ones wait in the stable for the next model, others end."""
        for workhorse in self._workhorses:
            if sound and self._stable is not None:
                ray.get(workhorse.release.remote())
                ray.get(self._stable.give_back.remote(self._kind, self._runtime, workhorse))
            else:
                ray.kill(workhorse)

    def _deal(self, method: str, rows: Rows, *args: Any) -> list[Any]:
        if num_rows(rows) < len(self._workhorses):
            raise ValueError(
                f"{self._role}: {num_rows(rows)} rows cannot be dealt to {len(self._workhorses)} Workhorses"
            )
        parts = split(rows, len(self._workhorses))
        return self._get([getattr(w, method).remote(p, *args) for w, p in zip(self._workhorses, parts, strict=True)])

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._get([getattr(w, method).remote(*args) for w in self._workhorses])

    def _get(self, refs: list[Any]) -> list[Any]:
        try:
            return self._watch.collect(refs)
        except Exception as error:
            if isinstance(error, WorkhorseError) or len(self._workhorses) > 1:
                # Peers may be waiting in a collective for ever: this model is over.
                for workhorse in self._workhorses:
                    ray.kill(workhorse)
            raise


@contextlib.contextmanager
def open_models(
    runtime: RuntimeConfig, log_dir: Path, specs: dict[str, ModelSpec | GeneratorSpec]
) -> Iterator[dict[str, Any]]:
    """Start one WholeModel a role, all at the same time; end them all, whatever happens.

    Yields role → actor handle: `ray.get(models["policy"].score.remote(rows))`.
    """
    models: dict[str, Any] = {}
    sound = False
    where = device(runtime)
    demands = [demand_of(role, spec, runtime, where) for role, spec in specs.items()]
    with reserved(demands, runtime, log_dir) as groups:
        try:
            for asked in demands:
                kind = Generator if isinstance(specs[asked.role], GeneratorSpec) else Learner
                models[asked.role] = (
                    ray.remote(WholeModel)
                    .options(num_cpus=0, max_restarts=0)
                    .remote(kind, asked, runtime, log_dir, groups.get(asked.role))
                )
            ray.get([models[role].build.remote(spec) for role, spec in specs.items()])
            yield models
            sound = True
        finally:
            _end(list(models.values()), sound)


def demand_of(role: str, spec: ModelSpec | GeneratorSpec, runtime: RuntimeConfig, where: str) -> Demand:
    """What the model of `spec` asks for on device `where` ("cpu" or "cuda")."""
    training = spec.training if isinstance(spec, ModelSpec) else None
    return demand(role, training.engine if training else None, runtime, where)


def _end(models: list[Any], sound: bool) -> None:
    """Part with the models; one that is busy, or stands still, is ended with its Workhorses."""
    stops = [model.stop.remote(sound=sound) for model in models]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS if sound else LEAVE_SECONDS)
    for model in models:
        ray.kill(model)
    stable = find_stable()
    if stable is not None:
        ray.get(stable.end_lent.remote(models))
