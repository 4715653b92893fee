"""Which model a WholeModel holds, and what it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.config.engines import FrozenConfig, LayoutConfig, TrainingConfig

if TYPE_CHECKING:
    from xray_runtime.models.objectives import Objective
    from xray_runtime.workers.whole_model import WholeModel
    from xray_runtime.workers.workhorse import Workhorse


@dataclass(frozen=True)
class BranchSpec:
    """A frozen model that another holds above their common trunk."""

    directory: Path
    head: Path | None = None
    """File of the scalar head's weights, of a reward model."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model a Learner holds and what it is for."""

    directory: Path
    """Checkpoint in Hugging Face form."""
    objective: Objective
    training: TrainingConfig | None = None
    """None: frozen, only scored."""
    frozen: FrozenConfig = field(default_factory=FrozenConfig)
    """How it is spread without `training`, and in what it computes."""
    score_tokens: int = 8192
    """Tokens in one scoring pass."""
    head: Path | None = None
    """File of the scalar head's weights; None with `new_head`: a fresh one."""
    new_head: bool = False
    trainable_layers: int | None = None
    branches: Mapping[str, BranchSpec] = field(default_factory=dict)
    """Role → frozen model whose top layers become a branch on the shared trunk."""
    adapter_seed: int = 0
    """Of LoRA adapters' first values, where `training` has them."""

    @property
    def workhorse(self) -> type[Workhorse]:
        """The class of its Workhorses."""
        from xray_runtime.workers.learner import Learner

        return Learner

    @property
    def whole_model(self) -> type[WholeModel]:
        """The actor that stands for it. Named here so that a stage's key digests the code of what computes."""
        from xray_runtime.workers.whole_model import WholeModel

        return WholeModel

    @property
    def layout(self) -> LayoutConfig:
        """How it is spread over Workhorses."""
        return self.frozen if self.training is None else self.training.engine

    def located(self, find: Callable[[Path], Path]) -> ModelSpec:
        """The spec for another node: `find` gives where a directory lies there."""
        branches = {
            role: BranchSpec(find(branch.directory), _located(branch.head, find))
            for role, branch in self.branches.items()
        }
        return replace(self, directory=find(self.directory), branches=branches, head=_located(self.head, find))


def _located(head: Path | None, find: Callable[[Path], Path]) -> Path | None:
    return None if head is None else find(head.parent) / head.name
