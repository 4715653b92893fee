"""Bundles on their way: checked, imported, refused."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import xray_runtime.trust.bundle as module
from tests.unit.trust.commands import bundled
from tests.unit.trust.promoting import broken
from tests.unit.trust.synthetic import Lifecycle
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.trust.bundle import audit_bundle, export, import_bundle


def test_a_bundle_is_checked_without_mlflow_and_imported_with_its_lineage(
    fresh: Callable[[], Path], untouched: Path, tmp_path: Path
) -> None:
    bundle = bundled(fresh(), tmp_path / "policy.tar")
    result = audit_bundle(bundle)
    assert result.is_sound
    assert result.checkpoints == 8
    other = tmp_path / "other"
    Lifecycle(other).add("own", "ppo", {"model.safetensors": b"own"}, {})
    uri = f"sqlite:///{other / 'mlflow.db'}"
    for key in (untouched / "keys" / "signing.pub", None):
        assert import_bundle(bundle, other, tracking_uri=uri, experiment="imported", public=key).is_sound
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
    key = output / "keys" / "signing.pub"
    assert not import_bundle(bundle, other, tracking_uri=uri, experiment="imported", public=key).is_sound
    assert not (other / "checkpoints").exists()


def test_a_bundle_of_another_signer_is_refused_by_key(fresh: Callable[[], Path], tmp_path: Path) -> None:
    bundle = bundled(fresh(), tmp_path / "policy.tar")
    own = Lifecycle(tmp_path / "own", tracking=False)
    found = audit_bundle(bundle, own.output / "keys" / "signing.pub")
    assert {f.code for f in found.findings if f.is_broken} >= {"signature-foreign", "log-broken"}


def test_a_bundle_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    with path.open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).total * 2)
    with pytest.raises(ConfigError, match="bytes are free for it"):
        audit_bundle(path)


def packed(*members: tarfile.TarInfo, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * max(member.size, 0)))
    return buffer.getvalue()


def named(*names: str) -> bytes:
    return packed(*map(tarfile.TarInfo, names))


def pax(**headers: str) -> bytes:
    member = tarfile.TarInfo("checkpoints/x")
    member.pax_headers = headers
    return packed(member)


def special(kind: bytes) -> bytes:
    member = tarfile.TarInfo("checkpoints/x")
    member.type, member.linkname = kind, "/etc/hostname"
    return packed(member)


def header(kind: bytes, size: int) -> bytes:
    """A header alone that says to be followed by so many bytes."""
    member = tarfile.TarInfo("checkpoints/x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


WHOLE = tarfile.TarInfo("checkpoints/x")
WHOLE.size = 5000
NOT_A_FILE, TWICE, OUT, MANY = "neither a plain file nor a directory", "appears twice", "points outside it", "more than"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "parent": (named("../escaped"), OUT),
    "parent in the middle": (named("checkpoints/../../escaped"), OUT),
    "absolute": (named("/escaped"), OUT),
    "two slashes": (named("checkpoints//x"), OUT),
    "here": (named("./checkpoints/x"), OUT),
    "no name": (named(""), OUT),
    "NUL": (pax(path="checkpoints/x\0/../../escaped"), OUT),
    "control characters": (named("checkpoints/\x1b[2J"), OUT),
    "a lone surrogate": (pax(path="checkpoints/\udcff"), OUT),
    "twice": (named("checkpoints/x", "checkpoints/y", "checkpoints/x"), TWICE),
    "twice, directories": (named("checkpoints/x", "checkpoints/X"), TWICE),
    "twice by another form": (named("checkpoints/\u00e9", "checkpoints/e\u0301"), TWICE),
    "below a file": (named("checkpoints", "checkpoints/x"), "cannot be read"),
    "deep": (named("checkpoints/" + "x/" * 1500 + "x"), MANY),
    "long": (named("checkpoints/" + "x/" * 20 + "x" * 1000), MANY),
    "one long part": (named("checkpoints/" + "x" * 400), "cannot be read"),
    "link": (special(tarfile.SYMTYPE), NOT_A_FILE),
    "hard link": (special(tarfile.LNKTYPE), NOT_A_FILE),
    "device": (special(tarfile.CHRTYPE), NOT_A_FILE),
    "pipe": (special(tarfile.FIFOTYPE), NOT_A_FILE),
    # A petabyte in a kilobyte.
    "holes": (pax(**{"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**50)}), NOT_A_FILE),
    "a larger size beside": (pax(size=str(2**50)), "cannot be read"),
    "a negative size beside": (pax(size="-1024"), NOT_A_FILE),
    "a large comment": (pax(comment="x" * 2**21), "a header of more than"),
    "a long name that is not there": (header(tarfile.GNUTYPE_LONGNAME, 2**40), "a header of more than"),
    "headers without end": (header(tarfile.XHDTYPE, 0) * 3000, "cannot be read"),
    "cut in a file": (packed(WHOLE)[:2000], "cannot be read"),
    "cut in the first header": (named("checkpoints/x")[:300], "cannot be read"),
    "text": (b"no archive", "cannot be read"),
    "no archive at all": (b"", "cannot be read"),
    "empty": (packed(), "there is no checkpoints"),
    "compressed": (gzip.compress(named("checkpoints/x")), "cannot be read"),
    "zip": (b"PK\x03\x04" + bytes(600), "cannot be read"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bundles_are_refused(kind: str, tmp_path: Path) -> None:
    path, (content, said) = tmp_path / "bundle.tar", HOSTILE[kind]
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^bundle: ") as error:
        audit_bundle(path)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).isprintable()
    assert not (tmp_path / "escaped").exists()
    assert not os.path.lexists("/escaped")


@pytest.mark.parametrize("header", ["size", "mtime", "uid"])
def test_numbers_beside_a_header_that_are_none_do_no_harm(header: str, tmp_path: Path) -> None:
    (tmp_path / "bundle.tar").write_bytes(pax(**{header: "inf"}))
    assert not audit_bundle(tmp_path / "bundle.tar").is_sound


def test_a_bundle_is_a_file_of_a_bounded_number_of_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="must be a file"):
            audit_bundle(path)
    monkeypatch.setattr(module, "MAX_MEMBERS", 3)
    (tmp_path / "bundle.tar").write_bytes(named(*(f"checkpoints/{number}" for number in range(4))))
    with pytest.raises(ConfigError, match="its member 4: more are not allowed"):
        audit_bundle(tmp_path / "bundle.tar")


def test_a_broken_chain_is_not_exported(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    shutil.rmtree(next(iter(output.glob("checkpoints/base-*"))))
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(ConfigError, match="the chain is broken"):
        export(place, node, tmp_path / "policy.tar")
