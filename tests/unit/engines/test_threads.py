"""Micro-batches on threads of their own: in order, two at a time, to the same bits whichever is first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from xray_runtime.data.batch import PairBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.threads import SMALLEST, add_gradients, in_threads, micro_batches_at_once

SECONDS = 30


@pytest.fixture
def four_threads(torch_threads: Callable[[int], None]) -> None:
    torch_threads(4)


@pytest.fixture
def one_thread(torch_threads: Callable[[int], None]) -> None:
    torch_threads(1)


def test_two_run_at_a_time_on_half_of_the_threads_each(four_threads: None) -> None:
    met = threading.Barrier(2)
    seen: dict[int, tuple[int, bool]] = {}

    def task(number: int) -> int:
        met.wait(SECONDS)  # broken if the other of a pair does not run
        time.sleep(0.02 * (number % 2 == 0))  # the second of a pair ends first
        seen[number] = torch.get_num_threads(), torch.is_grad_enabled()
        return number * number

    with torch.no_grad():
        assert list(in_threads(task, range(6))) == [(n, n * n) for n in range(6)]
    assert seen == dict.fromkeys(range(6), (2, False))
    assert torch.get_num_threads() == 4


def test_a_single_one_has_all_threads(four_threads: None) -> None:
    assert list(in_threads(lambda _: (torch.get_num_threads(), threading.get_ident()), range(1))) == [
        (0, (4, threading.get_ident()))
    ]


def test_one_thread_takes_one_at_a_time(one_thread: None) -> None:
    assert dict(in_threads(lambda _: threading.get_ident(), range(3))) == dict.fromkeys(range(3), threading.get_ident())


def test_a_failure_waits_for_the_other(four_threads: None) -> None:
    ended = []

    def task(number: int) -> None:
        if number == 0:
            raise RuntimeError("out of memory")
        time.sleep(0.1)
        ended.append(number)

    with pytest.raises(RuntimeError, match="out of memory"):
        list(in_threads(task, range(4)))
    assert ended == [1]


@pytest.mark.parametrize("late", [0, 1], ids=["the first ends last", "the second ends last"])
def test_gradients_are_added_in_order(four_threads: None, late: int) -> None:
    """Float32 sums depend on their order, so these numbers tell it: (1e8 + 1) − 1e8 is not (1e8 − 1e8) + 1."""
    weight, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    scales = [1e8, 1.0, -1e8, 0.5]

    def loss(number: int) -> torch.Tensor:
        time.sleep(0.02 * (number % 2 == late))
        return (weight * scales[number]).sum()

    add_gradients(loss, [weight, unused], range(4))
    expected = torch.zeros(1)
    for scale in scales:
        expected += torch.tensor([scale])
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert unused.grad is None


def test_gradients_of_a_shared_model_equal_those_of_the_whole_batch(four_threads: None) -> None:
    """Largest difference 1e-14, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    rows = torch.randn(20, 8, dtype=torch.float64)
    model(rows).square().sum().backward()
    whole = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    add_gradients(lambda part: model(part).square().sum(), list(model.parameters()), rows.split(3))
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13)


def test_little_work_stays_whole(four_threads: None, one_thread: None) -> None:
    model = nn.Linear(64, 64, bias=False)
    enough = SMALLEST // 64**2
    rows = [TextBatch(input_ids=Ragged.of([[0] * 5, [0] * (tokens - 5)])) for tokens in (enough - 1, enough)]
    pairs = PairBatch(input_ids=rows[0].input_ids, rejected_ids=Ragged.of([[0], []]))
    assert micro_batches_at_once(model, rows[1]) == 1  # one thread
    torch.set_num_threads(3)
    assert [micro_batches_at_once(model, some) for some in (*rows, pairs)] == [1, 2, 2]
