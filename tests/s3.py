"""A real S3-compatible server (rclone, from a package) on loopback, its objects as files in a directory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from xray.deployments.service import free_port

BUCKET = "bucket"


class S3Server:
    """Runs from the start; `kill` and `start` again is a server that was away."""

    def __init__(self, directory: Path) -> None:
        self.objects = directory / BUCKET
        self.objects.mkdir(parents=True)
        self._root, self._log = directory, directory.with_name("rclone.log")
        self._port = free_port()
        self.variables = {
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }
        """By which programs find it."""
        self.start()

    def start(self) -> None:
        key = f"{self.variables['AWS_ACCESS_KEY_ID']},{self.variables['AWS_SECRET_ACCESS_KEY']}"
        command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--config", os.devnull]
        command += ["--vfs-cache-mode", "off", "--addr", f"127.0.0.1:{self._port}", "--auth-key", key, str(self._root)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"rclone did not start: {self._log.read_text()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
