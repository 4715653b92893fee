"""A PPO stage over the fake models of `unit.methods.ppo.loop`, published in a store, and how it is computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.unit.methods.ppo.loop import PPOModel, World, attempt
from tests.unit.trust.synthetic import Lifecycle
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.cluster.stage import OpenModels
from xray_runtime.data.ledger import LedgerShard, read_shard, shard_path
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store, resolve
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.journal import ANSWERS, Journal, publish_answers
from xray_runtime.trust.recompute import OnProgress
from xray_runtime.trust.replay import Replay, replay
from xray_runtime.trust.replayable import replayable

FIELDS: dict[str, Any] = {
    "iterations": 4,
    "prompts_per_iteration": 4,
    "minibatch_size": 2,
    "epochs": 2,
    "max_new_tokens": 4,
    "reward_scaling": "running",
}
SURER = 0.1
MADE = ("model.safetensors", "validation.json", ANSWERS)


def judge(prompts: list[str], replies: list[str]) -> list[float]:
    """A source of reward that can be imported."""
    return [len(reply) / 10 for reply in replies]


@dataclass
class WorldOfFiles(World):
    parent: Path = Path()
    """What the policy is made from."""


class SavingModel(PPOModel):
    """Its weights are what it has learned, its other files its parent's."""

    def _save(self, directory: Path, head_file: str | None = None) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "model.safetensors").write_text(f"{self.role} {self.surer}")
        self.world.updates_in_files = self.updates
        for path in self.world.parent.iterdir():  # type: ignore[attr-defined]
            (directory / path.name).write_bytes(path.read_bytes())


class SilentModel(SavingModel):
    """Sends weights from GPU to GPU: nobody reads them on their way."""

    def _follow(self, policy: ModelHandle, version: int) -> str:
        super()._follow(policy, version)
        return None  # type: ignore[return-value]


@dataclass
class Published:
    """A PPO stage with its parents in a store."""

    output: Path
    inputs: PPOInputs
    model: type[PPOModel] = SavingModel

    def make(self, scratch: Path, **fields: Any) -> Published:
        lifecycle = Lifecycle(self.output, tracking=False)
        roles = {"policy": self.inputs.policy, "prompts": self.inputs.prompts, "rewards.0": self.inputs.rewards[0]}
        kinds = {"policy": "sft", "prompts": "prepare", "rewards.0": "reward_model"}
        for role, artifact in roles.items():
            files = {path.name: path.read_bytes() for path in artifact.path.iterdir() if path.name != MANIFEST}
            lifecycle.add(role.replace(".", "-"), kinds[role], files, {})
        fields = (
            FIELDS | {"rewards": [reward_term(model="rewards.0"), reward_term(function=f"{__name__}:judge")]} | fields
        )
        kept = scratch.with_name(f"{scratch.name}-kept")
        kept.mkdir()
        attempt(self.inputs, scratch, self.world(), model=self.model, kept=kept, ends_with_last=False, **fields)
        publish_answers(Journal(kept), scratch)
        files = {
            path.relative_to(scratch).as_posix(): path.read_bytes()
            for path in (*scratch.glob("ledger/*"), *(scratch / name for name in MADE))
            if path.is_file()
        } | {path.name: path.read_bytes() for path in self.inputs.policy.path.iterdir()}
        # What the loop's test adds to the fields.
        config = PPOConfig(**fields | {"kl": {"coef": 0.1, "target": 2.0, "horizon": 8.0}})
        said = config.model_dump(mode="json") | {"runtime": {"device": "cpu", "threads": 2}}
        lifecycle.add("ppo", "ppo", files, {role: role.replace(".", "-") for role in roles}, said, seed=7)
        return self

    @property
    def store(self) -> LineageStore:
        return open_lineage_store(self.output, None)

    @property
    def ledger(self) -> Path:
        return next(iter(self.output.glob("checkpoints/ppo-*"))) / "ledger"

    def world(self, **facts: Any) -> WorldOfFiles:
        return WorldOfFiles(**{"surer_by": SURER} | facts, parent=self.inputs.policy.path)

    def replay(
        self, iteration: int | None, scratch: Path, world: World | None = None, progress: OnProgress = lambda *_: None
    ) -> Replay:
        scratch.mkdir()
        place, node = resolve("ppo", self.output, None)
        return replay(
            replayable(node, place.graph, iteration), iteration, self.opener(world or self.world()), scratch, progress
        )

    def opener(self, world: World) -> OpenModels:
        @contextlib.contextmanager
        def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
            yield {role: self.model(role, world, eos_token_id=1) for role in specs}  # type: ignore[misc]

        return open_models

    def change_a_token(self, iteration: int, row: int = 2) -> None:
        path = shard_path(self.ledger, iteration)
        shard = read_shard(path)
        table = shard.table
        replies = table["reply_ids"].to_pylist()
        replies[row][0] += 1
        place = table.column_names.index("reply_ids")
        changed = table.set_column(place, table.schema.field("reply_ids"), pa.array(replies, table["reply_ids"].type))
        LedgerShard(shard.iteration, shard.policy, changed).write(self.ledger)
