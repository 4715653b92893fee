"""Snapshots: whole or not there, the newest sound one counts, older attempts are fenced, a full disk is said."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kernel.store.published import write_shard, write_snapshot
from xray_runtime.kernel.errors import StageInterruptedError, WorkerEndedError, is_out_of_memory, may_retry
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.kernel.store.snapshots import FILES, SEAL, FencedError, Snapshots
from xray_runtime.kernel.tracking.recorder import StageRecorder, snapshots_directory


def test_the_newest_is_found_by_another_attempt(tmp_path: Path) -> None:
    first = Snapshots(tmp_path, every=1, seal=process_seal())
    assert first.latest() is None
    write_snapshot(first, 1)
    write_snapshot(first, 12, b"newer")
    found = Snapshots(tmp_path, every=1, seal=process_seal()).latest()
    assert found is not None
    assert (found.step, found.state) == (12, {"step": 12})
    assert (found.directory / "policy" / "part").read_bytes() == b"newer"
    # The one before went only after this one was whole.
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-0000000012"]


def test_a_failed_write_leaves_the_one_before(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, every=1, seal=process_seal())
    write_snapshot(snapshots, 1)
    with pytest.raises(RuntimeError, match="engine"), snapshots.writing(2, {}):
        raise RuntimeError("the engine could not save")
    found = snapshots.latest()
    assert found is not None
    assert found.step == 1
    assert not list(tmp_path.glob("*.writing-*"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove file", "remove list", "list is nonsense"])
def test_a_damaged_one_is_skipped_with_a_line(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = Snapshots(tmp_path, every=1, seal=process_seal())
    write_snapshot(snapshots, 1)
    sound = (tmp_path / "step-0000000001").rename(tmp_path / "kept")
    write_snapshot(snapshots, 2)
    sound.rename(tmp_path / "step-0000000001")
    part, files = (tmp_path / "step-0000000002" / name for name in ("policy/part", "files.json"))
    if damage == "flip":
        part.write_bytes(b"weightz")
    elif damage == "truncate":
        part.write_bytes(b"")
    elif damage == "remove file":
        part.unlink()
    elif damage == "remove list":
        files.unlink()
    else:
        files.write_text("[")
    with caplog.at_level(logging.WARNING):
        found = Snapshots(tmp_path, every=1, seal=process_seal()).latest()
    assert found is not None
    assert found.step == 1
    assert "step-0000000002" in caplog.text
    assert "the snapshot before it is used" in caplog.text


def write_sharded(snapshots: Snapshots, step: int) -> None:
    """A snapshot of a model in two shards, each hashed by the rank that wrote it."""
    with snapshots.writing(step, {"step": step}) as directory:
        for rank in range(2):
            write_shard(directory / "policy" / f"rank-0000{rank}.safetensors", f"step {step}".encode())


def test_a_damaged_shard_is_left_to_the_ranks_and_then_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = Snapshots(tmp_path, every=1, seal=process_seal())
    write_sharded(snapshots, 1)
    older = (tmp_path / "step-0000000001").rename(tmp_path / "kept")
    write_sharded(snapshots, 2)
    older.rename(tmp_path / "step-0000000001")
    (tmp_path / "step-0000000002" / "policy" / "rank-00001.safetensors").write_bytes(b"stop 2")
    found = snapshots.latest()
    assert found is not None
    assert found.step == 2
    snapshots.refuse(found, "rank-00001.safetensors was changed")
    assert caplog.messages == ["rank-00001.safetensors was changed; the snapshot before it is used"]
    found = snapshots.latest()
    assert found is not None
    assert found.step == 1
    # Its index is sealed like any other file.
    index = found.directory / "policy" / "rank-00000.shard.json"
    index.write_text(index.read_text().replace('"step":3', '"step":4'))
    assert snapshots.latest() is None


def test_a_shard_is_not_hashed_again_by_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, hashed = Snapshots(tmp_path, every=1, seal=process_seal()), list[str]()

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr("xray_runtime.kernel.store.shards.file_sha256", counted)
    write_sharded(snapshots, 1)
    assert snapshots.latest() is not None
    assert sorted(set(hashed)) == ["rank-00000.shard.json", "rank-00001.shard.json", "state.json"]


def test_killed_between_two_shards_the_one_before_is_used(tmp_path: Path) -> None:
    write_sharded(Snapshots(tmp_path, every=1, seal=process_seal()), 1)
    code = f"""
import os
from pathlib import Path
from tests.unit.kernel.store.published import write_shard
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.store.snapshots import Snapshots
with Snapshots(Path({str(tmp_path)!r}), every=1, seal=process_seal()).writing(2, {{}}) as directory:
    write_shard(directory / "policy" / "rank-00000.safetensors", b"step 2")
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert list(tmp_path.glob("step-0000000002.writing-*/policy/rank-00000.safetensors"))
    found = Snapshots(tmp_path, every=1, seal=process_seal()).latest()
    assert found is not None
    assert found.step == 1
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000000001"]


def test_an_older_attempt_is_fenced(tmp_path: Path) -> None:
    older = Snapshots(tmp_path, every=1, seal=process_seal())
    write_snapshot(older, 3)
    newer = Snapshots(tmp_path, every=1, seal=process_seal())
    with pytest.raises(FencedError, match="another attempt"):
        write_snapshot(older, 4)
    with pytest.raises(FencedError):
        older.check()
    write_snapshot(newer, 4)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-0000000004"]


@pytest.mark.parametrize("plant", ["edited", "added", "no seal", "foreign seal", "another step", "another stage"])
def test_a_planted_snapshot_is_not_gone_on_from(
    plant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, intruder: Seal
) -> None:
    directory = tmp_path / "sft-1"
    seal = intruder if plant == "foreign seal" else process_seal()
    source = tmp_path / ("sft-2" if plant == "another stage" else "sft-1")
    write_snapshot(Snapshots(source, 1, seal), 7, b"poison")
    place = directory / "step-0000000007"
    if plant == "edited":
        (place / "policy" / "part").write_bytes(b"edited")
        listed = json.loads((place / FILES).read_text()) | {"policy/part": hashlib.sha256(b"edited").hexdigest()}
        (place / FILES).write_text(json.dumps(listed))
    elif plant == "added":
        (place / "policy" / "more").write_bytes(b"")
    elif plant == "no seal":
        (place / SEAL).unlink()
    elif plant == "another step":
        place.rename(directory / "step-0000000009")
    elif plant == "another stage":
        directory.mkdir()
        (source / place.name).rename(place)
    assert Snapshots(directory, 1, process_seal()).latest() is None
    assert "the snapshot before it is used" in caplog.text


def test_a_full_disk_is_reported_and_keeps_the_last_snapshot(tmp_path: Path) -> None:
    # A limit on file size fails the write where a full disk would.
    code = f"""
import resource, signal
from pathlib import Path
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.store.snapshots import Snapshots
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
snapshots = Snapshots(Path({str(tmp_path)!r}), every=1, seal=process_seal())
with snapshots.writing(1, {{}}) as directory:
    (directory / "part").write_bytes(b"x" * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with snapshots.writing(2, {{}}) as directory:
        (directory / "part").write_bytes(b"x" * 5000)
except OSError as error:
    print(error.strerror)
print(snapshots.latest().step)
"""
    said, step = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert "the snapshot after step 2 cannot be written (File too large)" in said
    assert step == "1"


def test_periodic_snapshots_take_a_small_share_of_the_time(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, every=5, seal=process_seal())
    assert [step for step in range(1, 16) if snapshots.due(step)] == [5, 10, 15]
    snapshots._spent = 3600.0
    assert not any(snapshots.due(step) for step in range(1, 16))


def test_long_steps_have_snapshots_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 700 s, of which the snapshots take none: every third ends 1800 s or more after the last snapshot."""
    now = 0.0
    monkeypatch.setattr("xray_runtime.kernel.store.snapshots.time.monotonic", lambda: now)
    snapshots, written = Snapshots(tmp_path, every=7, every_s=1800.0, seal=process_seal()), []
    for step in range(1, 13):
        now = 700.0 * step
        if snapshots.due(step):
            write_snapshot(snapshots, step)
            written.append(step)
    assert written == [3, 6, 7, 10]


def recorder(output: Path) -> StageRecorder:
    return StageRecorder(output, "sft", "k" * 64, None, lambda *_: None, every=1, seal=process_seal())


def steps(output: Path, first: StageRecorder) -> list[str]:
    first.close()
    return [line.split(",")[0] for line in first.metrics_path.read_text().splitlines()]


def test_metrics_after_the_snapshot_are_recorded_once(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.begin()
    assert first.resume() is None
    first.metrics({"loss": 3.0}, 0)
    first.write_snapshot(1, {"cursor": {"position": 4}}, lambda directory: None)
    first.metrics({"loss": 2.0}, 1)
    first.close()

    second = recorder(tmp_path)
    assert second.attempt == 2
    second.begin()
    snapshot = second.resume()
    assert snapshot is not None
    assert (snapshot.step, snapshot.state["cursor"]) == (1, {"position": 4})
    second.metrics({"loss": 2.0}, 1)
    second.metrics({"loss": 1.0}, 2)
    assert steps(tmp_path, second) == ['{"step": 0', '{"step": 1', '{"step": 2']
    second.finished()
    assert not snapshots_directory(tmp_path, "sft", "k" * 64).exists()


@pytest.mark.parametrize("error", [StageInterruptedError, WorkerEndedError])
def test_an_interruption_makes_a_snapshot_and_stops_and_without_its_worker_a_stage_is_tried_again(
    error: type[StageInterruptedError | WorkerEndedError], tmp_path: Path
) -> None:
    stage = recorder(tmp_path)
    stage.begin()
    stage.interrupt(error)
    assert stage.snapshot_due(7)
    with pytest.raises(error, match="stopped after step 7") as stopped:
        stage.write_snapshot(7, {}, lambda directory: None)
    assert may_retry(stopped.value) == (error is WorkerEndedError)
    # Whichever comes second, a run that was stopped stays so.
    stage.interrupt(StageInterruptedError if error is WorkerEndedError else WorkerEndedError)
    with pytest.raises(StageInterruptedError):
        stage.write_snapshot(8, {}, lambda directory: None)
    again = recorder(tmp_path)
    again.begin()
    found = again.resume()
    assert found is not None
    assert found.step == 8


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Workhorse died\nterminate called after throwing an instance of 'std::bad_alloc'"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("sft.lr"), False),
    ],
)
def test_out_of_memory_is_told_apart(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
