"""An audit ends soon, with a finding and no exception, whatever kind of file lies where one of a run's belongs."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweeps import sweep
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.trust.audit.checkpoints import audit

HUGE = 3 * 2**40
"""Bytes of a sparse file: it takes none on disk, and a quarter of an hour to read."""


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(HUGE)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def a_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    # The name of a socket has at most 107 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def link_to_itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def link_to_zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


KINDS = (sparse, pipe, directory, a_socket, link_to_itself, link_to_zeros)
PLACES = (
    *("checkpoints/sft-*/model.safetensors", "checkpoints/sft-*/manifest.json", "checkpoints/sft-*/README.md"),
    *("checkpoints/sft-*/attestation/statement.json", "checkpoints/sft-*/model.sig"),
    *("checkpoints/prepare-*/train.arrow", "checkpoints/evaluate-*/prompts.json"),
    *(
        "records/ppo-2-*/metrics.jsonl",
        "results/ppo-2-*.json",
        "report.html",
        "lifecycle.json",
        "log.jsonl",
        "log.checkpoint",
    ),
)
NEW = (
    *("checkpoints/sft-{0}/attestation/code.diff", "checkpoints/sft-{0}/extra", "checkpoints/stray", "records/stray"),
    *("mlartifacts/models/stray", "checkpoints/prepare-{1}.tokens-/a.arrow", "verified.json", "keys/trusted"),
    *("name\nwith a line", "name with \udcff", "records/\udcff", "snapshots"),
)


def found(output: Path) -> set[str]:
    return {finding.code for finding in audit(open_lineage_store(output, None)).findings}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "place"), sweep(KINDS, PLACES))
def test_odd_files_in_place_of_records_are_found(kind: Callable[[Path], None], place: str, bare: Path) -> None:
    kind(next(iter(bare.glob(place))))
    assert not audit(open_lineage_store(bare, None)).is_sound


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "place"), sweep(KINDS, NEW))
def test_stray_files_are_named(kind: Callable[[Path], None], place: str, bare: Path) -> None:
    digits = [next(iter(bare.glob(f"checkpoints/{stage}-*"))).name.rpartition("-")[2] for stage in ("sft", "prepare")]
    path = bare / place.format(*digits)
    path.parent.mkdir(exist_ok=True, parents=True)
    before = found(bare) if kind is sparse else set()
    kind(path)
    # An empty directory, and a link where none is looked for, are nothing.
    assert found(bare) > before or kind is not sparse or place in ("verified.json", "keys/trusted")


def test_a_file_that_is_none_has_no_digest(tmp_path: Path) -> None:
    for kind in (pipe, directory, a_socket, link_to_zeros):
        kind(tmp_path / "x")
        with pytest.raises(OSError, match=r"not a file|directory|No such device"):
            file_sha256(tmp_path / "x")
        shutil.rmtree(tmp_path / "x") if (tmp_path / "x").is_dir() else (tmp_path / "x").unlink()
    sparse(tmp_path / "x")
    with pytest.raises(OSError, match="more than 5 bytes"):
        file_sha256(tmp_path / "x", 5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_sealed_file_of_another_size_is_not_read(kind: Callable[[Path], None], tmp_path: Path) -> None:
    seal, path = process_seal(), tmp_path / "kept" / "tokens"
    path.parent.mkdir()
    path.write_bytes(b"tokens")
    seal.seal_file(path)
    assert seal.is_sealed(path)
    kind(path)
    assert not seal.is_sealed(path)
    # A seal that claims the size is not by the key.
    path.with_name("tokens.seal").write_text(f"{HUGE} {'0' * 64} AAAA")
    assert not seal.is_sealed(path)
    assert seal.read_sealed(path) is None
