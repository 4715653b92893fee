"""WholeModel: a Ray actor that stands for one whole model, however it is spread over Workhorses.

A call is dealt to the Workhorses and their answers are put together again; whoever calls sees one model. Calls to
different WholeModels run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from xray_runtime.actors.rows import Rows, balance, merge, num_rows, split, take
from xray_runtime.actors.stable import find_stable, start
from xray_runtime.actors.workhorse import Generator, GeneratorSpec, Learner, ModelSpec, Rank, Workhorse
from xray_runtime.config import RuntimeConfig
from xray_runtime.weights.device_transfer import Device, Transport, choose

if TYPE_CHECKING:
    from xray_runtime.engines.generation import Sampling
    from xray_runtime.weights.plasma import WeightUpdate

LOG_TAIL_LINES = 15
START_SECONDS = 10.0
"""A Workhorse that is not up by then may be waiting for CPUs that idle ones hold."""


class WorkhorseError(RuntimeError):
    """A Workhorse's process died; the message carries the end of its log."""


class WholeModel:
    """The proxy of one model. Start it through `open_models`."""

    def __init__(
        self,
        role: str,
        kind: type[Workhorse],
        num_workhorses: int,
        runtime: RuntimeConfig,
        log_dir: Path,
        num_replicas: int = 1,
    ):
        """Of `num_workhorses` in all, each `num_workhorses // num_replicas` hold one copy and meet in one group."""
        self._num_replicas = num_replicas
        self._role, self._kind, self._runtime, self._log_dir = role, kind, runtime, log_dir
        on_cpu = _device(runtime) == "cpu"
        self._stable = find_stable() if on_cpu and num_workhorses == num_replicas else None
        if self._stable is not None:
            me = ray.get_runtime_context().current_actor
            self._workhorses = ray.get([self._stable.lend.remote(kind, runtime, me) for _ in range(num_workhorses)])
        else:
            gpus = 0.0 if on_cpu else runtime.gpus_per_workhorse
            self._workhorses = [start(kind, runtime, gpus) for _ in range(num_workhorses)]

    def ping(self) -> None:
        """Answers where this WholeModel lives."""

    def build(self, spec: ModelSpec | GeneratorSpec) -> None:
        """Load the model on every Workhorse and join them to one process group."""
        self._spec = spec
        meeting_points = self._meet()
        size = len(self._workhorses) // self._num_replicas
        places = []
        for number in range(len(self._workhorses)):
            rank, replica = number % size, number // size
            host, port = meeting_points[replica * size]
            role = self._role if self._num_replicas == 1 else f"{self._role}-{replica}"
            places.append(Rank(role, rank, size, host, port, self._log_dir))
        self._get([w.build.remote(spec, place) for w, place in zip(self._workhorses, places, strict=True)])

    def _meet(self) -> list[tuple[str, int]]:
        """Where a process group could meet at each Workhorse, as soon as every one is up."""
        up = [w.rendezvous.remote() for w in self._workhorses]
        stable = find_stable()
        if stable is not None and len(ray.wait(up, num_returns=len(up), timeout=START_SECONDS)[0]) < len(up):
            # What Ray says of free CPUs lags behind what was just started, so the stable may have kept too many.
            ray.get(stable.make_room.remote())
        places: list[tuple[str, int]] = self._get(up)
        return places

    def score(self, rows: Rows, width: int = 0) -> Rows:
        """`Learner.score` of all rows, in order."""
        return merge(self._deal("score", rows, width))

    def train(self, rows: Rows, totals: dict[str, float], lr: float) -> dict[str, float]:
        """One optimizer step over all rows; sums over the Workhorses."""
        parts = self._deal("train", rows, totals, lr)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in {n for part in parts for n in part}}

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
        update: WeightUpdate = self._call("export_weights", version)[0]
        return update

    def load_weights(self, update: WeightUpdate) -> int:
        """Bring every Workhorse to `update`, or, where one fails, none; returns the version they all hold."""
        loads = [w.load_weights.remote(update) for w in self._workhorses]
        loaded, failure = [], None
        for workhorse, load in zip(self._workhorses, loads, strict=True):
            try:
                self._get([load])
                loaded.append(workhorse)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            self._get([workhorse.revert_weights.remote() for workhorse in loaded])
            raise failure
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
        pending = list(refs)
        try:
            # The first failure ends the call: its peers may be waiting for it in a collective.
            while pending:
                done, pending = ray.wait(pending)
                ray.get(done)
            answers: list[Any] = ray.get(refs)
            return answers
        except ray.exceptions.RayActorError as error:
            raise WorkhorseError(f"a Workhorse of {self._role!r} died\n{self._log_tail()}") from error

    def _log_tail(self) -> str:
        tails = []
        for path in sorted(self._log_dir.glob(f"{self._role}-*.log")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            tails.append("\n".join([f"last lines of {path}:", *lines]))
        return "\n".join(tails)


@contextlib.contextmanager
def open_models(
    runtime: RuntimeConfig, log_dir: Path, specs: dict[str, ModelSpec | GeneratorSpec]
) -> Iterator[dict[str, Any]]:
    """Start one WholeModel a role, all at the same time; end them all, whatever happens.

    Yields role → actor handle: `ray.get(models["policy"].score.remote(rows))`.
    """
    if runtime.weight_transfer in ("nccl", "ipc") and _device(runtime) == "cpu":
        raise ValueError(f"runtime.weight_transfer: {runtime.weight_transfer!r} needs GPUs, and this cluster has none")
    models: dict[str, Any] = {}
    sound = False
    try:
        for role, spec in specs.items():
            kind = Generator if isinstance(spec, GeneratorSpec) else Learner
            num_replicas = runtime.generator_replicas if isinstance(spec, GeneratorSpec) else 1
            num_workhorses = _num_workhorses(spec) * num_replicas
            models[role] = (
                ray.remote(WholeModel)
                .options(num_cpus=0, max_restarts=0)
                .remote(role, kind, num_workhorses, runtime, log_dir, num_replicas)
            )
        ray.get([models[role].build.remote(spec) for role, spec in specs.items()])
        yield models
        sound = True
    finally:
        for model in models.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(model.stop.remote(sound=sound))
            ray.kill(model)


def _num_workhorses(spec: ModelSpec | GeneratorSpec) -> int:
    """Workhorses of one replica."""
    if isinstance(spec, GeneratorSpec):
        return spec.config.tensor_parallel
    return spec.training.engine.num_workhorses if spec.training else 1


def _device(runtime: RuntimeConfig) -> str:
    # Asked of the cluster, not of this process: a WholeModel has no device of its own.
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
