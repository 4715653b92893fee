"""Episodes of a stage's loop with real environment workers, and models in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.loop import PPOModel, World, attempt, logprob
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import KLConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer

HERE = sample_environments.__name__


class Policy(PPOModel):
    """Says each word in the bytes of "an", which the tokenizer itself would write as one token."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        self._note(f"generate {len(rows)}")
        self.world.seeds += rows.seed.tolist()
        tokenizer = self.world.tokenizer  # type: ignore[attr-defined]
        word = tokenizer.convert_tokens_to_ids(["a", "n"])
        ids = Ragged.of([*word, sampling.stop_token_ids[0]] for _ in rows.seed)
        return ReplyBatch(
            response_ids=ids, rollout_logprobs=Ragged(logprob(ids.values), ids.offsets), ended=np.ones(len(ids), bool)
        )


def played(inputs: PPOInputs, out: Path, environment: str, **fields: Any) -> tuple[World, FakeRecorder]:
    world = World()
    world.tokenizer = load_tokenizer(inputs.policy.path)  # type: ignore[attr-defined]
    limits = {"max_turns": 8, "max_tokens": 64, "num_workers": 1} | fields.pop("limits", {})
    model = fields.pop("model", Policy)
    options: dict[str, Any] = {
        "environment": {"path": f"{HERE}:{environment}", **limits},
        "rewards": [],
        "iterations": 1,
        "gae_lambda": 1.0,
        "whiten_advantages": False,
        "kl": KLConfig(controller="fixed", coef=0.0),
    }
    return world, attempt(inputs, out, world, model=model, **options | fields)
