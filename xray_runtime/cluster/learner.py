"""The Workhorse of a model that is trained or only scores."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.micro_batches import as_arrays, as_tensors, joined, row_groups
from xray_runtime.cluster.plain_errors import plain_errors
from xray_runtime.cluster.published_checks import PublishedChecks
from xray_runtime.cluster.trunk_memory import TrunkMemory
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.data.batch import Scores, StepTotals, TextBatch
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.processes import return_freed_memory
from xray_runtime.kernel.signs import part_done
from xray_runtime.kernel.store.shards import read_shards, shard_problem

if TYPE_CHECKING:
    import torch

    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.protocols import WorkhorseHandle
    from xray_runtime.engines.engine import Engine, MicroBatch
    from xray_runtime.engines.generator import DirectSender
    from xray_runtime.engines.sync.object_store import WeightUpdate
    from xray_runtime.engines.sync.route import Route
    from xray_runtime.engines.sync.shared_memory import SharedWriter
    from xray_runtime.models.objectives import Objective


@plain_errors
class Learner(PublishedChecks, Workhorse):
    """One rank of a model that is trained or only scores."""

    engine: Engine | None = None
    scorer: Any = None
    _shared: SharedWriter | None = None
    _sender: DirectSender | None = None
    _trunks: TrunkMemory

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        """Load the model; if it is trained, join its process group and start its engine."""
        self._begin(rank_info)
        from safetensors.torch import load_file

        from xray_runtime.engines import process_group
        from xray_runtime.engines.offload import can_offload
        from xray_runtime.engines.shard_loading import skeleton_of
        from xray_runtime.engines.trainer import build_engine, build_scorer
        from xray_runtime.models.causal_lm import load_tokenizer, published
        from xray_runtime.models.family import family_of
        from xray_runtime.models.heads import HeadedLM
        from xray_runtime.models.pictures import PictureReader
        from xray_runtime.models.weight_files import same_trunk

        self.spec = spec
        ranks = rank_info.rank, rank_info.world_size
        for role, branch in spec.branches.items():
            if not same_trunk(spec.directory, branch.directory, spec.trainable_layers or 0, *ranks):
                raise ValueError(f"{role} does not share the policy's frozen trunk")
        lm = skeleton_of(spec.directory)
        self._published: Any = functools.partial(published, lm)
        module = HeadedLM(
            lm,
            scalar_head=spec.new_head or spec.head is not None,
            trainable_layers=spec.trainable_layers,
            branches=(model.load(role) for role, model in spec.branches.items()),
            adapters=spec.load_adapters(lm),
        )
        if spec.head is not None and module.scalar is not None:
            module.scalar.load_state_dict(load_file(spec.head))
        config: Any = lm.config
        if family_of(config.model_type).pictures is not None:
            module.pictures = PictureReader(lm, spec.directory, spec.pictures, load_tokenizer(spec.directory))
        # No dropout: rollout and update must compute the same log-probabilities.
        module.eval()
        self._trunks = TrunkMemory()
        if spec.training is not None or rank_info.world_size > 1:
            process_group.join(rank_info.rank, rank_info.world_size, rank_info.host, rank_info.port, self.device)
        with can_offload(self.runtime.trainer_sleeps and spec.training is not None):
            if spec.training is not None:
                self.engine = self.scorer = build_engine(module, spec.training, spec.directory, self.device)
            else:
                self.scorer = build_scorer(module, spec.frozen, spec.directory, self.device)
        self.module: Any = self.scorer.module
        self.module.eval()
        self._release()

    def unload(self) -> None:
        super().unload()
        if self.scorer is not None:
            self.scorer.close()
        # `_published` refers to the model, whose memory would stay.
        self.engine = self.scorer = self.module = self._published = self._shared = self._sender = None
        self._trunks = TrunkMemory()
        return_freed_memory()

    def sleep(self) -> None:
        """Free this model's GPU memory until `wake_up`; with `runtime.trainer_sleeps`."""
        from xray_runtime.engines.offload import offload

        self._trunks.forget()
        offload()

    def wake_up(self) -> None:
        from xray_runtime.engines.offload import onload

        onload()

    def release_memory(self) -> None:
        """Return the memory that this model only needs while it computes."""
        from xray_runtime.engines.offload import release

        self._trunks.forget()
        release()
        return_freed_memory()

    def score(self, rows: TextBatch) -> Scores:
        """The objective's scores of `rows`, in their order.

        Remembers the output of a frozen trunk for updates on rows with the same `id`, and for scoring the same rows.
        """
        if self.module.has_trunk:
            rows = self._trunks.identified(rows)
        return self._scores(self.spec.objective, rows)

    def reference(self, rows: TextBatch) -> Scores:
        """The scores of `rows` by `spec.reference`, with the adapters off."""
        assert self.spec.reference is not None
        with self.module.adapters.off():
            return self._scores(self.spec.reference, rows)

    def _scores(self, objective: Objective, rows: TextBatch) -> Scores:
        import torch

        batches = self._micro_batches(rows, self.spec.score_tokens)
        with self._turn(self.spec.scoring_at_once), torch.no_grad():
            passes = self.scorer.evaluate(objective.score, batches)
            return joined((batch, as_arrays(scores)) for batch, scores in passes)

    def train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        """One optimizer step over `rows`; answers with this rank's sums for the log, the number of tokens that it
        computed, and `grad_norm`.

        If this rank's loss or the whole gradient is not finite, no rank steps, and `grad_norm` is not finite. Raises
        NonFiniteError if a weight is not finite.
        """
        import torch

        from xray_runtime.models.objectives import num_computed_tokens, training_loss

        assert self.engine is not None
        assert self.spec.training is not None
        layout = self.spec.training.engine
        outputs: dict[int, dict[str, torch.Tensor]] = {}

        def loss(batch: MicroBatch) -> torch.Tensor:
            made = self.scorer.forward(training_loss, self.spec.objective, batch.tensors, totals)
            # Other stages of a pipeline have no loss.
            part_done(common=layout.pipeline_parallel == 1)
            value: torch.Tensor = made.loss
            if not batch.rows:
                return value * 0.0
            num_tokens = torch.tensor(num_computed_tokens(self.module, batch.tensors))
            outputs[batch.number] = made.sums | {"computed_tokens": num_tokens}
            finite = (
                torch.stack([value.detach().float(), *(part.float() for part in made.sums.values())]).isfinite().all()
            )
            # NaN reaches every rank through the gradient norm, so that none of them steps.
            return value * torch.where(finite, 1.0, math.nan)

        batches = self._micro_batches(rows, layout.micro_batch_tokens)
        with self._turn(self.spec.training_at_once):
            norm = self.engine.step(loss, batches, lr)
            if not math.isfinite(norm):
                deque(self._weights(head=True), maxlen=0)
        in_order = [outputs[number] for number in sorted(outputs)] or [{}]
        sums = {name: float(sum(stats[name] for stats in in_order)) for name in in_order[0]}
        return sums | {"grad_norm": norm}

    def _micro_batches(self, rows: TextBatch, max_tokens: int) -> Iterator[MicroBatch]:
        """Micro-batches of rows with the same prompts or similar lengths; the same number on every rank."""
        import torch

        from xray_runtime.engines.engine import MicroBatch
        from xray_runtime.engines.threads import micro_batches_at_once

        at_once = micro_batches_at_once(self.module, rows) if self.scorer.threaded else 1
        max_tokens //= self.runtime.micro_batch_divisor
        groups = row_groups(rows, max_tokens, packed=self.module.packs, at_once=at_once)
        count = len(groups)
        if self.rank_info.world_size > 1:
            most = torch.tensor(count, device=self.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            count = int(most)
        for number in range(count):
            index = groups[number] if number < len(groups) else []
            # A rank without rows still joins the collectives, with a row of weight 0.
            batch = rows.take(index or [0])
            tensors = as_tensors(batch, self.device)
            if self.module.has_trunk and "id" in batch:
                tensors = self._trunks.filled(batch, tensors, self.scorer, self.rank_info.world_size)
            part_done(common=True)
            yield MicroBatch(number, index, tensors)
        part_done(common=True)

    def save_state(self, directory: Path) -> None:
        """Write this rank's shard of a snapshot. `load_state` restores the same bits under the same layout."""
        assert self.engine is not None
        try:
            self.engine.save(directory)
        except NonFiniteError as error:
            raise NonFiniteError(f"{self._who}: {error}") from None

    def check_state(self, directory: Path, number: int, checkers: int) -> str | None:
        """Why a snapshot must not be loaded, if this rank finds it: it reads every `checkers`-th shard."""
        problems = (shard_problem(directory, shard) for shard in read_shards(directory)[number::checkers])
        return next((problem for problem in problems if problem is not None), None)

    def load_state(self, directory: Path) -> None:
        """Continue from a snapshot of `save_state`, written under any layout."""
        assert self.engine is not None
        self.engine.load(directory)

    def export_weights(self, version: int, shared: bool, dtype: str | None = None, merged: bool = True) -> WeightUpdate:
        """This rank's share of its pipeline stage's trained weights, by Hugging Face name.

        Args:
            shared: in memory that readers on this machine map, not in the object store.
            dtype: to send them in; None: as they are.
            merged: adapters as whole matrices; else under peft's names.
        """
        from xray_runtime.engines.sync.object_store import pack
        from xray_runtime.engines.sync.shared_memory import SharedWriter

        assert self.engine is not None
        self._shared = self._shared or SharedWriter()
        with self._turn():
            weights = self._weights(head=False, merged=merged)
            return pack(weights, version, self._shared if shared else None, dtype, self.engine.turn)

    def weight_names(self) -> set[str]:
        """Names of the trained weights; a collective."""
        return {name for name, _ in self._weights(head=False)}

    def send_weights(
        self, version: int, route: Route, meet: tuple[str, int], ranks: list[WorkhorseHandle], per_replica: int
    ) -> None:
        """Send trainable weights from GPU to GPU; see `engines.generator.DirectSender`."""
        from xray_runtime.engines.generator import Receivers, generator

        if self._sender is None:
            tensors = functools.partial(self._weights, head=False)
            receivers = Receivers(len(ranks), per_replica, functools.partial(_receive, ranks))
            plug = generator(route.engine)
            self._sender = plug.sender(route.transport, tensors, self.rank_info.rank, receivers)
        with self._turn():
            self._sender.send(version, meet)

    def begin_save(self, directory: Path, number: int, copiers: int) -> None:
        """Write this rank's part, `number` of `copiers`, of the model in Hugging Face form as it was loaded."""
        from xray_runtime.models.causal_lm import copy_model, copy_small_files

        if not self.spec.publishes_weights:
            directory.mkdir(parents=True, exist_ok=True)
            if not number:
                copy_small_files(self.spec.directory, directory)
            return
        copy_model(self.spec.directory, directory, number, copiers)

    def save(self, directory: Path, head_file: str | None) -> dict[str, str]:
        """Write trained weights into the model that `begin_save` wrote, and the scalar head into `head_file`; returns
        names and digests of what this rank wrote. Every rank joins the gathering, tensor by tensor; ranks with the same
        tensors take turns by file."""
        from safetensors.torch import save_file

        from xray_runtime.models.weight_files import HEAD_PREFIX, overwrite, tensor_digest

        assert self.engine is not None
        head: dict[str, torch.Tensor] = {}

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            merged = self.spec.publishes_weights
            for name, tensor in self._weights(head=True, merged=merged):
                if name.startswith(HEAD_PREFIX):
                    head[name.removeprefix(HEAD_PREFIX)] = tensor.detach().cpu().clone()
                elif merged:
                    yield name, tensor

        written = overwrite(directory, weights(), *self.engine.turn)
        number, _ = self.engine.turn
        if head_file is not None and head and number == 0:
            (directory / head_file).parent.mkdir(exist_ok=True)
            save_file(head, directory / head_file)
            written |= {HEAD_PREFIX + name: tensor_digest(tensor) for name, tensor in head.items()}
        return written

    def finish_save(self, directory: Path, number: int, checkers: int) -> dict[str, str]:
        """`weight_files.checked_digests` of this rank's part of a saved model."""
        from xray_runtime.models.weight_files import checked_digests

        return checked_digests(directory, number, checkers)

    @property
    def _who(self) -> str:
        return f"{self.rank_info.role!r}, rank {self.rank_info.rank}"

    def _weights(self, *, head: bool, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of trained weights, one at a time; see `Engine.weights`. Raises
        NonFiniteError."""
        from xray_runtime.algorithms.finite import all_finite
        from xray_runtime.models.weight_files import HEAD_PREFIX

        assert self.engine is not None
        for name, tensor in self.engine.weights(merged=merged):
            if not all_finite(tensor):
                raise NonFiniteError(f"{self._who}: the weight {name} has numbers that are not finite")
            if not name.startswith(HEAD_PREFIX):
                yield from self._published(name, tensor).items() if merged else [(name, tensor)]
            elif head:
                yield name, tensor


def _receive(ranks: list[WorkhorseHandle], step: str, infos: list[dict[str, Any]], version: int) -> None:
    import ray

    ray.get([rank.receive.remote(step, info, version) for rank, info in zip(ranks, infos, strict=True)])
