"""A checkpoint as it was written, read by plain transformers and compared with the model that was trained, before it is
signed: every tensor by its digest, and the log-probabilities of a few tokens.

The trainer's log-probabilities of these tokens are published beside the files (`TRIED`). A generator that reads the
files later computes its own, and compares the two before it samples (`check_reader`).

Files of float32 are mapped, so reading them takes no memory of its own. Where transformers puts experts together, it
takes as much as the model, and so log-probabilities are compared only where that is free (`fits`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.models.adapter_files import with_adapter
from xray_runtime.models.causal_lm import load_model, load_reported, published, saved_shapes
from xray_runtime.models.merging import base_of
from xray_runtime.models.trial import LENGTHS, own_logprobs, tried_rows
from xray_runtime.models.weight_files import HEAD_PREFIX, tensor_digest, tensors, weight_files

LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
"""Mean |log-probability difference| of the tried tokens, by the precision of the trainer's passes: bfloat16 rounds
each weight, which the files hold in float32, to 8 bits."""
TRIED = "logprobs.json"
"""File of a checkpoint: rows of token ids, and its trainer's log-probability of each token but a row's first."""


class PublishedError(RuntimeError):
    """The files of a trained model hold another one."""


def tried_ids(directory: Path) -> list[list[int]]:
    """The rows that trainer and reader score, of a checkpoint's vocabulary."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    vocabulary = int(content.get("text_config", content)["vocab_size"])
    return [row.tolist() for row in tried_rows(vocabulary)[0].split(list(LENGTHS))]


def check_published(
    directory: Path,
    source: Path,
    written: Mapping[str, str],
    tried: tuple[str, Sequence[float]],
    head_file: str | None = None,
) -> None:
    """Check the files that training from `source` left in `directory`.

    Args:
        written: name → digest of each trained tensor, as trainers had them; those of a scalar head begin with
            `HEAD_PREFIX`.
        tried: precision of the trainer's passes, and its log-probabilities of each token of `tried_ids` but a row's
            first.

    Raises:
        PublishedError: a tensor differs from the trained one, or an untrained one from the source's, or is missing, or
            no rank held it; or transformers computes other log-probabilities.
    """
    base = base_of(directory)
    found: dict[str, str]
    heads = {name: digest for name, digest in written.items() if name.startswith(HEAD_PREFIX)}
    expected = {name: digest for name, digest in written.items() if name not in heads}
    for name, tensor in tensors(source) if base is None else ():
        if name not in expected:
            expected[name] = tensor_digest(tensor)
    if base is not None:
        lm, found = _adapted(directory, source) if fits(source) else None, {}
    elif fits(directory):
        lm, found = _read(directory)
    else:
        lm, found = None, {name: tensor_digest(tensor) for name, tensor in tensors(directory)}
    if head_file is not None and heads:
        found |= {
            HEAD_PREFIX + name: tensor_digest(tensor) for name, tensor in load_file(directory / head_file).items()
        }
        expected |= heads
    wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    if wrong:
        held = "another value than was trained" if min(wrong) in found else "nothing in the files"
        raise PublishedError(
            f"{directory.name}: {min(wrong)} has {held} ({len(wrong)} of {len(expected)} tensors differ)"
        )
    if lm is not None:
        _check_logprobs(lm, directory, tried[1], LIMITS[tried[0]])


class Tried(NamedTuple):
    """The content of `TRIED`."""

    precision: str
    """That of the trainer's passes."""
    rows: list[list[int]]
    logprobs: list[float]


def write_tried(directory: Path, precision: str, logprobs: Sequence[float]) -> None:
    """Write `TRIED`, as `tried_ids` says."""
    content = Tried(precision, tried_ids(directory), list(logprobs))._asdict()
    (directory / TRIED).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_tried(directory: Path) -> Tried | None:
    """The content of `TRIED`; None: the checkpoint has none, as one that was not trained here."""
    file = directory / TRIED
    return Tried(**json.loads(file.read_bytes())) if file.is_file() else None


def check_reader(directory: Path, tried: Tried, found: Sequence[float], engine: str, precision: str) -> float:
    """The mean |difference| of log-probabilities, in nats, of an `engine` that read the checkpoint in `directory`.

    Args:
        found: its log-probabilities of the tokens of `tried`, computed in `precision`.

    Raises:
        PublishedError: it is too large.
    """
    limit = max(LIMITS[tried.precision], LIMITS[precision])
    off = _difference(found, tried.logprobs)
    if not off <= limit:
        raise PublishedError(
            f"{directory.name}: {engine} computes log-probabilities from the files that differ by {off:.2g} nats from "
            f"those of the model that was trained (at most {limit:g})"
        )
    return off


def _difference(found: Sequence[float], expected: Sequence[float]) -> float:
    if len(found) != len(expected):
        return float("nan")
    return sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(expected)


def fits(directory: Path) -> bool:
    """Whether half of the free memory holds the model."""
    size = sum(file.stat().st_size for file in set(weight_files(directory).values()))
    free: int = psutil.virtual_memory().available
    return size <= free // 2


def _read(directory: Path) -> tuple[Any, dict[str, str]]:
    """(the model that transformers makes of the files, name in files → digest of its tensors)."""
    try:
        lm, report = load_reported(transformers.AutoModelForCausalLM, str(directory), local_files_only=True)
    except Exception as error:
        raise PublishedError(f"{directory.name}: transformers cannot read it: {first_line(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(problem):
            raise PublishedError(
                f"{directory.name}: transformers has {problem.replace('_', ' ')}: {min(report[problem])}"
            )
    held: dict[str, Tensor] = dict(lm.named_parameters()) | {
        n: b for n, b in lm.named_buffers() if n in lm.state_dict()
    }
    saved = saved_shapes(lm)
    found = {
        part: tensor_digest(tensor)
        for name, whole in held.items()
        for part, tensor in published(lm, name, whole.detach()).items()
        if part in saved
    }
    return lm.eval(), found


def _adapted(directory: Path, source: Path) -> Any:
    """The model that peft makes of `source` and the adapter in `directory`."""
    try:
        return with_adapter(load_model(source), directory / ADAPTER, "adapter", source).eval()
    except ValueError as error:
        raise PublishedError(f"{directory.name}: peft cannot read it: {first_line(error)}") from error


def _check_logprobs(lm: Any, directory: Path, logprobs: Sequence[float], limit: float) -> None:
    rows = tried_ids(directory)
    ids, lengths = torch.tensor([token for row in rows for token in row]), torch.tensor([len(row) for row in rows])
    try:
        found, _ = own_logprobs(lm, ids, lengths)
    except ValueError as error:
        raise PublishedError(f"{directory.name}: {first_line(error)}") from error
    off = _difference(found.tolist(), logprobs)
    if not off <= limit:
        raise PublishedError(
            f"{directory.name}: transformers computes log-probabilities from the files that differ by {off:.2g} nats "
            f"from those of the model that was trained (at most {limit:g})"
        )
