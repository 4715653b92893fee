"""The other side of a chat with a served model, for the order in which its pieces come."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar


class Answers(BaseHTTPRequestHandler):
    """The other side of a chat, piece by piece as vLLM streams it: a call where tools are given, else an echo."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "champion"}]}).encode())

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(content)
        last = content["messages"][-1]
        if content.get("tools") and last["role"] == "user":
            function = {"name": "weather", "arguments": '{"city": '}
            deltas: list[dict[str, Any]] = [
                {"content": "let me see"},
                {"tool_calls": [{"index": 0, "id": "call-1", "function": function}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '"Ghent"}'}}]},
            ]
        else:
            deltas = [{"content": "reply "}, {"content": f"{len(self.asked)} to <b>{last['content']}</b>"}]
        chunks = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        self._send("".join([*chunks, "data: [DONE]\n\n"]).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""
