"""The journal: what is in it is found again, and what a kill cut short is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.kernel.store.shared import SharedFolder, SharedStore
from xray_runtime.rewards.journal import ANSWERS, Journal
from xray_runtime.rewards.source import Batch, Score, failure


def batch(step: int = 0) -> Batch:
    said = [[{"role": "user", "content": "p"}]] * 3
    return Batch(["p"] * 3, ["a", "a", "b"], said, metadata={"stage": "ppo", "step": step})


def test_answers_are_found_by_the_next_attempt(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    keys = first.keys("judge", batch())
    others = {*first.keys("judge", batch(1)), *first.keys("service", batch())}
    assert len({*keys} | others) == 9
    first.write("judge", 0, [(keys[0], Score(0.1, "said"))])
    first.write("judge", 0, [(keys[1], failure("away"))])
    second = Journal(tmp_path)
    assert second.find(keys[0]) == Score(0.1, "said")
    lost = second.find(keys[1])
    assert lost is not None
    assert math.isnan(lost.value)
    assert second.find(keys[2]) is None
    # What is known is not written twice.
    second.write("judge", 0, [(keys[0], Score(9.0))])
    assert len((tmp_path / ANSWERS).read_bytes().splitlines()) == 2


def test_a_write_cut_short_is_dropped(tmp_path: Path) -> None:
    journal, path = Journal(tmp_path), tmp_path / ANSWERS
    keys = journal.keys("judge", batch())
    journal.write("judge", 0, [(keys[0], Score(1.0))])
    first = len(path.read_bytes())
    journal.write("judge", 0, [(keys[1], Score(2.0)), (keys[2], Score(3.0))])
    whole = path.read_bytes()
    second = whole.index(b"\n", first) + 1
    for end in (first, *range(first + 1, len(whole) - 1, 9), second, len(whole) - 1):
        path.write_bytes(whole[:end])
        torn = Journal(tmp_path)
        assert torn.find(keys[0]) == Score(1.0)
        assert [torn.find(key) for key in keys[1:]] == [None, None]
        assert path.read_bytes() == whole[:first]
    torn.write("judge", 0, [(keys[1], Score(2.0))])
    again = Journal(tmp_path)
    assert path.read_bytes().startswith(whole[:first])
    assert [again.find(key) for key in keys] == [Score(1.0), Score(2.0), None]


def test_a_write_is_sealed_once_whatever_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal, made = process_seal(), []
    sign = seal.sign
    monkeypatch.setattr(seal, "sign", lambda *args: made.append(args) or sign(*args))
    journal = Journal(tmp_path, seal=seal)
    journal.write("judge", 0, [(f"key-{n}", Score(float(n))) for n in range(1000)])
    assert len(made) == 1
    assert [Journal(tmp_path, seal=seal).find(f"key-{n}") for n in (0, 999)] == [Score(0.0), Score(999.0)]


def test_another_machine_finds_what_was_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedFolder(SharedStore((tmp_path / "shared").as_uri()), "snapshots/ppo-1/kept")
    here, there = tmp_path / "here" / "ppo-1", tmp_path / "there" / "ppo-1"
    here.mkdir(parents=True)
    there.mkdir(parents=True)
    first = Journal(here, shared)
    keys = first.keys("judge", batch())
    first.write("judge", 0, [(keys[0], Score(0.1, "said"))])
    first.write("judge", 0, [(keys[1], failure("away"))])
    # The answers lie there before they lie here: what was used is nowhere lost with this machine.
    assert len(shared.read()) == 2
    second = Journal(there, shared)
    assert second.find(keys[0]) == Score(0.1, "said")
    assert math.isnan(second.find(keys[1]).value)  # type: ignore[union-attr]
    second.write("judge", 0, [(keys[0], Score(9.0)), (keys[2], Score(2.0))])
    assert (there / ANSWERS).read_bytes().count(b"\n") == 1
    # Back here: what was answered there in between is known.
    assert Journal(here, shared).find(keys[2]) == Score(2.0)

    for name in shared.read():
        shared.write(name, b'{"key": "%s", "score": 5.0, "why": null, "seal": ""}\n' % keys[0].encode())
    changed = Journal(there, shared)
    assert [changed.find(key) for key in keys] == [None, None, Score(2.0)]
    assert f"{name}: lines are not sealed with this run's key; their requests are repeated" in caplog.text


def test_planted_answers_are_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture, intruder: Seal) -> None:
    here, other = tmp_path / "ppo-1", tmp_path / "ppo-2"
    here.mkdir()
    other.mkdir()
    journal = Journal(here)
    keys = journal.keys("judge", batch())
    journal.write("judge", 0, [(keys[0], Score(0.1))])
    journal.write("judge", 0, [(keys[1], Score(0.2))])
    first, second = (here / ANSWERS).read_bytes().splitlines(keepends=True)
    # Edited, sealed for another stage, sealed with another key, no answer at all.
    Journal(other).write("judge", 0, [(keys[2], Score(9.0))])
    elsewhere = (other / ANSWERS).read_bytes()
    (other / ANSWERS).unlink()
    Journal(other.parent / "ppo-1", seal=intruder).write("judge", 0, [(keys[2], Score(9.0))])
    foreign = (here / ANSWERS).read_bytes().splitlines(keepends=True)[-1]
    planted = [
        first.replace(b"0.1", b"0.9"),
        *(elsewhere, foreign, b"[1]\n", b'{"key": "k", "seal": {}}\n', b"[" * 100_000 + b"\n"),
    ]
    for line in planted:
        caplog.clear()
        (here / ANSWERS).write_bytes(line + second)
        found = Journal(here)
        assert [found.find(key) for key in keys] == [None, Score(0.2), None], line[:80]
        assert "are not sealed with this run's key" in caplog.text
    # Before other lines, it breaks their seal; after them, it is like a write that was cut short.
    unsealed = b'{"key": "%s", "source": "judge", "step": 0, "score": 9.0, "why": ""}\n' % keys[2].encode()
    for content, score in ((unsealed + second, None), (second + unsealed, Score(0.2))):
        (here / ANSWERS).write_bytes(content)
        found = Journal(here)
        assert [found.find(key) for key in keys] == [None, score, None]


def test_without_a_directory_nothing_is_kept() -> None:
    journal = Journal(None)
    [key, *_] = journal.keys("judge", batch())
    journal.write("judge", 0, [(key, Score(1.0))])
    assert journal.find(key) is None
