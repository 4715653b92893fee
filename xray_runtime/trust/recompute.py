"""A published stage's body run again, from its inputs or a snapshot, with a recorder that compares what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.protocols import ModelHandle, Ready, Ref, get
from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.kind import Answer
from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.methods.ppo.hacking_monitor import read_answers
from xray_runtime.models.merging import full_model
from xray_runtime.rewards.journal import Journal, publish_answers
from xray_runtime.trust.keys import seal_of
from xray_runtime.trust.replay_answers import restore_recorded
from xray_runtime.trust.replayable import Replayable
from xray_runtime.trust.signing import has_signing_key

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels
    from xray_runtime.kernel.store.snapshots import Snapshot

OnProgress = Callable[[int, int, str, str], None]
"""(done, total, unit, note), as a stage's recorder takes them."""
Models = dict[str, ModelHandle]


class Done(Exception):
    """Ends the body: the comparison is complete."""


class Recomputation:
    """The recorder of a body that runs again. What is compared, and when it ends, subclasses say.

    Args:
        last: the last iteration of interest; None: the body runs to its end.
        scratch: an empty directory for its output.
    """

    def __init__(self, stage: Replayable, last: int | None, scratch: Path, progress: OnProgress) -> None:
        self.stage, self.last, self.scratch = stage, last, scratch
        self.out = scratch / "out"
        self.out.mkdir()
        self.log_dir = scratch / "logs" / stage.node.manifest.stage
        self.log_dir.mkdir(parents=True)
        self._progress = progress
        self._answers = read_answers(stage.node.directory)

    def seal(self) -> Seal:
        """Files are read only where they are sealed with the key that the body seals with."""
        output = self.stage.node.directory.parents[1]
        return seal_of(output) if has_signing_key(output) else process_seal()

    def specs(self, specs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of the models to open."""
        return specs

    def opened(self, models: Models) -> Models:
        """The models that the body gets."""
        return models

    def sent(self, version: int, digest: str | None) -> None:
        """The policy after `version` updates was sent to the generator; `digest`: of its weights."""

    def published(self) -> None:
        """The body has ended."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """An iteration has ended, whose shard is written."""

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        self._progress(done, total if self.last is None else min(self.last + 1, total), unit, note)

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


def recompute(recorder: Recomputation, open_models: OpenModels) -> list[str]:
    """Run the body of the recorder's stage. Returns the sources of reward whose answers were read from the checkpoint.

    Raises:
        ConfigError: a file of the checkpoint, or of an adapter's base, is damaged.
        Exception: any error of the body.
    """
    stage, scratch = recorder.stage, recorder.scratch
    seal = recorder.seal()
    taken = restore_recorded(stage.node.directory, stage.config, recorder.last, Journal(scratch, seal=seal))
    try:
        paths = {role: full_model(path, scratch / "inputs") for role, path in stage.paths.items()}
    except ValueError as error:
        raise ConfigError(f"REF: {error}") from None
    inputs = stage.kind.inputs_at(paths)
    manifest = stage.node.manifest

    @contextmanager
    def watched(specs: Mapping[str, Any]) -> Iterator[Models]:
        with open_models(recorder.specs(specs)) as models:
            models = recorder.opened(models)
            if "generator" in models:
                generator: Any = _WatchedGenerator(models["generator"], recorder.sent)
                models = models | {"generator": generator}
            yield models

    body: Stage[Any, Any] = Stage(
        manifest.stage, manifest.seed, stage.config, inputs, stage.runtime, watched, kept=scratch, seal=seal
    )
    try:
        stage.kind.run(body, recorder.out, recorder)
        publish_answers(Journal(scratch, seal=seal), recorder.out)
        recorder.published()
    except Done:
        pass
    return taken


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
