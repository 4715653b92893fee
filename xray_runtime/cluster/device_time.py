"""How long a stage held devices: the time from when its models were built until they are released, times devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pool.demand import demand, total
from xray_runtime.cluster.pool.placement import device
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.kernel.config.section import RuntimeConfig

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels


class DeviceTime:
    """Adds up the seconds of devices: of GPUs, or without any of the processes that hold shards."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, open_models: OpenModels, runtime: RuntimeConfig) -> OpenModels:
        """The same way to open models, measured."""

        @contextlib.contextmanager
        def opened(specs: Mapping[str, ModelSpec | GeneratorSpec]) -> Iterator[dict[str, ModelHandle]]:
            with open_models(specs) as models:
                start = time.monotonic()
                try:
                    yield models
                finally:
                    self.seconds += (time.monotonic() - start) * num_devices(specs, runtime)

        return opened


def num_devices(specs: Mapping[str, ModelSpec | GeneratorSpec], runtime: RuntimeConfig) -> float:
    where = device(runtime)
    demands = [demand(role, spec.layout, runtime, where) for role, spec in specs.items()]
    return total(demands).get("GPU") or float(sum(model.num_ranks for model in demands))
