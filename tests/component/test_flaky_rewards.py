"""PPO over real engines where a source of reward fails for some replies: they are left out, the rest is trained on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.component.models import open_models
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.engines.layouts import EngineConfig, GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.methods.common.inputs import PPOInputs
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.verifier_config import RegexVerifier

RUNTIME = RuntimeConfig(threads=2, device="cpu")


def test_rows_without_a_reward_are_left_out(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    config = PPOConfig(
        method="grpo",
        iterations=2,
        prompts_per_iteration=2,
        samples_per_prompt=4,
        minibatch_size=4,
        lr=1e-2,
        max_new_tokens=6,
        reward_scaling="none",
        max_failed=0.25,
        rewards=[
            reward_term(function="flaky", retries=1),
            reward_term(verifier=RegexVerifier(pattern="[a-m]"), weight=0.5),
        ],
        engine=EngineConfig(num_workhorses=2),
        generator=GeneratorConfig(engine="transformers"),
    )
    texts = ["hello there", "how are you", "fine thanks", "hello", "are you fine", "thanks"]
    examples = [Example(str(i), "c", [{"role": "user", "content": text}], "fine") for i, text in enumerate(texts)]
    write_pairs(tmp_path / TRAIN, Example, examples)
    (tmp_path / "dataset.json").write_text('{"max_prompt_tokens": 32}')
    calls = 0

    async def flaky(prompts: list[str], replies: list[str]) -> list[Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("away")
        # Of the second iteration's two minibatches one has three rows for two ranks.
        return [None if calls == 3 and row == 5 else len(reply) / 10 for row, reply in enumerate(replies)]

    @contextlib.contextmanager
    def opened(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with open_models(RUNTIME, tmp_path / "logs", specs) as models:
            yield models

    recorder = FakeRecorder(tmp_path)
    inputs = PPOInputs(Model(tiny_model), Dataset(tmp_path))
    stage = Stage("ppo", 3, config, inputs, RUNTIME, opened, {"flaky": flaky}, tmp_path)
    (tmp_path / "out").mkdir()
    run(stage, tmp_path / "out", recorder)  # type: ignore[arg-type]
    assert calls == 3
    assert [point["reward/failed"] for point in recorder.points] == [0.0, 1.0]
    assert [point["reward/source/flaky/failed"] for point in recorder.points] == [0.0, 1.0]
    assert [point["policy/updates"] for point in recorder.points] == [2.0, 2.0]
    assert all(0.0 <= point["reward/source/regex/mean"] <= 1.0 for point in recorder.points)
    assert all(math.isfinite(value) for point in recorder.points for value in point.values())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
