"""Which prompts an iteration draws, and why.

Draws depend on the stage's seed and on the rewards of the iterations that were recorded before, so a resumed stage and
a replay draw the same prompts. With `lag: n` a rollout is drawn n iterations before its turn, and knows as much less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from xray_runtime.data.batching import Cursor
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.training.prompts import UniquePrompts

if TYPE_CHECKING:
    from xray_runtime.methods.ppo.curriculum_config import CurriculumConfig

STATE = "curriculum.safetensors"


@dataclass(frozen=True)
class PromptStatistics:
    """The record of each of a stage's N prompts. Replies without a reward do not count."""

    draws: np.ndarray
    """How often it was scored, int32 [N]."""
    success: np.ndarray
    """Share of its last replies that solved it, float32 [N]; NaN before the first."""
    reward: np.ndarray
    """Their mean reward before scaling, float32 [N]; NaN before the first."""
    column: Callable[[str], np.ndarray]
    """Name of a column of the dataset → its value for each prompt, object [N]."""


WeightFunction = Callable[[PromptStatistics], Any]


@dataclass(frozen=True)
class Drawn:
    """Prompts by number, in the order drawn; with a curriculum also why."""

    prompts: list[int]
    reasons: list[str] | None = None

    def repeated(self, times: int) -> Drawn:
        """Each prompt `times` times in a row."""
        reasons = None if self.reasons is None else [reason for reason in self.reasons for _ in range(times)]
        return Drawn([prompt for prompt in self.prompts for _ in range(times)], reasons)


class PromptOrder:
    """Draws the prompts of a stage, by its `curriculum` or in a new random order each epoch.

    Args:
        cursor: the random order; its state is kept with the stage's.
        weights: the function that `curriculum.by` names.

    Raises:
        ValueError: the column lacks a number for some prompt, or the function returns no weights.
    """

    def __init__(
        self,
        config: CurriculumConfig | None,
        prompts: UniquePrompts,
        cursor: Cursor,
        weights: WeightFunction | None = None,
    ) -> None:
        self.cursor, self._config, self._prompts, self._weights = cursor, config, prompts, weights
        if config is None:
            return
        count = len(prompts)
        self._draws, self._rests = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._success, self._reward = np.full(count, np.nan, np.float32), np.full(count, np.nan, np.float32)
        self._columns: dict[str, np.ndarray] = {}
        if config.column is not None:
            self._values = _numbers(config.column, self.column(config.column), prompts)
            self._ranked = np.lexsort((np.array(Cursor(count, cursor.seed).take(count)), self._values))
            cursor.shuffled = False
        if weights is not None:
            self._probabilities(1)

    def take(self, count: int) -> Drawn:
        """The next `count` prompts. Raises ValueError if the function returns no weights for so many."""
        config = self._config
        if config is None:
            return Drawn(self.cursor.take(count))
        if self._weights is not None:
            chances = self._probabilities(count)
            seed = derive_seed(self.cursor.seed, "draw", self.cursor.epoch)
            self.cursor.epoch += 1  # counts the draws: there are no epochs
            taken = np.random.default_rng(seed).choice(len(chances), count, replace=False, p=chances)
            return Drawn(taken.tolist(), [f"weight {chances[prompt] * len(chances):.3g}" for prompt in taken])
        if config.column is not None:
            prompts = self._ranked[self.cursor.take(count)].tolist()
            return Drawn(prompts, [f"{config.column} {self._values[prompt]:g}" for prompt in prompts])
        drawn: list[int] = []
        while len(drawn) < count:
            for prompt in self.cursor.take(count - len(drawn)):
                if self._rests[prompt]:
                    self._rests[prompt] -= 1
                else:
                    drawn.append(prompt)
        return Drawn(drawn, [self._reason(prompt) for prompt in drawn])

    def record(self, prompts: np.ndarray, rewards: np.ndarray) -> None:
        """Take note of an iteration's rewards before scaling, float [B], of replies to `prompts`, int [B]; NaN: a reply
        has none."""
        config = self._config
        if config is None:
            return
        scored = ~np.isnan(rewards)
        numbers, index_of = np.unique(prompts[scored], return_inverse=True)
        counts = np.bincount(index_of)
        self._draws[numbers] += 1
        self._reward[numbers] = np.bincount(index_of, rewards[scored]) / counts
        success = np.bincount(index_of, rewards[scored] >= config.solved_at) / counts
        self._success[numbers] = success
        if config.by == "success":
            self._rests[numbers] = np.where((success >= config.easy) | (success <= config.hard), config.rest, 0)

    def metrics(self) -> dict[str, float]:
        """Shares of all prompts: scored so far, resting; and the mean success of those scored."""
        if self._config is None or not self._draws.any():
            return {}
        known = float((self._draws > 0).mean()), float(np.nanmean(self._success))
        found = dict(zip(("curriculum/seen", "curriculum/success"), known, strict=True))
        return found | ({"curriculum/resting": float((self._rests > 0).mean())} if self._config.by == "success" else {})

    def column(self, name: str) -> np.ndarray:
        """The values of a column of the dataset, object [N]. Raises ValueError if no prompt has it."""
        if name not in self._columns:
            columns = self._prompts.columns(range(len(self._prompts)))
            if name not in columns:
                others = ", ".join(columns) or "none"
                raise ValueError(f"curriculum: the dataset has no column {name!r}; it has {others}")
            self._columns[name] = np.array(columns[name], object)
        return self._columns[name]

    def save_state(self, directory: Path) -> None:
        """Write what was recorded of each prompt."""
        if self._config is not None:
            save_file(self._state(), directory / STATE)

    def load_state(self, directory: Path) -> None:
        if self._config is not None:
            for name, values in load_file(directory / STATE).items():
                self._state()[name][:] = values

    def _state(self) -> dict[str, np.ndarray]:
        return {"draws": self._draws, "rests": self._rests, "success": self._success, "reward": self._reward}

    def _reason(self, prompt: int) -> str:
        if not self._draws[prompt]:
            return "new"
        return f"{self._success[prompt]:.0%} solved it"

    def _probabilities(self, count: int) -> np.ndarray:
        config, function = self._config, self._weights
        assert config is not None
        assert function is not None
        known = PromptStatistics(self._draws.copy(), self._success.copy(), self._reward.copy(), self.column)
        answer = function(known)
        try:
            weights = np.asarray(answer, np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"curriculum: {config.by} returned something else than numbers: {error}") from None
        if weights.shape != (len(self._prompts),):
            raise ValueError(
                f"curriculum: {config.by} returned shape {weights.shape}, must be ({len(self._prompts)},): a weight "
                "for each prompt"
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError(f"curriculum: {config.by} returned a weight that is negative or not finite")
        if (usable := np.count_nonzero(weights)) < count:
            raise ValueError(f"curriculum: {config.by} returned {usable} weights above 0, must be at least {count}")
        chances: np.ndarray = weights / weights.sum()
        return chances


def _numbers(name: str, values: np.ndarray, prompts: UniquePrompts) -> np.ndarray:
    """The column as float64 [N]. Raises ValueError naming the first row that has no finite number."""
    for prompt, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            row = int(prompts.rows[prompt])
            raise ValueError(f"curriculum.column = {name!r}: row {row} has {value!r}, which is not a finite number")
    return np.array(values, np.float64)
