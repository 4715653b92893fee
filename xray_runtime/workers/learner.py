"""The Workhorse of a model that is trained, or only scored."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.batching import micro_batches
from xray_runtime.engines.topology import Topology
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.rows import Rows, num_rows, take
from xray_runtime.workers.workhorse import RankInfo, Workhorse, resolve_device

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.engine import Engine, MicroBatch
    from xray_runtime.weights.device_transfer import Transport
    from xray_runtime.weights.object_store import WeightUpdate
    from xray_runtime.workers.protocols import WorkhorseHandle


class Learner(Workhorse):
    """One rank of a model that is trained, or only scored."""

    def load_libraries(self) -> None:
        """Import the libraries that take seconds, before there is a model."""
        from xray_runtime.engines.training.zero import load_deepspeed
        from xray_runtime.models import causal_lm, heads  # noqa: F401

        load_deepspeed(resolve_device(self.runtime.device))

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        """Load the model and, where it is trained, join its process group and start its engine."""
        self._begin(rank_info)
        from safetensors.torch import load_file

        from xray_runtime.engines.engine import build_engine, build_scorer
        from xray_runtime.engines.offload import can_offload
        from xray_runtime.engines.training.zero import init_collectives
        from xray_runtime.models.adapters import Adapters
        from xray_runtime.models.causal_lm import load_model, skeleton
        from xray_runtime.models.heads import HeadedLM
        from xray_runtime.models.tensor_file import WEIGHTS_FILE

        self.spec = spec
        # A frozen trunk is compared with the reference's while both are whole.
        sharded = spec.trainable_layers is None and Topology.of(spec.layout).cuts
        lm = skeleton(str(spec.directory)) if sharded else load_model(spec.directory)
        lora = None if spec.training is None else spec.training.lora
        module = HeadedLM(
            lm,
            scalar_head=spec.new_head or spec.head is not None,
            trainable_layers=spec.trainable_layers,
            reference=None if spec.reference is None else load_model(spec.reference),
            adapters=None if lora is None else Adapters(lm, lora, spec.directory / WEIGHTS_FILE, spec.adapter_seed),
        )
        if spec.head is not None and module.scalar is not None:
            module.scalar.load_state_dict(load_file(spec.head))
        # No dropout anywhere: log-probabilities at rollout and at update must be of the same function.
        module.eval()
        self._trunks: dict[int, torch.Tensor] = {}
        if spec.training is not None or rank_info.world_size > 1:
            init_collectives(rank_info.rank, rank_info.world_size, rank_info.host, rank_info.port, self.device)
        self.engine: Engine | None = None
        self.scorer: Any
        with can_offload(self.runtime.trainer_sleeps and spec.training is not None):
            if not sharded:
                module.to(self.device)
            if spec.training is not None:
                self.engine = self.scorer = build_engine(module, spec.training, spec.directory, self.device)
            else:
                self.scorer = build_scorer(module, spec.frozen, spec.directory, self.device)
        self.module: Any = self.scorer.module
        self.module.eval()

    def unload(self) -> None:
        super().unload()
        self.engine = self.scorer = self.module = None
        self._trunks = {}
        gc.collect()

    def sleep(self) -> None:
        """Free this model's GPU memory for others until `wake_up`; with `runtime.trainer_sleeps`."""
        from xray_runtime.engines.offload import offload

        self._trunks.clear()
        offload()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        from xray_runtime.engines.offload import onload

        onload()

    def score(self, rows: Rows, width: int, at_once: int = 1) -> Rows:
        """The objective's scores of `rows`, in their order; per-token ones are [B, `width`].

        Remembers the frozen trunk's output of rows that carry an `id`, for the updates that follow. `at_once`: how many
        models work at the same time, this one included; they share `runtime.threads`.
        """
        with self._share_threads(at_once):
            return self._score(rows, width)

    def _score(self, rows: Rows, width: int) -> Rows:
        import torch

        self._trunks.clear()
        out: dict[str, np.ndarray] = {}
        batches = self._micro_batches(rows, self.spec.score_tokens // self.runtime.micro_batch_divisor)
        with torch.no_grad():
            for batch, scores in self.scorer.evaluate(self.spec.objective.score, batches):
                index = batch.rows
                for name, tensor in scores.items():
                    array = tensor.float().cpu().numpy()[: len(index)]
                    shape = (num_rows(rows), width) if array.ndim == 2 else (num_rows(rows),)
                    column = out.setdefault(name, np.zeros(shape, dtype=np.float32))
                    if array.ndim == 2:
                        column[index, : array.shape[1]] = array
                    else:
                        column[index] = array
        return out

    def train(self, rows: Rows, totals: dict[str, float], lr: float, at_once: int = 1) -> dict[str, float]:
        """One optimizer step over `rows`; returns this rank's sums for the log, and `grad_norm`. `at_once` as above."""
        with self._share_threads(at_once):
            return self._train(rows, totals, lr)

    def _train(self, rows: Rows, totals: dict[str, float], lr: float) -> dict[str, float]:
        import torch

        assert self.engine is not None
        assert self.spec.training is not None
        max_tokens = self.spec.training.engine.micro_batch_tokens // self.runtime.micro_batch_divisor
        sums: dict[str, torch.Tensor] = {}

        def loss(batch: MicroBatch) -> torch.Tensor:
            value, stats = self.scorer.forward(self.spec.objective.loss, batch.tensors, totals)
            if not batch.rows:
                return value * 0.0
            for name, stat in stats.items():
                sums[name] = sums.get(name, torch.zeros_like(stat)) + stat
            return value

        norm = self.engine.step(loss, self._micro_batches(rows, max_tokens), lr)
        return {name: float(v) for name, v in sums.items()} | {"grad_norm": norm}

    def _micro_batches(self, rows: Rows, max_tokens: int) -> Iterator[MicroBatch]:
        """Rows of like length, trimmed to it; the same number of micro-batches on every rank."""
        import torch

        from xray_runtime.engines.engine import MicroBatch

        widths = rows["lengths"]
        if "rejected_lengths" in rows:
            widths = 2 * np.maximum(widths, rows["rejected_lengths"])
        groups = micro_batches(widths.tolist(), max_tokens)
        count = len(groups)
        if self.rank_info.world_size > 1:
            most = torch.tensor(count, device=self.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            count = int(most)
        for number in range(count):
            index = groups[number] if number < len(groups) else []
            # A rank that has run out still joins the collectives, with a row that counts nothing.
            yield MicroBatch(index, self._tensors(take(rows, index or [0])))

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
            states = self.scorer.forward(type(self.module).trunk, input_ids)
            self._trunks |= dict(zip(ids, states, strict=True))
        width = input_ids.shape[1]
        states = [self._trunks[i] for i in ids]
        # Rows were cached at the width of another micro-batch; what lies beyond a row's own length never matters.
        return torch.stack([torch.nn.functional.pad(s[:width], (0, 0, 0, max(width - len(s), 0))) for s in states])

    def save_state(self, directory: Path) -> None:
        """This rank's shard of a snapshot: `load_state` continues with the same bits; in another layout, nearly so."""
        assert self.engine is not None
        self.engine.save(directory)

    def load_state(self, directory: Path) -> None:
        """Go on from a snapshot that `save_state` wrote, under whichever layout."""
        assert self.engine is not None
        self.engine.load(directory)

    def export_weights(self, version: int) -> WeightUpdate | None:
        """This pipeline stage's trained weights under their Hugging Face names; None but on one of its ranks."""
        from xray_runtime.weights.object_store import pack

        tensors = self._weights(head=False)
        if self.engine is not None and self.engine.writes:
            return pack(tensors, version)
        for _ in tensors:
            pass
        return None

    def send_weights(
        self,
        version: int,
        transport: Transport,
        meet: tuple[str, int],
        receivers: list[WorkhorseHandle],
        per_replica: int,
    ) -> None:
        """Trainable weights from GPU to GPU; see `weights.device_transfer.send`."""
        from xray_runtime.weights.device_transfer import send

        # Gathered once only to be measured: no layout knows whole shapes otherwise.
        metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._weights(head=False)]
        tensors = functools.partial(self._weights, head=False)
        send(transport, tensors, metadata, self.rank_info.rank, meet, receivers, per_replica, version)

    def begin_save(self, directory: Path) -> None:
        """Write the model in Hugging Face form as it was when it was loaded."""
        from xray_runtime.models.causal_lm import copy_model

        copy_model(self.spec.directory, directory)

    def save(self, directory: Path, head_file: str | None) -> list[str]:
        """Write what was trained into the model that `begin_save` made there, and the scalar head into `head_file`.

        Every rank joins the gathering, some write; one tensor at a time. Returns the names of what this one wrote
        into the model.
        """
        from safetensors.torch import save_file

        from xray_runtime.models.heads import HEAD_PREFIX
        from xray_runtime.models.tensor_file import WEIGHTS_FILE, TensorFile

        assert self.engine is not None
        if not self.engine.writes:
            for _ in self._weights(head=True):
                pass
            return []
        head, written = {}, []
        with TensorFile(directory / WEIGHTS_FILE) as file:
            for name, tensor in self._weights(head=True):
                if name.startswith(HEAD_PREFIX):
                    head[name.removeprefix(HEAD_PREFIX)] = tensor.detach().cpu().clone()
                else:
                    file.write(name, tensor)
                    written.append(name)
        if head_file is not None and head:
            (directory / head_file).parent.mkdir(exist_ok=True)
            save_file(head, directory / head_file)
        return written

    def _weights(self, *, head: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of what is trained, one at a time."""
        from xray_runtime.models.heads import HEAD_PREFIX

        assert self.engine is not None
        for name, tensor in self.engine.weights():
            if head or not name.startswith(HEAD_PREFIX):
                yield name, tensor
