"""Passes in training, noted: the losses and statistics of its own that a model's family says it has."""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.models.family import Auxiliary, HFConfig


class NotedPasses:
    """Passes of a model with this config, all of one micro-batch."""

    def __init__(self, auxiliary: Auxiliary, config: HFConfig) -> None:
        self._auxiliary, self._config, self._coefficient = auxiliary, config, auxiliary.coefficient(config)
        self.option, self.output = auxiliary.option, auxiliary.output
        self._losses: list[Tensor] = []
        self._statistics: list[dict[str, Tensor]] = []

    def add(self, output: tuple[Tensor, ...]) -> None:
        """Note a pass; `output` is its field of the backbone's output, of all tokens of its sequences."""
        if self._coefficient:
            self._losses.append(self._auxiliary.loss(output, self._config))
        self._statistics.append(self._auxiliary.statistics(output, self._config))

    def loss(self) -> Tensor:
        """The auxiliary loss [] of all passes, times its coefficient."""
        return self._coefficient * torch.stack(self._losses).sum()

    def statistics(self) -> dict[str, Tensor]:
        """Sums over all passes, for the log."""
        of_all = self._statistics
        return {name: torch.stack([sums[name] for sums in of_all]).sum() for name in (of_all[0] if of_all else ())}
