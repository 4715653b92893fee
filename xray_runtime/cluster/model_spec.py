"""The model that a Learner holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.engines.layouts import EngineConfig, FrozenConfig
from xray_runtime.engines.training_config import TrainingConfig

if TYPE_CHECKING:
    from xray_runtime.models.adapters import Adapters
    from xray_runtime.models.heads import Branch
    from xray_runtime.models.lora import LoRAConfig
    from xray_runtime.models.objectives import Objective

USES = ("xray_runtime.cluster.whole_model", "xray_runtime.cluster.learner")
"""Modules that run it, so that a stage's key digests their code."""


@dataclass(frozen=True)
class BranchSpec:
    """A frozen model that another model holds as a branch above their common trunk."""

    directory: Path
    head: Path | None = None
    """File of a reward model's scalar head."""

    def load(self, role: str) -> Branch:
        """The branch, as a skeleton but for its head."""
        from safetensors.torch import load_file

        from xray_runtime.engines.shard_loading import skeleton_of
        from xray_runtime.models.head_layers import ScalarHead
        from xray_runtime.models.heads import Branch

        lm: Any = skeleton_of(self.directory)
        scalar = None
        if self.head is not None:
            scalar = ScalarHead(lm.config.hidden_size, 1)
            scalar.load_state_dict(load_file(self.head))
        return Branch(role, lm, scalar, self.directory)


@dataclass(frozen=True)
class ModelSpec:
    """The model that a Learner holds, and its purpose."""

    directory: Path
    """Checkpoint in Hugging Face form."""
    objective: Objective
    training: TrainingConfig | None = None
    """None: the model is frozen and only scores."""
    frozen: FrozenConfig = field(default_factory=FrozenConfig)
    """Layout and precision without `training`."""
    score_tokens: int = 8192
    """Tokens in one scoring pass."""
    head: Path | None = None
    """File of the scalar head's weights. None with `new_head`: a new head."""
    new_head: bool = False
    trainable_layers: int | None = None
    branches: Mapping[str, BranchSpec] = field(default_factory=dict)
    """Role → frozen model whose top layers become a branch above the shared trunk."""
    adapter_seed: int = 0
    """Seed of LoRA adapters' first values."""
    pictures: tuple[Path, ...] = ()
    """Folders of the pictures that rows may have."""
    continues: bool = False
    """Training goes on with the adapter beside the weights in `directory`, into which it is merged."""
    adapter: Path | None = None
    """A checkpoint whose adapter a frozen model has beside its weights."""
    reference: Objective | None = None
    """The scores of this model with its adapters off, the reference of a policy."""
    scoring_at_once: int = 1
    """Models that score at the same time, this one included: on a CPU they share `runtime.threads`."""
    training_at_once: int = 1
    """Likewise models that train."""

    @property
    def publishes_weights(self) -> bool:
        """Whether it is published with its weights, and not as an adapter alone."""
        lora = None if self.training is None else self.training.lora
        return lora is None or lora.publish == "merged"

    @property
    def kept_adapters(self) -> LoRAConfig | None:
        """The trained adapters that are published as they are: of those on quantized matrices no checkpoint is the
        base."""
        lora = None if self.training is None else self.training.lora
        return None if lora is None or lora.quantize is not None else lora

    @property
    def libraries(self) -> str:
        return self.layout.libraries

    @property
    def layout(self) -> FrozenConfig | EngineConfig:
        return self.frozen if self.training is None else self.training.engine

    def load_adapters(self, lm: Any) -> Adapters | None:
        """Those that are trained, or that a frozen model has; they are put into `lm`."""
        from xray_runtime.kernel.graph.artifacts import ADAPTER
        from xray_runtime.models.adapter_files import adapter_files, read_fields
        from xray_runtime.models.adapters import Adapters
        from xray_runtime.models.weight_files import tensors_in

        lora = None if self.training is None else self.training.lora
        if self.adapter is not None:
            lora = read_fields(self.adapter / ADAPTER).lora
        if lora is None:
            return None
        adapters = Adapters(lm, lora, self.directory, self.adapter_seed)
        if self.adapter is not None:
            adapters.load(dict(tensors_in(adapter_files(self.adapter))))
        elif self.continues:
            adapters.go_on(dict(tensors_in(adapter_files(self.directory))))
        return adapters

    def located(self, find: Callable[[Path], Path]) -> ModelSpec:
        """The spec for another node; `find` returns a directory's path there."""
        branches = {
            role: BranchSpec(find(branch.directory), _located(branch.head, find))
            for role, branch in self.branches.items()
        }
        adapter = None if self.adapter is None else find(self.adapter)
        moved = replace(self, directory=find(self.directory), adapter=adapter, pictures=tuple(map(find, self.pictures)))
        return replace(moved, branches=branches, head=_located(self.head, find))


def scored_together(specs: Mapping[str, ModelSpec], beside: int = 0) -> dict[str, ModelSpec]:
    """`specs`, whose models score at the same time while `beside` others work."""
    return {role: replace(spec, scoring_at_once=len(specs) + beside) for role, spec in specs.items()}


def _located(head: Path | None, find: Callable[[Path], Path]) -> Path | None:
    return None if head is None else find(head.parent) / head.name
