"""Monitors a policy during training for signs of a hacked reward and acts on them as configured.

`algorithms.hacking` defines the signs. Every `window` iterations without one, the policy is kept next to the snapshots.
A stage that ends because of a sign publishes the policy kept before the iterations that show it. A person's answer is
kept too, so a later attempt does not ask again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.algorithms.hacking import COMMON, PHRASE_TOKENS, REPEATED, WATCHED, Sign, signs
from xray_runtime.algorithms.statistics import variety
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.kind import Answer, Recorder
from xray_runtime.methods.common.results import metric_name
from xray_runtime.methods.common.training.policy_versions import PolicyVersions
from xray_runtime.models.cached import cached_property

if TYPE_CHECKING:
    from xray_runtime.data.batch import Rollout
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.kind import PPOInputs

log = logging.getLogger(__name__)

ANSWERS = "answers.json"
RECORD = "watch.json"
"""The signs and the decisions on them, in the checkpoint of a stage that ended early or that a person continued."""


@dataclass
class MonitorState:
    """The state that snapshots keep."""

    first: list[dict[str, float]] = field(default_factory=list)
    last: list[dict[str, float]] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Signs that were acted on: `iteration`, `signs` by name, and `by` and `note` if a person decided."""


class HackingMonitor:
    """The monitor of one stage; `weights`: source of reward → its weight."""

    def __init__(self, stage: Stage[PPOConfig, PPOInputs], recorder: Recorder, weights: Mapping[str, float]) -> None:
        self._stage, self._config, self._recorder = stage, stage.config.watch, recorder
        self._weights = {metric_name(source): weight for source, weight in weights.items()}
        self.state = MonitorState()
        self.end: int | None = None
        """Number of updates of the kept policy that the stage ends with; None: the stage continues."""

    @property
    def _keeps(self) -> bool:
        return self._config.action in ("pause", "stop")

    @cached_property
    def versions(self) -> PolicyVersions:
        """The kept policies."""
        return PolicyVersions(self._directory, "kept")

    @property
    def _directory(self) -> Path:
        if self._stage.kept is None:
            action = f"{self._stage.name}: watch.action = {self._config.action!r}"
            raise RuntimeError(f"{action} needs a directory that outlives the attempt")
        return self._stage.kept

    def check(self, iteration: int, metrics: Mapping[str, float], rollout: Rollout) -> dict[str, float]:
        """Compare this iteration with the first ones. Returns the metrics `rollout/…`, the variety of the replies, and
        `hacking/…`, 1 for each sign. Afterwards `end` is set if the stage ends."""
        if self._config.action == "off":
            return {}
        ids = rollout.own_tokens()
        within, common = variety(torch.from_numpy(ids.values), torch.from_numpy(ids.lengths), PHRASE_TOKENS)
        found = {REPEATED: within, COMMON: common}
        point = {name: value for name, value in {**metrics, **found}.items() if name.startswith(WATCHED)}
        state, window = self.state, self._config.window
        if len(state.first) < window:
            state.first.append(point)
            return found
        state.last = [*state.last, point][-window:]
        if len(state.last) < window:
            return found
        prompts = self._stage.config.prompts_per_iteration
        shown = signs(state.first, state.last, self._weights, self._config, prompts)
        self._act(iteration, shown)
        return found | {f"hacking/{sign.name}": 1.0 for sign in shown}

    def _act(self, iteration: int, shown: list[Sign]) -> None:
        known = {name for entry in self.state.seen for name in entry["signs"]}
        fresh = [sign for sign in shown if sign.name not in known]
        if not fresh:
            return
        for sign in fresh:
            log.warning("%s, iteration %d: %s", self._stage.name, iteration, sign.text)
        entry: dict[str, Any] = {"iteration": iteration, "signs": {sign.name: sign.text for sign in fresh}}
        answer = self._answer(iteration, fresh) if self._config.action == "pause" else None
        if answer is not None:
            entry |= {"go_on": answer.go_on, "by": answer.by, "note": answer.note}
        self.state.seen.append(entry)
        if self._keeps and not (answer is not None and answer.go_on):
            self.end = self._before(iteration)

    def _answer(self, iteration: int, shown: list[Sign]) -> Answer | None:
        """A person's answer, from an earlier attempt if it has one."""
        path, seal = self._directory / ANSWERS, self._stage.seal
        answers = json.loads(path.read_text(encoding="utf-8")) if seal.is_sealed(path) else {}
        key = f"{iteration}: {', '.join(sign.name for sign in shown)}"
        if key not in answers:
            answer = self._recorder.ask(self._question(iteration, shown))
            if answer is None:
                return None
            write_atomic(path, json.dumps(answers | {key: asdict(answer)}))
            seal.seal_file(path)
            return answer
        return Answer(**answers[key])

    def _question(self, iteration: int, shown: list[Sign]) -> str:
        lines = [
            f"**{self._stage.name}** may be learning to please its reward alone (iteration {iteration + 1} of "
            f"{self._stage.config.iterations}):",
            "",
            *(f"- {sign.text}" for sign in shown),
            "",
            f"Continue? If not, the stage ends with the policy kept after {self._before(iteration)} iterations.",
        ]
        return "\n".join(lines)

    def _before(self, iteration: int) -> int:
        """Number of updates of the newest kept policy older than the last `window` rollouts, which show the sign."""
        return max(kept for kept in self.versions.numbers() if kept <= iteration - self._config.window + 1)

    # Kept policies

    def keep(self, models: Mapping[str, ModelHandle], updates: int) -> None:
        """Keep the policy every `window` updates; only the two newest stay."""
        if not self._keeps or updates % self._config.window:
            return
        self.versions.write(models, updates)
        # An earlier attempt may have kept newer policies; they are overwritten when their turn comes.
        for old in [kept for kept in self.versions.numbers() if kept <= updates][:-2]:
            self.versions.remove(old)

    def write_record(self, out: Path) -> None:
        """Write the signs that were acted on, if there are any."""
        if self._keeps and self.state.seen:
            record = {"ended_early": self.end is not None, "iterations": self.end, "seen": self.state.seen}
            (out / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")

    def save_state(self, directory: Path) -> None:
        if self._keeps:
            self.versions.save_state(directory)

    def load_state(self, directory: Path) -> None:
        if self._keeps:
            self.versions.load_state(directory)


def read_answers(checkpoint: Path) -> list[Answer]:
    """People's answers from the run of a checkpoint's stage, in order."""
    path = checkpoint / RECORD
    seen = json.loads(path.read_text(encoding="utf-8"))["seen"] if path.is_file() else []
    return [Answer(entry["go_on"], entry["by"], entry["note"]) for entry in seen if "by" in entry]
