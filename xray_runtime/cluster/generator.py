"""The Workhorse of a model that samples."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.plain_errors import plain_errors
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.kernel.processes import return_freed_memory

if TYPE_CHECKING:
    from xray_runtime.cluster.generator_spec import GeneratorSpec
    from xray_runtime.engines.generation import Generation
    from xray_runtime.engines.sampling import Sampling
    from xray_runtime.engines.sync.object_store import WeightUpdate


@plain_errors
class Generator(Workhorse):
    """One sampling engine, or one rank of an engine that is split over several Workhorses."""

    samples = True
    _engine: Generation
    """Kept when its model is unloaded, for the next one."""

    def build(self, spec: GeneratorSpec, rank_info: RankInfo) -> None:
        """Start the engine on the checkpoint, or load the checkpoint into the previous model's engine."""
        self._begin(rank_info)
        import torch

        from xray_runtime.engines.generation import Generation
        from xray_runtime.engines.sampling import EngineRank

        if spec.config.capabilities.remote:
            self.device = torch.device("cpu")  # this process has no GPU
        if hasattr(self, "_engine"):
            if self._engine.fits(spec.directory, spec.max_length, spec.config, spec.adapter):
                self._engine.readings.clear()  # of another stage
                self._engine.restart(spec.directory)
                self._engine.read_pictures(spec.pictures)
                self._engine.sleep()
                return
            del self._engine
            gc.collect()
        rank = EngineRank(self.device.type, rank_info.rank, rank_info.world_size, rank_info.host, rank_info.port)
        self._engine = Generation(spec.directory, spec.max_length, spec.config, self.runtime, rank, spec.adapter)
        self._engine.read_pictures(spec.pictures)

    def unload(self) -> None:
        super().unload()
        if hasattr(self, "_engine"):
            self._engine.weights.forget()
            self._engine.sleep()
        return_freed_memory()

    def sleep(self, synced_next: bool = False) -> None:
        """`Generation.sleep`."""
        self._engine.sleep(synced_next=synced_next)
        if self.device.type == "cpu":
            return_freed_memory()

    def wake_up(self) -> None:
        """`Generation.wake_up`."""
        self._engine.wake_up()

    def readings(self) -> dict[str, float]:
        """`Generation.readings`."""
        return self._engine.readings

    def layers_of(self, names: set[str]) -> set[str]:
        return self._engine.layers_of(names)

    def verify_weights(self, update: WeightUpdate, number: int, checkers: int) -> None:
        """Verify part `number` of `checkers` of `update`."""
        self._engine.weights.verify(update, number, checkers)

    def load_weights(self, update: WeightUpdate, verified: bool = False) -> int:
        """Load `update`, which is verified first unless all ranks together did it; returns the version now held."""
        self._engine.weights.load(update, verified=verified)
        return self._engine.weights.version

    def load_checkpoint(self, directory: Path, version: int) -> None:
        self._engine.restart(directory, version)

    def revert_weights(self) -> None:
        """Undo the last `load_weights`, because another replica failed."""
        self._engine.weights.revert()

    def receive(self, step: str, info: dict[str, Any], version: int) -> None:
        """One step of a transfer from GPU to GPU, which the trainer drives."""
        self._engine.receive(step, info, version)

    def generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        """Sample a reply to each prompt with its `seed`; see `Generation.generate`."""
        prompts = [ids.tolist() for ids in rows.input_ids]
        return self._engine.generate(prompts, rows.seed.tolist(), sampling, version)
