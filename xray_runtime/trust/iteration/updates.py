"""The update of an iteration, beyond what its ledger has: each optimizer step's numbers, and the state it ends with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xray_runtime.cluster.protocols import ModelHandle, Ref, get
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.engines.states import WEIGHT
from xray_runtime.kernel.evidence.envelope import EvidenceModel
from xray_runtime.kernel.store.manifest import Sha256
from xray_runtime.kernel.store.shards import read_shards
from xray_runtime.methods.common.sampling.turns import trained_models
from xray_runtime.trust.recompute import Models

GRAD_NORM = "grad_norm"
BeforeStep = Callable[[int, TextBatch, StepTotals, float], None]
"""Called before an optimizer step of the policy: number in the iteration, rows, totals, learning rate."""
CHUNK_BYTES = 1 << 20


class UpdateNumbers(EvidenceModel):
    """The numbers that an update computed, exactly."""

    steps: dict[str, list[dict[str, str]]]
    """Role → each optimizer step's sums and norm of the gradient, as Python writes the numbers."""
    weights: dict[str, Sha256]
    """Role → digest of the trained weights after it, in float32."""
    moments: dict[str, Sha256]
    """Role → digest of the optimizer's state after it, which every gradient of the iteration went into."""


class UpdateWatch:
    """Sees the optimizer steps of a stage's trained models.

    Args:
        scratch: where their states are written, to be hashed.
        before: called before each step of the policy, while `is_on`.
    """

    def __init__(self, scratch: Path, before: BeforeStep | None = None) -> None:
        self._scratch, self._before = scratch, before
        self._trained: dict[str, ModelHandle] = {}
        self._steps: dict[str, list[Ref[dict[str, float]]]] = {}
        self.is_on = False
        """Whether the iteration of interest has begun."""

    def watched(self, models: Models) -> Models:
        """The models, with those that are trained watched."""
        self._trained = trained_models(models)
        self._steps = {role: [] for role in self._trained}
        found: dict[str, Any] = {
            role: _Watched(self._trained[role], partial(self._train, role)) for role in self._trained
        }
        return models | found

    def _train(self, role: str, rows: TextBatch, totals: StepTotals, lr: float) -> Ref[dict[str, float]]:
        steps = self._steps[role]
        if self.is_on and role == "policy" and self._before is not None:
            self._before(len(steps), rows, totals, lr)
        answer = self._trained[role].train.remote(rows, totals, lr)
        if self.is_on:
            steps.append(answer)
        return answer

    def result(self) -> UpdateNumbers:
        """The update of the iteration that just ended."""
        steps = {
            role: [{name: repr(float(value)) for name, value in sorted(get(step).items())} for step in answers]
            for role, answers in self._steps.items()
        }
        digests = {role: self._digests(role) for role in self._trained}
        weights, moments = ({role: both[n] for role, both in digests.items()} for n in (0, 1))
        return UpdateNumbers(steps=steps, weights=weights, moments=moments)

    def _digests(self, role: str) -> tuple[str, str]:
        directory = self._scratch / role
        get(self._trained[role].save_state.remote(directory))
        return state_digests(directory)


class _Watched:
    """A trained model whose steps go through `train`."""

    def __init__(self, model: ModelHandle, train: Callable[..., Ref[dict[str, float]]]) -> None:
        self._model = model
        self.train = SimpleNamespace(remote=train)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def state_digests(directory: Path) -> tuple[str, str]:
    """(digest of the weights, digest of the optimizer's states) in the shards of a trained model."""
    weights, moments = hashlib.sha256(), hashlib.sha256()
    for shard in read_shards(directory):
        with (directory / shard.file).open("rb") as file:
            for key, piece in sorted(shard.pieces.items()):
                digest = weights if key.startswith(f"{WEIGHT}/") else moments
                digest.update(f"{key} {piece.model_dump_json(exclude={'offset'})}\n".encode())
                file.seek(piece.offset)
                left = piece.size * 4
                while left:
                    content = file.read(min(left, CHUNK_BYTES))
                    if not content:
                        raise ValueError(f"{directory / shard.file}: is shorter than its index says")
                    digest.update(content)
                    left -= len(content)
    return weights.hexdigest(), moments.hexdigest()


def differing(recorded: Mapping[str, Any], computed: Mapping[str, Any], what: str) -> str | None:
    """The first role whose value differs, as text; None where all are equal."""
    for role in sorted({*recorded, *computed}):
        then, now = recorded.get(role), computed.get(role)
        if then != now:
            return f"{what} of {role}: {then} in the bundle, {now} computed again"
    return None


def differing_steps(recorded: UpdateNumbers, computed: UpdateNumbers, *, norms: bool) -> str | None:
    """The first number of an optimizer step that differs: a norm of the gradient, or another; None where all agree."""
    for role in sorted({*recorded.steps, *computed.steps}):
        then, now = recorded.steps.get(role, []), computed.steps.get(role, [])
        if len(then) != len(now):
            return f"optimizer steps of {role}: {len(then)} in the bundle, {len(now)} computed again"
        for number, (old, new) in enumerate(zip(then, now, strict=True)):
            for name in sorted({*old, *new}):
                if (name == GRAD_NORM) == norms and old.get(name) != new.get(name):
                    values = f"{old.get(name)} in the bundle, {new.get(name)} computed again"
                    return f"optimizer step {number} of {role}, {name}: {values}"
    return None
