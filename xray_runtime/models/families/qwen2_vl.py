"""Qwen2-VL and Qwen2.5-VL: a Qwen2 that also reads pictures, which its tower turns into tokens."""

from __future__ import annotations

from xray_runtime.models.family import Family, Parts, Pictures

_TEXT = "model.language_model"
FAMILY = Family(
    model_types=("qwen2_vl", "qwen2_5_vl"),
    parts=Parts(_TEXT, f"{_TEXT}.embed_tokens", f"{_TEXT}.layers", f"{_TEXT}.norm"),
    pictures=Pictures(
        tower="model.visual",
        tokens=("vision_start_token_id", "image_token_id", "vision_end_token_id"),
        count=lambda processor, width, height: (
            processor.get_number_of_image_patches(height, width) // processor.merge_size**2
        ),
    ),
)
