"""What a rank of a trained model holds, in bytes: every storage of its weights, gradients and optimizer states."""

from __future__ import annotations

from typing import Any

from xray_runtime.models.heads import BorrowedHead


def innermost(engine: Any) -> Any:
    """The engine that has module and optimizer: itself, or what a pipeline stage is built around."""
    return getattr(engine, "_inner", engine)


def held_bytes(engine: Any) -> dict[str, int]:
    """Bytes of every storage an engine's model, gradients and optimizer refer to, each counted once."""
    zero = engine.optimizer
    adam = getattr(zero, "optimizer", zero)
    parameters = list(engine.module.parameters())
    borrowed = [module.weight for module in engine.module.modules() if isinstance(module, BorrowedHead)]
    # ZeRO-3 hands the optimizer what it steps only while it steps it.
    stepped = [p for group in adam.param_groups for p in group["params"]]
    stepped += getattr(zero, "fp32_partitioned_groups_flat", [])
    partitions = [
        *getattr(zero, "averaged_gradients", {}).values(),
        *getattr(zero, "all_grad_tensors", {}).values(),
    ]
    kinds = {
        "weights": [*borrowed, *(t for p in parameters for t in (p.data, getattr(p, "ds_tensor", None)))],
        "optimizer": [*stepped, *(t for state in adam.state.values() for t in state.values())],
        "gradients": [
            *(p.grad for p in (*parameters, *stepped, *borrowed)),
            *(t for tensors in partitions for t in tensors or []),
        ],
    }
    seen: set[int] = set()
    held = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for tensor in tensors:
            storage = None if tensor is None else tensor.untyped_storage()
            if storage is not None and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[kind] += storage.nbytes()
    return held
