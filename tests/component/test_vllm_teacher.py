"""A teacher behind the address of a real `vllm serve`: what it says is what the same model says as one of ours, and
neither a resumed stage nor a replay asks it again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.distilling import attempt
from tests.component.generator_process import ServerProcess
from xray.deployments.service import free_port
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.engines.generators.vllm.loading import environment
from xray_runtime.rewards.journal import Journal, publish_answers, restore_answers

MAX_LENGTH = 64
WEIGHTS = "model.safetensors"


class VLLMServer(ServerProcess):
    """`vllm serve` of a model, with the settings of its generators on a CPU."""

    def __init__(self, model: Path) -> None:
        self.port = free_port()
        options = ["--port", str(self.port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
        options += ["--max-model-len", str(MAX_LENGTH), "--served-model-name", "teacher", "--block-size", "32"]
        variables = os.environ | environment("cpu") | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # a server has its engine in another process
        # What `vllm serve` runs: that command asks for its version by a name that vLLM for CPUs does not have.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
        self.process = subprocess.Popen(command, env=variables, start_new_session=True)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[VLLMServer]:
    found = VLLMServer(tiny_model)
    try:
        found.wait()
        yield found
    finally:
        found.kill()


def logprobs(root: Path, number: int) -> Any:
    rows = read_shard(shard_path(root / "out" / "ledger", number)).table.to_pylist()
    return [row["reply_ids"] for row in rows], [p for row in rows for p in row["teacher_logprobs"]]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("beta", [None, 0.5])
def test_what_it_says_is_what_the_model_says(
    cluster: None, server: VLLMServer, tiny_model: Path, tmp_path: Path, beta: float | None
) -> None:
    given: dict[str, Any] = {"iterations": 2, "beta": beta, "top_k": 8}
    kept = tmp_path / "kept"
    kept.mkdir()
    where: dict[str, Any] = {"url": server.address, "model": "teacher", "timeout_s": 60.0}
    asked: dict[str, Any] = {"source": "server", "server": where}
    of_server = attempt(tiny_model, None, tmp_path / "server", kept=kept, **given, **asked)
    of_model = attempt(tiny_model, tiny_model, tmp_path / "model", **given)
    for number in range(2):
        (replies, found), (of_others, expected) = (logprobs(tmp_path / name, number) for name in ("server", "model"))
        # Rounding differs, so replies may from the first update on.
        if number == 0:
            assert replies == of_others
            assert found == pytest.approx(expected, abs=1e-4)
    assert of_server.points[0]["kl/teacher_k1"] == pytest.approx(0.0, abs=1e-4)
    assert of_model.points[0]["kl/teacher_k1"] == 0.0
    if beta is not None:
        apart = (found.points[0]["policy/teacher_divergence"] for found in (of_server, of_model))
        assert list(apart) == pytest.approx([0.0, 0.0], abs=1e-6)
    replayed = tmp_path / "replayed"
    replayed.mkdir()
    publish_answers(Journal(kept), tmp_path / "server" / "out")  # as a task does after its stage
    assert restore_answers(tmp_path / "server" / "out", Journal(replayed)) == {"teacher"}
    gone = asked | {"server": where | {"url": "http://127.0.0.1:9"}}
    attempt(tiny_model, None, tmp_path / "again", kept=replayed, **given, **gone)
    for name in (WEIGHTS, "ledger/000001.parquet"):
        assert (tmp_path / "again" / "out" / name).read_bytes() == (tmp_path / "server" / "out" / name).read_bytes()
