"""A Learner's side of the comparison of a published model with the one that it trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.plain_errors import plain_errors

if TYPE_CHECKING:
    import torch

    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.protocols import Tried


@plain_errors
class PublishedChecks:
    """Methods of a `Learner`."""

    spec: ModelSpec
    scorer: Any
    device: torch.device
    _micro_batches: Any

    def tried_logprobs(self) -> Tried:
        """The trained model's answer to `published_check.tried_ids`; a collective."""
        import torch

        from xray_runtime.cluster.micro_batches import as_arrays, joined
        from xray_runtime.data.batch import TextBatch
        from xray_runtime.models.objectives import ReferenceObjective
        from xray_runtime.models.published_check import tried_ids

        tried = tried_ids(self.spec.directory)
        rows = TextBatch.of([row[:1] for row in tried], [row[1:] for row in tried])
        with torch.no_grad():
            passes = self.scorer.evaluate(ReferenceObjective(1.0).score, self._micro_batches(rows, 2**20))
            scores = joined((batch, as_arrays(output)) for batch, output in passes)
        assert self.spec.training is not None
        precision = self.spec.training.resolved(self.device.type).engine.precision
        return precision, scores.ref_logprobs.values.tolist() if len(scores) else []

    def check_saved(self, directory: Path, head_file: str | None, written: dict[str, str], tried: Tried) -> None:
        """`published_check.check_published` of what all ranks wrote."""
        from xray_runtime.models.published_check import check_published

        check_published(directory, self.spec.directory, written, tried, head_file)
