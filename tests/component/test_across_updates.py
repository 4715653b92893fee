"""Single replies across weight updates over real engines: versions, the bytes of a replay, and a dead generator."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.component.processes import open_models, pids
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.health import WorkhorseError
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.ledger import read_shard
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import root_cause
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.journal import Journal
from xray_runtime.trust.replay_answers import restore_recorded

ITERATIONS = 6
ATTEMPTS = 4
"""At a run with a reply that has tokens of two versions."""
RUNTIME = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)


class Recorder(FakeRecorder):
    """Calls `then` after each iteration."""

    then: Callable[[int], None] = staticmethod(lambda step: None)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        super().metrics(values, step)
        self.then(step)


def configured(engine: str) -> PPOConfig:
    return PPOConfig(
        method="grpo",
        lag=2,
        in_flight_updates=True,
        iterations=ITERATIONS,
        prompts_per_iteration=4,
        samples_per_prompt=2,
        minibatch_size=8,
        epochs=1,
        lr=1e-2,
        max_new_tokens=48,
        truncated="penalize",
        reward_scaling="none",
        rewards=[reward_term(function="length")],
        generator=GeneratorConfig(engine=engine),
    )


def attempt(
    model: Path, root: Path, kept: Path, engine: str, after: Callable[[int, dict[str, Any]], None] = lambda *_: None
) -> None:
    root.mkdir()
    kept.mkdir(exist_ok=True)
    texts = ["hello there", "how are you", "fine thanks", "hello", "are you fine", "thanks"]
    examples = [Example(str(i), "c", [{"role": "user", "content": text}], "fine") for i, text in enumerate(texts)]
    write_pairs(root / TRAIN, Example, examples)
    (root / "dataset.json").write_text('{"max_prompt_tokens": 16}')
    recorder, config = Recorder(root), configured(engine)

    @contextmanager
    def opened(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with open_models(RUNTIME, root / "logs", specs) as models:
            recorder.then = lambda step: after(step, models)
            yield models

    functions = {"length": lambda prompts, replies: [len(reply) / 10 for reply in replies]}
    (root / "out").mkdir()
    stage = Stage("ppo", 3, config, PPOInputs(Model(model), Dataset(root)), RUNTIME, opened, functions, kept)
    run(stage, root / "out", recorder)  # type: ignore[arg-type]


def files(root: Path) -> dict[str, bytes]:
    out = root / "out"
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.parquet")} | {
        "weights": (out / "model.safetensors").read_bytes()
    }


@pytest.mark.parametrize("engine", ["vllm", pytest.param("transformers", marks=pytest.mark.long)])
def test_replies_go_on_with_new_weights_and_a_replay_samples_the_same(
    cluster: None, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    # On a busy machine an update may come when every reply of a run has ended.
    for number in range(ATTEMPTS):
        whole = tmp_path / f"whole-{number}"
        attempt(tiny_model, whole, tmp_path / f"kept-{number}", engine)
        shards = [read_shard(path).table.to_pylist() for path in sorted((whole / "out" / "ledger").iterdir())]
        if mixed := sum(len(set(row["token_versions"])) > 1 for rows in shards for row in rows):
            break
    groups = [row["group"] for rows in shards for row in rows]
    assert sorted(groups) == sorted([*range(4 * ITERATIONS)] * 2)
    for iteration, rows in enumerate(shards):
        for row in rows:
            versions = np.array(row["token_versions"])
            assert iteration - 2 <= versions.min() <= versions.max() <= iteration
            # Tokens of the version that learns are scored as they were sampled.
            current = versions == iteration
            difference = np.array(row["logprobs"]) - np.array(row["rollout_logprobs"])
            assert np.abs(difference[current]).max(initial=0) < 1e-4
    assert mixed

    replayed = tmp_path / "replayed-kept"
    replayed.mkdir()
    restore_recorded(whole / "out", configured(engine), ITERATIONS - 1, Journal(replayed))
    attempt(tiny_model, tmp_path / "replayed", replayed, engine)
    assert files(tmp_path / "replayed") == files(whole)


# `test_failures` loses a rank, and unit tests this loop's generator.
@pytest.mark.long
def test_a_dead_generator_is_an_error_within_seconds(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    died: list[float] = []

    def kill(step: int, models: dict[str, Any]) -> None:
        if step == 1:
            died.append(time.monotonic())
            [process] = pids(models["generator"])
            os.kill(process, signal.SIGKILL)

    with pytest.raises(Exception, match="generator") as caught:
        attempt(tiny_model, tmp_path / "run", tmp_path / "kept", "vllm", kill)
    assert isinstance(root_cause(caught.value), WorkhorseError)
    assert time.monotonic() - died[0] < 30
