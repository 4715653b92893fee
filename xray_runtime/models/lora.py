"""The fields of low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Positive, Section

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama, without its output layer."""
EXPERTS = "experts"
"""The experts of a mixture, as `target_modules` and transformers call them."""


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank · B·A, where only A and B are trained. There is no dropout,
    because rollout and update must compute log-probabilities with the same function."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Scale of B·A, divided by `rank`."""
    rslora: bool = False
    """Divide `alpha` by √rank instead, so that high ranks learn as fast (rsLoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Train the norm of each row of the matrix by itself (DoRA, Liu et al. 2024)."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the linear layers with adapters, such as `[q_proj, v_proj]`, and `experts`, of which each gets its own;
    None: all linear layers but the output layer."""

    quantize: Literal["nf4"] | None = None
    """`nf4`: hold the matrices below the adapters in 4 bits, frozen (QLoRA, Dettmers et al. 2023). The policy, and the
    reference that it is with its adapters off, compute with these rounded matrices; generators and checkpoints get
    their float32 values with the adapters merged, and checkpoints no adapter."""
    publish: Literal["merged", "adapter"] = "merged"
    """`merged`: checkpoints have whole weights, and the adapter beside them. `adapter`: they have the adapter alone,
    and every stage or command that reads one merges it into the weights of its base, which must be in the same
    store."""

    @model_validator(mode="after")
    def _quantized(self) -> Self:
        if self.quantize is not None:
            given = f"quantize = {self.quantize!r} is not allowed with"
            if self.dora:
                raise ValueError(f"{given} dora, which needs the norms of whole matrices")
            if self.publish == "adapter":
                raise ValueError(f"{given} publish = 'adapter': the base has other weights than the policy")
            if EXPERTS in (self.target_modules or ()):
                raise ValueError(f"{given} target_modules: experts, which are no linear layers")
        return self

    @property
    def scaling(self) -> float:
        """The factor of B·A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def peft_fields(self, base: str | None, layers: list[str], matrices: Sequence[str] = ()) -> dict[str, Any]:
        """The content of peft's adapter_config.json for adapters in `layers` (the last parts of their names) of the
        model `base`, and in these `matrices` of its experts."""
        experts = {"target_parameters": [f"{EXPERTS}.{name}" for name in matrices]} if matrices else {}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "target_modules": layers,
            "bias": "none",
            "inference_mode": True,
        } | experts
