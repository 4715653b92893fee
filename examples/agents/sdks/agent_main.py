"""The way the agents of this folder are started. Each is a function of (task, base URL, API key) and returns a reward.

python openai_sdk.py < task.json      one episode, as `environment: {command: …}` does
python openai_sdk.py --port 8000      a service, for `environment: {url: "http://127.0.0.1:8000"}`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[[dict[str, Any], str, str], float]


def right(task: dict[str, Any], answer: str | None) -> bool:
    """Whether an answer is that of the task."""
    return (answer or "").strip() == task["answer"]


def run(play: Play) -> None:
    """Play one episode, or serve."""
    if "--port" in sys.argv:
        serve(play, int(sys.argv[sys.argv.index("--port") + 1]))
    else:
        print(play(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))


def serve(play: Play, port: int) -> None:
    """Play an episode for each POST, in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps(play(given["task"], given["base_url"], given["api_key"])).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
