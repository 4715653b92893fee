"""The protocol of a generator: a library, or a server elsewhere, that samples replies.

A generator is a folder or a file in `generators`, or an entry point of the group `xray.generators`. As with trainers
(`engines.trainer`), its module is light and imports its library in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from xray_runtime.engines.capabilities import Transport
from xray_runtime.engines.layouts import GENERATORS, GeneratorConfig, GeneratorPlug

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.engines.sampling import EngineRank, Sampler
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.lora import LoRAConfig


class MemoryPool(Protocol):
    """GPU memory that can be moved to the host and back, at the same addresses."""

    def use_memory_pool(self, tag: str) -> AbstractContextManager[object]:
        """Memory that this thread allocates meanwhile belongs to `tag`."""

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        """Move the memory of these tags to the host, and drop the rest."""

    def wake_up(self) -> None:
        """Map it again."""


class DirectSender(Protocol):
    """One trainer rank's connection with all ranks of a generator, from GPU to GPU."""

    def send(self, version: int, meet: tuple[str, int]) -> None:
        """Send the weights as `version`; every trainer rank calls this. `meet`: host and free port on rank 0."""


@dataclass(frozen=True)
class Receivers:
    """All ranks of a generator, as the sending side sees them."""

    count: int
    per_replica: int
    """Ranks that share one copy of the model."""
    step: Callable[[str, list[dict[str, Any]], int], None]
    """Has every rank make a step, with its own info, towards a version (`Sampler.receive`), and waits for all."""


class GenerationEngine(GeneratorPlug, Protocol):
    """A way to sample replies."""

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        """Import slow libraries before a model is opened."""

    def sampler(
        self,
        directory: Path,
        max_length: int,
        config: GeneratorConfig,
        runtime: RuntimeConfig,
        rank: EngineRank,
        adapter: LoRAConfig | None = None,
    ) -> Sampler:
        """This rank of a model.

        Args:
            directory: a checkpoint in Hugging Face form.
            max_length: longest prompt and reply together, in tokens.
            adapter: `write` gets peft's names of an adapter with these fields, or nothing, which takes it out; with
                `capabilities.adapters` alone.
        """

    def memory_pool(self) -> MemoryPool:
        """With `capabilities.memory_pool`."""
        raise AssertionError(f"{type(self).__name__} does not support this call")

    def sender(
        self,
        transport: Transport,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        rank: int,
        receivers: Receivers,
    ) -> DirectSender:
        """The trainer's side of a `transport` of `capabilities.transports` other than `plasma`.

        Args:
            tensors: gathers (name, whole tensor) pairs, in the same order every time; a collective of the trainer's
                ranks.
            rank: of the trainer.
        """
        raise AssertionError(f"{type(self).__name__} does not support this call")


def generator(name: str) -> GenerationEngine:
    """The generator `name`. Raises ValueError: there is none."""
    return cast("GenerationEngine", GENERATORS.get(name))
