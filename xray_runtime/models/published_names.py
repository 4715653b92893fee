"""Tensors under the names and in the shapes of files, written into the parameters of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xray_runtime.models.causal_lm import published


class PublishedNames:
    """The parameters of `lm` by the names that `save_pretrained` gives them.

    In memory transformers puts some tensors of files together, such as the experts of a layer. Where each of their
    elements lies there is found once, by giving numbers instead of weights to transformers' own conversion.
    """

    def __init__(self, lm: Any) -> None:
        self._lm, self._own = lm, dict(lm.named_parameters())
        self._places: dict[str, tuple[str, Tensor]] = {}
        """Name in files → parameter, and the places of the tensor's elements in it."""
        for name, parameter in self._own.items():
            numbers = torch.arange(parameter.numel()).view(parameter.shape)
            for saved, places in published(lm, name, numbers).items():
                if saved != name:
                    self._places[saved] = name, places.flatten()
        saved_names = lm.state_dict().keys()
        # Files hold these too: constants of an activation.
        self._own |= {name: buffer for name, buffer in lm.named_buffers() if name in saved_names}

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of files. Raises AttributeError: `lm` has none of this name."""
        if name in self._places:
            parameter, places = self._places[name]
            self._own[parameter].view(-1)[places.to(tensor.device)] = tensor.flatten()
            return
        # A tied output layer may also arrive under its own name, with the same bytes.
        held = self._own[name] if name in self._own else self._lm.get_parameter(name)
        held.copy_(tensor)
