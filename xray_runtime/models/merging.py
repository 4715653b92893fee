"""Checkpoints that were published as adapters alone (`lora.publish: adapter`): the whole model, merged when it is read.

Such a checkpoint has every file of a model but its weights: these are in the checkpoint that its `adapter/` names, by
digest. That one lies beside it, and may be such a checkpoint itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from xray_runtime.kernel.files import sync
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.checkpoints import verify
from xray_runtime.models.adapter_files import adapter_files, read_fields
from xray_runtime.models.weight_files import copy_weights, overwrite, tensors_in, weight_files

PREFIX, LOCK = "xray-whole-", ".lock"
UNLOCKED_SECONDS = 60.0
"""An older directory without a held lock was left behind."""


class AdapterBase(NamedTuple):
    """The checkpoint with the weights."""

    directory: Path
    sha256: str


def base_of(directory: Path) -> AdapterBase | None:
    """The base of a checkpoint that is an adapter alone; None: it has weights, or is no model."""
    if not (directory / ADAPTER).is_dir() or weight_files(directory):
        return None
    fields = read_fields(directory / ADAPTER)
    return AdapterBase(directory.parent / fields.base, fields.base_sha256)


def full_model(directory: Path, scratch: Path) -> Path:
    """`directory`, or the whole model that it is an adapter of, written into a directory of its name in `scratch`.

    There a link of its base's name leads to the base.

    Raises:
        ValueError: its base is not beside it, or was changed; one line.
    """
    base = base_of(directory)
    if base is None:
        return directory
    problems = ["it names no digest of it"] if not base.sha256 else verify(base.directory, base.sha256)
    if problems:
        raise ValueError(
            f"{directory.name}: it is an adapter of {base.directory.name}, which cannot be read: {problems[0]}"
        )
    out = scratch / directory.name
    if not out.exists():
        merge(directory, full_model(base.directory, scratch), out)
        link = scratch / base.directory.name
        if not link.exists():
            link.symlink_to(base.directory.absolute())
    return out


def merge(directory: Path, base: Path, out: Path) -> None:
    """Write the files of `directory`, and the weights of `base` with its adapter merged into them, into `out`."""
    from xray_runtime.models.adapters import Adapters
    from xray_runtime.models.causal_lm import skeleton

    shutil.copytree(directory, out)
    copy_weights(base, out)
    adapters = Adapters(skeleton(str(base)), read_fields(directory / ADAPTER).lora, base, seed=0)
    adapters.load(dict(tensors_in(adapter_files(directory))))
    overwrite(out, adapters.merged(lambda name, parameter: parameter.detach()), 0, 1)


def write_model(directory: Path, sha256: str, out: Path) -> None:
    """Write the whole model of the checkpoint `directory` in Hugging Face form into the new directory `out`.

    Raises:
        FileExistsError: there is something.
        ValueError: the checkpoint or its base was changed.
    """
    from xray_runtime.models.causal_lm import copy_model

    if problems := verify(directory, sha256):
        raise ValueError(f"{directory.name}: {problems[0]}")
    if out.exists():
        raise FileExistsError(out)
    temporary = out.with_name(f"{out.name}.writing-{os.getpid()}")
    try:
        with opened_model(directory) as model:
            copy_model(model, temporary)
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def opened_model(directory: Path) -> Iterator[Path]:
    """`full_model`, in a directory that is removed at the end, or by the next call if this process is killed."""
    _remove_left_behind()
    # Locked within a moment of its creation, until this process ends.
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch, FileLock(Path(scratch, LOCK)):
        yield full_model(directory, Path(scratch))


def _remove_left_behind() -> None:
    """Remove whole models of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # such as filelock's Timeout
            status = left.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and time.time() - status.st_mtime > UNLOCKED_SECONDS:
                with FileLock(left / LOCK, timeout=0):
                    shutil.rmtree(left)
