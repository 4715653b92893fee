"""Episodes of a stage's loop with real agents and a real gateway, and models in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.agents import sample_agents
from tests.unit.agents.parts import FakeGenerator
from tests.unit.methods.ppo.loop import PPOModel, World, attempt, logprob
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.methods.ppo.config import KLConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer

HERE = sample_agents.__name__


class Policy(PPOModel):
    """Says a few letters, which the seed decides, and checks that each token is scored after its own history."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        self._note(f"generate {version}")
        self.world.seeds += rows.seed.tolist()
        found = FakeGenerator(self.world.tokenizer)(rows, sampling, version)  # type: ignore[attr-defined]
        ids = found.response_ids
        return found.with_columns(rollout_logprobs=ids.like(logprob(ids.values)))


def played(
    inputs: PPOInputs, out: Path, agent: str | None = "two_turns", **fields: Any
) -> tuple[World, FakeRecorder, Any]:
    """(world, recorder, the ledger's first shard)."""
    world = World()
    world.tokenizer = load_tokenizer(inputs.policy.path)  # type: ignore[attr-defined]
    limits = {"max_tokens": 256, "timeout_s": 60.0} | fields.pop("limits", {})
    options: dict[str, Any] = {
        "environment": {"agent": f"{HERE}:{agent}", **limits},
        "rewards": [],
        "iterations": 1,
        "max_new_tokens": 16,
        "advantages": "reinforce++",
        "whiten_advantages": False,
        "kl": KLConfig(controller="fixed", coef=0.0),
    }
    recorder = attempt(inputs, out, world, model=Policy, **options | fields)
    return world, recorder, read_shard(shard_path(out / "ledger", 0)).table
