"""vLLM with an adapter beside frozen weights, which each update replaces.

An update is written into a directory in peft's form, which vLLM reads and which is removed then. vLLM takes an adapter
none of whose layers it has, and would sample from the frozen model: that is an error here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from xray_runtime.engines.generators.vllm.sampler import WEIGHTS, VLLMSampler, allowed_rank
from xray_runtime.engines.sampling import EngineRank
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.adapters import PEFT_PREFIX, adapted_layers
from xray_runtime.models.causal_lm import skeleton
from xray_runtime.models.lora import LoRAConfig

NUMBER = 1
"""vLLM's number of the adapter."""


class AdapterSampler(VLLMSampler):
    """A `VLLMSampler` whose updates bring an adapter with the fields of `adapter`."""

    def __init__(
        self, directory: Path, max_length: int, runtime: RuntimeConfig, rank: EngineRank, adapter: LoRAConfig
    ) -> None:
        # All that vLLM could adapt includes the experts of a mixture, for which it has no kernels on CPU.
        layers = {name.rpartition(".")[2] for name in adapted_layers(skeleton(str(directory)), adapter)}
        options = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": allowed_rank(adapter.rank),
            "lora_target_modules": sorted(layers),
        }
        super().__init__(directory, max_length, runtime, rank, **options)
        self._fields = adapter

    def logprobs(self, rows: list[list[int]]) -> None:
        """vLLM gives no log-probabilities of a prompt while it may have adapters."""

    def write(self, tensors: Tensors, version: int) -> None:
        """Replace the adapter by peft's `tensors`; without any, take it out."""
        from vllm.lora.request import LoRARequest

        self._wake(WEIGHTS)
        engine, held = self._llm.llm_engine, dict(tensors)
        # The cache holds prefixes as the old adapter computed them.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: a request is still running")
        self._adapter = None
        engine.remove_lora(NUMBER)
        if not held:
            return
        with tempfile.TemporaryDirectory(prefix="xray-adapter-") as place:
            write_adapter(Path(place), self._fields, held)
            engine.add_lora(LoRARequest("policy", NUMBER, place))
        sent = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in held}
        [bound] = self._llm.collective_rpc(_bound)
        if unbound := sent - bound:
            what = f"{len(unbound)} of the adapter's {len(sent)} layers"
            raise RuntimeError(f"{what} would change nothing: vLLM has no {min(unbound)}")
        self._adapter = LoRARequest("policy", NUMBER, place)


def _bound(worker: Any) -> set[str]:
    """Names of the layers, as checkpoints have them, that compute the adapter."""
    manager = worker.model_runner.lora_manager._adapter_manager
    adapter, found = manager.get_adapter(NUMBER), set[str]()
    for name in manager.modules:
        if held := manager._get_lora_layer_weights(adapter, name):
            parts = manager.packed_modules.get(name)
            pairs = [(name, held.lora_a)] if parts is None else zip(parts, held.lora_a, strict=True)
            found |= {part for part, a in pairs if a is not None}
    return found
