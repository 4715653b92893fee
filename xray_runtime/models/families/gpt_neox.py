"""GPT-NeoX and Pythia: attention and MLP side by side, under names of their own."""

from __future__ import annotations

from xray_runtime.models.family import Family, Parts

FAMILY = Family(
    model_types=("gpt_neox",),
    parts=Parts("gpt_neox", "gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    tried=("vllm",),
)
