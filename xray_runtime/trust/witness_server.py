"""A witness over HTTP: https://c2sp.org/tlog-witness."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.trust.note import WitnessKey
from xray_runtime.trust.signing import read_public
from xray_runtime.trust.witness import MAX_BYTES, PATH, TIMEOUT_S, TRUSTED, DirectoryWitness, respond


def trust_log(directory: Path, public: Path) -> None:
    """Cosign logs that a key signs. Raises ConfigError: it is no public key."""
    try:
        digest, content = read_public(public).sha256, read_bounded(public)
        (directory / TRUSTED).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(directory / TRUSTED / f"{digest[:16]}.pub", content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trust: {str(public)!r} is not allowed: {first_line(error)}") from None


def serve(directory: Path, host: str, port: int, on_ready: Callable[[WitnessKey], object]) -> None:
    """Answer until Ctrl-C or SIGTERM. Raises ConfigError: the directory cannot be used."""
    try:
        witness = DirectoryWitness(directory)
        key = witness.key()
    except (OSError, ValueError) as error:
        raise ConfigError(f"DIR: {str(directory)!r} is not allowed: {first_line(error)}") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadingHTTPServer((host, port), _handler(witness)) as server, contextlib.suppress(KeyboardInterrupt):
        on_ready(key)
        server.serve_forever()


def _handler(witness: DirectoryWitness) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self.path != PATH or not length.isdecimal() or len(length) > 9 or int(length) > MAX_BYTES:
                status, text = 400, f"POST {PATH} with at most {MAX_BYTES} bytes\n"
            else:
                status, text = respond(witness, self.rfile.read(int(length)))
            self.send_response(status)
            self.send_header("Content-Type", "text/x.tlog.size" if status == 409 else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged."""

    return Handler
