"""Adapters of the experts of a mixture: W_e + s B_e A_e for each expert e of a layer, as peft's `target_parameters`.

transformers holds the experts of a layer as parameters [E, out, in] (or [E, in, out]) of one module. A [E, rank, in]
and B [E, out, rank] are further parameters of that module, so that whatever gathers or shares its experts does the same
to them. A pass computes with the sum, which is as large as the experts of one layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from xray_runtime.models.lora import EXPERTS


def is_experts(name: str, module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer as matrices [E, …, …]."""
    return name.rpartition(".")[2] == EXPERTS and bool(_matrices(module))


def expert_matrices(lm: nn.Module) -> list[str]:
    """Names of the matrices of a model's experts, as `AdaptedExperts.matrices`."""
    return next(([*_matrices(module)] for name, module in lm.named_modules() if is_experts(name, module)), [])


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}


class AdaptedExperts:
    """Adapters put into the `module` of a layer's experts."""

    def __init__(self, module: Any, rank: int, scaling: float) -> None:
        self.module, self.scaling, self.is_off = module, scaling, False
        self._kind: Any = type(module)  # FSDP makes a class of its own of it
        self.transposed = bool(getattr(module, "is_transposed", False))
        matrices = _matrices(module)
        self.matrices = list(matrices)
        """Names of the adapted parameters, in the order in which peft wraps them."""
        for name, matrix in matrices.items():
            count, out, inner = matrix.shape
            if self.transposed:
                out, inner = inner, out
            # Drawn as peft draws them: one linear layer for all experts.
            a = torch.empty(count * rank, inner, device="cpu")
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            module.register_parameter(f"{name}_lora_A", nn.Parameter(a.view(count, rank, inner)))
            module.register_parameter(f"{name}_lora_B", nn.Parameter(torch.zeros(count, out, rank, device="cpu")))
        module.forward = self._forward

    def _forward(self, *args: Any, **options: Any) -> Any:
        """The module's own pass over other parameters; several threads may be in it."""
        view = self._kind.__new__(self._kind)
        held = dict(self.module._parameters)
        if not self.is_off:
            for name in self.matrices:
                held[name] = held[name] + self.delta(*(held[part] for part in self.part_names(name)))
        view.__dict__ = self.module.__dict__ | {"_parameters": held}
        return self._kind.forward(view, *args, **options)

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """s B A of each expert, in the form of W."""
        return (torch.bmm(a.mT, b.mT) if self.transposed else torch.bmm(b, a)) * self.scaling

    @staticmethod
    def part_names(matrix: str) -> tuple[str, str]:
        """Names of A and B of a matrix."""
        return f"{matrix}_lora_A", f"{matrix}_lora_B"

    def parts(self) -> dict[str, tuple[str, nn.Parameter]]:
        """Name in peft's form, after the module's → (name in the module, parameter). Peft wraps the module once for
        each matrix."""
        found = {}
        for number, matrix in enumerate(reversed(self.matrices)):
            for side, name in zip("AB", self.part_names(matrix), strict=True):
                found[f"{'base_layer.' * number}lora_{side}.weight"] = name, getattr(self.module, name)
        return found


def to_peft(tensor: Tensor, name: str) -> Tensor:
    """A [E, rank, in] as [E · rank, in], B [E, out, rank] as [out, rank · E]; others as they are."""
    if tensor.dim() != 3:
        return tensor
    return tensor.flatten(0, 1) if "lora_A" in name else tensor.permute(1, 2, 0).flatten(1)


def from_peft(tensor: Tensor, name: str, shape: torch.Size) -> Tensor:
    """The inverse of `to_peft`. Raises RuntimeError: the sizes are others."""
    if len(shape) != 3:
        return tensor
    count, out, rank = shape
    return tensor.view(shape) if "lora_A" in name else tensor.view(out, rank, count).permute(2, 0, 1)
