"""vLLM's memory on one device, in bytes: weights, KV cache, the profiled prefill pass, CUDA graphs and workspace."""

from __future__ import annotations

from xray_runtime.planning.memory import (
    Layout,
    Memory,
    device_parameters,
    layer_activation_bytes,
    logit_bytes,
    reading_bytes,
)
from xray_runtime.planning.shapes import ModelShape

GENERATOR_BATCH_TOKENS = 16_384
"""Tokens of vLLM's prefill pass (default of `max_num_batched_tokens` on large GPUs)."""
GRAPH_BYTES = 20 * 2**20
"""CUDA graphs of one layer for all captured batch sizes: an assumption, after the 0.5 to 1.5 GiB that vLLM logs for
models of 30 to 80 layers."""
WORKSPACE_BYTES = 512 * 2**20
"""Workspace of the attention and sampling kernels: an assumption, FlashInfer's 394 MiB and more."""


def kv_cache_bytes(shape: ModelShape, tokens: int, weight_bytes: int, tp: int = 1, pp: int = 1) -> int:
    """Keys and values of `tokens` cached tokens: 2·L·k·d·w each, split by tp (whole heads) and pp (whole layers)."""
    layers, kv_heads = -(-shape.num_layers // pp), -(-shape.num_kv_heads // tp)
    return 2 * layers * kv_heads * shape.head_size * weight_bytes * tokens


def generation_memory(
    shape: ModelShape,
    weight_bytes: int,
    layout: Layout,
    *,
    sequences: int,
    cached_tokens: int,
    reserved_kv_bytes: int = 0,
    on_gpu: bool = False,
) -> Memory:
    """vLLM with a KV cache of `cached_tokens`, at least `reserved_kv_bytes`, sampling `sequences` at a time."""
    kv_cache = kv_cache_bytes(shape, cached_tokens, weight_bytes, layout.tp, layout.pp)
    return Memory(
        weights=device_parameters(shape, layout.tp, layout.pp, split_vocabulary=True) * weight_bytes,
        activations=layer_activation_bytes(shape, GENERATOR_BATCH_TOKENS, weight_bytes, layout.tp),
        logits=logit_bytes(shape, sequences),
        kv_cache=max(kv_cache, reserved_kv_bytes),
        buffers=WORKSPACE_BYTES + shape.num_layers * GRAPH_BYTES if on_gpu else 0,
        loading=reading_bytes(shape, weight_bytes, layout),
    )
