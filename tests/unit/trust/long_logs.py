"""Logs of many entries, and a stage that reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.unit.kernel.store.published import IDENTITY
from xray.tasks.spec import StageResult
from xray.tasks.stored_results import find_result, keep_result
from xray_runtime.kernel.evidence.lines import LogRecord, parse_line, read_signed_lines
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.evidence.view import START, Left, Line
from xray_runtime.kernel.history.evidence import read_logged
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, Store
from xray_runtime.trust.log import log_checkpoints, sign_line
from xray_runtime.trust.signing import signing_key

ENTRIES = 500


def aged(output: Path, entries: int = ENTRIES) -> None:
    """An output directory with a log of so many entries."""
    output.mkdir(parents=True, exist_ok=True)
    private, previous, number = signing_key(output), START, 0
    with (output / LOG).open("wb") as file:
        while number < entries:
            files = {f"{number}": previous}
            text = sign_line(output, LogRecord, Left(note=str(number)), files, private=private, previous=previous)
            file.write(text)
            previous, number = parse_line(1, text, LogRecord).sha256, number + 1


def read_lines(output: Path) -> Iterator[Line]:
    """The entries of a log, in order."""
    return read_signed_lines(output / LOG, LogRecord)


def stage(output: Path, number: int) -> None:
    """The log's part in one computed stage: as `tasks.stage_job` and `tasks.run_summary` read and write it."""
    store = Store(output / CHECKPOINTS)
    identity = IDENTITY.model_copy(update={"stage": f"s{number}"})
    name, key = identity.stage, identity.key
    assert find_result(name, key, output, store) is None
    with store.building(name, key) as built:
        (built / "model.bin").write_bytes(b"weights")
        checkpoint = store.publish(built, identity, type="Model", step=1, dataset=None)
    log_checkpoints(output, {"parent-1": "ab" * 32}, here=False)
    log_checkpoints(output, {checkpoint.path.name: checkpoint.sha256}, here=True)
    records = output / "records" / checkpoint.path.name / "metrics.jsonl"
    records.parent.mkdir(parents=True)
    records.write_text("{}\n")
    result = StageResult(
        name=name, kind="sft", key=key, checkpoint=checkpoint, parents={}, dataset=None, mlflow_run_id="r",
        seconds=1.0, attempts=1,
    )  # fmt: skip
    keep_result(result, output, store)
    assert read_logged(output, records) == b"{}\n"
