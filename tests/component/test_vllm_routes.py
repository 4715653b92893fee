"""Rows of vLLM's steps, dealt out to requests: some wait, some are preempted and computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class Router:
    def __init__(self, num_experts: int) -> None:
        self.global_num_experts = num_experts


def requests(num_experts: int) -> Any:
    # Only the worker that runs this needs vLLM.
    from xray_runtime.engines.generators.vllm.routes import RecordedRequests

    return RecordedRequests([Router(num_experts)] * 2)


def step(recorded: Any, *rows: tuple[str, int, int], ids: list[int]) -> None:
    """A step of two layers, in which each token takes an expert: its id in the first layer, one more in the second."""
    first = torch.tensor(ids)[:, None]
    recorded.step = {layer: (first / 10 + layer, first + layer) for layer in range(2)}
    recorded.split_step(iter(rows))


def test_each_request_gets_its_own_tokens_in_order() -> None:
    recorded = requests(256)
    # Two prompts, then a token of each in another order, then a token of one; row 6 pads.
    step(recorded, ("0", 0, 3), ("1", 0, 2), ids=[1, 2, 3, 4, 5, 99])
    step(recorded, ("1", 2, 1), ("0", 3, 1), ids=[6, 7])
    step(recorded, ("1", 3, 1), ids=[8])
    one, other = recorded.of("0", 4), recorded.of("1", 3)
    assert one.ids.dtype == "uint16"
    assert one.ids[:, :, 0].tolist() == [[1, 2], [2, 3], [3, 4], [7, 8]]
    assert one.weights[:, 1, 0].tolist() == pytest.approx([1.1, 1.2, 1.3, 1.7])
    assert other.ids[:, 0, 0].tolist() == [4, 5, 6]


def test_a_preempted_request_keeps_the_routes_that_it_was_sampled_by() -> None:
    recorded = requests(8)
    step(recorded, ("0", 0, 2), ids=[1, 2])
    step(recorded, ("0", 2, 1), ids=[3])
    step(recorded, ("0", 0, 4), ids=[5, 5, 5, 4])
    found = recorded.of("0", 4).ids
    assert found.dtype == "uint8"
    assert found[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_tokens_without_routes_are_an_error() -> None:
    recorded = requests(8)
    with pytest.raises(RuntimeError, match="vLLM took a prefix from its cache"):
        step(recorded, ("0", 32, 2), ids=[1, 2])
    recorded.step = {0: (torch.ones(1, 1), torch.ones(1, 1))}
    with pytest.raises(RuntimeError, match="vLLM chose experts where they cannot be recorded"):
        recorded.split_step(iter([("0", 0, 1)]))
