"""Streams: what a loss or an advantage may read by name, beside the fields that it always gets.

What a function reads is found by trying it on a `Probe` (`algorithms.checking`); only that is computed and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

COLUMN = "column "
"""Before the name of a column of the dataset's row."""
TOPK_POLICY_LOGPROBS = "topk_policy_logprobs"
TOPK = ("topk_ids", "topk_logprobs", TOPK_POLICY_LOGPROBS)
"""Streams of the sampler's likeliest tokens."""


class StreamError(ValueError):
    """A function reads a stream that is not there."""


def read(streams: Mapping[str, Tensor], name: str) -> Tensor:
    """The stream `name`. Raises StreamError: it is not there; one line."""
    if name in streams:
        return streams[name]
    raise StreamError(f"{name} was not read when the function was tried, so it is not there: read it in every call")


class TokenStreams:
    """Streams that losses and advantages may read: a number for each token, [B, T] for advantages, [R] for a loss.

    Each raises ValueError, one line, where nothing provides it.
    """

    streams: Mapping[str, Tensor]

    @property
    def old_logprobs(self) -> Tensor:
        """The trainer's own, before the rollout's first update."""
        return read(self.streams, "old_logprobs")

    @property
    def rollout_logprobs(self) -> Tensor:
        """The generator's own, of the policy that sampled."""
        return read(self.streams, "rollout_logprobs")

    @property
    def ref_logprobs(self) -> Tensor:
        """The reference's."""
        return read(self.streams, "ref_logprobs")

    @property
    def versions(self) -> Tensor:
        """int64: updates before the policy that sampled each token."""
        return read(self.streams, "versions")

    @property
    def turns(self) -> Tensor:
        """int64 from 0: which stretch of its reply, between what the policy only read, each token is of."""
        return read(self.streams, "turns")

    @property
    def teacher_logprobs(self) -> Tensor:
        """The teacher's, of the stage's `distillation`; the policy's own where it reads other text than the reply."""
        return read(self.streams, "teacher_logprobs")

    @property
    def topk_ids(self) -> Tensor:
        """int32 [R, k], or [B, T, k]: the sampler's `top_logprobs` likeliest tokens in the place of each token; −1
        where top-p, top-k or min-p left fewer."""
        return read(self.streams, "topk_ids")

    @property
    def topk_logprobs(self) -> Tensor:
        """[R, k], or [B, T, k]: the sampler's own of these; `logprobs.NO_LOGPROB` where there is none."""
        return read(self.streams, "topk_logprobs")

    def column(self, name: str) -> Tensor:
        """The numbers in a column of the dataset, float64: [B] for advantages, NaN where a row has none; for a loss,
        which allows no such row, each token has its row's."""
        return read(self.streams, COLUMN + name)


class Probe(Mapping[str, Tensor]):
    """Streams that note in `noted` which of them are read.

    Args:
        values: the streams.
        column: makes the column of a name; every name is one.
    """

    def __init__(self, values: Mapping[str, Tensor], column: Callable[[str], Tensor], noted: set[str]) -> None:
        self._values, self._column, self.noted = values, column, noted

    def __getitem__(self, name: str) -> Tensor:
        self.noted.add(name)
        return self._values[name] if name in self._values else self._column(name)

    def __contains__(self, name: object) -> bool:
        return name in self._values or str(name).startswith(COLUMN)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Probe:
        """The same with `change`, of a name and its values, of each."""
        changed = {name: change(name, values) for name, values in self._values.items()}
        return Probe(changed, lambda name: change(name, self._column(name)), self.noted)
