"""HTTP servers of this process that answer with JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

S = TypeVar("S", bound=ThreadingHTTPServer)


class Answering(BaseHTTPRequestHandler):
    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def answer(self, content: Any, status: int = 200) -> None:
        """Bytes as they are, all else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def serving(server: S) -> Iterator[S]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
