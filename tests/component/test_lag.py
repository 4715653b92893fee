"""PPO with `lag` over real engines: rollout and update are at work together, and the bytes do not show it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.component.processes import Meeting, open_models
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.opening import WORKHORSES
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import PromptBatch, ReplyBatch, TextBatch
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.objectives import PolicyForward, PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.rewards.config import reward_term

ITERATIONS, REPLIES, MAX_NEW_TOKENS = 4, 4, 6
RUNTIME = RuntimeConfig(threads=2, device="cpu")
MEETING = "meeting"
PATIENCE_SECONDS = 60.0


def await_other(me: str, number: int, other: str, other_number: int) -> None:
    """Stay at work until the other's call of that number is at work too. It stays until this one is, so both are."""
    meeting = ray.get_actor(MEETING)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ray.get(meeting.has_begun.remote(other)) < other_number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{other} {other_number} did not begin while {me} {number} was at work")
        time.sleep(0.01)
    ray.get(meeting.meet.remote(me, number))


class SlowGenerator(Generator):
    """Every rollout but the first lasts until the update that it is beside has begun."""

    def generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        # What a probe asks for is shorter.
        if sampling.max_new_tokens == MAX_NEW_TOKENS:
            number = ray.get(ray.get_actor(MEETING).begin.remote("rollout"))
            if number > 1:
                await_other("rollout", number, "update", number - 1)
        return super().generate(rows, sampling, version)


@dataclass(frozen=True)
class SlowGeneratorSpec(GeneratorSpec): ...


WORKHORSES[SlowGeneratorSpec] = SlowGenerator


@dataclass(frozen=True)
class SlowObjective(PPOObjective):
    """Every update but the last lasts until the rollout that is beside it has begun."""

    def forward(self, module: HeadedLM, rows: TextBatch[torch.Tensor]) -> PolicyForward:
        number = ray.get(ray.get_actor(MEETING).begin.remote("update"))
        if number < ITERATIONS:
            await_other("update", number, "rollout", number + 1)
        return super().forward(module, rows)


def slowed(config: PPOConfig, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The same models, of which generator and policy wait for each other."""
    generator = specs["generator"]
    return {
        "generator": SlowGeneratorSpec(generator.directory, generator.max_length, generator.config),
        "policy": replace(specs["policy"], objective=SlowObjective(config)),
    }


def attempt(
    model: Path,
    root: Path,
    *,
    slow: bool = False,
    newest: Snapshot | None = None,
    lag: int = 1,
    iterations: int = ITERATIONS,
) -> FakeRecorder:
    """Run the stage, one update an iteration; a snapshot after each."""
    config = PPOConfig(
        lag=lag,
        iterations=iterations,
        prompts_per_iteration=REPLIES,
        minibatch_size=REPLIES,
        epochs=1,
        lr=1e-2,
        max_new_tokens=MAX_NEW_TOKENS,
        trainable_layers=1,
        truncated="penalize",
        reward_scaling="none",
        rewards=[reward_term(function="length")],
        generator=GeneratorConfig(engine="transformers"),
    )
    root.mkdir()
    texts = ["hello there", "how are you", "fine thanks", "hello", "are you fine", "thanks"]
    examples = [Example(str(i), "c", [{"role": "user", "content": text}], "fine") for i, text in enumerate(texts)]
    write_pairs(root / TRAIN, Example, examples)
    (root / "dataset.json").write_text('{"max_prompt_tokens": 32}')

    @contextlib.contextmanager
    def opened(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with open_models(RUNTIME, root / "logs", slowed(config, specs) if slow else specs) as models:
            yield models

    functions = {"length": lambda prompts, replies: [len(reply) / 10 for reply in replies]}
    inputs = PPOInputs(Model(model), Dataset(root))
    recorder = FakeRecorder(root, newest)
    (root / "out").mkdir()
    run(Stage("ppo", 3, config, inputs, RUNTIME, opened, functions), root / "out", recorder)  # type: ignore[arg-type]
    return recorder


def test_a_rollout_beside_each_update_and_the_same_bytes(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    meeting = Meeting.options(name=MEETING).remote()
    whole = attempt(tiny_model, tmp_path / "whole", slow=True)
    # Rollout 1 is there before anything is learned, the last update has none beside it.
    pairs = [("rollout", n + 1) for n in range(1, ITERATIONS)] + [("update", n) for n in range(1, ITERATIONS)]
    assert sorted(ray.get(meeting.all_met.remote())) == sorted(pairs)
    assert [point["rollout/version"] for point in whole.points] == [0, 0, 1, 2]
    assert max(point["sync/mismatch"] for point in whole.points) < 1e-4
    # An update lies between the policy that sampled and the one that learns; the weights of the loss are made of it.
    assert min(point["rollout/mismatch"] for point in whole.points[1:]) > 1e-3

    resumed = attempt(tiny_model, tmp_path / "resumed", newest=whole.snapshots[1])
    assert len(resumed.points) == ITERATIONS - 2
    weights = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]


@pytest.mark.long  # `test_ppo_loop` says it of a loop whose models are in one process
@pytest.mark.parametrize("lag", [2, 4])
def test_older_replies_are_weighed_and_a_stage_goes_on_to_the_same_bytes(
    cluster: None, tiny_model: Path, tmp_path: Path, lag: int
) -> None:
    whole = attempt(tiny_model, tmp_path / "whole", lag=lag, iterations=lag + 2)
    assert [point["rollout/lag"] for point in whole.points] == [min(n, lag) for n in range(lag + 2)]
    assert max(point["sync/mismatch"] for point in whole.points) < 1e-4
    assert min(point["rollout/mismatch"] for point in whole.points[1:]) > 1e-3
    # After one update, with `lag` rollouts in the snapshot that later versions of this attempt could not sample.
    resumed = attempt(tiny_model, tmp_path / "resumed", newest=whole.snapshots[0], lag=lag, iterations=lag + 2)
    assert len(resumed.points) == lag + 1
    weights = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]
    shards = [sorted((tmp_path / name / "out" / "ledger").glob("*")) for name in ("whole", "resumed")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]
