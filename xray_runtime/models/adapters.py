"""Low-rank adapters in a causal LM: beside a frozen matrix W stands s · B·A (Hu et al. 2021, "LoRA").

    LoRA     y = W x + s B A x            s = alpha / rank
    rsLoRA   the same                     s = alpha / √rank        (Kalajdzievski 2023)
    DoRA     y = m ⊙ (W + s B A) x / ‖W + s B A‖                   (Liu et al. 2024; the norm of each row, a constant
                                                                    in the backward pass, as its section 4.3 says)

Only A [rank, in], B [out, rank] and m [out] are trained and saved in snapshots. They are published beside the whole
matrices, W + s B A under their Hugging Face names, and read by peft, which computes the same (`tests`). A mixture's
experts have theirs in `expert_adapters`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from xray_runtime.models.expert_adapters import AdaptedExperts, from_peft, is_experts, to_peft
from xray_runtime.models.lora import EXPERTS, LoRAConfig
from xray_runtime.models.nf4 import NF4Linear
from xray_runtime.models.weight_files import MappedFiles, weight_files

LINEAR = nn.Linear, Conv1D
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config fields by which families name the number of experts in a layer."""
PEFT_PREFIX = "base_model.model."
"""Prefix of a model's layers in the names of peft."""

Whole = Callable[[str, Any], Tensor]
"""(name in the `HeadedLM`, parameter) → its whole float32 value, however it is sharded; every rank that holds a part
calls it."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter.

    Args:
        dora: with a magnitude, whose values are not set yet.
    """

    def __init__(self, base: Any, rank: int, scaling: float, *, dora: bool) -> None:
        super().__init__()
        quantized = isinstance(base, NF4Linear)
        self.transposed = base.transposed if quantized else isinstance(base, Conv1D)
        shape = base.shape if quantized else base.weight.shape
        out, inner = shape[::-1] if self.transposed else shape
        self.base_layer, self.scaling, self.is_off = base, scaling, False
        # On the CPU and with values, also beside a weight on the meta device. torch draws A as peft does.
        self.lora_A, self.lora_B = nn.Linear(inner, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.magnitude = nn.Parameter(torch.empty(out)) if dora else None
        self.register_buffer("start_A", None, persistent=False)
        self.register_buffer("start_B", None, persistent=False)
        self.between: Callable[[Tensor], Tensor] = lambda low: low
        """How tensor-parallel peers join their parts of A x."""
        self.over_columns: Callable[[Tensor], Tensor] = lambda norms: norms
        """How tensor-parallel peers that share the columns of W join the norms of their parts of its rows."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # whoever reads it would compute without the adapter
            raise AttributeError(
                "lora is not supported for a layer whose weight the model reads itself: set lora.target_modules"
            )
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., out] of inputs [..., in]."""
        plain: Tensor = self.base_layer(x)
        if self.is_off:
            return plain
        added = self.added(x)
        if self.magnitude is None:
            return plain + added
        weight, bias = self.base_layer.weight, self.base_layer.bias
        share = self.share(weight.T if self.transposed else weight)
        unbiased = plain if bias is None else plain - bias
        scaled: Tensor = plain + (share - 1.0) * unbiased + share * added
        return scaled

    def added(self, x: Tensor) -> Tensor:
        """s B A x [..., out] of inputs [..., in]."""
        added: Tensor = self.lora_B(self.between(self.lora_A(x))) * self.scaling
        if self.start_A is not None:  # as small a product as the other, so that their difference begins as zero
            low = self.between(nn.functional.linear(x, self.start_A.to(x.dtype)))
            added = added - nn.functional.linear(low, self.start_B.to(x.dtype)) * self.scaling
        return added

    def share(self, weight: Tensor) -> Tensor:
        """m / ‖W + s B A‖ [out], DoRA's factor of each row of W [out, in]."""
        assert self.magnitude is not None
        with torch.no_grad():
            whole = weight + self.scaling * (self.lora_B.weight @ self.lora_A.weight)
            norms = self.over_columns(torch.linalg.norm(whole, dim=1))
        return self.magnitude / norms

    def parts(self) -> dict[str, nn.Parameter]:
        """Its trained parameters by name."""
        found: dict[str, Any] = {"lora_A.weight": self.lora_A.weight, "lora_B.weight": self.lora_B.weight}
        return found if self.magnitude is None else found | {"magnitude": self.magnitude}


def joined_norms(group: Any, norms: Tensor) -> Tensor:
    """The norms [out] of rows of which each rank of `group` has the norms of a part."""
    squares = norms.square()
    torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt()


class Adapters:
    """The adapters of `lm`, which are put into it here; all else in it is frozen.

    Args:
        lm: a Hugging Face causal LM.
        checkpoint: its directory. Merging starts from these float32 weights, not from what passes run in, and
            so needs no gathering of them; with `config.quantize` from what they are rounded to.
        seed: of A's first values; B begins as zeros, and the model as it was.

    Raises:
        ValueError: the model has no layer that `config.target_modules` names, it is no linear layer, or `checkpoint`
            has no matrix of its own for it.
    """

    def __init__(self, lm: Any, config: LoRAConfig, checkpoint: Path, seed: int) -> None:
        self.config, self._lm = config, lm
        self._files, self._mapped = weight_files(checkpoint), MappedFiles()
        names = adapted_layers(lm, config)
        lm.requires_grad_(False)
        self.layers: dict[str, AdaptedLinear] = {}
        """By name in `lm`."""
        self.experts: dict[str, AdaptedExperts] = {}
        self._starts: dict[str, tuple[Tensor, Tensor]] = {}
        """Layer → A and B that are part of its frozen matrix already."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for name in names:
                base = lm.get_submodule(name)
                if is_experts(name, base):
                    self.experts[name] = AdaptedExperts(base, config.rank, config.scaling)
                    continue
                self._saved(name)
                if config.quantize is not None:
                    base = NF4Linear(base, self._weight(name))
                layer = AdaptedLinear(base, config.rank, config.scaling, dora=config.dora)
                if layer.magnitude is not None:
                    weight = base.weight.detach() if not base.weight.is_meta else self._weight(name)
                    layer.magnitude.data = torch.linalg.norm(weight.T if layer.transposed else weight, dim=1)
                self.layers[name] = layer
                lm.set_submodule(name, layer)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone: what `lm` was before it had adapters."""
        self._turn(off=True)
        try:
            yield
        finally:
            self._turn(off=False)

    def _turn(self, *, off: bool) -> None:
        layers: list[AdaptedLinear | AdaptedExperts] = [*self.layers.values(), *self.experts.values()]
        for layer in layers:
            layer.is_off = off

    @contextlib.contextmanager
    def taken_out(self) -> Iterator[None]:
        """Leave only the frozen layers in the model, for what replaces them by others."""
        for name, layer in self.layers.items():
            self._lm.set_submodule(name, layer.base_layer)
        yield
        for name, layer in self.layers.items():
            layer.base_layer = self._lm.get_submodule(name)
            self._lm.set_submodule(name, layer)

    def keep(self, lm: Any) -> None:
        """Forget the layers that are no longer in `lm`, as other pipeline stages have them."""
        held = dict(lm.named_modules())
        self.layers = {name: layer for name, layer in self.layers.items() if held.get(name) is layer}
        self.experts = {name: layer for name, layer in self.experts.items() if held.get(name) is layer.module}

    def merged(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        """(name in files, matrix that computes the same without an adapter) of every adapted layer, one at a time."""
        for name, layer in self.layers.items():
            own = {part: whole(f"lm.{name}.{part}", parameter) for part, parameter in layer.parts().items()}
            delta = (own["lora_B.weight"] @ own["lora_A.weight"]) * layer.scaling
            if name in self._starts:
                a, b = (start.to(delta.device) for start in self._starts[name])
                delta = delta - (b @ a) * layer.scaling
            frozen = layer.base_layer.matrix() if self.config.quantize is not None else self._weight(name)
            weight = frozen.to(delta.device) + (delta.T if layer.transposed else delta)
            if layer.magnitude is not None:
                rows = 0 if layer.transposed else 1
                share = own["magnitude"] / torch.linalg.norm(weight, dim=rows)
                weight = weight * (share if layer.transposed else share[:, None])
            yield self._saved(name), weight
        for name, experts in self.experts.items():
            for matrix in experts.matrices:
                parts = [(part, getattr(experts.module, part)) for part in experts.part_names(matrix)]
                delta = experts.delta(*(whole(f"lm.{name}.{part}", parameter) for part, parameter in parts))
                # Files hold the experts of a layer one by one, or turned round; sums are taken as they stand there.
                for saved, change in revert_weight_conversion(self._lm, {f"{name}.{matrix}": delta}).items():
                    yield saved, self._mapped.read(self._files, saved).to(delta.device) + change

    def unmerged(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, whole float32 value) of every trained parameter, one at a time."""
        for peft, (name, parameter) in self._trained().items():
            yield peft, to_peft(whole(name, parameter), peft)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with the adapters `tensors` (`unmerged`), or with none where there are none.

        Raises:
            ValueError: they are of another model's layers.
        """
        own = {peft: parameter for peft, (_, parameter) in self._trained().items()}
        wrong = [n for n in own.keys() | tensors.keys() if n not in own or n not in tensors] if tensors else []
        wrong += [name for name in own.keys() & tensors.keys() if to_peft(own[name], name).shape != tensors[name].shape]
        if wrong:
            raise ValueError(f"the adapter is not of this {type(self._lm).__name__} ({min(wrong)})")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(from_peft(tensor, name, own[name].shape))
        self._turn(off=not tensors)

    def go_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Train on from `tensors` (`unmerged`), which are merged into `lm` already: a pass adds what they change from
        now on, so that adapters off still are the model as it was given. Raises ValueError: as `load`."""
        self.load(tensors)
        for name, layer in self.layers.items():
            layer.start_A, layer.start_B = (part.weight.detach().clone() for part in (layer.lora_A, layer.lora_B))
            self._starts[name] = layer.start_A, layer.start_B

    def _trained(self) -> dict[str, tuple[str, nn.Parameter]]:
        """peft's name → (name in the `HeadedLM`, parameter)."""
        found: dict[str, tuple[str, nn.Parameter]] = {}
        for name, layer in self.layers.items():
            for part, parameter in layer.parts().items():
                peft = "lora_magnitude_vector" if part == "magnitude" else part
                found[f"{PEFT_PREFIX}{name}.{peft}"] = f"lm.{name}.{part}", parameter
        for name, experts in self.experts.items():
            for peft, (part, parameter) in experts.parts().items():
                found[f"{PEFT_PREFIX}{name}.{peft}"] = f"lm.{name}.{part}", parameter
        return found

    def _weight(self, name: str) -> Tensor:
        # Mapped once: merging at every sync reads no file again.
        return self._mapped.read(self._files, self._saved(name))

    def _saved(self, name: str) -> str:
        """The name in files of a layer's matrix."""
        own = f"{name}.weight"
        if own in self._files:
            return own
        # Some families have other names in memory.
        saved: list[str] = [*revert_weight_conversion(self._lm, {own: torch.empty(0)})]
        if len(saved) != 1 or saved[0] not in self._files:
            raise ValueError(f"lora is not supported for {name} of a {type(self._lm).__name__}: no file has its matrix")
        return saved[0]


def adapted_layers(lm: Any, config: LoRAConfig) -> list[str]:
    """Names of the layers of `lm` that get adapters.

    Raises:
        ValueError: the model has no layer that `config.target_modules` names, or it is no linear layer.
    """
    if config.target_modules is None:
        return linear_layers(lm)
    output, found, scanned = lm.get_output_embeddings(), list[str](), _scanned_layers(lm)
    for name, module in lm.named_modules():
        if not _is_named(name, config.target_modules):
            continue
        problem = None
        if module is output or isinstance(module, nn.Embedding):
            problem = "is an embedding or the output layer, which may share its weight with another"
        elif name in scanned:
            problem = "is read by the state-space layer that has it, which would compute without the adapter"
        elif is_experts(name, module):
            problem = "are experts, whose adapters have no norms: leave out lora.dora" if config.dora else None
        elif not isinstance(module, LINEAR):
            problem = f"is a {type(module).__name__}, and no linear layer"
        if problem is not None:
            raise ValueError(f"lora.target_modules: {config.target_modules} is not allowed: {name} {problem}")
        found.append(name)
    missing = [each for each in config.target_modules if not any(_is_named(name, [each]) for name in found)]
    if missing:
        experts = {EXPERTS for name, module in lm.named_modules() if is_experts(name, module)}
        raise ValueError(
            f"lora.target_modules: {missing} is not allowed: a {type(lm).__name__} has no such layer; it has "
            + ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers(lm)} | experts))
        )
    return found


def _is_named(name: str, targets: Collection[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def linear_layers(lm: Any) -> list[str]:
    """Names of the linear layers of `lm` but its output layer, what the scan of a state-space layer reads and, in a
    mixture, its experts and what chooses them."""
    output = lm.get_output_embeddings()
    mixtures = {name.rpartition(".")[0] for name, _ in lm.named_modules() if name.endswith(".experts")}
    counts = {getattr(lm.config, field, None) for field in NUM_EXPERTS}
    scanned = _scanned_layers(lm)

    def is_adapted(name: str, module: nn.Module) -> bool:
        if not isinstance(module, LINEAR) or module is output or name in scanned or "experts" in name.split("."):
            return False
        chooses = any(name.startswith(f"{mixture}.") for mixture in mixtures) and module.weight.shape[0] in counts
        return not chooses

    return [name for name, module in lm.named_modules() if is_adapted(name, module)]


def _scanned_layers(lm: Any) -> set[str]:
    """Names of the linear layers in Mamba's state-space layers but the first: fused scans read their weights (on a
    GPU all of them, as peft says of `out_proj`; `dt_proj` everywhere)."""
    mixers = {name for name, module in lm.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")}
    return {
        name
        for name, module in lm.named_modules()
        if isinstance(module, LINEAR) and name.rpartition(".")[0] in mixers and not name.endswith(".in_proj")
    }
