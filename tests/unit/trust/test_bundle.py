"""What goes along with a bundle: a page, provenance that in-toto's tools verify, records; none can be changed."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement as InTotoStatement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

from tests.unit.trust.synthetic import Lifecycle
from tests.unit.trust.tampering import flip
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.store.manifest import ATTESTATION
from xray_runtime.trust.adopt import checkpoint_from
from xray_runtime.trust.bundle import UNKNOWN, UNKNOWN_KEY, audit_bundle, export, open_bundle
from xray_runtime.trust.keys import trust


@pytest.fixture(scope="module")
def unpacked(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a bundle of the policy."""
    folder = tmp_path_factory.mktemp("bundle")
    run = Path(shutil.copytree(untouched, folder / "run", symlinks=True))
    place, node = resolve("ppo-2", run, None)
    assert export(place, node, folder / "policy.tar") == 8
    with tarfile.open(folder / "policy.tar") as archive:
        archive.extractall(folder / "files", filter="data")
    return folder / "files"


def packed(files: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for entry in sorted(files.iterdir()):
            archive.add(entry, entry.name)
    return path


def test_a_bundle_says_what_it_cannot_prove(unpacked: Path, tmp_path: Path) -> None:
    bundle = packed(unpacked, tmp_path / "policy.tar")
    result = audit_bundle(bundle)
    assert result.is_sound, result.broken
    assert result.notes == [*UNKNOWN, UNKNOWN_KEY]
    assert audit_bundle(bundle, unpacked / "keys" / "signing.pub").notes == list(UNKNOWN)


def test_one_page_shows_the_lineage_the_judgements_and_the_terms(unpacked: Path) -> None:
    page = (unpacked / "index.html").read_text(encoding="utf-8")
    for text in (
        "own.jsonl",
        "not stated",
        "win_rate",
        # By each judge, with its interval.
        "<td>judges: gold: win_rate</td><td>0.6</td>",
        "<td>judges: gold: win_rate_ci95</td><td>0.4 to 0.8</td>",
        "question 50",
        "data:image/svg+xml;base64,",
        "checkpoints/ppo-2-",
    ):
        assert text in page
    assert "file://" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_in_totos_own_tools_verify_the_provenance(unpacked: Path) -> None:
    pem = (unpacked / "keys" / "signing.pub").read_text()
    lines = (unpacked / "provenance.intoto.jsonl").read_text().splitlines()
    assert len(lines) == 8
    statements = {path.read_bytes() for path in unpacked.glob(f"checkpoints/*/{ATTESTATION}/statement.json")}
    for line in lines:
        content = json.loads(line)
        keyid = content["signatures"][0]["keyid"]
        key = SSlibKey(keyid, "ecdsa", "ecdsa-sha2-nistp256", {"public": pem})
        envelope = Envelope.from_dict(content)
        envelope.verify([key], 1)
        assert f"{line}\n".encode() in statements
        found = json.loads(envelope.payload)
        statement = json_format.ParseDict(found, statement_pb2.Statement())
        InTotoStatement.copy_from_pb(statement).validate()
        assert found["predicateType"] == "https://slsa.dev/provenance/v1"
        # Own fields are allowed where SLSA leaves room for them; all of SLSA's must be of its types.
        details = {k: v for k, v in found["predicate"]["runDetails"].items() if not k.startswith("xray_")}
        predicate = found["predicate"] | {"runDetails": details}
        provenance = json_format.ParseDict(predicate, provenance_pb2.Provenance())
        assert provenance.run_details.builder.id == "urn:xray"
        envelope.payload = envelope.payload.replace(b'"seed":0', b'"seed":1')
        with pytest.raises(VerificationError):
            envelope.verify([key], 1)


def test_checkpoints_signed_elsewhere_are_sound_in_a_bundle(fresh: Callable[[], Path], tmp_path: Path) -> None:
    """It brings both keys along."""
    life = Lifecycle(tmp_path / "run-2", tracking=False)
    source = fresh()
    trust(life.output, source / "keys" / "signing.pub")
    life.done["sft"] = checkpoint_from(f"{source}#sft", life.output, None)
    life.add("more", "sft", {"model.safetensors": b"more"}, {"base": "sft"})
    place, node = resolve("more", life.output, None)
    assert export(place, node, tmp_path / "more.tar") == 4
    result = audit_bundle(tmp_path / "more.tar")
    assert result.is_sound, result.broken


def test_to_see_what_is_in_it_manifests_are_enough(unpacked: Path, tmp_path: Path) -> None:
    with open_bundle(packed(unpacked, tmp_path / "policy.tar"), manifests_only=True) as store:
        assert len(store.graph.nodes) == 8
        assert {path.name for path in store.output.rglob("*") if path.is_file()} == {"manifest.json"}


CHANGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "gone": Path.unlink,
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "another content": lambda path: path.write_bytes(b"{}"),
}
ADDED = ("index.html", "provenance.intoto.jsonl", "croissant/*.json", "records/*/metrics.jsonl", "log.jsonl")
"""What goes along with the checkpoints."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pattern", [*ADDED, "checkpoints/ppo-2-*/model.safetensors", "checkpoints/sft-*/model.sig"])
def test_no_file_of_a_bundle_can_be_changed_or_left_out(
    pattern: str, change: str, unpacked: Path, tmp_path: Path
) -> None:
    files = Path(shutil.copytree(unpacked, tmp_path / "files"))
    CHANGES[change](next(files.glob(pattern)))
    broken = audit_bundle(packed(files, tmp_path / "policy.tar")).broken
    assert broken
    if pattern in ADDED:
        # A log that is not whole says nothing of the checkpoints either.
        of_log = ("checkpoint-unlogged",) if pattern == "log.jsonl" else ()
        assert all(text.startswith(("run-changed", "file-unsigned", "file-added", "log-", *of_log)) for text in broken)


@pytest.mark.parametrize("name", ["croissant/more.json", "croissant/more/one.json", "source/more"])
def test_nothing_can_be_put_beside_what_was_exported(name: str, unpacked: Path, tmp_path: Path) -> None:
    files = Path(shutil.copytree(unpacked, tmp_path / "files"))
    (files / name).parent.mkdir(exist_ok=True)
    (files / name).write_text("{}")
    broken = audit_bundle(packed(files, tmp_path / "policy.tar")).broken
    assert f"file-unsigned ({name})" in broken


def test_without_a_key_nothing_is_exported(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    (output / "keys" / "signing.pem").unlink()
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(ConfigError, match="BUNDLE: a bundle's additions must be signed"):
        export(place, node, tmp_path / "policy.tar")
