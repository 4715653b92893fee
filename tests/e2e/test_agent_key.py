"""A lifecycle that an SSH agent signs: the agent dies while a stage trains, and a stranger verifies what came of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, XRAY, environment, xray
from tests.unit.trust.agents import needs_agent, ssh_agent
from tests.unit.trust.stranger import script_of_page, stranger
from tests.waiting import wait_until

SETTINGS = {"steps": 40, "prepare.max_conversations": 200, "prepare.context_messages": 1, "runtime.retries": 0}
RUN = [
    "run",
    "tests.graphs:sft_alone",
    *(part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")),
]


def checkpoints(output: Path) -> dict[str, str]:
    """Stage → sha256 of its checkpoint."""
    lifecycle: dict[str, Any] = json.loads((output / "lifecycle.json").read_text())
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in lifecycle["stages"]}


def _trains(output: Path) -> bool:
    return any(path.stat().st_size for path in output.glob("records/sft-*/metrics.jsonl"))


@needs_agent
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_agent_that_dies_while_a_stage_trains(tmp_path: Path) -> None:
    output, whole = tmp_path / "run", tmp_path / "whole"
    command = [*RUN, "--output", str(output)]
    with ssh_agent() as agent:
        signed = {"XRAY_SIGNING_KEY": str(agent.key("run")), "SSH_AUTH_SOCK": str(agent.socket)}
        said = tmp_path / "said"
        with said.open("w") as log:
            process = subprocess.Popen([XRAY, *command], cwd=ROOT, env=environment() | signed, stdout=log, stderr=log)
            try:
                wait_until(lambda: _trains(output), seconds=600, process=process, why=said)
                agent.end()
                assert process.wait(600) == 1
            finally:
                process.kill()
        assert f"the SSH agent at {agent.socket} does not answer (Connection refused)" in " ".join(
            said.read_text().split()
        )
        # Nothing of the stage is there half signed.
        assert not list(output.glob("checkpoints/sft-*/manifest.json"))
        lines = (output / "log.jsonl").read_bytes().splitlines(keepends=True)
        assert all(json.loads(line)["signatures"] and line.endswith(b"\n") for line in lines)
        again = xray(*command, variables=signed)
        assert (again.code, "does not answer" in again.err) == (2, True), again.err
        agent.start()
        agent.run("ssh-add", agent.folder / "run")
        done = xray(*command, variables=signed)
        assert done.code == 0, done.err
        bundle = tmp_path / "bundle.tar"
        for arguments in (
            ("audit", "--all", "--output", str(output)),
            ("export", "sft", str(bundle), "--output", str(output)),
        ):
            done = xray(*arguments, variables=signed)
            assert done.code == 0, done.out + done.err
    assert xray(*RUN, "--output", str(whole)).code == 0
    assert checkpoints(output) == checkpoints(whole)
    _verified_by_a_stranger(bundle, output, tmp_path)


def _verified_by_a_stranger(bundle: Path, output: Path, folder: Path) -> None:
    with tarfile.open(bundle) as archive:
        archive.extractall(folder / "bundle", filter="data")
    public = shutil.copy(output / "keys" / "signing.pub", folder / "signing.pub")
    [model] = (folder / "bundle" / "checkpoints").glob("sft-*")
    verify = ("model_signing", "verify", "key", model, "--signature", model / "model.sig", "--public_key", public)
    for arguments in (verify, (script_of_page(folder / "verify.py"), folder / "bundle", public)):
        done = stranger(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
