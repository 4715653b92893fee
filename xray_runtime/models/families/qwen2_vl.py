"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a Qwen that also reads pictures, which its tower turns into tokens.

Qwen3-VL's tower also gives features of its lower layers, which the first layers of the language model add to their
states (DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xray_runtime.models.family import Family, Parts, Pictures

if TYPE_CHECKING:
    from torch import Tensor


def _layout(processor: Any, tokenizer: Any, config: Mapping[str, Any], width: int, height: int) -> list[int]:
    patches = processor.get_number_of_image_patches(height, width)
    return [config["image_token_id"]] * (patches // processor.merge_size**2)


def _encoded(features: Tensor) -> dict[str, Any]:
    first, *deep = features
    return {"pooler_output": (first,)} | ({"deepstack_features": [(one,) for one in deep]} if deep else {})


_TEXT = "model.language_model"
FAMILY = Family(
    model_types=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    parts=Parts(_TEXT, f"{_TEXT}.embed_tokens", f"{_TEXT}.layers", f"{_TEXT}.norm"),
    pictures=Pictures(
        towers=("model.visual",),
        written=("vision_start_token_id", "image_token_id", "vision_end_token_id"),
        layout=_layout,
        encoded=_encoded,
        has_grid=True,
    ),
)
