"""One iteration of a PPO stage computed again from its bundle, and which of its parts come out the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from xray_runtime.data.ledger import (
    FAILURE,
    GOLD,
    SCORE,
    LedgerShard,
    first_difference,
    read_shard,
    shard_path,
)
from xray_runtime.engines.layouts import GENERATORS
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.kernel.store.snapshots import STATE, Snapshot
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.rewards.reward_sources import ENVIRONMENT
from xray_runtime.trust.iteration.recorded_replies import RecordedReplies
from xray_runtime.trust.iteration.updates import UpdateWatch, differing, differing_steps
from xray_runtime.trust.recompute import Done, Models, OnProgress, Recomputation, recompute

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels
    from xray_runtime.trust.iteration.bundle import PortableIteration

Verdict = Literal["equal", "DIFFERENT", "recorded"]
SCORES = ("logprobs", "entropy", "ref_logprobs", "teacher_logprobs", "kept_mass")
REWARDS = (GOLD, "reward", "scaled_reward", "turn_rewards")
ADVANTAGES = ("advantages", "weights")
TRAINED = "times_trained"
ROW = "row"
HASHED = ("_hash", "_mean")
AFTER = "weights after"
"""The last part of every comparison that reached the update."""


@dataclass(frozen=True)
class ReplayedPart:
    """One part of the iteration."""

    name: str
    verdict: Verdict
    note: str = ""
    """The first difference, or where something was read from."""


@dataclass
class IterationReplay:
    """The result."""

    iteration: int
    parts: list[ReplayedPart] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, and the update was compared."""
        return AFTER in {part.name for part in self.parts} and all(part.verdict != "DIFFERENT" for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {"same": self.is_same, "iteration": self.iteration, "parts": [asdict(part) for part in self.parts]}


def without_sampler(bundle: PortableIteration, missing: list[str]) -> str | None:
    """Why the replies must be read from the ledger; None where they can be sampled again.

    Args:
        missing: libraries of the stage's identity that are not installed here.
    """
    config = _config(bundle)
    engine = config.generator.engine
    if GENERATORS.get(engine).capabilities.remote:
        return f"its sampler, {engine}, runs elsewhere"
    return f"not installed here: {', '.join(missing)}" if missing else None


def replay_iteration(
    bundle: PortableIteration, open_models: OpenModels, scratch: Path, progress: OnProgress, recorded: str | None = None
) -> IterationReplay:
    """Compute the iteration again and compare each part.

    Args:
        scratch: an empty directory.
        recorded: why the replies are read from the ledger and not sampled.

    Raises:
        Exception: any error of the body.
    """
    recorder = _Recorder(bundle, scratch, progress, recorded)
    recorder.taken = recompute(recorder, open_models)
    return IterationReplay(bundle.record.iteration, recorder.parts())


def _config(bundle: PortableIteration) -> PPOConfig:
    config = bundle.stage.config
    assert isinstance(config, PPOConfig)
    return config


class _Recorder(Recomputation):
    def __init__(self, bundle: PortableIteration, scratch: Path, progress: OnProgress, recorded: str | None) -> None:
        number = bundle.record.iteration
        super().__init__(bundle.stage, number, scratch, progress)
        self._bundle, self._number, self._recorded = bundle, number, recorded
        self._snapshot = bundle.snapshot
        self._watch = UpdateWatch(scratch / "after")
        self._digests: dict[int, str | None] = {}
        """Version → digest of the weights that were sent."""
        self._files: ReplayedPart | None = None
        self._update: list[ReplayedPart] = []
        self._ledger: list[ReplayedPart] = []
        self.taken: list[str] = []

    def seal(self) -> Seal:
        # The bundle was checked as a whole, and its owner's key is not here.
        return process_seal()

    def resume(self) -> Snapshot | None:
        if self._snapshot is None:
            return None
        state = json.loads((self._snapshot / STATE).read_text(encoding="utf-8"))
        return Snapshot(self._snapshot, self._number, state)

    def refuse_snapshot(self, problem: str) -> None:
        raise ConfigError(f"REF: its snapshot cannot be loaded: {problem}")

    def specs(self, specs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {role: spec for role, spec in specs.items() if role != "generator" or self._recorded is None}

    def opened(self, models: Models) -> Models:
        self._watch.is_on = True
        models = self._watch.watched(models)
        if self._recorded is None:
            return models
        generator: Any = RecordedReplies(self._then.table, _config(self._bundle).generator.engine)
        return models | {"generator": generator}

    def sent(self, version: int, digest: str | None) -> None:
        self._digests[version] = digest
        if version > self._number:
            raise Done

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._ledger, self._update = self._compared_ledger(), self._compared_update()
        is_last = self._number + 1 == _config(self._bundle).iterations
        if self._recorded is not None or not (is_last or self._policy(self._number + 1)):
            raise Done

    def published(self) -> None:
        """The last iteration: the files are the checkpoint's."""
        different = None
        for entry in self.stage.node.manifest.files:
            path = self.out / entry.path
            if entry.path.startswith(f"{LEDGER}/"):
                continue
            made = file_sha256(path) if path.is_file() else "no such file"
            if made != entry.sha256:
                different = different or f"{entry.path}: {entry.sha256} in the checkpoint, {made} computed again"
        self._files = _part("files of the checkpoint", different)

    def parts(self) -> list[ReplayedPart]:
        """All that was compared, in the order of the computation."""
        # An environment's answers are part of the replies.
        read = {"rewards": self.taken, "replies": [name for name in self.taken if name == ENVIRONMENT]}
        ledger = [_recorded(part, read.get(part.name, [])) for part in self._ledger]
        before = self._sent(self._number, "weights before")
        after = self._sent(self._number + 1, "weights that were sent next")
        found = [before, *ledger, *self._update, after, self._files]
        return [part for part in found if part is not None]

    @cached_property
    def _then(self) -> LedgerShard:
        return read_shard(shard_path(self.stage.ledger, self._number))

    def _policy(self, version: int) -> str | None:
        """The digest of the weights after `version` updates that the ledger has."""
        path = shard_path(self.stage.ledger, version)
        return read_shard(path, lists=False).policy if path.is_file() else None

    def _sent(self, version: int, name: str) -> ReplayedPart | None:
        recorded, digest = self._policy(version), self._digests.get(version)
        if recorded is None or self._recorded is not None:
            return None
        same = recorded == digest
        return _part(name, None if same else f"{recorded} in the ledger, {digest} computed again")

    def _compared_ledger(self) -> list[ReplayedPart]:
        then, now = self._then, read_shard(shard_path(self.out / LEDGER, self._number))
        groups: dict[str, list[str]] = {"replies": [], "log-probabilities": [], "rewards": [], "advantages": []}
        for name in then.table.column_names:
            groups[_group(name)].append(name)
        found = []
        for group, names in groups.items():
            part = _part(group, _difference(then, now, names), self._note() if group == "replies" else "")
            if group == "replies" and self._recorded is not None and part.verdict == "equal":
                part = ReplayedPart(group, "recorded", self._recorded)
            found.append(part)
        same = all(part.verdict != "DIFFERENT" for part in found)
        if same and then.to_bytes() != replace(now, policy=then.policy).to_bytes():
            found.append(ReplayedPart("ledger", "DIFFERENT", "the same values in different bytes, or other columns"))
        return found

    def _note(self) -> str:
        before = min(self._number, _config(self._bundle).lag)
        return f"in the snapshot, as they were sampled {before} iterations before" if before else ""

    def _compared_update(self) -> list[ReplayedPart]:
        then, now = self._bundle.record.update, self._watch.result()
        gradient = differing_steps(then, now, norms=True)
        return [
            _part("loss", differing_steps(then, now, norms=False)),
            _part("gradient", gradient or differing(then.moments, now.moments, "optimizer state")),
            _part(AFTER, differing(then.weights, now.weights, "weights")),
        ]


def _part(name: str, difference: str | None, note: str = "") -> ReplayedPart:
    return ReplayedPart(name, "equal", note) if difference is None else ReplayedPart(name, "DIFFERENT", difference)


def _recorded(part: ReplayedPart, sources: list[str]) -> ReplayedPart:
    """The part with the sources whose answers were read from the checkpoint."""
    notes = [part.note] if part.note else []
    return replace(part, note="; ".join([*notes, *(f"recorded: {name}" for name in sources)]))


def _group(column: str) -> str:
    name = column
    for suffix in HASHED:
        name = name.removesuffix(suffix)
    if name in SCORES:
        return "log-probabilities"
    if name in REWARDS or name.startswith((SCORE, FAILURE)):
        return "rewards"
    return "advantages" if name in (*ADVANTAGES, TRAINED) else "replies"


def _difference(then: LedgerShard, now: LedgerShard, names: list[str]) -> str | None:
    """The first difference in these columns."""

    def chosen(table: pa.Table) -> pa.Table:
        return table.select([name for name in dict.fromkeys([ROW, *names]) if name in table.column_names])

    # The digest of the weights is compared on its own.
    old, new = (LedgerShard(each.iteration, None, chosen(each.table)) for each in (then, now))
    found = first_difference(old, new)
    return None if found is None else str(found)
