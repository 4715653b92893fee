"""Commands over a synthetic lifecycle."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from xray.cli.main import app
from xray.deployments.service import free_port
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.trust.bundle import export


def xray(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def place(output: Path, stage: str) -> Path:
    return next(iter(output.glob(f"checkpoints/{stage}-*")))


def bundled(output: Path, path: Path) -> Path:
    place, node = resolve("ppo-2", output, None)
    assert export(place, node, path) == 8
    return path


def serve_command(output: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and what was said, of a command that ends before anything is started."""
    port = free_port()
    done = CliRunner().invoke(app, ["serve", "--output", str(output), "--port", str(port), *arguments])
    return done.exit_code, done.output.strip()
