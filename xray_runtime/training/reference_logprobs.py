"""Log-probabilities of a dataset's replies under the reference: computed once, before training, and kept beside it.

Their key (`data.derived`) is a digest of all that decides them: the replies' tokens, the reference's manifest, how it
is spread, the device, X-ray's code and the libraries. An interrupted stage goes on with the same bytes, and trials of a
search compute them once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.derived import Derived, computed_key
from xray_runtime.data.replies import Replies
from xray_runtime.data.rows import Rows, load_rows, save_rows
from xray_runtime.seeding import derive_seed
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import MANIFEST
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Recorder, Stage
    from xray_runtime.models.objectives import Objective

ENDING = ".safetensors"
CHUNK = 512
"""Replies that are asked for at a time."""


class ReferenceLogprobs:
    """What a stage needs of its reference: the log-probability of each whole reply.

    Args:
        stage: whose `reference`, or where it has none whose `policy` as it begins, computes them.
        dataset: the directory beside which they are kept.
        parts: name → replies.
    """

    def __init__(
        self,
        stage: Stage[Any, Any],
        dataset: Path,
        parts: Mapping[str, Replies],
        recorder: Recorder,
    ) -> None:
        self._parts, self._recorder = parts, recorder
        self.model: Path = (stage.inputs.reference or stage.inputs.policy).path
        """The checkpoint of the reference."""
        key = computed_key(
            stage,
            # It is spread as the policy is.
            {"engine", "lora", "trainable_layers"},
            replies={name: _digest(part) for name, part in parts.items()},
            reference=file_sha256(self.model / MANIFEST),
            # Which replies go through together shows in the last bits.
            chunk=CHUNK,
        )
        self._derived, self._name = Derived(dataset, stage.seal), f"reference-{key}{ENDING}"

    def load(self) -> dict[str, np.ndarray] | None:
        """Part → log-probabilities [size], float32, where they are there."""
        path = self._derived.find(self._name)
        return load_rows(path) if path is not None else None

    def compute(self, model: ModelHandle) -> dict[str, np.ndarray]:
        """Have the reference score all replies, and keep what it says."""
        total, done = sum(part.size for part in self._parts.values()), 0
        found: Rows = {}
        for name, part in self._parts.items():
            scores = []
            for numbers in _chunks(part.size):
                self._recorder.progress(done, total, "replies", "scored by the reference")
                scores.append(get(model.score.remote(part.take(numbers)))["logprobs"])
                done += len(numbers)
            found[name] = np.concatenate(scores).astype(np.float32)
        # Where another process was faster, it is its bytes that count.
        return load_rows(self._derived.make(self._name, lambda path: save_rows(path, found)))


@contextmanager
def open_policy(
    stage: Stage[Any, Any], objective: Objective, reference: ReferenceLogprobs | None
) -> Iterator[tuple[ModelHandle, dict[str, np.ndarray] | None]]:
    """The policy to be trained, and what the reference says, which scores first where that is not known yet.

    The reference never lives beside the policy: it needs no memory of its own, nor a branch on a frozen trunk. Where
    the policy as it begins is the reference, it is the model that scores.
    """
    config, start = stage.config, stage.inputs.policy.path

    def model(directory: Path) -> dict[str, ModelSpec]:
        spec = ModelSpec(
            directory,
            objective,
            training=config,
            trainable_layers=config.trainable_layers,
            adapter_seed=derive_seed(stage.seed, stage.name, "adapters"),
        )
        return {"policy": spec}

    known = reference.load() if reference is not None else None
    if reference is not None and known is None and reference.model != start:
        with stage.open_models(model(reference.model)) as models:
            known = reference.compute(models["policy"])
    with stage.open_models(model(start)) as models:
        if reference is not None and known is None:
            known = reference.compute(models["policy"])
        yield models["policy"], known


def _digest(part: Replies) -> str:
    digest = hashlib.sha256(str(part.size).encode())
    for numbers in _chunks(part.size):
        rows = part.take(numbers)
        for array in (rows["input_ids"].values, rows["input_ids"].offsets, rows["prompt_lengths"]):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _chunks(size: int) -> Iterator[np.ndarray]:
    # Equal ones: a small last one might have fewer rows than there are ranks.
    return iter(np.array_split(np.arange(size), max(size // CHUNK, 1)) if size else [])
