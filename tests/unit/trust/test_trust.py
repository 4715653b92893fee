"""A run signs only what it verified, a bundle proves nothing about itself, and no decision can be removed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.commands import bundled, xray
from tests.unit.trust.synthetic import NAME, Lifecycle
from tests.unit.trust.tampering import lines, sql, write_lines
from xray.tasks import lost_runs
from xray.tasks.run_summary import RunSummary, end_record
from xray.tasks.spec import StageResult
from xray.tasks.stored_results import keep_result
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import END, LIFECYCLE, REPORT, view
from xray_runtime.kernel.evidence.view import RunBegan
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.tracking.recorder import StageRecorder, records_directory
from xray_runtime.kernel.tracking.registry import LOG_TAG
from xray_runtime.trust.adopt import checkpoint_from
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.bundle import audit_bundle, import_bundle
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.log import append, decide
from xray_runtime.trust.signing import public_key, read_public, signing_key

EVIL = "approved by the board"


def found(output: Path) -> set[str]:
    return {finding.code for finding in audit(open_lineage_store(output, None)).findings}


# The end of the log


def declined(output: Path) -> None:
    """A person's refusal is the last entry, as `promotion.decline` leaves it."""
    decided = view(output).decided[NAME, "candidate"]
    fields = {"name": NAME, "alias": "champion", "version": decided.version, "checkpoint": decided.checkpoint}
    decide(output, action="decline", by="ada", note="unsafe", **fields)


def take_off(output: Path) -> None:
    """The last entry, and the mark that MLflow has of it."""
    write_lines(output, lines(output)[:-1])
    sql(output, f"update model_version_tags set value = '{view(output).mark}' where key = '{LOG_TAG}'")


def _by_a_stranger(output: Path) -> None:
    other = output.parent / "other"
    decide(other, action="register", name="x", alias="candidate", version="1", checkpoint="ab" * 32)
    shutil.copy(other / END, output / END)


def _a_link(output: Path) -> None:
    shutil.move(output / END, output.parent / "end")
    (output / END).symlink_to(output.parent / "end")


ENDS: dict[str, Callable[[Path], object]] = {
    "alone": lambda output: None,
    "without": lambda output: (output / END).unlink(),
    "empty": lambda output: (output / END).write_text(""),
    "stranger": _by_a_stranger,
    "another text": lambda output: (output / END).write_bytes(lines(output)[-1]),
    "link": _a_link,
    "directory": lambda output: ((output / END).unlink(), (output / END).mkdir()),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_decision_cannot_be_taken_off_the_log(how: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    declined(output)
    assert "log-shorter" not in found(output)
    take_off(output)
    ENDS[how](output)
    assert "log-shorter" in found(output)


def test_several_entries_cannot_be_taken_off_with_the_end_of_before(fresh: Callable[[], Path]) -> None:
    output = fresh()
    declined(output)
    declined(output)
    before = (output / END).read_bytes()
    declined(output)
    # A process that is killed between the two leaves this.
    (output / END).write_bytes(before)
    assert "log-shorter" not in found(output)
    declined(output)
    (output / END).write_bytes(before)
    assert "log-shorter" in found(output)


# Signed by a run


def summary(output: Path, stage: str) -> tuple[RunSummary, StageResult]:
    """A run that finds a stage, as far as its summary goes."""
    node = find(stage, open_lineage_store(output, None))
    facts = {"name": stage, "kind": node.manifest.kind, "key": node.manifest.key, "checkpoint": node.reference(None)}
    numbers = {"mlflow_run_id": "r", "seconds": 1.0, "attempts": 0}
    result = StageResult.model_validate({**facts, **numbers, "parents": node.manifest.parents, "dataset": None})
    return RunSummary(output, output, {"seed": 0}, "again", None, "#"), result


RECORDS = {
    "metrics.jsonl": json.dumps({"step": 9, "time_ms": 1, "metrics": {EVIL: 9.0, "ppo/loss": 1e9}}) + "\n",
    "rollouts.json": json.dumps({"columns": ["prompt"], "rows": [[EVIL]]}),
    "metrics.svg": f"<svg>{EVIL}</svg>",
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("how", ["added", "replaced"])
def test_a_report_shows_no_record_that_was_not_signed(name: str, how: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    again, result = summary(output, "ppo-2")
    path = records_directory(output, "ppo-2", result.key) / name
    before = path.read_text() if path.exists() else ""
    path.write_text(before + RECORDS[name] if how == "added" else RECORDS[name])
    again.stage_done(0, result, 0.1)
    content = again.close("completed")
    end_record(output, output / LIFECYCLE, content, again.files)
    assert EVIL not in (output / REPORT).read_text()
    assert EVIL not in content
    # The intruder takes it away again.
    path.write_text(before) if before else path.unlink(missing_ok=True)
    signed = view(output).files
    assert not any(name.endswith("rollouts.json") for name in signed)


@pytest.mark.parametrize("name", ["samples.json", "evaluation.json"])
def test_a_report_shows_no_sample_that_was_not_published(name: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    again, result = summary(output, "evaluate")
    path = result.checkpoint.path / name
    path.write_text(path.read_text().replace("0.6", "0.9").replace('"a"', f'"{EVIL}"'))

    def whole_run() -> None:
        again.stage_done(0, result, 0.1)
        again.close("completed")

    with pytest.raises(ValueError, match=name):
        whole_run()
    assert EVIL not in (output / REPORT).read_text()


PLANTED = (
    "records/{0}/approval.json",
    "records/{0}/metrics.csv",
    "records/{0}/training.png",
    "records/{0}/deep/x.json",
)


@pytest.mark.parametrize("place", PLANTED)
def test_the_end_of_a_run_signs_no_file_that_it_did_not_write(place: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    again, result = summary(output, "ppo-2")
    path = output / place.format(result.checkpoint.path.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(EVIL)
    again.stage_done(0, result, 0.1)
    end_record(output, output / LIFECYCLE, again.close("completed"), again.files)
    keep_result(result, output, Store(output / "checkpoints"), written={})
    assert path.relative_to(output).as_posix() not in view(output).files
    assert "file-unsigned" in found(output)


def test_a_stage_signs_the_records_that_it_wrote_alone(tmp_path: Path) -> None:
    recorder = StageRecorder(tmp_path, "sft", "ab" * 32, None, lambda *_: None, 1, process_seal())
    directory = records_directory(tmp_path, "sft", "ab" * 32)
    (directory / "approval.json").write_text("{}")
    recorder.begin()
    recorder.metrics({"sft/loss": 2.0}, 0)
    recorder.table("samples", ["prompt"], [["asked"]])
    recorder.table("others", ["prompt"], [["asked"]])
    recorder.seal_metrics()
    (directory / "others.json").write_text(json.dumps({"columns": ["prompt"], "rows": [[EVIL]]}))
    assert {path.name for path in recorder.sealed()} == {"attempts", "metrics.jsonl", "samples.json"}
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(RECORDS["metrics.jsonl"].encode())
    assert {path.name for path in recorder.sealed()} == {"attempts", "samples.json"}
    recorder.close()


@pytest.mark.parametrize("known", [True, False])
def test_the_record_of_a_lost_run_is_signed_as_the_run_wrote_it(known: bool, tmp_path: Path) -> None:
    output = tmp_path / "run"
    Lifecycle(output, tracking=False)
    if known:
        facts = {"project": "p", "seed": 7, "config_digest": "d"}
        texts = {"run_directory": "", "tracking": "", "experiment": "e", "name": "n", "params": "0" * 64}
        began = RunBegan.model_validate({"run_id": "lost", "facts": facts, "tags": {}, **texts})
        append(output, began)
    RunSummary(output, output, {"seed": 7}, "lost", None, "#")
    path = output / LIFECYCLE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"seed": 8, "project": EVIL, "evaluation": {"win_rate": 0.99}}))
    lost_runs.close_lost_runs([output])
    signed = view(output).files.get(LIFECYCLE)
    assert (signed is not None) == known
    assert not known or EVIL not in path.read_text()


# Bundles


STRAYS = (
    *("checkpoints/notes.txt", "checkpoints/x.damaged-1/model.safetensors", "checkpoints/x.building-/1-2/model.py"),
    *("checkpoints/x.tokens-/a.arrow", "keys/signing.pem", "keys/extra.pub", "keys/trusted/notes.txt"),
    *("keys/retired/evil.json", "logs/run.log", "locks/x.lock", "jobs/1/job.json", "prefect/prefect.db", "README.md"),
    *("searches/s/search.json", "feedback/x/session.json", "snapshots/sft-1/step-0000000001/x", "mlflow.db"),
    *("digests.sqlite", "verified.json", "recorded/chain.jsonl", "results/x.json", "records/other/metrics.jsonl"),
)


@pytest.mark.parametrize("name", STRAYS)
def test_a_stray_file_of_a_bundle_is_found(name: str, untouched: Path, tmp_path: Path) -> None:
    bundle = bundled(untouched, tmp_path / "policy.tar")
    (tmp_path / "stray").write_text("x")
    with tarfile.open(bundle, "a") as archive:
        archive.add(tmp_path / "stray", name)
    assert not audit_bundle(bundle, public_key(untouched)).is_sound
    other = tmp_path / "other"
    uri = f"sqlite:///{other / 'mlflow.db'}"
    found = import_bundle(bundle, other, tracking_uri=uri, experiment="x", public=public_key(untouched))
    assert not found.is_sound
    assert not (other / "checkpoints").exists()


def test_no_key_that_a_bundle_brings_is_trusted(untouched: Path, tmp_path: Path) -> None:
    intruder, other = tmp_path / "intruder", tmp_path / "other"
    signing_key(intruder)
    bundle = bundled(untouched, tmp_path / "policy.tar")
    with tarfile.open(bundle, "a") as archive:
        archive.add(public_key(intruder), f"keys/trusted/{read_public(public_key(intruder)).sha256[:16]}.pub")
    uri = f"sqlite:///{other / 'mlflow.db'}"
    with pytest.raises(ConfigError, match=r"is signed with key \w{16}, which is not trusted here: .* --public-key"):
        import_bundle(bundle, other, tracking_uri=uri, experiment="x", public=None)
    assert not (other / "checkpoints").exists()
    result = import_bundle(bundle, other, tracking_uri=uri, experiment="x", public=public_key(untouched))
    assert result.is_sound, result.broken
    assert {key.sha256 for key in trusted_keys(other)} == {
        read_public(public_key(untouched)).sha256,
        read_public(public_key(other)).sha256,
    }


@pytest.mark.parametrize("form", ["{0}#ppo-2", "{1}#ppo-2", "{1}"])
def test_no_other_directory_is_trusted_for_its_own_key(form: str, untouched: Path, tmp_path: Path) -> None:
    ref = form.format(untouched, bundled(untouched, tmp_path / "policy.tar"))
    with pytest.raises(ConfigError, match=r"which is not trusted here: .* `xray keys trust KEY.pub --output"):
        checkpoint_from(ref, tmp_path / "run", None)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    done = xray("keys", "trust", public_key(untouched), "--output", tmp_path / "run")
    assert (done.exit_code, read_public(public_key(untouched)).sha256 in done.output) == (0, True)
    assert checkpoint_from(ref, tmp_path / "run", None).stage == "ppo-2"


def test_an_invalid_key_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path / "notes.txt", tmp_path / "absent", tmp_path):
        done = xray("keys", "trust", path, "--output", tmp_path / "run")
        assert (done.exit_code, len(done.output.splitlines())) == (2, 1)


# Modes


def test_nothing_that_a_command_writes_can_be_written_by_others(untouched: Path, tmp_path: Path) -> None:
    """Under umask 0, as some services and containers have it."""
    bundle, other = bundled(untouched, tmp_path / "policy.tar"), tmp_path / "other"
    command = [sys.executable, "-m", "xray.cli.main", "import", str(bundle), "--output", str(other)]
    command += ["--public-key", str(public_key(untouched))]
    subprocess.run(command, check=True, preexec_fn=lambda: os.umask(0), stdout=subprocess.DEVNULL)
    paths = [other, *other.rglob("*")]
    assert len(paths) > 50
    assert [str(path) for path in paths if stat.S_IMODE(path.lstat().st_mode) & 0o022 and not path.is_symlink()] == []
