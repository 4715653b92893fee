"""A Learner's side of the comparison of a published model with the one that it trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.workers.plain_errors import plain_errors

if TYPE_CHECKING:
    import torch

    from xray_runtime.workers.model_spec import ModelSpec
    from xray_runtime.workers.protocols import Tried


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

        from xray_runtime.config.engines import with_precision
        from xray_runtime.data.rows import text_rows
        from xray_runtime.models.objectives import ReferenceObjective
        from xray_runtime.models.published_check import tried_ids

        tried = tried_ids(self.spec.directory)
        rows, found = text_rows([row[:1] for row in tried], [row[1:] for row in tried]), dict[int, list[float]]()
        with torch.no_grad():
            for batch, scores in self.scorer.evaluate(ReferenceObjective(1.0).score, self._micro_batches(rows, 2**20)):
                of_rows = zip(batch.rows, scores["ref_logprobs"], strict=False)
                found |= {row: logprobs.float().tolist() for row, logprobs in of_rows}
        assert self.spec.training is not None
        precision = with_precision(self.spec.training, self.device.type).engine.precision
        return precision, [logprob for row in sorted(found) for logprob in found[row]]

    def check_saved(self, directory: Path, head_file: str | None, written: dict[str, str], tried: Tried) -> None:
        """`published_check.check_published` of what all ranks wrote."""
        from xray_runtime.models.published_check import check_published

        check_published(directory, self.spec.directory, written, tried, head_file)
