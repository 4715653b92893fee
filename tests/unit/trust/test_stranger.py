"""docs/verify-without-xray.md, followed by somebody who has no X-ray."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from base64 import b64decode
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.unit.trust.commands import bundled, place
from tests.unit.trust.stranger import OURS, script_of_page, stranger
from tests.unit.trust.tampering import flip, rotated
from xray_runtime.kernel.evidence.envelope import new_private_key, public_half
from xray_runtime.kernel.evidence.log import COSIGNED, END, LOG
from xray_runtime.kernel.evidence.view import Left
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.trust.log import append, choose_witness, decide
from xray_runtime.trust.note import LogCheckpoint, WitnessKey


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script on the page."""
    return script_of_page(tmp_path / "verify.py")


@pytest.fixture
def unpacked(bare: Path, tmp_path: Path) -> tuple[Path, Path, WitnessKey]:
    """(bundle, public key, key of the witness)."""
    key = choose_witness(bare, str(tmp_path / "witness"), None, by="Ada")
    append(bare, Left(note="later"))
    with tarfile.open(bundled(bare, tmp_path / "bundle.tar")) as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    return tmp_path / "bundle", Path(shutil.copy(bare / "keys" / "signing.pub", tmp_path / "signing.pub")), key


def test_nothing_of_xray_is_there() -> None:
    for name in OURS:
        assert stranger(name).returncode == 1


def test_the_model_and_its_history_are_verified(
    script: Path, unpacked: tuple[Path, Path, WitnessKey], tmp_path: Path
) -> None:
    bundle, public, key = unpacked
    model = place(bundle, "ppo-2")
    verify = ("model_signing", "verify", "key", model, "--signature", model / "model.sig", "--public_key", public)
    assert stranger(*verify).returncode == 0
    done = stranger(script, bundle, public, key)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{model.name} was made from .*reference xray:", done.stdout)
    assert "and a witness knows it" in done.stdout
    other = tmp_path / "other.pub"
    other.write_bytes(public_half(new_private_key()))
    for arguments in ((bundle, other), (bundle, public, WitnessKey("a", key.public))):
        assert stranger(script, *arguments).returncode == 1
    flip(model / "model.safetensors")
    assert stranger(*verify).returncode == 1


def test_the_bill_of_materials_is_one_that_cyclonedx_validates(unpacked: tuple[Path, Path, WitnessKey]) -> None:
    text = (unpacked[0] / "bom.cdx.json").read_text()
    validator = JsonStrictValidator(SchemaVersion.V1_7)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"machine-learning-model"', '"a model"')) is not None
    bill = json.loads(text)
    model = bill["metadata"]["component"]
    assert model["name"] == "ppo-2"
    assert {one["name"] for one in model["pedigree"]["ancestors"]} == {"ppo-1", "sft", "reward"}
    names = {one["bom-ref"]: one["name"] for one in bill["components"]}
    assert [names[one["ref"]] for one in model["modelCard"]["modelParameters"]["datasets"]] == ["prepare"]
    metrics = {one["type"]: one["value"] for one in model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]}
    assert (metrics["win_rate"], metrics["gold_delta"]) == ("0.6", "0.2")
    assert f"pkg:pypi/torch@{version('torch')}" in names
    assert {one["ref"] for one in bill["dependencies"]} >= {model["bom-ref"]}


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file": lambda bundle: flip(place(bundle, "ppo-2") / "model.safetensors"),
    "a statement": lambda bundle: flip(place(bundle, "sft") / "attestation" / "statement.json"),
    "a hash of the log": lambda bundle: flip(next(iter(bundle.glob("source/tile/0/*.p/*")))),
    "an entry of the log": lambda bundle: flip(bundle / "source" / "entries.jsonl"),
    "the log's checkpoint": lambda bundle: flip(bundle / "source" / "checkpoint"),
    "no entry about a checkpoint": lambda bundle: (bundle / "source" / "entries.jsonl").write_text(""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, script: Path, unpacked: tuple[Path, Path, WitnessKey]) -> None:
    bundle, public, key = unpacked
    CHANGES[change](bundle)
    assert stranger(script, bundle, public, key).returncode == 1


def test_a_log_that_was_put_back_has_the_time_of_its_witness(script: Path, bare: Path, tmp_path: Path) -> None:
    """As the page says: it verifies, and the time is the older one."""
    key = choose_witness(bare, str(tmp_path / "witness"), None, by="Ada")
    older = {name: (bare / name).read_bytes() for name in (LOG, END, COSIGNED)}
    [line] = LogCheckpoint.parse(older[COSIGNED].decode()).signatures[1:]
    append(bare, Left(note="later"))
    for name, content in older.items():
        (bare / name).write_bytes(content)
    with tarfile.open(bundled(bare, tmp_path / "bundle.tar")) as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    done = stranger(script, tmp_path / "bundle", bare / "keys" / "signing.pub", key)
    then = datetime.fromtimestamp(int.from_bytes(line.signature[:8]), UTC)
    assert (done.returncode, f"the witness cosigned it at {then}" in done.stdout) == (0, True), done.stderr


def test_what_an_older_key_signed_fails(script: Path, bare: Path, tmp_path: Path) -> None:
    rotated(bare)
    with tarfile.open(bundled(bare, tmp_path / "bundle.tar")) as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    assert stranger(script, tmp_path / "bundle", bare / "keys" / "signing.pub").returncode == 1


def test_a_decision_about_a_checkpoint_does_not_publish_it(script: Path, bare: Path, tmp_path: Path) -> None:
    model = file_sha256(place(bare, "ppo-2") / "manifest.json")
    decide(bare, action="register", name="x", alias="candidate", version="1", checkpoint=model)
    with tarfile.open(bundled(bare, tmp_path / "bundle.tar")) as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    entries = tmp_path / "bundle" / "source" / "entries.jsonl"
    found = {line: json.loads(b64decode(json.loads(line)["payload"]))["predicate"] for line in entries.open("rb")}
    assert {one["action"] for one in found.values() if one["checkpoint"] == model} == {"publish", "register"}
    kept = [line for line, one in found.items() if (one["action"], one["checkpoint"]) != ("publish", model)]
    entries.write_bytes(b"".join(kept))
    done = stranger(script, tmp_path / "bundle", bare / "keys" / "signing.pub")
    assert (done.returncode, "does not publish" in done.stderr) == (1, True), done.stderr
