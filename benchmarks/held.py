"""What a rank of a model holds, in bytes: storages of a trained one's states, and the most that torch allocates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.models.head_layers import BorrowedHead
from xray_runtime.models.tensor_file import WEIGHTS_FILE


class LoadedLearner(Learner):
    """Remembers the most it held while it was built."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        mapped = (spec.directory / WEIGHTS_FILE).stat().st_size
        self.most_bytes = peak_bytes(lambda: super(LoadedLearner, self).build(spec, rank_info), mapped)


def peak_bytes(work: Callable[[], object], mapped: int = 0) -> int:
    """The most bytes on the CPU at one time that `work` allocates, by torch's record of every allocation.

    Without files of `mapped` bytes: torch records the whole of one that is only mapped.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # garbage from before must not be freed during the measurement
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes() if abs(change.nbytes()) != mapped else 0
        peak = max(peak, held)
    return peak


def live_bytes() -> int:
    """Bytes of the storages of all tensors in this process."""
    import torch

    gc.collect()
    held: dict[int, int] = {}
    for each in gc.get_objects():
        # `isinstance` would wake lazy modules, whose class is a property.
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def innermost(engine: Any) -> Any:
    """The engine that has module and optimizer: itself, or what a pipeline stage is built around."""
    return getattr(engine, "_inner", engine)


def held_bytes(engine: Any) -> dict[str, int]:
    """Bytes of every storage an engine's model, gradients and optimizer refer to, each counted once."""
    from torch.distributed.tensor import DTensor

    zero = engine.optimizer
    adam = getattr(zero, "optimizer", zero)
    parameters = list(engine.module.parameters())
    borrowed = [module.weight for module in engine.module.modules() if isinstance(module, BorrowedHead)]
    # ZeRO-3 hands the optimizer what it steps only while it steps it.
    stepped = [p for group in adam.param_groups for p in group["params"]]
    stepped += getattr(zero, "fp32_partitioned_groups_flat", [])
    partitions = [*getattr(zero, "averaged_gradients", {}).values(), *getattr(zero, "all_grad_tensors", {}).values()]
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
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            storage = None if tensor is None else tensor.untyped_storage()
            if storage is not None and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[kind] += storage.nbytes()
    return held
