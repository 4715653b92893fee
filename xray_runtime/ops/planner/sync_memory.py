"""Memory of a GPU while weights go from the policy to the generator, beside what both hold between their turns.

Read in vLLM 0.32 (`distributed/weight_transfer/packed_tensor.py`, `model_loader/reload/layerwise.py`).
"""

from __future__ import annotations

from xray_runtime.models.shapes import ModelShape, ceil_div
from xray_runtime.ops.planner.memory import Layout, Options, largest_tensor
from xray_runtime.ops.planner.model_states import FLOAT32_BYTES, HALF_BYTES

PACKED_BYTES = 2**30
"""vLLM's buffer for tensors that are sent together (default of `packed_buffer_size_bytes`). X-ray makes it as large as
the largest tensor."""
CHUNKS = 2
"""Chunks that NCCL has in flight on either side (vLLM's `DEFAULT_PACKED_NUM_BUFFERS`)."""


def buffer_bytes(shape: ModelShape) -> int:
    """The buffer through which CUDA IPC sends: one that both processes map."""
    return max(PACKED_BYTES, HALF_BYTES * largest_tensor(shape))


def sending_bytes(
    shape: ModelShape, weight_bytes: int, layout: Layout, options: Options, *, through_host: bool, shared: bool
) -> int:
    """Memory to send the policy: the buffer, or NCCL's chunks, each up to one tensor beyond the buffer's size.

    One tensor at a time is there once more where it is gathered by ZeRO-3, merged with its adapters, or rounded.

    Args:
        through_host: weights go through host memory.
        shared: the generator is on the same GPUs.
    """
    largest = largest_tensor(shape)
    copy = weight_bytes * largest if layout.zero_stage >= 3 and layout.num_copies > 1 else 0
    copy += FLOAT32_BYTES * largest if options.lora_rank is not None else 0
    copy += HALF_BYTES * largest if weight_bytes > HALF_BYTES else 0
    if through_host or layout.tp * layout.pp > 1:
        return FLOAT32_BYTES * largest
    return copy + (buffer_bytes(shape) if shared else _chunk_bytes(shape))


def receiving_bytes(shape: ModelShape, weight_bytes: int, tp: int, *, through_host: bool, shared: bool) -> int:
    """Memory to receive it in the generator: copies of a chunk's tensors, and the module that they are loaded into."""
    loaded = max(largest_tensor(shape, tp), 2 * shape.hidden_size * ceil_div(shape.intermediate_size, tp))
    module = weight_bytes * loaded
    if through_host:
        return module + weight_bytes * largest_tensor(shape)
    if not shared:
        return module + _chunk_bytes(shape)
    return module + min(buffer_bytes(shape), HALF_BYTES * shape.num_parameters)


def _chunk_bytes(shape: ModelShape) -> int:
    largest = HALF_BYTES * largest_tensor(shape)
    return CHUNKS * min(PACKED_BYTES + largest, HALF_BYTES * shape.num_parameters)
