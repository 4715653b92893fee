"""Log-probabilities of a dataset's replies under the reference: computed once, before training, and kept beside it.

    checkpoints/preferences-ab12….tokens-/reference-KEY-DIGEST.safetensors

KEY is a digest of all that decides them: the replies' tokens, the reference's manifest, how it is spread, the device,
X-ray's code and the libraries; DIGEST is of its own bytes. An interrupted stage goes on with the same bytes, and trials
of a search compute them once. What is damaged is made again; all of it may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from xray_runtime.data.replies import Replies
from xray_runtime.data.rows import Rows, load_rows, save_rows
from xray_runtime.data.tokens import SUFFIX
from xray_runtime.files import sync
from xray_runtime.store.identity import environment_digest, file_sha256
from xray_runtime.store.manifest import MANIFEST
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.engines import TrainingConfig
    from xray_runtime.stages.kind import Recorder, Stage

log = logging.getLogger(__name__)

CHUNK = 512
"""Replies that are asked for at a time."""


class ReferenceLogprobs:
    """What a stage needs of its reference: the log-probability of each whole reply.

    Args:
        dataset: the directory beside which they are kept.
        reference: the checkpoint that computes them.
        parts: name → replies.
    """

    def __init__(
        self,
        stage: Stage[Any, Any],
        dataset: Path,
        reference: Path,
        parts: Mapping[str, Replies],
        recorder: Recorder,
    ) -> None:
        self._parts, self._recorder = parts, recorder
        self._folder = dataset.with_name(dataset.name + SUFFIX)
        self._key = _key(stage, reference, parts)

    def load(self) -> dict[str, np.ndarray] | None:
        """Part → log-probabilities [size], float32, where they are there; a damaged file is deleted."""
        for path in self._folder.glob(f"reference-{self._key}-*.safetensors"):
            if path.stem == f"reference-{self._key}-{_file_digest(path)}":
                return load_rows(path)
            log.warning("%s is damaged: the reference scores again", path)
            path.unlink(missing_ok=True)
        return None

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
        self._folder.mkdir(exist_ok=True)
        temporary = self._folder / f"reference.writing-{uuid.uuid4().hex[:8]}"
        try:
            save_rows(temporary, found)
            sync(temporary)
            os.replace(temporary, self._folder / f"reference-{self._key}-{_file_digest(temporary)}.safetensors")
        finally:
            temporary.unlink(missing_ok=True)
        return found


def _key(stage: Stage[Any, Any], reference: Path, parts: Mapping[str, Replies]) -> str:
    config: TrainingConfig = stage.config
    content = {
        "replies": {name: _digest(part) for name, part in parts.items()},
        "reference": file_sha256(reference / MANIFEST),
        # It is spread as the policy is.
        "layout": config.model_dump(mode="json", include={"engine", "lora", "trainable_layers"}),
        "runtime": [stage.runtime.device, stage.runtime.threads],
        # Which replies go through together shows in the last bits.
        "chunk": CHUNK,
        "software": environment_digest(),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _digest(part: Replies) -> str:
    digest = xxhash.xxh3_128(str(part.size).encode())
    for numbers in _chunks(part.size):
        rows = part.take(numbers)
        for array in (rows["input_ids"].values, rows["input_ids"].offsets, rows["prompt_lengths"]):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _chunks(size: int) -> Iterator[np.ndarray]:
    # Equal ones: a small last one might have fewer rows than there are ranks.
    return iter(np.array_split(np.arange(size), max(size // CHUNK, 1)) if size else [])


def _file_digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
