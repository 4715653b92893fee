"""WholeModel: a Ray actor that stands for one whole model, however it is spread over Workhorses.

A call is dealt to the Workhorses and their answers are put together again; whoever calls sees one model. Calls to
different WholeModels run at the same time.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.engines.topology import Topology
from xray_runtime.planning.demand import Demand, demand, stage_demands
from xray_runtime.store.identity import environment_digest
from xray_runtime.weights.device_transfer import Device, Transport, choose
from xray_runtime.workers.generator import Generator
from xray_runtime.workers.generator_spec import GeneratorSpec
from xray_runtime.workers.health import HealthMonitor, WorkhorseError
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.nodes import WorkerInfo, check_environment, note_placement, same_node
from xray_runtime.workers.placement import (
    START_SECONDS,
    BusyClusterError,
    bundle_of,
    device,
    evict_idle,
    holders,
    reserved,
)
from xray_runtime.workers.pool import find_worker_pool, start
from xray_runtime.workers.rows import Rows, balance, merge, num_rows, split, take
from xray_runtime.workers.staging import FileStager
from xray_runtime.workers.workhorse import Rank, Workhorse

if TYPE_CHECKING:
    from xray_runtime.engines.generation.sampling import Sampling
    from xray_runtime.weights.object_store import WeightUpdate

STOP_SECONDS, LEAVE_SECONDS = 20.0, 3.0
"""How long a model has to part with its Workhorses: in good order, and after a failure."""


class WholeModel:
    """The proxy of one model. Start it through `open_models`."""

    def __init__(
        self, kind: type[Workhorse], demand: Demand, runtime: RuntimeConfig, log_dir: Path, group: Any = None
    ) -> None:
        self._role, self._kind, self._runtime, self._log_dir = demand.role, kind, runtime, log_dir
        self._num_replicas = demand.num_replicas
        # Replicas of the model, each spread over Workhorses; how, `build` says.
        self._topology = Topology(data=demand.num_ranks)
        self._stable = None if demand.grouped() else find_worker_pool()
        if self._stable is not None:
            me = ray.get_runtime_context().current_actor
            what_for = f"{log_dir} {demand.role}"
            lent = [self._stable.lend.remote(kind, runtime, me, what_for) for _ in range(demand.num_ranks)]
            self._workhorses = ray.get(lent)
        else:
            bundles = [0 if group is None else bundle_of(demand, group, rank) for rank in range(demand.num_ranks)]
            self._workhorses = [start(kind, runtime, demand.gpus, group, bundle) for bundle in bundles]
        timeouts = (runtime.hang_timeout_s, runtime.collective_timeout_s)
        self._health = HealthMonitor(demand.role, self._workhorses, log_dir, *timeouts)

    def ping(self) -> None:
        """Answers where this WholeModel lives."""

    def build(self, spec: ModelSpec | GeneratorSpec, wanted_software: str) -> list[WorkerInfo]:
        """Load the model on every Workhorse and join them to one process group; returns where each lives.

        Raises:
            ConfigError: one of them is not of `wanted_software`.
        """
        if isinstance(spec, ModelSpec):
            self._topology = Topology.of(spec.layout)
        self._spec = spec
        meeting_points = self._meet()
        lives: list[WorkerInfo] = self._call("worker_info")
        for rank, there in enumerate(lives):
            check_environment(f"Workhorse {rank} of {self._role!r}", there, wanted_software)
        nodes = [there.node for there in lives]
        self._carrier = FileStager(self._workhorses, nodes, self._get, self._log_dir)
        size = len(self._workhorses) // self._num_replicas
        builds = []
        for number, workhorse in enumerate(self._workhorses):
            rank, replica = number % size, number // size
            host, port = meeting_points[replica * size]
            log_dir = None if self._carrier.is_remote(number) else self._log_dir
            place = Rank(self._role, number, rank, size, host, port, log_dir)
            builds.append(workhorse.build.remote(self._as_seen_by(number), place))
        self._get(builds)
        return lives

    def _as_seen_by(self, rank: int) -> ModelSpec | GeneratorSpec:
        """The spec, its files where this rank finds them."""
        bring, spec = self._carrier.bring, self._spec
        directory = bring(spec.directory)[rank]
        if isinstance(spec, GeneratorSpec):
            return replace(spec, directory=directory)
        reference = None if spec.reference is None else bring(spec.reference)[rank]
        head = None if spec.head is None else bring(spec.head.parent)[rank] / spec.head.name
        return replace(spec, directory=directory, reference=reference, head=head)

    def _meet(self) -> list[tuple[str, int]]:
        """Where a process group could meet at each Workhorse, as soon as every one is up."""
        up = [w.rendezvous.remote() for w in self._workhorses]
        if not self._are_up(up, START_SECONDS):
            # What Ray says of free CPUs lags behind what was just started, so the stable may have kept too many.
            evict_idle()
            if not self._are_up(up, self._runtime.wait_timeout_s):
                raise BusyClusterError(
                    f"{self._role}: waited {self._runtime.wait_timeout_s:g} s (runtime.wait_timeout_s) for CPUs which "
                    f"others hold: {holders()}"
                )
        self._health.begin()
        places: list[tuple[str, int]] = self._get(up)
        return places

    def _are_up(self, up: list[Any], timeout_s: float) -> bool:
        return len(ray.wait(up, num_returns=len(up), timeout=timeout_s)[0]) == len(up)

    def score(self, rows: Rows, width: int = 0) -> Rows:
        """`Learner.score` of all rows, in order."""
        return merge(self._deal("score", rows, width))

    def train(self, rows: Rows, totals: dict[str, float], lr: float) -> dict[str, float]:
        """One optimizer step over all rows; sums over the rows, and `grad_norm`."""
        parts = self._deal("train", rows, totals, lr)
        sums = {name: sum(part.get(name, 0.0) for part in parts) for name in {n for part in parts for n in part}}
        # Every rank knows the same norm.
        return sums | {"grad_norm": parts[0]["grad_norm"]}

    def generate(self, rows: Rows, sampling: Sampling, version: int) -> Rows:
        """`Generator.generate`, prompts dealt to the replicas by their predicted tokens; replies in order."""
        loads = balance(rows["lengths"] + sampling.max_new_tokens, self._num_replicas)
        size = len(self._workhorses) // self._num_replicas
        calls: list[Any] = []
        answers: list[tuple[list[int], int]] = []
        for replica, load in enumerate(loads):
            if load:
                # Every rank of a replica works on the same prompts; the first one's answer is the replica's.
                ranks = self._workhorses[replica * size : (replica + 1) * size]
                answers.append((load, len(calls)))
                calls += [w.generate.remote(take(rows, load), sampling, version) for w in ranks]
        replies = self._get(calls)
        order = np.argsort(np.concatenate([load for load, _ in answers]), kind="stable")
        parts = [replies[first] for _, first in answers]
        return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}

    def export_weights(self, version: int) -> WeightUpdate:
        """The policy's trainable weights as version `version`, in the object store."""
        parts = [part for part in self._call("export_weights", version) if part is not None]
        return replace(parts[0], buckets=tuple(bucket for part in parts for bucket in part.buckets))

    def load_weights(self, update: WeightUpdate) -> int:
        """Bring every Workhorse to `update`, or, where one fails, none; returns the version they all hold."""
        loads = [w.load_weights.remote(update) for w in self._workhorses]
        try:
            self._health.collect(loads)
        except WorkhorseError:
            self._kill()
            raise
        except Exception:
            ray.wait(loads, num_returns=len(loads), timeout=self._runtime.hang_timeout_s)
            loaded = [w for w, load in zip(self._workhorses, loads, strict=True) if _succeeded(load)]
            self._get([workhorse.revert_weights.remote() for workhorse in loaded])
            raise
        return update.version

    def follow(self, policy: Any, version: int) -> None:
        """Bring this generator to `policy`'s weights as `version`, the shortest way between their devices."""
        assert isinstance(self._spec, GeneratorSpec)
        theirs, ours = ray.get(policy.where.remote()), self.where()
        transport = choose(self._runtime.weight_transfer, self._spec.config, theirs, ours)
        if transport == "plasma":
            self.load_weights(ray.get(policy.export_weights.remote(version)))
        else:
            per_replica = len(self._workhorses) // self._num_replicas
            ray.get(policy.send_weights.remote(version, transport, self._workhorses, per_replica))

    def send_weights(self, version: int, transport: Transport, receivers: list[Any], per_replica: int) -> None:
        """`Learner.send_weights` to the Workhorses of a generator, on all ranks."""
        self._call("send_weights", version, transport, self._call("rendezvous")[0], receivers, per_replica)

    def where(self) -> list[Device]:
        """The devices it is spread over."""
        devices: list[Device] = self._call("where")
        return devices

    def sleep(self) -> None:
        """`Learner.sleep` on all ranks."""
        self._call("sleep")

    def wake_up(self) -> None:
        """`Learner.wake_up` on all ranks."""
        self._call("wake_up")

    def save(self, directory: Path, head_file: str | None = None) -> None:
        """Write the model in Hugging Face form."""
        places, leaders = self._carrier.places(directory), self._carrier.leaders()
        self._get([self._workhorses[rank].begin_save.remote(places[rank]) for rank in leaders], leaders)
        written = self._each("save", [(place, head_file) for place in places])
        for rank, came in self._carrier.fetch(places, directory).items():
            # Each of that node's ranks wrote its tensors into one copy of the model.
            names = [name for r, place in enumerate(places) if place == places[rank] for name in written[r]]
            _join(came, directory, names, head_file)
        self._carrier.drop(places)

    def save_state(self, directory: Path) -> None:
        """Write a snapshot of model and optimizer into `directory`, every rank its part."""
        places = self._carrier.places(directory)
        self._each("save_state", [(place,) for place in places])
        for came in self._carrier.fetch(places, directory).values():
            shutil.copytree(came, directory, dirs_exist_ok=True)
            shutil.rmtree(came)
        self._carrier.drop(places)

    def load_state(self, directory: Path) -> None:
        """Go on from a snapshot."""
        places = self._carrier.lend(directory)
        self._each("load_state", [(place,) for place in places])
        self._carrier.drop(places)

    def stop(self, *, sound: bool = False) -> None:
        """Part with the Workhorses: `sound` ones wait in the stable for the next model, others end."""
        for workhorse in self._workhorses:
            if sound and self._stable is not None:
                ray.get(workhorse.release.remote())
                ray.get(self._stable.release_worker.remote(self._kind, self._runtime, workhorse))
            else:
                if sound:
                    ray.get(workhorse.drop.remote())
                ray.kill(workhorse)

    def _deal(self, method: str, rows: Rows, *args: Any) -> list[Any]:
        """The answer of each replica: all its Workhorses get the same rows, one of them answers for it."""
        replicas = self._topology.data
        if num_rows(rows) < replicas:
            raise ValueError(f"{self._role}: {num_rows(rows)} rows cannot be dealt to {replicas} Workhorses")
        parts = [ray.put(part) for part in split(rows, replicas)]
        answers = self._get(
            [
                getattr(w, method).remote(parts[self._topology.data_rank(rank)], *args)
                for rank, w in enumerate(self._workhorses)
            ]
        )
        return [answer for rank, answer in enumerate(answers) if self._topology.reports(rank)]

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._each(method, [args] * len(self._workhorses))

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._get([getattr(w, method).remote(*a) for w, a in zip(self._workhorses, arguments, strict=True)])

    def _get(self, refs: list[Any], ranks: list[int] | None = None) -> list[Any]:
        try:
            return self._health.collect(refs, ranks)
        except Exception as error:
            answered = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
            if isinstance(error, WorkhorseError) or len(answered) < len(refs):
                # Peers may be waiting in a collective for ever: this model is over.
                self._kill()
            raise

    def _kill(self) -> None:
        for workhorse in self._workhorses:
            ray.kill(workhorse)


def _join(came: Path, directory: Path, names: Iterable[str], head_file: str | None) -> None:
    """Put what another node's ranks wrote (`came`, which goes) into the model in `directory`."""
    from xray_runtime.models.tensor_file import WEIGHTS_FILE, copy_tensors

    if not (directory / WEIGHTS_FILE).exists():
        # No rank is here: the first to come is the model.
        shutil.copytree(came, directory, dirs_exist_ok=True)
    else:
        copy_tensors(came / WEIGHTS_FILE, directory / WEIGHTS_FILE, names)
        if head_file is not None and (came / head_file).exists():
            (directory / head_file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(came / head_file, directory / head_file)
    shutil.rmtree(came)


def _succeeded(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except Exception:
        return False
    return True


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
    if runtime.weight_transfer in ("nccl", "ipc") and where == "cpu":
        raise ValueError(f"runtime.weight_transfer: {runtime.weight_transfer!r} needs GPUs, and this cluster has none")
    demands = [demand_of(role, spec, runtime, where) for role, spec in specs.items()]
    with reserved(demands, runtime, log_dir) as groups:
        try:
            for asked in demands:
                kind = Generator if isinstance(specs[asked.role], GeneratorSpec) else Learner
                models[asked.role] = (
                    ray.remote(WholeModel)
                    .options(num_cpus=0, max_restarts=0, scheduling_strategy=same_node())
                    .remote(kind, asked, runtime, log_dir, groups.get(asked.role))
                )
            lives = ray.get([models[role].build.remote(spec, environment_digest()) for role, spec in specs.items()])
            note_placement(log_dir, dict(zip(specs, lives, strict=True)))
            yield models
            sound = True
        finally:
            _end(list(models.values()), sound)


def expect_models(config: LifecycleConfig, stage: str) -> None:
    """Start the processes in which the stable will lend `stage` its models, so that they load their libraries now."""
    stable = find_worker_pool()
    if stable is None:
        return
    demands = [d for d in stage_demands(config, device(config.runtime)).get(stage, []) if not d.grouped()]
    generators = sum(d.num_ranks for d in demands if d.role == "generator")
    stable.expect.remote(Learner, config.runtime, sum(d.num_ranks for d in demands) - generators)
    stable.expect.remote(Generator, config.runtime, generators, config.generator)


def demand_of(role: str, spec: ModelSpec | GeneratorSpec, runtime: RuntimeConfig, where: str) -> Demand:
    """What the model of `spec` asks for on device `where` ("cpu" or "cuda")."""
    return demand(role, spec.config if isinstance(spec, GeneratorSpec) else spec.layout, runtime, where)


def _end(models: list[Any], sound: bool) -> None:
    """Part with the models; one that is busy, or stands still, is ended with its Workhorses."""
    stops = [model.stop.remote(sound=sound) for model in models]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS if sound else LEAVE_SECONDS)
    for model in models:
        ray.kill(model)
    stable = find_worker_pool()
    if stable is not None:
        ray.get(stable.kill_leased.remote(models))
