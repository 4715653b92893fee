"""The recorder: what is kept, for whom, how long; feedback; a disk that fills; and each tampering named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.live.serving.recording import KEYS, MODEL, exchange, keep, with_recorder
from tests.unit.trust.tampering import flip
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.history import recorded
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.graph import CheckpointGraph
from xray_runtime.kernel.history.recorded import CHAIN, RecordedReader, SegmentWriter
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.live.serving import recorder as recorder_module
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder
from xray_runtime.trust.audit.checks.recorded import check_recorded
from xray_runtime.trust.keys import rotate, trusted_keys


def records(output: Path, user: str | None = None) -> list[dict[str, Any]]:
    return list(RecordedReader(output).rows(user, (), None))


def broken(output: Path, *known: str) -> set[str]:
    """Code and subject of what a check finds."""
    graph = CheckpointGraph()
    graph.nodes |= dict.fromkeys((MODEL, *known))  # type: ignore[arg-type]
    verifier = Verifier(trusted_keys(output))
    store = LineageStore(output, graph, None)
    found = check_recorded(store, read_log(output, verifier)[0].folded.view, verifier, hashing=True)
    return {f"{finding.code} {finding.subject.removeprefix(RECORDED + '/')}" for finding in found}


def judge(output: Path, key: str = KEYS["shop"], **content: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"answer": f"{1:032x}", **content}).encode()
    return with_recorder(output, lambda recorder: recorder.feedback(body, key_digest(key)))


def test_an_answer_is_kept_whole_and_its_text_encrypted(tmp_path: Path) -> None:
    assert keep(tmp_path, exchange(1, text="a secret")) == {}
    [row] = records(tmp_path)
    assert (row["id"], row["model"], row["latency_s"], row["first_s"]) == (f"{1:032x}", MODEL, 0.5, 0.25)
    assert (row["prompt_tokens"], row["reply_tokens"], row["complete"]) == (3, 2, True)
    assert row["texts"]["request"]["messages"] == [{"role": "user", "content": "a secret"}]
    assert row["texts"]["answer"]["choices"][0]["message"]["content"] == "fine 1"
    bytes_on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"a secret" not in bytes_on_disk
    assert b"ann" not in (tmp_path / RECORDED / "00000001.parquet").read_bytes()
    assert broken(tmp_path) == set()


def test_records_verify_after_a_users_key_is_deleted(tmp_path: Path) -> None:
    keep(tmp_path, exchange(1, "ann"), exchange(2, "bob"))
    [ann] = records(tmp_path, "ann")
    (tmp_path / RECORDED / "keys" / ann["user"]).unlink()
    assert [row["texts"] is None for row in records(tmp_path)] == [False, True]
    assert broken(tmp_path) == set()
    # A new agreement has a new key, which does not open what was deleted.
    keep(tmp_path, exchange(3, "ann"))
    assert [row["texts"] is None for row in records(tmp_path)] == [False, False, True]


def test_a_key_that_is_deleted_while_the_recorder_runs_is_not_used_again(tmp_path: Path) -> None:
    async def work(recorder: AnswerRecorder) -> None:
        await recorder.keep([exchange(1, "ann")], {}, True)
        [row] = records(tmp_path)
        (tmp_path / RECORDED / "keys" / row["user"]).unlink()
        await recorder.keep([exchange(2, "ann")], {}, True)

    with_recorder(tmp_path, work)
    assert [row["texts"] is None for row in records(tmp_path)] == [False, True]


def test_a_header_names_the_user_before_the_request_does(tmp_path: Path) -> None:
    # The request's own field says ann.
    keep(tmp_path, dataclasses.replace(exchange(1, "ann"), user="bob"), exchange(2, "ann"))
    assert [[row["id"] for row in records(tmp_path, name)] for name in ("ann", "bob")] == [[f"{2:032x}"], [f"{1:032x}"]]


def test_an_answer_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    keep(tmp_path, exchange(1), exchange(1))
    keep(tmp_path, exchange(1), exchange(2))
    assert [row["id"] for row in records(tmp_path)] == [f"{2:032x}", f"{1:032x}"]


def test_one_user_cannot_flood_the_store(tmp_path: Path) -> None:
    flood = [exchange(number, "mallory") for number in range(20)]
    assert keep(tmp_path, *flood, exchange(99, "ann"), answers_per_hour=5) == {"too many of one user": 15}
    assert len(records(tmp_path, "ann")) == 1


def redact(texts: dict[str, Any]) -> dict[str, Any] | None:
    text = json.dumps(texts)
    if "private" in text:
        return None
    if "fail" in text:
        raise KeyError("no such thing")
    cleaned: dict[str, Any] = json.loads(text.replace("4929 1234", "[card]"))
    return cleaned


def test_only_what_a_redaction_passes_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", __name__)
    texts = ("my card is 4929 1234", "private", "fail")
    found = [exchange(number, text=text) for number, text in enumerate(texts)]
    left_out = keep(tmp_path, *found, redact=f"{__name__}:redact", redaction={__name__: "ab" * 32})
    assert left_out == {"redacted": 2}
    [row] = records(tmp_path)
    assert row["texts"]["request"]["messages"][0]["content"] == "my card is [card]"


def test_feedback_of_each_form_is_kept_beside_its_answer(tmp_path: Path) -> None:
    keep(tmp_path, exchange(1, "ann"))
    for signals in (
        {"thumb": "down"},
        {"score": 0.5},
        {"correction": "no"},
        {"better": "yes"},
        {"text": "why", "user": "bob"},
    ):
        status, content = judge(tmp_path, **signals)
        assert (status, content["kept"], content["answer"]) == (200, True, f"{1:032x}")
    rows = [row for row in records(tmp_path) if row["kind"] == "feedback"]
    kept = [row["texts"]["feedback"] for row in reversed(rows)]
    assert kept == [{"thumb": "down"}, {"score": 0.5}, {"correction": "no"}, {"better": "yes"}, {"text": "why"}]
    assert {(row["answer"], row["application"], row["model"]) for row in rows} == {(f"{1:032x}", "shop", MODEL)}
    assert len(records(tmp_path, "bob")) == 1
    assert broken(tmp_path) == set()


def test_feedback_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    keep(tmp_path, exchange(1))
    first, again = judge(tmp_path, thumb="up"), judge(tmp_path, thumb="up")
    assert first == again
    assert len(records(tmp_path)) == 2


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        ({"thumb": "sideways"}, 400, "thumb: \"sideways\" is not allowed: must be 'up' or 'down'"),
        ({"score": 2}, 400, "score: 2 is not allowed: must be less than or equal to 1"),
        ({}, 400, "one of thumb, score, correction, better, text is required"),
        ({"thumb": "up", "stars": 5}, 400, "stars: unknown field; allowed here: "),
        ({"thumb": "up", "answer": "../etc"}, 400, 'answer: "../etc" is not allowed: must match '),
        ({"thumb": "up", "answer": "f" * 32}, 404, "is not a recorded answer, or is too old"),
        ({"thumb": "up", "model": "cd" * 32}, 400, f"is not allowed: the answer is by {MODEL}"),
        ({"thumb": "up", "key": KEYS["desk"]}, 403, "belongs to another application"),
        ({"thumb": "up", "key": "guessed"}, 401, "the feedback key is missing or wrong"),
        ({"thumb": "up", "key": ""}, 401, "the feedback key is missing or wrong"),
    ],
)
def test_forged_feedback_is_refused_in_one_line(
    content: dict[str, Any], status: int, text: str, tmp_path: Path
) -> None:
    keep(tmp_path, exchange(1, application="shop"))
    found, answer = judge(tmp_path, **content)
    assert found == status
    assert text in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert len(records(tmp_path)) == 1


def test_a_body_that_is_no_json_is_refused(tmp_path: Path) -> None:
    for body in (b"", b"{", b"[1]", b"[" * 100_000, b'"x"', b"\xff"):
        status, _ = with_recorder(tmp_path, lambda recorder, b=body: recorder.feedback(b, key_digest(KEYS["shop"])))
        assert status == 400


def test_a_flood_of_feedback_is_bounded_by_user_and_by_answer(tmp_path: Path) -> None:
    async def flood(recorder: AnswerRecorder) -> list[int]:
        await recorder.keep([exchange(1), exchange(2)], {}, True)
        found = []
        for number in range(30):
            content = {"answer": f"{1 + number % 2:032x}", "text": str(number)}
            found.append(recorder.feedback(json.dumps(content).encode(), key_digest(KEYS["shop"])))
        others = [{"answer": f"{1:032x}", "thumb": "up", "user": str(number)} for number in range(30)]
        found += [recorder.feedback(json.dumps(content).encode(), key_digest(KEYS["desk"])) for content in others]
        return [status for status, _ in await asyncio.gather(*found)]

    statuses = with_recorder(tmp_path, flood, feedback_per_hour=8)
    assert [statuses[:30].count(code) for code in (200, 429)] == [8, 22]
    # At most so many about one answer, whoever sends them.
    assert statuses[30:].count(200) == recorder_module.FEEDBACK_PER_ANSWER - 4


def test_rows_wait_for_a_full_disk_and_what_was_lost_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(recorder_module, "FEEDBACK_SECONDS", 0.2)
    full, real = [True], SegmentWriter.write

    def write(self: SegmentWriter, *arguments: Any) -> None:
        if full:
            # The file is written, and the disk fills before it is signed.
            (tmp_path / RECORDED / "00000001.parquet").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(self, *arguments)

    monkeypatch.setattr(SegmentWriter, "write", write)

    async def work(recorder: AnswerRecorder) -> None:
        waiting = asyncio.create_task(recorder.keep([exchange(1)], {"outbox full": 7}, True))
        body = json.dumps({"answer": f"{1:032x}", "thumb": "up"}).encode()
        await asyncio.sleep(0.05)
        assert (await recorder.feedback(body, key_digest(KEYS["shop"])))[0] == 503
        assert not waiting.done()
        full.clear()
        assert await waiting == {}
        assert (await recorder.feedback(body, key_digest(KEYS["shop"])))[0] == 200

    with_recorder(tmp_path, work)
    assert sorted(row["kind"] for row in records(tmp_path)) == ["answer", "feedback"]
    assert RecordedReader(tmp_path).chain.lost == {"outbox full": 7}
    assert broken(tmp_path) == set()


def test_a_segment_whose_writing_failed_at_the_end_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "RETRY_SECONDS", 0.01)
    real, failed = evidence().append_line, list[bool]()

    def append(*arguments: Any, **options: Any) -> bytes:
        line = real(*arguments, **options)
        if not failed:
            failed.append(True)
            raise OSError(5, "Input/output error")
        return line

    monkeypatch.setattr(evidence(), "append_line", append)
    keep(tmp_path, exchange(1))
    assert failed
    assert len(records(tmp_path)) == 1
    assert broken(tmp_path) == set()


@pytest.mark.parametrize("moment", ["before the segment", "before it is signed", "while it is signed"])
def test_a_recorder_that_is_killed_while_it_writes_continues(moment: str, tmp_path: Path) -> None:
    keep(tmp_path, exchange(1))
    child = os.fork()
    if child == 0:
        if moment == "before the segment":
            recorded.write_atomic = lambda path, content: (path.with_name("x.writing-1").write_bytes(b"x"), os._exit(9))  # type: ignore[assignment,return-value]
        elif moment == "before it is signed":
            evidence().append_line = lambda *arguments, **_: os._exit(9)  # type: ignore[method-assign]
        else:

            def half(output: Path, path: Path, *arguments: Any, **_: Any) -> bytes:
                with path.open("ab") as file:
                    file.write(b'{"payload": "half a li')
                    file.flush()
                os._exit(9)

            evidence().append_line = half  # type: ignore[method-assign]
        keep(tmp_path, exchange(2))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    keep(tmp_path, exchange(2), exchange(3))
    assert [row["id"] for row in records(tmp_path)] == [f"{number:032x}" for number in (3, 2, 1)]
    assert broken(tmp_path) == set()
    assert list((tmp_path / RECORDED).glob("*writing*")) == []


def test_records_older_than_the_retention_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, exchange(1))
    first = (tmp_path / RECORDED / "00000001.parquet").read_bytes()
    now = time.time()
    monkeypatch.setattr(recorded.time, "time", lambda: now + 3 * 86400)
    keep(tmp_path, exchange(2), retention_days=4)
    assert len(records(tmp_path)) == 2
    keep(tmp_path, exchange(3), retention_days=2)
    assert records(tmp_path) == []
    assert not (tmp_path / RECORDED / "00000001.parquet").exists()
    assert broken(tmp_path) == set()
    (tmp_path / RECORDED / "00000001.parquet").write_bytes(first)
    assert broken(tmp_path) == {"recorded-broken 00000001.parquet"}


FIRST, SECOND = "00000001.parquet", "00000002.parquet"


def lines_kept(folder: Path, *kept: int) -> None:
    lines = (folder / CHAIN).read_bytes().splitlines(keepends=True)
    (folder / CHAIN).write_bytes(b"".join(lines[number] for number in kept))


def linked(folder: Path) -> None:
    (folder / SECOND).rename(folder / "elsewhere")
    (folder / SECOND).symlink_to(folder / "elsewhere")


def signed_by_another(folder: Path) -> None:
    other = folder.parent.parent / "other"
    keep(other, exchange(7))
    shutil.rmtree(folder)
    shutil.copytree(other / RECORDED, folder)


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited": (lambda folder: flip(folder / SECOND), f"recorded-broken {SECOND}"),
    "removed": (lambda folder: (folder / SECOND).unlink(), f"recorded-broken {SECOND}"),
    "replayed": (lambda folder: shutil.copy(folder / FIRST, folder / SECOND), f"recorded-broken {SECOND}"),
    "added": (
        lambda folder: shutil.copy(folder / FIRST, folder / "00000005.parquet"),
        "recorded-broken 00000005.parquet",
    ),
    "linked": (linked, f"recorded-broken {SECOND}"),
    "line removed": (lambda folder: lines_kept(folder, 0, 2), "recorded-broken chain.jsonl 2"),
    "cut short": (
        lambda folder: (lines_kept(folder, 0, 1), (folder / "00000003.parquet").unlink()),
        "recorded-shorter chain.jsonl",
    ),
    "signed by another": (signed_by_another, "recorded-broken chain.jsonl 1"),
    "readable by others": (lambda folder: (folder / "keys" / "pseudonyms").chmod(0o640), "recorded-readable keys"),
    "all gone": (shutil.rmtree, "recorded-shorter chain.jsonl"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_is_named(name: str, tmp_path: Path) -> None:
    output, (tamper, named) = tmp_path / "run", TAMPERINGS[name]
    output.mkdir()
    for number in range(1, 4):
        keep(output, exchange(number))
    assert broken(output) == set()
    tamper(output / RECORDED)
    assert broken(output) == {named}


def test_a_record_that_names_a_model_which_was_never_here_is_named(tmp_path: Path) -> None:
    keep(tmp_path, exchange(1, model="cd" * 32))
    assert broken(tmp_path) == {"recorded-foreign 00000001.parquet"}
    assert broken(tmp_path, "cd" * 32) == set()


def test_the_chain_holds_over_a_rotation_of_the_key(tmp_path: Path) -> None:
    keep(tmp_path, exchange(1))
    time.sleep(1.1)
    rotate(tmp_path, by="ann", note="")
    keep(tmp_path, exchange(2))
    assert broken(tmp_path) == set()
    assert len(records(tmp_path)) == 2
