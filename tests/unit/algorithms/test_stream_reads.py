"""Streams: what a function reads is noted and handed over; what is not there is refused in one line."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.estimators import AdvantageInputs
from xray_runtime.algorithms.losses import PolicyLossInputs
from xray_runtime.algorithms.streams import Probe, StreamError, read

NONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ref_logprobs",
            "ref_logprobs was not read when the function was tried, so it is not there: read it in every call",
        ),
    ],
)
def test_what_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(StreamError, match=f"^{re.escape(message)}$"):
        read({"old_logprobs": NONE}, name)


def test_a_column_is_the_stream_of_its_name() -> None:
    streams = {"column level": torch.tensor([3.0]), "level": NONE}
    tokens = PolicyLossInputs(NONE, NONE, NONE, None, 0.2, 0.2, None, streams)
    assert tokens.column("level").tolist() == [3.0]
    rollout = AdvantageInputs(NONE, NONE, NONE, NONE, NONE, NONE, 1.0, 1.0, streams)
    assert rollout.column("level").tolist() == [3.0]


def test_a_probe_notes_what_is_read() -> None:
    def length(name: str) -> Tensor:
        return torch.tensor([len(name)])

    noted: set[str] = set()
    probe = Probe({"versions": torch.tensor([3, 4]), "turns": torch.tensor([5])}, length, noted)
    assert [name in probe for name in ("versions", "column level", "level", "ref_logprobs")] == [
        True,
        True,
        False,
        False,
    ]
    assert (list(probe), len(probe), noted) == (["versions", "turns"], 2, set())
    assert (probe["versions"].tolist(), probe["column level"].tolist()) == ([3, 4], [12])
    assert noted == {"versions", "column level"}


def test_a_changed_probe_notes_in_the_same_place() -> None:
    noted: set[str] = set()
    probe = Probe({"turns": torch.tensor([5])}, lambda name: torch.tensor([len(name)]), noted)
    changed = probe.map(lambda name, x: 100 * len(name) + x)
    assert (changed["turns"].tolist(), changed["column level"].tolist()) == ([505], [1212])
    assert noted == {"turns", "column level"}
