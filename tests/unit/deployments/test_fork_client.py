"""Which workers the fork server starts, and what happens where it does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xray.deployments import fork_client
from xray.deployments.fork_client import worker_command
from xray_runtime.cluster.pool.libraries import VARIABLE

PYTHON = "/usr/bin/python3"
WORKER = ["ray/_private/workers/default_worker.py", "--worker-id=1"]


def context(variables: dict[str, str], **changes: object) -> list[str]:
    content = {"command_prefix": [], "env_vars": variables, "py_executable": PYTHON, "java_jars": [], **changes}
    setup = "ray/_private/workers/setup_worker.py"
    return [setup, *WORKER, "--language=PYTHON", f"{fork_client.CONTEXT}{json.dumps(content)}"]


def test_a_plain_worker_has_no_libraries() -> None:
    assert worker_command(VARIABLE, PYTHON, WORKER) == ("", WORKER)


def test_a_workhorse_has_those_of_its_environment() -> None:
    assert worker_command(VARIABLE, PYTHON, context({VARIABLE: "trainer:deepspeed"})) == ("trainer:deepspeed", WORKER)


@pytest.mark.parametrize(
    "arguments",
    [
        context({VARIABLE: "trainer:deepspeed", "CUBLAS": "1"}),
        context({"OTHER": "trainer:deepspeed"}),
        context({}),
        context({VARIABLE: "trainer:deepspeed"}, command_prefix=["nice"]),
        context({VARIABLE: "trainer:deepspeed"}, py_executable="/other/python"),
        ["ray/dashboard/agent.py"],
        ["ray/_private/workers/setup_worker.py", *WORKER],
    ],
)
def test_ray_starts_every_other_process(arguments: list[str]) -> None:
    assert worker_command(VARIABLE, PYTHON, arguments) is None


@pytest.mark.parametrize("address", ["missing", "file"])
def test_without_an_answer_the_worker_starts_as_ray_would(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    worker = tmp_path / "default_worker.py"
    worker.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-I", "-S", fork_client.__file__, str(tmp_path / address), VARIABLE, sys.executable]
    done = subprocess.run([*command, str(worker), "--a=b"], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "['--a=b']", done.stderr
