"""A checkpoint is used only if a trusted key signed its record: bytes that agree with a manifest do not suffice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trust.long_logs import read_lines
from tests.unit.trust.synthetic import Lifecycle
from tests.unit.trust.tampering import restated
from xray_runtime.kernel.evidence.envelope import new_private_key
from xray_runtime.kernel.store.checkpoints import load_manifest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.trust.attestation import open_store
from xray_runtime.trust.keys import rotate
from xray_runtime.trust.log import log_checkpoints
from xray_runtime.trust.signing import signing_key


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, CheckpointRef, str]:
    """(output directory, a checkpoint in it, its key)."""
    life = Lifecycle(tmp_path / "run", tracking=False)
    ref = life.add("base", "base", {"model.safetensors": b"weights"}, {})
    return life.output, ref, load_manifest(ref.path).key


def _signed_by_a_stranger(output: Path, directory: Path) -> None:
    restated(directory, lambda _: None, new_private_key())


def _signed_again(output: Path, directory: Path) -> None:
    def later(content: Any) -> None:
        content["predicate"]["runDetails"]["metadata"]["finishedOn"] = "2026-12-01T00:00:00+00:00"

    restated(directory, later, signing_key(output).read_bytes())


def test_a_planted_checkpoint_is_moved_aside_when_the_stage_is_computed(made: tuple[Path, CheckpointRef, str]) -> None:
    output, ref, key = made
    kept = shutil.copytree(ref.path, output / "kept")
    _signed_by_a_stranger(output, ref.path)
    store = open_store(output)
    with store.building("base", key) as built:
        shutil.copytree(kept, built, dirs_exist_ok=True)
        store._put_in_place(built, ref.path)
    assert ref.path.with_name(f"{ref.path.name}.damaged-1").is_dir()
    assert open_store(output).find("base", key) is not None


def test_old_signatures_are_read_and_a_directory_without_a_key_trusts_none(
    made: tuple[Path, CheckpointRef, str], tmp_path: Path
) -> None:
    output, ref, key = made
    rotate(output, by="a person", note="")
    assert open_store(output).find("base", key) is not None
    bare = tmp_path / "bare"
    shutil.copytree(ref.path, bare / "checkpoints" / ref.path.name)
    assert open_store(bare).find("base", key) is None


def test_a_statement_of_another_run_is_not_used(made: tuple[Path, CheckpointRef, str], tmp_path: Path) -> None:
    """Both computed the same bytes, and one key signs for both."""
    output, ref, key = made
    kept = Path(shutil.copytree(ref.path, tmp_path / "kept"))
    _signed_again(output, ref.path)
    assert open_store(output).find("base", key) is None
    # A run that goes on without it does not sign it.
    log_checkpoints(output, {ref.path.name: ref.sha256}, here=False)
    assert open_store(output).find("base", key) is None
    shutil.rmtree(ref.path)
    kept.rename(ref.path)
    assert open_store(output).find("base", key) is not None


def test_the_statement_of_a_stage_that_was_computed_again_counts(made: tuple[Path, CheckpointRef, str]) -> None:
    output, ref, key = made
    _signed_again(output, ref.path)
    log_checkpoints(output, {ref.path.name: ref.sha256}, here=True, renew=True)
    assert open_store(output).find("base", key) is not None
    assert [entry.action for entry in (line.entry for line in read_lines(output))] == ["publish"] * 2
    log_checkpoints(output, {ref.path.name: ref.sha256}, here=True, renew=True)
    assert len(list(read_lines(output))) == 2
