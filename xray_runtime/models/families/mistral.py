"""Mistral: a Llama, in its first versions with sliding windows, which are not packed."""

from __future__ import annotations

from xray_runtime.models.family import Beyond, Family

FAMILY = Family(model_types=("mistral",), packs=True, beyond=lambda config, sizes: Beyond(), tried=("vllm",))
