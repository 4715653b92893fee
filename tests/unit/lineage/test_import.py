"""Bundles on their way: checked, imported, refused."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.lineage.promoting import broken
from tests.unit.lineage.synthetic import Lifecycle
from xray_runtime.config.validation import ConfigError
from xray_runtime.lineage.bundle import audit_bundle, export, import_bundle
from xray_runtime.lineage.reference import open_lineage_store, resolve


def bundled(output: Path, path: Path) -> Path:
    place, node = resolve("ppo-2", output, None)
    assert export(place, node, path) == 8
    return path


def test_a_bundle_is_checked_without_mlflow_and_imported_with_its_lineage(
    fresh: Callable[[], Path], tmp_path: Path
) -> None:
    bundle = bundled(fresh(), tmp_path / "policy.tar")
    result = audit_bundle(bundle)
    assert result.is_sound
    assert result.checkpoints == 8
    other = tmp_path / "other"
    Lifecycle(other).add("own", "ppo", {"model.safetensors": b"own"}, {})
    uri = f"sqlite:///{other / 'mlflow.db'}"
    for _ in range(2):
        assert import_bundle(bundle, other, tracking_uri=uri, experiment="imported", public=None).is_sound
    assert broken(other) == []
    assert all(path.stat().st_mode & 0o077 == 0 for path in (other / "keys").rglob("*") if path.is_dir())
    assert len(open_lineage_store(other, None).graph.nodes) == 9


def test_a_tampered_bundle_is_named_and_not_imported(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    weights = next(iter(output.glob("checkpoints/sft-*/model.safetensors")))
    weights.write_bytes(weights.read_bytes()[::-1])
    bundle = bundled(output, tmp_path / "policy.tar")
    assert {f.code for f in audit_bundle(bundle).findings if f.is_broken} == {"file-changed"}
    other = tmp_path / "other"
    uri = f"sqlite:///{other / 'mlflow.db'}"
    assert not import_bundle(bundle, other, tracking_uri=uri, experiment="imported", public=None).is_sound
    assert not (other / "checkpoints").exists()


def test_a_bundle_of_another_signer_is_refused_by_key(fresh: Callable[[], Path], tmp_path: Path) -> None:
    bundle = bundled(fresh(), tmp_path / "policy.tar")
    own = Lifecycle(tmp_path / "own", tracking=False)
    found = audit_bundle(bundle, own.output / "keys" / "signing.pub")
    assert {f.code for f in found.findings if f.is_broken} == {"signature-foreign", "run-unsigned"}


SPECIAL = {
    "link": tarfile.SYMTYPE,
    "hard link": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
    "pipe": tarfile.FIFOTYPE,
    "holes": tarfile.REGTYPE,
}


def test_a_bundle_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    with path.open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).total * 2)
    with pytest.raises(ConfigError, match="bytes of disk space are free"):
        audit_bundle(path)


@pytest.mark.parametrize("kind", ["parent", "absolute", "text", "empty", *SPECIAL])
def test_hostile_bundles_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    member = tarfile.TarInfo({"parent": "../escaped", "absolute": str(tmp_path / "escaped")}.get(kind, "x"))
    if kind in SPECIAL:
        member.type, member.linkname = SPECIAL[kind], "/etc/hostname"
    if kind == "holes":
        # A petabyte in a kilobyte.
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**50)}
    if kind == "text":
        path.write_text("no archive")
    else:
        with tarfile.open(path, "w") as archive:
            if kind != "empty":
                archive.addfile(member)
    with pytest.raises(
        ConfigError, match="which is neither a plain file nor a directory" if kind in SPECIAL else "bundle: "
    ):
        audit_bundle(path)
    assert not (tmp_path / "escaped").exists()
    assert not os.path.exists("/escaped")


def test_a_broken_chain_is_not_exported(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    shutil.rmtree(next(iter(output.glob("checkpoints/base-*"))))
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(ConfigError, match="the chain is broken"):
        export(place, node, tmp_path / "policy.tar")
