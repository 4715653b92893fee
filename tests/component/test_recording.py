"""Ray, vLLM and HAProxy together with a recorder that is killed while people are answered."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.live.serving.recording import KEYS, settings
from xray.deployments.service import free_port
from xray_runtime.kernel.history.recorded import RecordedReader
from xray_runtime.live.serving.recorder import start_recorder
from xray_runtime.live.serving.recording import ANSWER_HEADER
from xray_runtime.live.serving.replica import ServedModel
from xray_runtime.live.serving.server import ModelServer

HOW = {"role": "user", "content": "how are you"}


def post(url: str, body: dict[str, Any], **headers: str) -> tuple[str | None, str]:
    """(id of the recorded answer, body of the answer)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **named})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return answer.headers[ANSWER_HEADER], answer.read().decode()


@pytest.mark.long
def test_answers_are_recorded_even_if_the_recorder_is_killed(cluster: None, model: ServedModel, tmp_path: Path) -> None:
    recorder, port = start_recorder(settings(tmp_path)), free_port()
    server, address = ModelServer("127.0.0.1", port, 1, model.logs, recorder), f"http://127.0.0.1:{port}/v1"
    asked = {"messages": [HOW], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    try:
        server.deploy(model)
        nobody, plain = post(f"{address}/chat/completions", asked)
        whole, same = post(f"{address}/chat/completions", {**asked, "user": "ann"}, x_xray_record="yes")
        text = json.loads(same)["choices"][0]["message"]["content"]
        assert (nobody, json.loads(plain)["choices"][0]["message"]["content"]) == (None, text)
        assert json.loads(same)["id"] == f"chatcmpl-{whole}"
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("ray::Recorder"):
                process.kill()
        streamed, _ = post(f"{address}/chat/completions", {**asked, "stream": True}, x_xray_record="yes")
        thumb = {"answer": streamed, "thumb": "up"}
        authorization = f"Bearer {KEYS['shop']}"
        # The copy is sent to the recorder a moment after the answer.
        for _ in range(60):
            try:
                post(f"{address}/feedback", thumb, authorization=authorization)
                break
            except urllib.error.HTTPError as error:
                if error.code not in (404, 503):
                    raise
                time.sleep(0.5)
    finally:
        server.stop()
    rows = {row["id"]: row for row in RecordedReader(tmp_path).rows(None, (), None)}
    assert {row["kind"] for row in rows.values()} == {"answer", "feedback"}
    assert len(rows) == 3
    for identity in (whole, streamed):
        row = rows[str(identity)]
        assert row["texts"]["answer"]["choices"][0]["message"]["content"] == text
        assert (row["model"], row["complete"], row["reply_tokens"]) == (model.sha256, True, 4)
        assert row["prompt_tokens"] > 0
