"""A stage's points in TensorBoard's own files, read by TensorBoard's own reader."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.tracking.mirrors import EVENTS, MIRRORS, EventFiles, OfflineRun, require_mirror
from xray_runtime.kernel.tracking.recorder import StageRecorder

KEY = "ab" * 32


def recorder(output: Path, mirror: Any = EventFiles) -> StageRecorder:
    return StageRecorder(output, "sft", KEY, None, lambda *_: None, every=2, seal=process_seal(), mirror=mirror)


def steps(output: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [place] = output.glob(f"records/*/{EVENTS}")
    events = EventAccumulator(str(place))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def wandb_points(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) in a run's file: LevelDB's log after a header of 7 bytes, each record whole in its block."""
    from wandb.proto import wandb_internal_pb2

    content, place, found = path.read_bytes(), 7, []
    while place + 7 <= len(content):
        _, size, kind = struct.unpack_from("<IHB", content, place)
        assert kind == 1
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + size])
        place += 7 + size
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if name in values:
            found.append((record.history.step.num, values[name]))
    return found


def test_a_resumed_attempt_leaves_each_point_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = recorder(tmp_path)
    first.begin()
    for step in (1, 2):
        first.metrics({"sft/loss": 4.0 / step}, step)
    first.write_snapshot(2, {}, lambda directory: None)
    # It is killed after a point that no snapshot has.
    first.metrics({"sft/loss": 9.0}, 3)
    first.close()
    assert steps(tmp_path, "sft/loss") == [(1, 4.0), (2, 2.0)]
    second = recorder(tmp_path)
    second.begin()
    second.metrics({"sft/loss": 0.5}, 3)
    second.send()
    second.close()
    assert steps(tmp_path, "sft/loss") == [(1, 4.0), (2, 2.0), (3, 0.5)]


class Failing:
    """A mirror whose disk is full."""

    def __init__(self, records: Path) -> None: ...

    def points(self, lines: list[Any]) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None: ...


def test_a_mirror_that_fails_does_not_fail_the_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = recorder(tmp_path, Failing)
    one.begin()
    one.metrics({"sft/loss": 1.0}, 1)
    one.send()
    one.close()
    assert "the mirror did not accept the metrics" in caplog.text


def test_a_missing_library_is_named_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xray_runtime.kernel.tracking.mirrors.find_spec", lambda name: None)
    require_mirror("none")
    for name in MIRRORS:
        line = f"runtime.mirror: '{name}' is not allowed: it is not installed; `pip install xray-rlhf[{name}]`"
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
            require_mirror(name)


@pytest.mark.long
def test_an_offline_run_of_wandb_has_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network or login; a second attempt replaces the run of the first."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for attempt in (1, 2):
        one = recorder(tmp_path, OfflineRun)
        one.begin()
        for step in ((1, 2), (3,))[attempt - 1]:
            one.metrics({"sft/loss": 4.0 / step}, step)
        one.write_snapshot(attempt + 1, {}, lambda directory: None)
        one.close()
    [run] = tmp_path.glob("records/*/wandb/offline-run-*/*.wandb")
    assert wandb_points(run, "sft/loss") == [(1, 4.0), (2, 2.0), (3, 4.0 / 3)]
