"""`xray run` with its generator elsewhere: `xray generator`, found by address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.component.generator_process import running
from tests.e2e.conftest import Outcome, xray
from xray.deployments.service import free_port

CONFIG = {
    "project": "xray-servers",
    "gold": None,
    "data": {"max_conversations": 100, "context_messages": 1, "max_chars": 60, "max_prompt_tokens": 32},
    "base": {
        "kind": "fresh",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "intermediate_size": 128,
        "max_positions": 64,
    },
    "sft": {"steps": 4, "batch_size": 8, "max_response_tokens": 16},
    "preferences": None,
    "reward": None,
    "rewards": [{"verifier": {"kind": "regex", "pattern": "a"}}],
    "ppo": {
        "stages": [
            {
                "method": "grpo",
                "iterations": 2,
                "prompts_per_iteration": 4,
                "samples_per_prompt": 4,
                "minibatch_size": 16,
                "max_new_tokens": 8,
                "reward_scaling": "none",
            }
        ]
    },
    "evaluate": {"num_prompts": 8, "max_new_tokens": 8, "bootstrap_samples": 100, "num_samples_shown": 2},
    "runtime": {"threads": 1, "device": "cpu"},
}


@pytest.mark.long
def test_a_lifecycle_samples_at_a_server(tmp_path: Path) -> None:
    config, output = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(CONFIG))
    addresses = [f"http://127.0.0.1:{free_port()}"]

    def run(*options: str, output: Path = output) -> Outcome:
        server = ["--set", "generator.engine=server", "--set", f"generator.addresses=[{','.join(addresses)}]"]
        return xray("run", str(config), "--output", str(output), "--json", *options, *server)

    # Nothing is computed where nobody answers.
    refused = run()
    assert refused.code == 2
    [line] = refused.err.strip().splitlines()
    assert line.startswith(f"error: ppo-1.generator.addresses: no server can sample: {addresses[0]}: ConnectError")
    assert not (output / "checkpoints").exists()

    # The server only needs a model of the run's shape: here, the one that the run begins with.
    first = xray("run", str(config), "--output", str(output), "--json", "--until", "base")
    assert first.code == 0, first.err
    [base] = [stage for stage in first.lifecycle["stages"] if stage["name"] == "base"]
    with running(_directory(base), 64) as server:
        server.wait()
        addresses.append(server.address)
        done = run()
        assert done.code == 0, done.err
        stages = {stage["name"]: stage for stage in done.lifecycle["stages"]}
        assert stages["ppo-1"]["attempts"] == 1
        # A run elsewhere, with another model than the server's, ends as it opens its models.
        other = run("--set", "base.intermediate_size=96", output=tmp_path / "other")
    assert other.code == 2
    assert "it has another model: intermediate_size of its config.json is 128, and 96 of the stage's" in other.err

    # The vLLM of a Workhorse samples the same replies, so that the same policy is trained.
    local = xray("run", str(config), "--output", str(tmp_path / "local"), "--json", "--until", "ppo-1")
    assert local.code == 0, local.err
    [theirs] = [stage for stage in local.lifecycle["stages"] if stage["name"] == "ppo-1"]
    assert _weights(stages["ppo-1"]) == _weights(theirs)


def _directory(stage: dict[str, Any]) -> Path:
    return Path(stage["checkpoint"]["uri"].removeprefix("file://"))


def _weights(stage: dict[str, Any]) -> bytes:
    return (_directory(stage) / "model.safetensors").read_bytes()
