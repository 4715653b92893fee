"""Log-probabilities of a dataset's replies under the reference: computed once, before training, and kept.

Their key (`kernel.store.derived`) is a digest of everything that determines them: the replies' tokens, the reference's
manifest and layout, the device, X-ray's code and the libraries. A resumed stage reads the same bytes, and the trials of
a search compute them once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.ragged import load_columns, save_columns
from xray_runtime.data.replies import Replies
from xray_runtime.kernel.store.derived import Derived
from xray_runtime.kernel.store.identity import digest, environment_digest, file_sha256
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.methods.common.training.trained_model import trained_model

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.models.objectives import Objective

ENDING = ".safetensors"
CHUNK = 512
"""Number of replies scored at a time."""


class ReferenceLogprobs:
    """The log-probability of each whole reply of `parts` (name → replies) under the stage's `reference`, or else its
    initial `policy`; they are kept next to the directory `dataset`."""

    def __init__(self, stage: Stage[Any, Any], dataset: Path, parts: Mapping[str, Replies], recorder: Recorder) -> None:
        self._parts, self._recorder = parts, recorder
        self.model: Path = (stage.inputs.reference or stage.inputs.policy).path
        """The checkpoint of the reference."""
        content = {
            "replies": {name: _content_digest(part) for name, part in parts.items()},
            "reference": file_sha256(self.model / MANIFEST),
            # The last bits depend on which replies are scored together, and on all that follows.
            "chunk": CHUNK,
            # The reference has the policy's layout.
            "layout": stage.config.model_dump(mode="json", include={"engine", "lora", "trainable_layers"}),
            "runtime": list(stage.runtime.in_keys().values()),
            "software": environment_digest(),
        }
        key = digest(content)[:32]
        self._derived, self._name = Derived(dataset, stage.seal), f"reference-{key}{ENDING}"

    def load(self) -> dict[str, np.ndarray] | None:
        """Part → log-probabilities [size], float32; None if they are not computed yet."""
        path = self._derived.find(self._name)
        return _read(path) if path is not None else None

    def compute(self, model: ModelHandle) -> dict[str, np.ndarray]:
        """Score all replies with the reference and keep the result."""
        total, done = sum(part.size for part in self._parts.values()), 0
        logprobs: dict[str, np.ndarray] = {}
        for name, part in self._parts.items():
            scores = []
            for numbers in _chunks(part.size):
                self._recorder.progress(done, total, "replies", "scored by the reference")
                scores.append(get(model.score.remote(part.take(numbers))).reply_logprobs)
                done += len(numbers)
            logprobs[name] = np.concatenate(scores).astype(np.float32)
        # If another process was faster, its bytes count.
        return _read(self._derived.make(self._name, lambda path: save_columns(path, logprobs)))


@contextmanager
def open_policy(
    stage: Stage[Any, Any], objective: Objective[Any], reference: ReferenceLogprobs | None
) -> Iterator[tuple[ModelHandle, dict[str, np.ndarray] | None]]:
    """The policy to train, and the reference's log-probabilities, computed first if necessary.

    Reference and policy are never open at the same time, so the reference needs no memory of its own and no branch on a
    frozen trunk. If the initial policy is the reference, the policy itself computes them.
    """
    start, known = stage.inputs.policy.path, reference.load() if reference is not None else None
    if reference is not None and known is None and reference.model != start:
        with stage.open_models({"policy": trained_model(stage, reference.model, objective)}) as models:
            known = reference.compute(models["policy"])
    with stage.open_models({"policy": trained_model(stage, start, objective)}) as models:
        if reference is not None and known is None:
            known = reference.compute(models["policy"])
        yield models["policy"], known


def _read(path: Path) -> dict[str, np.ndarray]:
    return {name: part for name, part in load_columns(path).items() if isinstance(part, np.ndarray)}


def _content_digest(part: Replies) -> str:
    content = hashlib.sha256(str(part.size).encode())
    for numbers in _chunks(part.size):
        rows = part.take(numbers)
        for array in (rows.input_ids.values, rows.input_ids.offsets, rows.prompt_lengths):
            content.update(array.tobytes())
    return content.hexdigest()


def _chunks(size: int) -> Iterator[np.ndarray]:
    # Chunks of equal size: a small last one might have fewer rows than there are ranks.
    return iter(np.array_split(np.arange(size), max(size // CHUNK, 1)) if size else [])
