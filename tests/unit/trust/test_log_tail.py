"""A long log is parsed once: what a stage reads and writes does not cost more as its output directory ages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.long_logs import ENTRIES, aged, stage
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.log import LOG, LogTail, view
from xray_runtime.kernel.evidence.view import Left, LogView
from xray_runtime.trust.keys import trusted_keys, trusted_view
from xray_runtime.trust.log import append


def test_a_stage_parses_its_own_lines_however_long_the_log_is(tmp_path: Path, parsed: list[int]) -> None:
    counts = []
    for entries in (10, ENTRIES):
        output = tmp_path / str(entries)
        aged(output, entries)
        # A process reads the whole log once for each of the two views.
        view(output), trusted_view(output)
        assert len(parsed) == 2 * entries
        stage(output, 1)
        parsed.clear()
        before = view(output).head.entries
        stage(output, 2)
        counts.append((len(parsed), view(output).head.entries - before))
        parsed.clear()
    # Two entries (the checkpoint, then its result and records), each read by both views.
    assert counts == [(4, 2), (4, 2)]


def test_a_view_never_changes(tmp_path: Path) -> None:
    append(tmp_path, Left(note="a"), {"a": "0" * 64})
    before = view(tmp_path)
    append(tmp_path, Left(note="b"), {"b": "0" * 64})
    assert (set(before.files), before.head.entries) == ({"a"}, 1)
    assert (set(view(tmp_path).files), view(tmp_path).head.entries) == ({"a", "b"}, 2)


def in_place(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def renamed(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


CHANGED: dict[str, Callable[[list[bytes]], bytes]] = {
    "shorter": lambda lines: b"".join(lines[:-1]),
    "empty": lambda lines: b"",
    "without its first": lambda lines: b"".join(lines[1:]),
    "in another order": lambda lines: b"".join([lines[1], lines[0], *lines[2:]]),
    "one twice": lambda lines: b"".join([*lines, lines[-1]]),
    "with half a line": lambda lines: b"".join(lines) + lines[-1][:100],
    "with a line of no entry": lambda lines: b"".join(lines) + b"{}\n",
    "with lines of another directory": lambda lines: b"",
}


@pytest.mark.parametrize("write", [in_place, renamed])
@pytest.mark.parametrize("how", CHANGED)
def test_a_log_that_was_changed_is_read_as_by_a_process_that_never_read_it(
    how: str, write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    output, other = tmp_path / "out", tmp_path / "other"
    aged(output, 4)
    aged(other, 6)
    verifier = Verifier(trusted_keys(output))
    tails = {None: LogTail(output / LOG), verifier: LogTail(output / LOG, verifier)}
    assert [tail.view().head.entries for tail in tails.values()] == [4, 4]
    content = CHANGED[how]((output / LOG).read_bytes().splitlines(keepends=True))
    write(output / LOG, (other / LOG).read_bytes() if "another directory" in how else content)
    is_sound = how == "shorter"
    for key, tail in tails.items():
        assert tail.view() == LogTail(output / LOG, key).view(), key
    with contextlib.nullcontext() if is_sound or how == "empty" else pytest.raises(ValueError, match=r"log\.jsonl: "):
        tails[verifier].sound_view()
    if how == "with half a line":
        append(output, Left(note="next"))
        assert [tail.view().head.entries for tail in tails.values()] == [5, 5]


def test_a_log_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    aged(tmp_path, 2)
    tail = LogTail(tmp_path / LOG)
    assert tail.view().head.entries == 2
    (tmp_path / LOG).rename(tmp_path / "moved")
    assert tail.view() == LogView()
    with pytest.raises(ValueError, match="it is not there"):
        tail.sound_view()
    (tmp_path / LOG).symlink_to(tmp_path / "moved")
    assert tail.view() == LogView()
