"""WholeModel: a Ray actor that stands for one whole model, however it is spread over Workhorses.

A call is dealt to the Workhorses and their answers are put together again; whoever calls sees one model. Calls to
different WholeModels run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from xray_runtime.actors.rows import Rows, merge, num_rows, split
from xray_runtime.actors.stable import find_stable, start
from xray_runtime.actors.workhorse import Generator, GeneratorSpec, Learner, ModelSpec, Rank, Workhorse
from xray_runtime.config import RuntimeConfig
from xray_runtime.engines.topology import Topology

if TYPE_CHECKING:
    from xray_runtime.engines.vllm_generator import Sampling
    from xray_runtime.weights.plasma import WeightUpdate

LOG_TAIL_LINES = 15
START_SECONDS = 10.0
"""A Workhorse that is not up by then may be waiting for CPUs that idle ones hold."""


class WorkhorseError(RuntimeError):
    """A Workhorse's process died; the message carries the end of its log."""


class WholeModel:
    """The proxy of one model. Start it through `open_models`."""

    def __init__(self, role: str, kind: type[Workhorse], num_workhorses: int, runtime: RuntimeConfig, log_dir: Path):
        self._role, self._kind, self._runtime, self._log_dir = role, kind, runtime, log_dir
        on_cpu = _device(runtime) == "cpu"
        # Replicas of the model, each spread over Workhorses; how, `build` says.
        self._topology = Topology(data=num_workhorses)
        self._stable = find_stable() if on_cpu and num_workhorses == 1 else None
        if self._stable is not None:
            me = ray.get_runtime_context().current_actor
            self._workhorses = [ray.get(self._stable.lend.remote(kind, runtime, me))]
        else:
            gpus = 0.0 if on_cpu else runtime.gpus_per_workhorse
            self._workhorses = [start(kind, runtime, gpus) for _ in range(num_workhorses)]

    def ping(self) -> None:
        """Answers where this WholeModel lives."""

    def build(self, spec: ModelSpec | GeneratorSpec) -> None:
        """Load the model on every Workhorse and join them to one process group."""
        if isinstance(spec, ModelSpec) and spec.training is not None:
            self._topology = Topology.of(spec.training.engine)
        host, port = self._meet()
        size = len(self._workhorses)
        places = [Rank(self._role, rank, size, host, port, self._log_dir) for rank in range(size)]
        self._get([w.build.remote(spec, place) for w, place in zip(self._workhorses, places, strict=True)])

    def _meet(self) -> tuple[str, int]:
        """Where the process group meets, as soon as every Workhorse is up."""
        up = [w.rendezvous.remote() for w in self._workhorses]
        stable = find_stable()
        if stable is not None and len(ray.wait(up, num_returns=len(up), timeout=START_SECONDS)[0]) < len(up):
            # What Ray says of free CPUs lags behind what was just started, so the stable may have kept too many.
            ray.get(stable.make_room.remote())
        place: tuple[str, int] = self._get(up)[0]
        return place

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
        """`Generator.generate` over all replicas."""
        return merge(self._deal("generate", rows, sampling, version))

    def export_weights(self, version: int) -> WeightUpdate:
        """The policy's trainable weights as version `version`, in the object store."""
        parts = [part for part in self._call("export_weights", version) if part is not None]
        return replace(parts[0], buckets=tuple(bucket for part in parts for bucket in part.buckets))

    def load_weights(self, update: WeightUpdate) -> int:
        """Bring every replica to `update`; returns the version they all hold."""
        versions = set(self._call("load_weights", update))
        if versions != {update.version}:
            raise RuntimeError(f"{self._role}: replicas hold versions {sorted(versions)} after update {update.version}")
        return update.version

    def save(self, directory: Path, head_file: str | None = None) -> None:
        """Write the model in Hugging Face form."""
        self._get([self._workhorses[0].begin_save.remote(directory)])
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
    models: dict[str, Any] = {}
    sound = False
    try:
        for role, spec in specs.items():
            kind = Generator if isinstance(spec, GeneratorSpec) else Learner
            training = spec.training if isinstance(spec, ModelSpec) else None
            num_workhorses = training.engine.num_workhorses if training else 1
            models[role] = (
                ray.remote(WholeModel)
                .options(num_cpus=0, max_restarts=0)
                .remote(role, kind, num_workhorses, runtime, log_dir)
            )
        ray.get([models[role].build.remote(spec) for role, spec in specs.items()])
        yield models
        sound = True
    finally:
        for model in models.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(model.stop.remote(sound=sound))
            ray.kill(model)


def _device(runtime: RuntimeConfig) -> str:
    # Asked of the cluster, not of this process: a WholeModel has no device of its own.
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
