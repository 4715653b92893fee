"""Handles and weights: what a call returns, and what can be weighed."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import xray
from tests.unit.kernel.graph.calls import brevity, parts, refused
from xray_runtime.kernel.graph.graph import Graph, OnlyPlannedError
from xray_runtime.kernel.graph.handles import reward


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ("no colon", "'no colon'"),
        ("a:b.c", "'a:b.c'"),
        (3, "3"),
        (functools.partial(brevity), f"{functools.partial(brevity)!r}"),
    ],
    ids=["no colon", "a dotted name", "a number", "a partial"],  # an address would differ from worker to worker
)
def test_a_reward_must_be_a_function(function: Any, shown: str) -> None:
    assert refused(lambda: reward(function)) == (
        f"reward: {shown} is not allowed: must be a function, 'module:function', or reward models; or leave it "
        "out and set another kind's field, such as verifier"
    )


def test_only_numbers_weigh(graph: Graph) -> None:
    _, _, kind = parts()
    with pytest.raises(TypeError):
        kind * "2"  # type: ignore[operator]


def test_weights_are_for_rewards(graph: Graph) -> None:
    data, base, _ = parts()
    assert "must be a Model, the result of a stage" in refused(lambda: xray.sft(0.5 * base, data))
    seen = refused(lambda: xray.compare(base, base, data, seen=[0.5 * data]))
    assert seen.startswith("compare.seen.0: Weighted(")
    assert seen.endswith("must be an Artifact, the result of a stage")


def test_a_plan_has_no_results(graph: Graph) -> None:
    base = xray.base(model="x")
    with pytest.raises(OnlyPlannedError, match=r"^base: has no result, because this graph is only planned$") as caught:
        base.result()
    assert caught.value.stage == "base"
    assert isinstance(caught.value, RuntimeError)
