"""WholeModel: the proxy of one whole model, a Ray actor that hides how the model is spread over Workhorses.

A call is scattered over the Workhorses and their answers are merged. Calls to different WholeModels run concurrently.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import ray

from xray_runtime.cluster.adapter import save_adapter
from xray_runtime.cluster.health import HealthMonitor, WorkhorseError
from xray_runtime.cluster.plain_errors import plain_errors
from xray_runtime.cluster.pool.liveness import answered
from xray_runtime.cluster.pool.nodes import check_environment
from xray_runtime.cluster.progress import find_progress
from xray_runtime.cluster.protocols import Ref, Scattered, WholeModelHandle, WorkhorseHandle, get
from xray_runtime.cluster.published_model import PublishedModel
from xray_runtime.cluster.staging import FileStager, merge_copy
from xray_runtime.cluster.stepped_model import SteppedModel
from xray_runtime.cluster.types import RankInfo, WorkerInfo
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, TextBatch
from xray_runtime.data.columnar import ColumnBatch
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sync.route import Device, Route, choose_route
from xray_runtime.engines.topology import Topology
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX

if TYPE_CHECKING:  # of specs too, or the trainer's code would be in the keys of stages that only sample
    from xray_runtime.cluster.generator_spec import GeneratorSpec
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.engines.sampling import Sampling
    from xray_runtime.engines.sync.object_store import WeightUpdate

T = TypeVar("T")
B = TypeVar("B", bound=ColumnBatch)
K = TypeVar("K", bound=ColumnBatch)


@plain_errors
class WholeModel(PublishedModel, SteppedModel):
    """The proxy of one model, and later of another; `opening` starts it."""

    _workhorses: list[WorkhorseHandle]
    _routes: dict[WholeModelHandle, Route]
    """Policy → how its weights come to this generator."""

    def ping(self) -> None:
        """Answers as long as this WholeModel lives."""

    def build(
        self,
        role: str,
        runtime: RuntimeConfig,
        log_dir: Path,
        spec: ModelSpec | GeneratorSpec,
        workhorses: list[WorkhorseHandle],
        num_replicas: int,
        environment_digest: str,
        run_id: str = "",
    ) -> list[WorkerInfo]:
        """Load the model on its Workhorses and join them to one process group.

        Args:
            role: of the model in its stage.
            log_dir: directory of the Workhorses' logs, on nodes that see it.
            workhorses: in order of rank.
            num_replicas: number of whole copies of the model.
            environment_digest: digest of the code and libraries that each must have.
            run_id: of the run whose progress actor learns that the Workhorses are at work, if it has one.

        Returns:
            Info of each Workhorse.

        Raises:
            ConfigError: a Workhorse has another environment.
        """
        self._role, self._runtime, self._log_dir = role, runtime, log_dir
        self._spec, self._workhorses, self._num_replicas, self._routes = spec, workhorses, num_replicas, {}
        self._no_steps()
        layout = spec.layout
        self._topology = Topology(data=len(workhorses)) if isinstance(layout, GeneratorConfig) else Topology.of(layout)
        timeouts = (self._runtime.hang_timeout_s, self._runtime.collective_timeout_s)
        progress = find_progress(run_id)

        def alive(parts: int) -> None:
            if progress is not None:
                progress.alive.remote(log_dir.name, parts)

        self._health = HealthMonitor(self._role, workhorses, self._log_dir, *timeouts, alive)
        up = [workhorse.rendezvous.remote() for workhorse in workhorses]
        # A starting process does not answer heartbeats yet.
        ray.wait(up, num_returns=len(up))
        self._health.begin()
        meeting_points = self._get(up)
        workers = self._call(lambda w: w.worker_info.remote())
        for rank, worker in enumerate(workers):
            check_environment(f"Workhorse {rank} of {self._role!r}", worker, environment_digest)
        self._stager = FileStager(workhorses, [w.node for w in workers], self._get, self._log_dir)
        size = len(workhorses) // num_replicas
        builds = []
        for number, workhorse in enumerate(workhorses):
            rank, replica = number % size, number // size
            host, port = meeting_points[replica * size]
            logs = None if self._stager.is_remote(number) else log_dir
            rank_info = RankInfo(role, number, rank, size, host, port, logs)
            builds.append(workhorse.build.remote(spec.located(partial(self._staged, number)), rank_info))
        self._get(builds)
        return workers

    def _staged(self, rank: int, directory: Path) -> Path:
        return self._stager.stage_in(directory)[rank]

    def unload(self, reused: bool) -> None:
        """Remove the model's staged files and, if the Workhorses are `reused`, free its memory."""
        self._call(lambda w: w.unload.remote() if reused else w.remove_directories.remote())
        self._workhorses, self._routes = [], {}

    def score(self, rows: Scattered[TextBatch]) -> Scores:
        """`Learner.score` of all rows, in order. Raises NonFiniteError if a score is not finite."""
        answers = self._scatter(rows, lambda w, shard: w.score.remote(shard))
        self._check_finite(answers, self._reporting())
        return _in_order(answers, rows)

    def reference(self, rows: Scattered[TextBatch]) -> Scores:
        """`Learner.reference` of all rows, in order. Raises NonFiniteError as `score`."""
        answers = self._scatter(rows, lambda w, shard: w.reference.remote(shard))
        self._check_finite(answers, self._reporting())
        return _in_order(answers, rows)

    def generate(self, rows: Scattered[PromptBatch], sampling: Sampling, version: int) -> ReplyBatch:
        """`Generator.generate` with a shard of the prompts a replica; replies in order. Raises NonFiniteError: a
        log-probability is not finite."""
        size = len(self._workhorses) // self._num_replicas
        calls: list[Ref[ReplyBatch]] = []
        firsts: list[int] = []
        for replica, places in enumerate(rows.places):
            if len(places):
                # Every rank of a replica gets the same prompts; the first rank answers for it.
                ranks = self._workhorses[replica * size : (replica + 1) * size]
                firsts.append(len(calls))
                calls += [w.generate.remote(rows.shard(replica), sampling, version) for w in ranks]
        replies = self._get(calls)
        self._check_finite([replies[first] for first in firsts], firsts)
        return _in_order([replies[first] for first in firsts], rows)

    def export_weights(
        self, version: int, shared: bool = False, dtype: str | None = None, merged: bool = True
    ) -> WeightUpdate:
        """The trainable weights as version `version`, in shared memory of this machine or in the object store; adapters
        merged into their matrices, or as they are."""
        updates = self._call(lambda w: w.export_weights.remote(version, shared, dtype, merged))
        # Ranks of a stage divide its buckets; generators load a layer at a time, and so want them in order.
        ranked = [((self._topology.stage(rank), b.place), b) for rank, one in enumerate(updates) for b in one.buckets]
        return replace(updates[0], buckets=tuple(bucket for _, bucket in sorted(dict(ranked).items())))

    def load_weights(self, update: WeightUpdate) -> int:
        """Load `update` on every Workhorse or, if one fails, on none; returns the version they all hold."""
        checkers = zip(self._workhorses, self._stager.node_peers(), strict=True)
        sent = cast("WeightUpdate", ray.put(update))  # it names every tensor: pickled once, and not for each rank
        self._get([w.verify_weights.remote(sent, *peer) for w, peer in checkers], apart=True)
        loads = [w.load_weights.remote(sent, True) for w in self._workhorses]
        try:
            self._get(loads, apart=True)
        except WorkhorseError:
            raise
        except Exception:
            loaded = [w for w, load in zip(self._workhorses, loads, strict=True) if answered(load, 0)]
            self._get([workhorse.revert_weights.remote() for workhorse in loaded])
            raise
        return update.version

    def load_checkpoint(self, directory: Path, version: int) -> None:
        """Load a checkpoint, which differs from this generator's only in its weights, as `version`."""
        directories = self._stager.stage_in(directory)
        ranks = zip(self._workhorses, directories, strict=True)
        self._get([w.load_checkpoint.remote(path, version) for w, path in ranks])

    def follow(self, policy: WholeModelHandle, version: int) -> str | None:
        """Load `policy`'s weights as `version` into this generator, by the fastest transport between their devices.

        Returns a digest of the weights; None after a transfer from GPU to GPU, which does not read them.
        """
        if policy not in self._routes:
            self._routes[policy] = self._route(policy)
        route = self._routes[policy]
        if route.transport == "plasma":
            update = get(policy.export_weights.remote(version, route.shared, route.dtype, not route.adapter))
            self.load_weights(update)
            return update.digest
        per_replica = len(self._workhorses) // self._num_replicas
        get(policy.send_weights.remote(version, route, self._workhorses, per_replica))
        return None

    def _route(self, policy: WholeModelHandle) -> Route:
        def names() -> tuple[set[str] | None, set[str]]:
            trained = get(policy.whole_weight_names.remote())
            return trained, self._call(lambda w: w.layers_of.remote(trained or set()))[0]

        assert isinstance(self._spec.layout, GeneratorConfig)
        devices = get(policy.where.remote()), self.where()
        adapter = self._spec.adapter is not None
        wanted = "plasma" if adapter else self._runtime.weight_transfer
        return replace(choose_route(wanted, self._spec.layout, *devices, names), adapter=adapter)

    def whole_weight_names(self) -> set[str] | None:
        """Names of the trained weights; None if no rank has all of them whole."""
        return None if self._topology.is_split else self._call(lambda w: w.weight_names.remote())[0]

    def send_weights(self, version: int, route: Route, receivers: list[WorkhorseHandle], per_replica: int) -> None:
        """`Learner.send_weights` on all ranks, to the Workhorses of a generator."""
        meet = self._call(lambda w: w.rendezvous.remote())[0]
        self._call(lambda w: w.send_weights.remote(version, route, meet, receivers, per_replica))

    def where(self) -> list[Device]:
        return self._call(lambda w: w.where.remote())

    def sleep(self, synced_next: bool = False) -> None:
        """`Learner.sleep`, or `Generator.sleep` of a model that samples."""
        given = {"synced_next": synced_next} if isinstance(self._spec.layout, GeneratorConfig) else {}
        self._call(lambda w: w.sleep.remote(**given))

    def wake_up(self) -> None:
        self._call(lambda w: w.wake_up.remote())

    def release_memory(self) -> None:
        self._call(lambda w: w.release_memory.remote())

    def save(self, directory: Path, head_file: str | None = None) -> None:
        """Write the model in Hugging Face form, and compare the files with it. The ranks on a disk divide copying;
        afterwards those on this node's disk divide hashing, if there are several files, and one reads all. Raises
        PublishedError: they hold another model than was trained."""
        from xray_runtime.models.weight_files import HEAD_PREFIX, write_digests

        directories, peers = self._stager.output_directories(directory), self._stager.peers()
        ranks = list(zip(self._workhorses, directories, peers, strict=True))
        self._get([w.begin_save.remote(path, *peer) for w, path, peer in ranks])
        written = self._get([w.save.remote(path, head_file) for w, path, _ in ranks])
        for rank, copy in self._stager.stage_out(directories, directory).items():
            # All ranks of that node wrote their tensors into one copy of the model.
            own_ranks = [r for r, path in enumerate(directories) if path == directories[rank]]
            names = [name for r in own_ranks for name in written[r] if not name.startswith(HEAD_PREFIX)]
            merge_copy(copy, directory, names, head_file)
        self._stager.remove(directories)
        if (lora := (spec := cast("ModelSpec", self._spec)).kept_adapters) is not None:
            sent = self.export_weights(0, merged=False)
            save_adapter(sent, directory / ADAPTER, lora, spec.directory, continues=spec.continues)
        here = [rank for rank, path in enumerate(directories) if path == directory]
        self._check_saved(directory, head_file, {n: d for part in written for n, d in part.items()}, here)
        if (directory / WEIGHTS_INDEX).exists():
            calls = [self._workhorses[rank].finish_save.remote(directory, *peers[rank]) for rank in here]
            digests = {name: sha256 for part in self._get(calls, here) for name, sha256 in part.items()}
            write_digests(directory, directory, digests)

    def save_state(self, directory: Path) -> None:
        """Write a snapshot of model and optimizer into `directory`; every rank writes its shard."""
        directories = self._stager.output_directories(directory)
        self._get([w.save_state.remote(path) for w, path in zip(self._workhorses, directories, strict=True)])
        for copy in self._stager.stage_out(directories, directory).values():
            shutil.copytree(copy, directory, dirs_exist_ok=True)
            shutil.rmtree(copy)
        self._stager.remove(directories)

    def check_state(self, directory: Path) -> str | None:
        """Why a snapshot must not be loaded, in one line; None where no shard is damaged. The ranks on a disk divide
        its shards."""
        directories = self._stager.stage_in(directory)
        ranks = zip(self._workhorses, directories, self._stager.peers(), strict=True)
        checks = [w.check_state.remote(path, *peer) for w, path, peer in ranks]
        problem = next((text for text in self._get(checks) if text is not None), None)
        if problem is not None:
            self._stager.forget(directory)
        return problem

    def load_state(self, directory: Path) -> None:
        """Continue from a snapshot that `check_state` found sound."""
        directories = self._stager.stage_in(directory)
        self._get([w.load_state.remote(path) for w, path in zip(self._workhorses, directories, strict=True)])
        self._stager.forget(directory)

    def _check_finite(self, answers: Sequence[ColumnBatch], ranks: Iterable[int]) -> None:
        for rank, answer in zip(ranks, answers, strict=True):
            if (wrong := answer.non_finite()) is not None:
                raise NonFiniteError(f"{self._role!r}, rank {rank}: {wrong} are not finite")

    def _reporting(self) -> list[int]:
        """The rank that answers for each replica."""
        return [rank for rank in range(len(self._workhorses)) if self._topology.reports(rank)]

    def _scatter(self, rows: Scattered[TextBatch], call: Callable[[WorkhorseHandle, TextBatch], Ref[T]]) -> list[T]:
        """The answer of each replica. All Workhorses of a replica get the same rows; one answers for it."""
        answers = self._get(self._shards(rows, call))
        return [answers[rank] for rank in self._reporting()]

    def _shards(self, rows: Scattered[TextBatch], call: Callable[[WorkhorseHandle, TextBatch], Ref[T]]) -> list[Ref[T]]:
        return [call(w, rows.shard(self._topology.data_rank(r))) for r, w in enumerate(self._workhorses)]

    def _call(self, call: Callable[[WorkhorseHandle], Ref[T]]) -> list[T]:
        """The answer of every Workhorse, in order of rank."""
        return self._get([call(workhorse) for workhorse in self._workhorses])

    def _get(self, refs: list[Ref[T]], ranks: list[int] | None = None, *, apart: bool = False) -> list[T]:
        """The answers; `apart`: no call waits for a peer's, so where one fails the others end."""
        try:
            return self._health.collect(refs, ranks)
        except Exception as error:
            wait_s = self._runtime.hang_timeout_s if apart else 0
            dead = isinstance(error, WorkhorseError)
            if dead or len(ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0]) < len(refs):
                # Peers may wait in a collective for ever.
                self._kill()
            raise

    def _kill(self) -> None:
        for workhorse in self._workhorses:
            ray.kill(workhorse)


def _in_order(answers: list[B], rows: Scattered[K]) -> B:
    """The answers to the shards, in the order of the batch."""
    if len(rows.shards) == 1:
        return answers[0]
    return type(answers[0]).join(answers, [places.tolist() for places in rows.places if len(places)])
