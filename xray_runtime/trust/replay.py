"""Replay: a published stage computed again, and every byte compared.

Snapshots are removed when a stage is published, so a replay starts from the stage's inputs, with its body and config.
A PPO stage may end after a given iteration: each is compared with the ledger, which has a digest of the weights after
it, since the next iteration sent them to its generator. Where a stage runs to its end, the files are compared with the
checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.protocols import ModelHandle, Ready, Ref, get
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.gold import import_function
from xray_runtime.data.ledger import Difference, first_difference, iterations, read_shard, shard_path
from xray_runtime.kernel.config.section import RuntimeConfig, Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.graph.kind import Answer, StageKind, config_of
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.store.checkpoints import inspect
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.common.environment import AgentConfig, environment_of
from xray_runtime.methods.ppo.hacking_monitor import read_answers
from xray_runtime.models.merging import full_model
from xray_runtime.rewards.journal import Journal, publish_answers
from xray_runtime.trust.keys import seal_of
from xray_runtime.trust.replay_answers import require_answers, restore_recorded
from xray_runtime.trust.rollouts import require_ledger
from xray_runtime.trust.signing import has_signing_key

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels
    from xray_runtime.kernel.store.identity import Identity
    from xray_runtime.kernel.store.snapshots import Snapshot

OnProgress = Callable[[int, int, str, str], None]
"""(done, total, unit, note), as a stage's recorder takes them."""


@dataclass
class Replay:
    """The result of a replay."""

    iteration: int | None
    """The last one that is compared. None: the stage is computed to its end."""
    compared: list[int] = field(default_factory=list)
    """Iterations whose rollouts are equal in every byte."""
    difference: Difference | None = None
    changed_since: bool = False
    """Whether the replay equals what was published: then the file was changed later."""
    weights: str | None = None
    """Digest of the trained weights, if they were compared."""
    files: int = 0
    """Files of the checkpoint that are equal in every byte, once the stage came to its end."""
    taken: list[str] = field(default_factory=list)
    """Sources of reward that might answer differently when asked again: their answers are in the checkpoint."""

    @property
    def is_same(self) -> bool:
        return self.difference is None and (self.files > 0 or self.iteration in self.compared)

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "same": self.is_same,
            "iteration": self.iteration,
            "compared": self.compared,
            "files": self.files,
            "weights": self.weights,
            "taken": self.taken,
            "difference": None if found is None else vars(found) | {"changed_since": self.changed_since},
        }


@dataclass(frozen=True)
class Replayable:
    """A stage that can be replayed, with the arguments of its body."""

    node: Node
    kind: StageKind
    config: Section
    runtime: RuntimeConfig
    paths: dict[str, Path]
    """Role → checkpoint of each input."""

    @property
    def ledger(self) -> Path:
        return self.node.directory / LEDGER

    def identity(self, memory: Any) -> Identity:
        """The stage's identity today: code and libraries may differ from those that computed it."""
        from xray_runtime.kernel.graph.stage_identity import identify

        manifest = self.node.manifest
        parents = manifest.parents
        found = identify(self.kind, manifest.stage, self.config, manifest.seed, self.runtime, parents, {}, memory)
        return found[0]


def replayable(node: Node, graph: CheckpointGraph, iteration: int | None) -> Replayable:
    """The stage of a checkpoint, ready to replay up to `iteration`, or to its end.

    Raises:
        ConfigError: it has no ledger of that iteration; its kind is unknown; it reads what is not in the store; a
            parent is missing or damaged; a function cannot be imported; or a source of reward might answer differently,
            and its answers are not in the checkpoint.
    """
    manifest, kind = node.manifest, node.kind
    kept = iterations(node.directory / LEDGER) if iteration is None else require_ledger(node, iteration)
    if kind is None:
        raise ConfigError(
            f"REF: {node.name} is not allowed: its stage kind {manifest.kind!r} is unknown here; name the module that "
            "registers it with --import"
        )
    values = {name: value for name, value in manifest.config.items() if name != "runtime"}
    try:
        config = config_of(kind, values)
        runtime = RuntimeConfig(**(manifest.config["runtime"] if kind.computes else {}))
    except (ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise ConfigError(f"REF: {node.name}: this version of X-ray cannot read its config ({reason})") from None
    if outside := ", ".join(name for name in kind.outside_of(config) if not name.startswith("environment.")):
        raise ConfigError(
            f"REF: {node.name} is not allowed: it reads {outside} from outside the store, which has only a digest of it"
        )
    require_answers(node, config, kept, iteration if iteration is not None else max(kept, default=0))
    for role, sha256 in manifest.parents.items():
        parent = graph.nodes.get(sha256)
        if parent is None:
            raise ConfigError(f"REF: {role} {sha256[:12]} of {node.name} is not in the store (`xray fetch`?)")
        damages = inspect(parent.directory, sha256)
        if damages:
            raise ConfigError(f"REF: {role} {parent.name} is not what {node.name} was made from: {damages[0].text}")
    # An agent does not run again: neither its function nor its directory is read.
    played = environment_of(config)
    agent = played.called_functions if isinstance(played, AgentConfig) else ()
    for name in (name for name in kind.functions_of(config) if name not in agent):
        try:
            import_function(name, "function")
        except ValueError as error:
            raise ConfigError(f"REF: {node.name}: {error}") from None
    paths = {role: graph.nodes[sha256].directory.absolute() for role, sha256 in manifest.parents.items()}
    return Replayable(node, kind, config, runtime, paths)


def replay(
    stage: Replayable,
    iteration: int | None,
    open_models: OpenModels,
    scratch: Path,
    progress: OnProgress = lambda *_: None,
) -> Replay:
    """Compute `stage` again up to `iteration`, or to its end; compare each iteration that a ledger has, and the files.

    Args:
        open_models: `cluster.opening.model_opener`.
        scratch: an empty directory for its output.

    Raises:
        Exception: any error of the body.
    """
    # The replay reads its files only where they are sealed with the key that it seals with.
    output = stage.node.directory.parents[1]
    seal = seal_of(output) if has_signing_key(output) else process_seal()
    journal = Journal(scratch, seal=seal)
    result = Replay(iteration, taken=restore_recorded(stage.node.directory, stage.config, iteration, journal))
    out = scratch / "out"
    out.mkdir()
    recorder = _ReplayRecorder(stage, result, out, progress)
    try:
        paths = {role: full_model(path, scratch / "inputs") for role, path in stage.paths.items()}
    except ValueError as error:
        raise ConfigError(f"REF: {error}") from None
    inputs = stage.kind.inputs_at(paths)
    manifest = stage.node.manifest

    @contextmanager
    def watched(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        with open_models(specs) as models:
            if "generator" in models:
                generator: Any = _WatchedGenerator(models["generator"], recorder.sent)
                models = models | {"generator": generator}
            yield models

    body: Stage[Any, Any] = Stage(
        manifest.stage, manifest.seed, stage.config, inputs, stage.runtime, watched, kept=scratch, seal=seal
    )
    try:
        stage.kind.run(body, out, recorder)
        publish_answers(Journal(scratch, seal=seal), out)
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
        if self._result.iteration is not None and step > self._result.iteration:
            # There is no digest of the weights; but this iteration, which started from them, is equal.
            raise _Done

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        last = self._result.iteration
        self._progress(done, total if last is None else min(last + 1, total), unit, note)

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
        self._end(found or Difference(step, None, name, "the same values in different bytes", "those of the values"))

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
            last = self._result.iteration
            if last is not None and version > last and recorded is not None:
                self._result.weights = digest
                raise _Done

    def published(self) -> None:
        """Compare the files of the body, which has ended, with the checkpoint's."""
        from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX
        from xray_runtime.models.tensor_file import WEIGHTS_FILE

        for entry in self._stage.node.manifest.files:
            if entry.path.startswith(f"{LEDGER}/"):
                continue
            path = self._out / entry.path
            made = file_sha256(path) if path.is_file() else "no such file"
            if made != entry.sha256:
                self._end(Difference(self._result.iteration, None, entry.path, entry.sha256, made))
            self._result.files += 1
            # The index has the digests of all files of weights.
            if entry.path in (WEIGHTS_FILE, WEIGHTS_INDEX):
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

    def refuse_snapshot(self, problem: str) -> None: ...

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
