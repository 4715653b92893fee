"""Whether a model can be taken apart at its family's parts, found out without its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from xray_runtime.kernel.errors import first_line
from xray_runtime.models.family import family_of


def backbone_of(lm: Any) -> Any:
    """The part of a causal LM that computes last hidden states; transformers' `base_model` of Llama 4 is the whole."""
    family = family_of(lm.config.model_type)
    is_part = lm.base_model is lm or family.pictures is not None
    return lm.get_submodule(family.parts.backbone) if is_part else lm.base_model


@torch.no_grad()
def check_parts(lm: Any, field: str) -> None:
    """Check, without weights, that a backbone with its family's parts hands on states as they are: without its layers
    and its norm it changes nothing. Some families scale what enters their layers, and would do so again in a part of
    theirs (`HeadedLM.trunk`).

    Raises:
        ValueError: it changes something; the message begins with `field`, a field and its value.
    """
    # Stages import this module too, and do without these three seconds.
    from xray_runtime.models.causal_lm import without_weights

    # transformers writes the attention into the config that it is given.
    parts, plain = family_of(lm.config.model_type).parts, without_weights(copy.deepcopy(lm.config))
    backbone = plain.get_submodule(parts.backbone)
    backbone.config.use_cache = False
    for part in (*plain.get_submodule(parts.layers), plain.get_submodule(parts.norm)):
        part.forward = _unchanged
    states = torch.linspace(-1.0, 1.0, 4 * lm.config.hidden_size).view(1, 4, -1)
    try:
        is_plain = torch.equal(backbone(inputs_embeds=states).last_hidden_state, states)
    except Exception as error:
        raise ValueError(
            f"{field} is not allowed: a {type(lm).__name__} fails in parts: {first_line(error)}"
        ) from error
    if not is_plain:
        raise ValueError(
            f"{field} is not allowed: a {type(lm).__name__} scales states between its embeddings and layers"
        )


def _unchanged(states: Tensor, *args: Any, **options: Any) -> Tensor:
    return states
