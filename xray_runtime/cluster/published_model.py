"""A WholeModel's side of the comparisons of published files with the trained model: when they are written and when
generators read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xray_runtime.cluster.plain_errors import plain_errors
from xray_runtime.cluster.protocols import Ref, WorkhorseHandle


@plain_errors
class PublishedModel:
    """Methods of a `WholeModel`."""

    _spec: Any
    _workhorses: list[WorkhorseHandle]
    _call: Callable[[Callable[[WorkhorseHandle], Ref[Any]]], list[Any]]
    _get: Callable[[list[Ref[Any]], list[int]], list[Any]]

    def readings(self) -> dict[str, float]:
        """`Generation.readings` of the replica that differs most."""
        found: dict[str, float] = {}
        for each in self._call(lambda w: w.readings.remote()):
            found |= {name: max(nats, found.get(name, 0.0)) for name, nats in each.items()}
        return found

    def _check_saved(self, directory: Path, head_file: str | None, written: dict[str, str], here: list[int]) -> None:
        """`published_check.check_published`, by the first rank on this node, or in this process; then publish what the
        trainer computed."""
        from xray_runtime.models.published_check import check_published, write_tried

        answers = self._call(lambda w: w.tried_logprobs.remote())
        tried = next((each for each in answers if each[1]), answers[0])
        if here:
            self._get([self._workhorses[here[0]].check_saved.remote(directory, head_file, written, tried)], here[:1])
        else:
            check_published(directory, self._spec.directory, written, tried, head_file)
        write_tried(directory, *tried)
