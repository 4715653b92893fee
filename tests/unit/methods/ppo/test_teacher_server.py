"""A teacher behind an address: a real model that answers as vLLM does, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.message_texts import Messages
from tests.unit.methods.ppo.method_setting import MakeLM, as_tensors
from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.ppo.distillation_config import TeacherServerConfig
from xray_runtime.methods.ppo.teacher_server import TeacherServer
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.teacher_objective import TeacherObjective
from xray_runtime.rewards.journal import ANSWERS, Journal, publish_answers, restore_answers

ROWS = TextBatch.of([[5, 9, 7], [8, 50], [8, 50]], [[42, 11, 1], [3, 1], [25]])
TOP_K = 4
PROMPTS = [([{"role": "user", "content": "a question"}], [5, 9, 7])]


class Teacher(ThreadingHTTPServer):
    """vLLM's `/v1/completions` and `/tokenize` over a model."""

    def __init__(self, lm: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lm, self.asked, self.broken, self.prompt = lm, list[dict[str, Any]](), 0, [5, 9, 7]
        self.most = 20

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": self.prompt, "count": len(self.prompt)}
        self.asked.append(request)
        if self.broken:
            self.broken -= 1
            return {"choices": [{"prompt_logprobs": None}]}
        ids, k = request["prompt"], request["prompt_logprobs"]
        if k > self.most:
            raise PermissionError(f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.most}")
        with torch.no_grad():
            logp = self.lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        places: list[Any] = [None]
        for before, token in enumerate(ids[1:]):
            most = logp[before].topk(k).indices.tolist()
            found = {str(i): {"logprob": float(logp[before, i]), "rank": 1 + most.index(i)} for i in most}
            places.append({str(token): {"logprob": float(logp[before, token]), "rank": 99}} | found)
        return {"choices": [{"text": "x", "prompt_logprobs": places}]}


class Handler(BaseHTTPRequestHandler):
    server: Teacher

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, answer = 200, self.server.answer(self.path, request)
        except PermissionError as error:
            status, answer = 400, {"error": {"message": str(error)}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def lm(make_lm: MakeLM) -> Any:
    return make_lm(3)


@pytest.fixture
def teacher(lm: Any) -> Iterator[Teacher]:
    with Teacher(lm) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asks(teacher: Teacher, kept: Path | None = None, top_k: int = TOP_K, *, keeps: bool = True) -> TeacherServer:
    stage = SimpleNamespace(
        name="distill", kept=kept, kept_shared=None, seal=process_seal(), config=SimpleNamespace(keeps_answers=keeps)
    )
    url = f"http://127.0.0.1:{teacher.server_port}"
    config = TeacherServerConfig(url=url, model="large", retries=1, backoff_s=0.0)
    return TeacherServer(stage, config, top_k)  # type: ignore[arg-type]


def same(found: Scores, expected: Scores) -> None:
    for name, column in expected.columns().items():
        assert found.columns()[name].offsets.tolist() == column.offsets.tolist()  # type: ignore[union-attr]
        given, wanted = (columns.columns()[name].values for columns in (found, expected))  # type: ignore[union-attr]
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5)
        assert given.dtype == (np.int32 if name.endswith("ids") else np.float32)


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_its_answers_are_those_of_the_model(teacher: Teacher, lm: Any, top_k: int) -> None:
    found = asks(teacher, top_k=top_k).score(ROWS, 3)
    given = as_tensors(ROWS)
    with torch.no_grad():
        expected = TeacherObjective(1.0, top_k, lm.config.vocab_size).score(HeadedLM(lm), given)
    same(found, expected.map(lambda values: values.numpy()))  # type: ignore[arg-type]


def test_no_reply_is_asked_twice_and_a_replay_reads_the_checkpoint(
    teacher: Teacher, tmp_path: Path, message_texts: Messages
) -> None:
    kept, again, out = (tmp_path / name for name in ("kept", "again", "out"))
    for folder in (kept, again, out):
        folder.mkdir()
    first = asks(teacher, kept).score(ROWS, 3)
    assert len(teacher.asked) == 3
    same(asks(teacher, kept).score(ROWS, 3), first)
    assert len(teacher.asked) == 3
    # Another step has answers of its own.
    asks(teacher, kept).score(ROWS, 4)
    assert len(teacher.asked) == 6
    asks(teacher, kept).check(PROMPTS)
    assert len(teacher.asked) == 7
    publish_answers(Journal(kept), out)
    journal = Journal(again)
    assert restore_answers(out, journal) == {"teacher"}
    same(asks(teacher, again).score(ROWS, 3), first)
    # Nor does a replay need the server for what it had read alike.
    teacher.prompt = [0]
    asks(teacher, again).check(PROMPTS)
    assert len(teacher.asked) == 7
    (out / ANSWERS).write_text('{"key": "x", "source": "teacher", "answer": {}}\n')
    with pytest.raises(ValueError, match=r"line 1: damaged$"):
        restore_answers(out, journal)


def test_what_may_not_be_kept_is_not_published(teacher: Teacher, tmp_path: Path) -> None:
    asks(teacher, tmp_path, keeps=False).score(ROWS, 3)
    (tmp_path / "out").mkdir()
    publish_answers(Journal(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out" / ANSWERS).exists()


def test_an_answer_without_log_probabilities_is_asked_for_again_and_then_fails(
    teacher: Teacher, tmp_path: Path, message_texts: Messages
) -> None:
    teacher.broken = 1
    asks(teacher, tmp_path).score(ROWS, 0)
    assert len(teacher.asked) == 4
    teacher.broken = 100
    with message_texts.raises(RuntimeError):
        asks(teacher, tmp_path).score(ROWS, 1)


def test_it_must_read_what_the_student_reads(teacher: Teacher, message_texts: Messages) -> None:
    asks(teacher).check(PROMPTS)
    teacher.prompt = [5, 9, 7, 2]
    with message_texts.raises(ValueError):
        asks(teacher).check(PROMPTS)
    teacher.prompt, teacher.most = [5, 9, 7], TOP_K - 1
    with message_texts.raises(ValueError):
        asks(teacher).check(PROMPTS)
    teacher.prompt = "5 9 7"  # type: ignore[assignment]
    with message_texts.raises(ValueError):
        asks(teacher).check(PROMPTS)
