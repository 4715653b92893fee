"""The weights of a checkpoint in Hugging Face form: one safetensors file, or several and an index that names them.

`model.safetensors.index.json` maps each tensor to its file. In the `metadata` of ours is also `sha256`: the digest of
each file by the rank that wrote it (`kernel.store.shards.written_sha256`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor

from xray_runtime.kernel.signs import part_done
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX
from xray_runtime.kernel.store.shards import read_index
from xray_runtime.models.family import family_of
from xray_runtime.models.tensor_file import NAMES, WEIGHTS_FILE, TensorFile, check_file, create

HEAD_PREFIX = "scalar."
"""Prefix of a scalar head's parameter names; Hugging Face models have no such head."""
SHARD_BYTES = 5_000_000_000
"""Largest size of a file of weights, unless one tensor is larger."""


def weight_files(directory: Path) -> dict[str, Path]:
    """Tensor → its file, for every tensor of a checkpoint; empty if it has no safetensors files under these names.

    Raises:
        ValueError: the index is damaged.
    """
    file = directory / WEIGHTS_FILE
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    index = read_index(directory)
    return {} if index is None else {name: directory / each for name, each in index.weight_map.items()}


def tensors(directory: Path, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a checkpoint's tensors in order of their names, one at a time: those in `names`, or all."""
    return tensors_in(weight_files(directory), names)


def tensors_in(files: Mapping[str, Path], names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """`tensors` of files by name."""
    for name, file in sorted(files.items()):
        if names is None or name in names:
            # Opened for each tensor, as in `read_tensor`.
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)


def read_tensor(files: Mapping[str, Path], name: str, dim: int = 0, low: int = 0, high: int | None = None) -> Tensor:
    """A tensor of `weight_files` in float32, or its slice `low` to `high` along `dim`, which is then all that is
    read."""
    # Opened for each tensor: pages of a mapped file stay in memory until it is closed.
    with safe_open(files[name], framework="pt") as file:
        # A number has no slices.
        whole = high is None
        part: Tensor = (
            file.get_tensor(name) if whole else file.get_slice(name)[(*[slice(None)] * dim, slice(low, high))]
        )
        return part.to(torch.float32, copy=True)


class MappedFiles:
    """Float32 tensors of checkpoints as views of their mapped files: processes of one machine share a file's pages.

    The mapping is private. A write to a tensor changes neither the file nor what others read, but takes memory of its
    own, so only weights that nothing trains are mapped. Whoever maps a checkpoint has checked its digest; it is written
    once and put in place by a rename, so a checkpoint that replaces it is another file, and the mapped one stays as it
    is. Only a write to the file itself would show, and `check_unchanged` finds that.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}
        self._states: dict[Path, tuple[int, tuple[int, int]]] = {}
        """A descriptor of each mapped file, and what `_changed` says of it."""

    def read(self, files: Mapping[str, Path], name: str, dim: int = 0, low: int = 0, high: int | None = None) -> Tensor:
        """As `read_tensor`, with a copy only of what is not float32 or, as a slice, not contiguous."""
        file = files[name]
        if file not in self._opened:
            descriptor = os.open(file, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            self._states[file] = descriptor, _changed(descriptor)
            self._opened[file] = safe_open(file, framework="pt")
        whole: Tensor = self._opened[file].get_tensor(name)
        part = whole if high is None else whole.narrow(dim, low, high - low)
        return part.to(torch.float32).contiguous()

    def check_unchanged(self) -> None:
        """Raises RuntimeError: a mapped file was written to."""
        for file, (descriptor, before) in self._states.items():
            if _changed(descriptor) != before:
                raise RuntimeError(f"{file} was written to while a model used it; run again")


def _changed(descriptor: int) -> tuple[int, int]:
    """Size and time of the last write of an open file."""
    state = os.fstat(descriptor)
    return state.st_size, state.st_mtime_ns


def has_plain(files: Mapping[str, Path], shapes: Mapping[str, torch.Size]) -> bool:
    """Whether `files` names floating-point tensors of these names and shapes, and nothing else."""
    if files.keys() != shapes.keys():
        return False
    for file in set(files.values()):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                if name not in files:
                    continue
                held = opened.get_slice(name)
                if held.get_dtype() not in NAMES.values() or tuple(held.get_shape()) != shapes.get(name):
                    return False
    return True


def write_float32(files: Mapping[str, Path], shapes: Mapping[str, torch.Size], directory: Path) -> None:
    """Write tensors of `files` in float32 as `save_pretrained` would, one at a time."""
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(meta, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        create(directory / file, {name: tuple(shapes[name]) for name in names}, {"format": "pt"})
        with TensorFile(directory / file) as written:
            for name in names:
                written.write(name, read_tensor(files, name))
                part_done()
    if split.is_sharded:
        total = sum(shape.numel() for shape in shapes.values())
        content = {"metadata": {"total_parameters": total} | split.metadata, "weight_map": split.tensor_to_filename}
        (directory / WEIGHTS_INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_weights(source: Path, directory: Path, number: int = 0, copiers: int = 1) -> None:
    """Copy every `copiers`-th file of weights from the one `number` on, and the index if `number` is 0."""
    for file in sorted(set(weight_files(source).values()))[number::copiers]:
        shutil.copyfile(file, directory / file.name)
    if not number:
        write_digests(source, directory, {})


def write_digests(source: Path, directory: Path, sha256: Mapping[str, str]) -> None:
    """Write the index of `source`, if it has one, into `directory` with these digests of the files there."""
    index = read_index(source)
    if index is not None:
        metadata = {key: value for key, value in index.metadata.items() if key != "sha256"}
        content = {"metadata": metadata | ({"sha256": dict(sha256)} if sha256 else {}), "weight_map": index.weight_map}
        (directory / WEIGHTS_INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def overwrite(directory: Path, weights: Iterable[tuple[str, Tensor]], number: int, writers: int) -> dict[str, str]:
    """Overwrite tensors of a checkpoint in place, in every `writers`-th file from the one `number` on. All `writers`
    get the same `weights`. Returns the names and digests of those that this one wrote."""
    files, written = weight_files(directory), dict[str, str]()
    mine = sorted(set(files.values()))[number::writers]
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(TensorFile(file)) for file in mine}
        for name, tensor in weights:
            if files[name] in opened:
                opened[files[name]].write(name, tensor)
                written[name] = tensor_digest(tensor)
    return written


def checked_digests(directory: Path, number: int, checkers: int) -> dict[str, str]:
    """sha256 by name of every `checkers`-th file of weights from the one `number` on.

    Raises:
        NonFiniteError: one has numbers that are not finite.
    """
    files = sorted(set(weight_files(directory).values()))[number::checkers]
    for file in files:
        check_file(file, file.name)
    return {file.name: file_sha256(file) for file in files}


def copy_tensors(source: Path, target: Path, names: Iterable[str]) -> None:
    """Overwrite the tensors `names` of one checkpoint by those of another, one at a time."""
    files = weight_files(target)
    for name, tensor in tensors(source, frozenset(names)):
        with TensorFile(files[name]) as written:
            written.write(name, tensor)


def check_finite(directory: Path) -> None:
    """Check the tensors of all safetensors files below `directory`, except those that a rank checked when it recorded
    their digests.

    Raises:
        NonFiniteError: one has numbers that are not finite.
    """
    for path in sorted(directory.rglob("*.safetensors")):
        index = read_index(path.parent)
        if index is None or path.name not in index.sha256:
            check_file(path, path.relative_to(directory).as_posix())


def same_trunk(one: Path, other: Path, top_layers: int, number: int = 0, checkers: int = 1) -> bool:
    """Whether two checkpoints differ in nothing but the weights of `top_layers` upper layers and the final norm.

    Checker `number` of the `checkers` that divide the tensors compares its own only.
    """
    if one == other:
        return True
    config, other_config = (json.loads((directory / "config.json").read_text()) for directory in (one, other))
    names = weight_files(one).keys()
    if config != other_config or names != weight_files(other).keys():
        return False
    above = _above_trunk(config, top_layers)
    below = set(sorted(name for name in names if not name.startswith(above))[number::checkers])
    pairs = zip(tensors(one, below), tensors(other, below), strict=True)
    return all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a tensor's shape, type and bytes."""
    digest = xxhash.xxh3_128(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _above_trunk(config: dict[str, Any], top_layers: int) -> tuple[str, ...]:
    """Prefixes of the names of weights above a frozen trunk."""
    return family_of(config.get("model_type")).parts.above(config["num_hidden_layers"], top_layers)
