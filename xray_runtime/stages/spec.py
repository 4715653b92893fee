"""What a stage is: its plan, what a task is handed, what it gives back, and where it reports.

A stage body is a function `run(spec, out, recorder) -> step` in a module of this package named after its kind. It
writes its files into `out` and knows nothing of Prefect, MLflow, caching or publication.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

from xray_runtime.config.base import FreshBase
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.preferences import GoldPreferences
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.store.ref import CheckpointRef

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from xray_runtime.store.snapshots import Snapshot


SEEN_BY_CHAMPION = "seen-by-champion-"
"""How the roles of datasets behind the champion begin that are not behind the candidate (stage `compare`)."""

JUDGEMENTS = "judgements"
"""Kind of checkpoint that holds what people judged (see `feedback`), and its role to the stage `preferences`."""
JUDGED_PAIRS = "pairs.jsonl"
"""Its preference pairs."""

USES: tuple[str, ...] = ()
"""Of the modules imported by name here: a key digests the code of the stage's kind by itself."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a lifecycle before it runs."""

    name: str
    kind: str
    sections: dict[str, Any]
    """JSON of the config sections the stage may read: exactly what its key digests."""
    parents: dict[str, str]
    """Role → name of the stage whose checkpoint plays it."""


class StageSpec(BaseModel):
    """All a stage body may depend on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    key: str
    seed: int
    sections: dict[str, Any]
    parents: dict[str, CheckpointRef]
    runtime: RuntimeConfig

    def parent(self, role: str) -> Path:
        """Directory of the checkpoint that plays `role`."""
        return Path(self.parents[role].uri)


class Recorder(Protocol):
    """Where a stage reports what people look at; nothing reported here enters a checkpoint."""

    log_dir: Path
    """Noisy output of workers and engines goes to files in this directory."""

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def figure(self, name: str, figure: Figure) -> None: ...

    def resume(self) -> Snapshot | None:
        """The newest snapshot of this stage, if an attempt before left one; metrics after it are forgotten."""

    def snapshot_due(self, step: int) -> bool:
        """Whether to write a snapshot after `step` steps: now and then, and whenever the stage is asked to stop."""

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        """Make a snapshot of `state` and of what `save` writes into a directory. Raises where asked to stop."""


def plan_stages(config: LifecycleConfig) -> list[StagePlan]:
    """The lifecycle as a list of stages in order.

    A stage's `sections` hold what can change its result and nothing else, so changing `ppo.stages.1.lr` leaves every
    stage before `ppo-2` as it was.
    """
    lengths = config.data.model_dump(mode="json", include={"max_prompt_tokens"})
    numeric = config.runtime.model_dump(mode="json", include={"device", "threads"})
    trainable = None if isinstance(config.base, FreshBase) else config.base.trainable_layers

    def sections(**parts: Any) -> dict[str, Any]:
        dumped = {k: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for k, v in parts.items()}
        return dumped | {"seed": config.seed}

    model = {"lengths": lengths, "numeric": numeric, "trainable_layers": trainable}
    sampling = model | {"generator": config.generator}
    plans = [
        StagePlan("prepare", "prepare", sections(data=config.data), {}),
        StagePlan(
            "base",
            "base",
            sections(base=config.base, numeric=numeric),
            {"dataset": "prepare"} if isinstance(config.base, FreshBase) else {},
        ),
        StagePlan("sft", "sft", sections(sft=config.sft, **model), {"base": "base", "dataset": "prepare"}),
        StagePlan(
            "preferences",
            "preferences",
            sections(
                preferences=config.preferences,
                **({"gold": config.gold, **sampling} if isinstance(config.preferences, GoldPreferences) else {}),
            ),
            {"sft": "sft", "dataset": "prepare"}
            if isinstance(config.preferences, GoldPreferences)
            else {"dataset": "prepare"},
        ),
        StagePlan(
            "reward", "reward", sections(reward=config.reward, **model), {"sft": "sft", "dataset": "preferences"}
        ),
    ]
    policy = "sft"
    for number, stage in enumerate(config.ppo.stages, start=1):
        name = f"ppo-{number}"
        plans.append(
            StagePlan(
                name,
                "ppo",
                sections(ppo=stage, gold=config.gold, frozen=config.frozen, **sampling),
                {"policy": policy, "reference": "sft", "reward": "reward", "dataset": "prepare"},
            )
        )
        policy = name
    plans.append(
        StagePlan(
            "evaluate",
            "evaluate",
            sections(evaluate=config.evaluate, gold=config.gold, frozen=config.frozen, **sampling),
            {"policy": policy, "sft": "sft", "reward": "reward", "dataset": "prepare"},
        )
    )
    return plans


def run_stage(spec: StageSpec, out: Path, recorder: Recorder) -> int:
    """Run the body of `spec.kind`, writing its files into `out`; returns the step (updates made) of the result."""
    body = importlib.import_module(f"xray_runtime.stages.{spec.kind}")
    step: int = body.run(spec, out, recorder)
    return step
