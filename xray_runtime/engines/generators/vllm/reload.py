"""Reload layers of a running vLLM model; the destination of each Hugging Face tensor is recorded once.

vLLM's layer-wise reload makes a trial load of every tensor each time, which takes most of the time for a small model,
and a layer that only gets a part of its tensors (q and v of a fused qkv, say) has uninitialized memory for the rest.
Here one trial load of the whole checkpoint, without values, records the calls of vLLM's weight loaders by layer. A
reload repeats the calls of the given layers, and vLLM lays the layers out as usual.

This works without names or architectures. `record` returns None if a repetition might differ: something bypasses the
weight loaders, or a tensor is changed before it reaches one.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    CopyCounter,
    restore_layer_on_meta,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class LoaderCall:
    """One call of a weight loader: the tensor `name` goes into `parameter` of a layer."""

    name: str
    parameter: str
    signature: inspect.Signature
    arguments: dict[str, Any]
    slot: str
    """Name of the argument that is the tensor."""

    def bound(self, tensor: torch.Tensor) -> inspect.BoundArguments:
        return inspect.BoundArguments(self.signature, OrderedDict(self.arguments | {self.slot: tensor}))


class Reloader:
    """Reloads the layers of `model` for which all tensors are given."""

    def __init__(
        self, model: nn.Module, shapes: dict[str, torch.Size], calls: dict[nn.Module, list[LoaderCall]]
    ) -> None:
        self._model, self._shapes, self._calls = model, shapes, calls
        self._names = {layer: {call.name for call in own} for layer, own in calls.items()}
        self._layers: dict[str, list[nn.Module]] = {name: [] for name in shapes}
        for layer, names in self._names.items():
            for name in names:
                self._layers[name].append(layer)
        attention = (layer for layer in model.modules() if is_deferred_attention_layer(layer))
        self._attention: list[Any] = list(attention)

    def with_siblings(self, names: set[str]) -> set[str]:
        """`names` and all other tensors of their layers."""
        return names.union(*(self._names[layer] for name in names for layer in self._layers.get(name, ())))

    @torch.no_grad()
    def load(self, tensors: Tensors, dtype: torch.dtype) -> None:
        """Load `tensors`. After a failure, reloaded layers keep their new weights, and `close` must be called. Raises
        ValueError: a tensor is not one of the checkpoint's or has another shape, or a layer's are incomplete."""
        loaded: set[nn.Module] = set()
        waiting: dict[nn.Module, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            if self._shapes.get(name) != tensor.shape:
                raise ValueError(f"weight {name}: shape {tuple(tensor.shape)}, must be {self._shapes.get(name)}")
            for layer in self._layers[name]:
                arrived = waiting.setdefault(layer, {})
                arrived[name] = tensor
                if len(arrived) == len(self._names[layer]):
                    self._reload(layer, waiting.pop(layer))
                    loaded.add(layer)
        if waiting:
            layer, arrived = next(iter(waiting.items()))
            raise ValueError(f"weight {min(self._names[layer] - arrived.keys())} is missing: its layer is incomplete")
        self._finish(loaded, dtype)

    def _reload(self, layer: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        if not isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
            # Without a special layout (a norm, say), load into the layer's own tensors.
            for call in self._calls[layer]:
                parameter, arguments = getattr(layer, call.parameter), call.bound(tensors[call.name])
                arguments.arguments["param"] = parameter
                _get_original_loader(parameter)(*arguments.args, **arguments.kwargs)
            return
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        info.load_numel_total = 0  # open, for `close`
        restore_layer_on_meta(layer, info)
        info.loaded_weights = [(call.parameter, call.bound(tensors[call.name])) for call in self._calls[layer]]
        _layerwise_process(layer, info)

    def _finish(self, loaded: set[nn.Module], dtype: torch.dtype) -> None:
        changed = {id(parameter) for layer in loaded for parameter in layer.parameters(recurse=False)}
        for module in self._model.modules():
            # A tied output layer has no own tensor, but a packed copy on CPU.
            if isinstance(module, ParallelLMHead) and module not in loaded and id(module.weight) in changed:
                module.quant_method.process_weights_after_loading(module)
        for layer in self._attention:
            layer.process_weights_after_loading(dtype)


def record(model: Any, shapes: dict[str, torch.Size]) -> Reloader | None:
    """A `Reloader` of `model`; None if only vLLM's own reload can do it. `shapes`: Hugging Face name → shape, for all
    tensors of its checkpoint."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    calls: dict[nn.Module, list[LoaderCall]] = {}
    copied = 0

    def recorder(layer: nn.Module, parameter: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(loader)

        def load(*args: Any, **kwargs: Any) -> Any:
            nonlocal copied
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            # Raises ValueError if the tensor was changed.
            (slot,) = [key for key, value in bound.arguments.items() if id(value) in names]
            call = LoaderCall(names[id(bound.arguments[slot])], parameter, signature, dict(bound.arguments), slot)
            calls.setdefault(layer, []).append(call)
            # On the meta device, so that biases, which vLLM leaves in place, keep their values.
            bound.arguments["param"] = to_meta_tensor(bound.arguments["param"])
            with CopyCounter() as counter:
                answer = loader(*bound.args, **bound.kwargs)
            copied += counter.copied_numel
            return answer

        return load

    initialize_layerwise_reload(model)
    originals: list[tuple[Any, Callable[..., Any]]] = []
    try:
        for layer in model.modules():
            for name, tensor in get_layer_tensors(layer).items():
                if name not in SKIP_LOAD_TENSORS:
                    originals.append((tensor, _get_original_loader(tensor)))
                    tensor.weight_loader = recorder(layer, name, originals[-1][1])
        with CopyCounter() as counter:
            model.load_weights(iter(tensors.items()))
    except Exception:  # from a model's code, given tensors without values
        return None
    finally:
        for tensor, loader in originals:
            tensor.weight_loader = loader
        close(model)
    if counter.copied_numel != copied or any(is_deferred_attention_layer(layer) for layer in calls):
        return None
    return Reloader(model, shapes, calls)


def close(model: nn.Module) -> None:
    """Restore the tensors of layers that a failed load left open, and drop what had arrived."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()
