"""Replay: the iterations of a published PPO stage computed again, each compared with the ledger.

Snapshots are removed when a stage is published, so a replay starts from the stage's inputs, with its body and config,
and ends after the given iteration. The ledger has a digest of the weights after it, which the next iteration sent to
its generator; the weights after the last iteration are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.data.gold import import_function
from xray_runtime.data.ledger import LEDGER, Difference, first_difference, iterations, read_shard, shard_path
from xray_runtime.graph.answer import Answer
from xray_runtime.graph.kind import Stage, StageKind, config_of
from xray_runtime.lineage.graph import Graph, Node
from xray_runtime.lineage.keys import seal_of
from xray_runtime.lineage.recorded_answers import restore_answers, servers
from xray_runtime.lineage.rollouts import require_iteration, require_ledger
from xray_runtime.lineage.signing import has_signing_key
from xray_runtime.rewards.journal import Journal
from xray_runtime.rl.hacking_monitor import read_answers
from xray_runtime.store.checkpoints import inspect
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.seal import process_seal
from xray_runtime.workers.protocols import ModelHandle, Ready, Ref, get

if TYPE_CHECKING:
    from xray_runtime.graph.kind import OpenModels
    from xray_runtime.store.identity import Identity
    from xray_runtime.store.snapshots import Snapshot

OnProgress = Callable[[int, int, str], None]
"""(iterations done, their total, note)."""


@dataclass
class Replay:
    """The result of a replay."""

    iteration: int
    compared: list[int] = field(default_factory=list)
    """Iterations whose rollouts are equal in every byte."""
    difference: Difference | None = None
    """The first difference."""
    changed_since: bool = False
    """Whether the replay equals what was published: then the file was changed later."""
    weights: str | None = None
    """Digest of the trained weights, if they were compared."""
    taken: list[str] = field(default_factory=list)
    """Sources of reward that are servers, whose answers may vary: their scores are taken from the ledger."""

    @property
    def is_same(self) -> bool:
        return self.difference is None and self.iteration in self.compared

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "same": self.is_same,
            "iteration": self.iteration,
            "compared": self.compared,
            "weights": self.weights,
            "taken": self.taken,
            "difference": None if found is None else vars(found) | {"changed_since": self.changed_since},
        }


@dataclass(frozen=True)
class Replayable:
    """A stage that can be replayed, with the arguments of its body."""

    node: Node
    kind: StageKind
    config: Any
    runtime: RuntimeConfig
    inputs: Any

    @property
    def ledger(self) -> Path:
        return self.node.directory / LEDGER

    def identity(self, memory: Any) -> Identity:
        """The stage's identity today: code and libraries may differ from those that computed it."""
        from xray_runtime.graph.stage_identity import identify

        manifest = self.node.manifest
        parents = manifest.parents
        found = identify(self.kind, manifest.stage, self.config, manifest.seed, self.runtime, parents, {}, memory)
        return found[0]


def replayable(node: Node, graph: Graph, iteration: int) -> Replayable:
    """The stage of a checkpoint, ready to replay up to `iteration`.

    Raises:
        ConfigError: it has no ledger, or none of that iteration; a parent is missing or damaged; a function cannot be
            imported; or its rewards come from servers, and the ledger lacks some of the replies they scored.
    """
    manifest, kind = node.manifest, node.kind
    kept = require_ledger(node)
    require_iteration(iteration, kept)
    if kind is None:
        raise ConfigError(f"REF: {node.name} is not allowed: its stage kind {manifest.kind!r} is unknown here")
    values = {name: value for name, value in manifest.config.items() if name != "runtime"}
    try:
        config = config_of(kind, values)
        runtime = RuntimeConfig(**manifest.config["runtime"])
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"REF: {node.name}: this version of X-ray cannot read its config ({reason})") from None
    if servers(config) and (kept[: iteration + 1] != list(range(iteration + 1)) or config.ledger.tokens == "hashed"):
        raise ConfigError(
            f"REF: {node.name} is not allowed: its rewards come from servers, and its ledger does not hold the replies "
            f"of all iterations to {iteration}"
        )
    for role, sha256 in manifest.parents.items():
        parent = graph.nodes.get(sha256)
        if parent is None:
            raise ConfigError(f"REF: {role} {sha256[:12]} of {node.name} is not in the store (`xray fetch`?)")
        damages = inspect(parent.directory, sha256)
        if damages:
            raise ConfigError(f"REF: {role} {parent.name} is not what {node.name} was made from: {damages[0].text}")
    for name in kind.functions(config):
        try:
            import_function(name, "function")
        except ValueError as error:
            raise ConfigError(f"REF: {node.name}: {error}") from None
    paths = {role: graph.nodes[sha256].directory.absolute() for role, sha256 in manifest.parents.items()}
    return Replayable(node, kind, config, runtime, kind.inputs_at(paths))


def replay(
    stage: Replayable, iteration: int, open_models: OpenModels, scratch: Path, progress: OnProgress = lambda *_: None
) -> Replay:
    """Compute `stage` again up to `iteration`, and compare each iteration that the ledger has.

    Args:
        open_models: `workers.opening.model_opener`.
        scratch: an empty directory for its output.

    Raises:
        Exception: any error of the body.
    """
    # The replay reads its files only where they are sealed with the key that it seals with.
    output = stage.node.directory.parents[1]
    seal = seal_of(output) if has_signing_key(output) else process_seal()
    journal = Journal(scratch, seal=seal)
    result = Replay(
        iteration, taken=restore_answers(stage.node.directory, stage.config, stage.inputs, iteration, journal)
    )
    out = scratch / "out"
    out.mkdir()
    recorder = _ReplayRecorder(stage, result, out, progress)
    manifest = stage.node.manifest

    @contextmanager
    def watched(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        with open_models(specs) as models:
            generator: Any = _WatchedGenerator(models["generator"], recorder.sent)
            yield models | {"generator": generator}

    body: Stage[Any, Any] = Stage(
        manifest.stage, manifest.seed, stage.config, stage.inputs, stage.runtime, watched, kept=scratch, seal=seal
    )
    try:
        stage.kind.run(body, out, recorder)
        recorder.published()
    except _Done:
        pass
    return result


class _Done(Exception):
    """Ends the body: the comparison is complete."""


class _ReplayRecorder:
    """The recorder of a replay: compares each iteration as soon as its shard is written."""

    def __init__(self, stage: Replayable, result: Replay, out: Path, progress: OnProgress) -> None:
        self.log_dir = out.parent / "logs" / stage.node.manifest.stage
        self.log_dir.mkdir(parents=True)
        self._stage, self._result, self._out, self._progress = stage, result, out, progress
        self._kept = set(iterations(stage.ledger))
        self._answers = read_answers(stage.node.directory)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if step in self._kept:
            self._compare(step)
            self._result.compared.append(step)
        if step > self._result.iteration:
            # There is no digest of the weights; but this iteration, which started from them, is equal.
            raise _Done

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        self._progress(done, min(self._result.iteration + 1, total), note)

    def _compare(self, step: int) -> None:
        name = shard_path(Path(LEDGER), step).as_posix()
        ours, theirs = self._out / name, self._stage.node.directory / name
        if ours.read_bytes() == theirs.read_bytes():
            return
        listed = {entry.path: entry.sha256 for entry in self._stage.node.manifest.files}
        self._result.changed_since = file_sha256(ours) == listed.get(name)
        try:
            found = first_difference(read_shard(theirs), read_shard(ours))
        except ValueError as error:
            found = Difference(step, None, name, str(error), "a sound shard")
        self._end(found or Difference(step, None, name, "other bytes for the same values", "those of the values"))

    def sent(self, version: int, digest: str | None) -> None:
        """Compare the policy after `version` updates, as it is sent to the generator."""
        if version in self._kept:
            path = shard_path(self._stage.ledger, version)
            try:
                recorded = read_shard(path).policy
            except ValueError as error:
                self._end(Difference(version, None, path.name, str(error), "a sound shard"))
            if recorded is not None and digest != recorded:
                self._end(Difference(version - 1, None, "weights after it", recorded, str(digest)))
            if version > self._result.iteration and recorded is not None:
                self._result.weights = digest
                raise _Done

    def published(self) -> None:
        """Compare the files of the body, which has ended, with the checkpoint's."""
        from xray_runtime.models.tensor_file import WEIGHTS_FILE

        for entry in self._stage.node.manifest.files:
            if entry.path.startswith(f"{LEDGER}/"):
                continue
            path = self._out / entry.path
            made = file_sha256(path) if path.is_file() else "no such file"
            if made != entry.sha256:
                self._end(Difference(self._result.iteration, None, entry.path, entry.sha256, made))
            if entry.path == WEIGHTS_FILE:
                self._result.weights = made

    def _end(self, found: Difference) -> None:
        self._result.difference = found
        raise _Done

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def figure(self, name: str, figure: Any) -> None: ...

    def ask(self, question: str) -> Answer | None:
        # The person's answers are on record.
        return self._answers.pop(0) if self._answers else None

    def resume(self) -> Snapshot | None:
        return None

    def snapshot_due(self, step: int) -> bool:
        return False

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None: ...


class _WatchedGenerator:
    """A generator that calls `sent` with each version it receives and the digest of its weights."""

    def __init__(self, generator: ModelHandle, sent: Callable[[int, str | None], None]) -> None:
        self._generator, self._sent = generator, sent
        self.follow = SimpleNamespace(remote=self._follow)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def _follow(self, policy: ModelHandle, version: int) -> Ref[str | None]:
        digest = get(self._generator.follow.remote(policy, version))
        self._sent(version, digest)
        return Ready(digest)
