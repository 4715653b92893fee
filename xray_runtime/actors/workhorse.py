"""Workhorses: Ray actors that hold one device and one shard of one model.

`Learner` holds a `HeadedLM` (trained or frozen), `Generator` a vLLM engine. A Workhorse knows its rank in its model and
nothing of other models; everything between models goes through `WholeModel`.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.actors.pulse import Heart, Pulse
from xray_runtime.actors.rows import Rows, num_rows, take
from xray_runtime.config import RuntimeConfig, TrainingConfig
from xray_runtime.data.batching import micro_batches
from xray_runtime.processes import redirect_output

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.vllm_generator import Sampling, VLLMGenerator
    from xray_runtime.models.objectives import Objective
    from xray_runtime.weights.plasma import WeightUpdate


@dataclass(frozen=True)
class ModelSpec:
    """Which model a Learner holds and what it is for."""

    directory: Path
    """Checkpoint in Hugging Face form."""
    objective: Objective
    training: TrainingConfig | None = None
    """None: frozen, only scored."""
    score_tokens: int = 8192
    """Padded tokens in one scoring pass."""
    head: Path | None = None
    """File of the scalar head's weights; None with `new_head`: a fresh one."""
    new_head: bool = False
    trainable_layers: int | None = None
    reference: Path | None = None
    """Checkpoint whose top layers become the reference branch on the shared trunk."""


@dataclass(frozen=True)
class GeneratorSpec:
    """Which model a Generator starts from."""

    directory: Path
    max_length: int


@dataclass(frozen=True)
class Rank:
    """A Workhorse's place: its model's role, its rank, how many there are, where they meet, where its noise goes."""

    role: str
    rank: int
    world_size: int
    host: str
    port: int
    log_dir: Path


class Workhorse:
    """What every Workhorse does first: settle its device and its threads."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        # OpenMP reads these once, when torch is first imported. Waiting threads must sleep: several models share cores.
        os.environ |= {"OMP_NUM_THREADS": str(runtime.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self.runtime = runtime
        self._heart = Heart()

    def _settle(self, place: Rank) -> None:
        """Take `place`, in the state a new process would be in: a Workhorse may have held another model before."""
        redirect_output(place.log_dir / f"{place.role}-{place.rank}.log")
        import torch

        self.place = place
        self._heart.work_thread = threading.get_ident()
        self.device = torch.device(resolve_device(self.runtime.device))
        torch.set_num_threads(self.runtime.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(0)

    def release(self) -> None:
        """Let go of the model."""
        self._heart = Heart()

    def pulse(self) -> Pulse:
        """A sign of life, given in a thread of its own."""
        return self._heart.pulse()

    def rendezvous(self) -> tuple[str, int]:
        """(host, free port) for this model's process group, asked of rank 0."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as s:
            s.bind((host, 0))
            return host, int(s.getsockname()[1])


def resolve_device(wanted: str) -> str:
    """ "cpu" or "cuda"; "auto" takes CUDA where this process has it. Imports torch only when it must look."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Learner(Workhorse):
    """One rank of a model that is trained, or only scored."""

    def build(self, spec: ModelSpec, place: Rank) -> None:
        """Load the model and, where it is trained, join its process group and start its engine."""
        self._settle(place)
        from safetensors.torch import load_file

        from xray_runtime.models.causal_lm import load_model
        from xray_runtime.models.heads import HeadedLM

        self.spec = spec
        module = HeadedLM(
            load_model(spec.directory),
            scalar_head=spec.new_head or spec.head is not None,
            trainable_layers=spec.trainable_layers,
            reference=None if spec.reference is None else load_model(spec.reference),
        )
        if spec.head is not None and module.scalar is not None:
            module.scalar.load_state_dict(load_file(spec.head))
        module.to(self.device)
        # No dropout anywhere: log-probabilities at rollout and at update must be of the same function.
        module.eval()
        self._trunks: dict[int, torch.Tensor] = {}
        self.engine = None
        self.module: Any = module
        if spec.training is not None:
            from xray_runtime.engines.zero import ZeroEngine, init_collectives

            init_collectives(place.rank, place.world_size, place.host, place.port, self.device)
            self.engine = ZeroEngine(module, spec.training, self.device)
            self.module = self.engine.module
        elif self.place.world_size > 1:
            raise ValueError(f"{self.place.role}: a frozen model has one Workhorse")
        self.module.eval()

    def release(self) -> None:
        super().release()
        self.engine = self.module = None
        self._trunks = {}
        gc.collect()

    def score(self, rows: Rows, width: int) -> Rows:
        """The objective's scores of `rows`, in their order; per-token ones are [B, `width`].

        Remembers the frozen trunk's output of rows that carry an `id`, for the updates that follow.
        """
        import torch

        self._trunks.clear()
        out: dict[str, np.ndarray] = {}
        with torch.no_grad():
            for index, batch in self._micro_batches(rows, self.spec.score_tokens // self.runtime.micro_batch_divisor):
                scores = self._run(self.spec.objective.score, batch)
                for name, tensor in scores.items():
                    array = tensor.float().cpu().numpy()[: len(index)]
                    shape = (num_rows(rows), width) if array.ndim == 2 else (num_rows(rows),)
                    column = out.setdefault(name, np.zeros(shape, dtype=np.float32))
                    if array.ndim == 2:
                        column[index, : array.shape[1]] = array
                    else:
                        column[index] = array
        return out

    def train(self, rows: Rows, totals: dict[str, float], lr: float) -> dict[str, float]:
        """One optimizer step over `rows`; returns this rank's sums for the log, and `grad_norm`."""
        import torch

        assert self.engine is not None
        assert self.spec.training is not None
        max_tokens = self.spec.training.engine.micro_batch_tokens // self.runtime.micro_batch_divisor
        sums: dict[str, torch.Tensor] = {}

        def losses() -> Iterator[torch.Tensor]:
            for index, batch in self._micro_batches(rows, max_tokens):
                loss, stats = self._run(self.spec.objective.loss, batch, totals)
                if not len(index):
                    yield loss * 0.0
                    continue
                for name, value in stats.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value
                yield loss

        norm = self.engine.step(losses(), lr)
        # Every rank knows the same norm; only rank 0 reports it, since reports are summed.
        return {name: float(v) for name, v in sums.items()} | {"grad_norm": norm if self.place.rank == 0 else 0.0}

    def _run(self, task: Callable[..., Any], batch: Any, *args: Any) -> Any:
        if self.engine is not None:
            return self.engine.forward(task, batch, *args)
        return self.module(task, batch, *args)

    def _micro_batches(self, rows: Rows, max_tokens: int) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """(row indices, trimmed tensors) of like-length micro-batches; the same number of them on every rank."""
        import torch

        widths = rows["lengths"]
        if "rejected_lengths" in rows:
            widths = 2 * np.maximum(widths, rows["rejected_lengths"])
        groups = micro_batches(widths.tolist(), max_tokens)
        count = len(groups)
        if self.place.world_size > 1:
            most = torch.tensor(count, device=self.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            count = int(most)
        for number in range(count):
            index = groups[number] if number < len(groups) else []
            # A rank that has run out still joins the collectives, with a row that counts nothing.
            yield index, self._tensors(take(rows, index or [0]))

    def _tensors(self, rows: Rows) -> dict[str, torch.Tensor]:
        import torch

        width = int(rows["lengths"].max())
        if "rejected_lengths" in rows:
            width = max(width, int(rows["rejected_lengths"].max()))
        batch = {}
        for name, column in rows.items():
            if name == "id":
                continue
            tensor = torch.from_numpy(np.ascontiguousarray(column[:, :width] if name.endswith("_ids") else column))
            batch[name] = tensor.to(self.device)
        if self.module.has_trunk and "id" in rows:
            batch["trunk"] = self._trunk(rows["id"].tolist(), batch["input_ids"])
        return batch

    def _trunk(self, ids: list[int], input_ids: torch.Tensor) -> torch.Tensor:
        import torch

        if any(i not in self._trunks for i in ids):
            states = self._run(type(self.module).trunk, input_ids)
            self._trunks |= dict(zip(ids, states, strict=True))
        width = input_ids.shape[1]
        states = [self._trunks[i] for i in ids]
        # Rows were cached at the width of another micro-batch; what lies beyond a row's own length never matters.
        return torch.stack([torch.nn.functional.pad(s[:width], (0, 0, 0, max(width - len(s), 0))) for s in states])

    def save_state(self, directory: Path) -> None:
        """This rank's part of a snapshot: `load_state` of it goes on to the same bits."""
        assert self.engine is not None
        self.engine.save(directory)

    def load_state(self, directory: Path) -> None:
        """Go on from a snapshot that `save_state` wrote with the same number of Workhorses."""
        assert self.engine is not None
        self.engine.load(directory)

    def export_weights(self, version: int) -> WeightUpdate | None:
        """Trainable weights under their Hugging Face names, in the object store; None but on rank 0."""
        from xray_runtime.weights.plasma import pack

        tensors = self._gathered(trainable_only=True)
        if self.place.rank == 0:
            return pack(tensors, version)
        for _ in tensors:
            pass
        return None

    def save(self, directory: Path, head_file: str | None) -> None:
        """Write the model in Hugging Face form; rank 0 writes, every rank joins the gathering."""
        from safetensors.torch import save_file

        from xray_runtime.models.causal_lm import save_weights

        weights = {name: t.detach().cpu().clone() for name, t in self._gathered(trainable_only=True)}
        head = {}
        if self.module.scalar is not None:
            parameters = dict(self.module.scalar.named_parameters())
            with self._gather(list(parameters.values())):
                head = {name: p.detach().cpu().clone() for name, p in parameters.items()}
        if self.place.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            save_weights(self.module.lm, weights, self.spec.directory, directory)
            if head_file is not None and head:
                (directory / head_file).parent.mkdir(exist_ok=True)
                save_file(head, directory / head_file)

    def _gather(self, parameters: list[Any]) -> Any:
        import contextlib

        return self.engine.gathered(parameters) if self.engine is not None else contextlib.nullcontext()

    def _gathered(self, *, trainable_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor), one at a time."""
        for name, parameter in self.module.lm.named_parameters():
            if parameter.requires_grad or not trainable_only:
                with self._gather([parameter]):
                    yield name, parameter.data


class Generator(Workhorse):
    """One vLLM engine."""

    _generator: VLLMGenerator | None = None

    def build(self, spec: GeneratorSpec, place: Rank) -> None:
        """Start vLLM on the checkpoint, or load the checkpoint into the vLLM of the model before."""
        self._settle(place)
        from xray_runtime.engines.vllm_generator import VLLMGenerator

        if self._generator is not None and self._generator.fits(spec.directory, spec.max_length):
            self._generator.restart(spec.directory)
        else:
            self._generator = VLLMGenerator(spec.directory, spec.max_length, self.device.type, self.runtime)

    def load_weights(self, update: WeightUpdate) -> int:
        """Verify and take over `update`; returns the version now held."""
        assert self._generator is not None
        self._generator.load(update)
        return self._generator.version

    def generate(self, rows: Rows, sampling: Sampling, version: int) -> Rows:
        """Sample a reply to each prompt (`input_ids`, `lengths`) with its `seed`; see `VLLMGenerator.generate`."""
        assert self._generator is not None
        prompts = [ids[:n].tolist() for ids, n in zip(rows["input_ids"], rows["lengths"], strict=True)]
        return self._generator.generate(prompts, rows["seed"].tolist(), sampling, version)
