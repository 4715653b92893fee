"""A caller's rows through a WholeModel to its Workhorses and back, all in this process: no Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xray_runtime.cluster import handles
from xray_runtime.cluster.handles import INLINE_BYTES, ModelProxy
from xray_runtime.cluster.protocols import Ready
from xray_runtime.cluster.whole_model import WholeModel
from xray_runtime.data.batch import PolicyBatch, PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.engines.topology import Topology

SAMPLING = Sampling(4, 1.0, (1,), 0)


class Calls:
    """`calls.NAME.remote(…)` calls `target.NAME(…)`; a reference among its arguments is read, as Ray does."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        function: Callable[..., Any] = getattr(self._target, name)

        class Method:
            def remote(_, *args: Any) -> Ready[Any]:
                given = [arg.value if isinstance(arg, Ready) else arg for arg in args]
                return Ready(function(*given))

        return Method()


class Workhorse:
    """Answers with the rows' numbers."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def score(self, rows: TextBatch) -> Scores:
        self.given.append(rows)
        return Scores(nll=rows.input_ids.values[rows.input_ids.offsets[:-1]] * 10.0)

    def train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        self.given.append(rows)
        return {"policy_loss": float(len(rows)), "grad_norm": 2.0}

    def generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        self.given.append(rows)
        ids = Ragged.of([seed] for seed in rows.seed)
        return ReplyBatch(response_ids=ids, rollout_logprobs=ids.like(ids.values * 0.0), ended=rows.seed > 0)


def opened(monkeypatch: pytest.MonkeyPatch, layout: Any, num_workhorses: int) -> tuple[ModelProxy, list[Workhorse]]:
    monkeypatch.setattr(handles.ray, "put", Ready)
    workhorses = [Workhorse() for _ in range(num_workhorses)]
    model: Any = WholeModel()
    model._role, model._workhorses = "policy", [Calls(each) for each in workhorses]
    samples = isinstance(layout, GeneratorConfig)
    model._no_steps()
    model._num_replicas = num_workhorses if samples else 1
    model._topology = Topology(data=num_workhorses) if samples else Topology.of(layout)
    model._get = lambda refs, ranks=None: [ref.value for ref in refs]
    return ModelProxy(Calls(model), "policy", layout, num_workhorses), workhorses  # type: ignore[arg-type]


def rows_of(count: int, length: int = 3) -> PolicyBatch:
    rows = TextBatch.of([[row] for row in range(count)], [[row] * length for row in range(count)])
    return rows.as_kind(PolicyBatch, branches=Ragged.of([[1]] * count), id=np.arange(count))


@pytest.mark.parametrize("num_workhorses", [1, 2, 3])
def test_answers_come_back_in_the_order_of_the_rows(monkeypatch: pytest.MonkeyPatch, num_workhorses: int) -> None:
    proxy, workhorses = opened(monkeypatch, FrozenConfig(num_workhorses=num_workhorses), num_workhorses)
    rows = rows_of(7)
    assert proxy.score.remote(rows).value.nll.tolist() == [row * 10.0 for row in range(7)]  # type: ignore[attr-defined]
    answer = proxy.train.remote(rows, {}, 1e-3).value  # type: ignore[attr-defined]
    assert answer == {"policy_loss": 7.0, "grad_norm": 2.0}
    for workhorse in workhorses:
        # What models do not read stays with the caller.
        assert all(list(given.columns()) == ["input_ids", "prompt_lengths", "id"] for given in workhorse.given)
        assert [len(given) for given in workhorse.given] == [len(workhorse.given[0])] * 2


def test_a_step_is_begun_before_the_one_before_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is that of its own step, in whatever order they are read."""
    proxy, workhorses = opened(monkeypatch, FrozenConfig(num_workhorses=2), 2)
    model = proxy.model._target  # type: ignore[attr-defined]
    sizes = [3, 5, 2]
    numbers = [model.begin_train(proxy._scattered(rows_of(size)), {}, 1e-3) for size in sizes]
    assert [len(given) for given in workhorses[0].given] == [2, 3, 1]
    assert [model.end_train(n)["policy_loss"] for n in reversed(numbers)] == [2.0, 5.0, 3.0]
    assert not model._begun


def test_only_small_shards_travel_inside_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one replica get the same object."""
    seen: list[Any] = []
    proxy, workhorses = opened(monkeypatch, FrozenConfig(num_workhorses=4, tensor_parallel=2), 4)
    score = proxy.model._target.score  # type: ignore[attr-defined]
    proxy.model._target.score = lambda rows: seen.append(rows) or score(rows)  # type: ignore
    few, many = rows_of(4), rows_of(4, length=INLINE_BYTES // 16)
    assert many.num_bytes > 2 * INLINE_BYTES
    for rows in (few, many):
        proxy.score.remote(rows)
    small, large = seen
    assert all(isinstance(shard, TextBatch) for shard in small.shards)
    assert all(isinstance(shard, Ready) for shard in large.shards)
    assert [len(each) for each in large.places] == [2, 2]
    assert workhorses[0].given[1] is workhorses[1].given[1] is not workhorses[2].given[1]


def test_prompts_are_spread_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, workhorses = opened(monkeypatch, GeneratorConfig(), 2)
    prompts = PromptBatch(input_ids=Ragged.of([[1] * n for n in (9, 1, 1, 8)]), seed=np.array([7, 0, 5, 6]))
    replies = proxy.generate.remote(prompts, SAMPLING, 0).value  # type: ignore[attr-defined]
    assert [row.tolist() for row in replies.response_ids] == [[7], [0], [5], [6]]
    assert replies.ended.tolist() == [True, False, True, True]
    # 13 and 5 tokens, 12 and 5: the longest each to the least load.
    assert [each.given[0].seed.tolist() for each in workhorses] == [[7, 5], [0, 6]]
    # One prompt needs no second replica.
    proxy.generate.remote(prompts.take([0]), SAMPLING, 0)
    assert [len(each.given) for each in workhorses] == [2, 1]


def test_too_few_rows_are_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, workhorses = opened(monkeypatch, FrozenConfig(num_workhorses=3), 3)
    with pytest.raises(ValueError, match=r"^policy: 2 rows are too few for 3 replicas$"):
        proxy.score.remote(rows_of(2))
    assert not any(workhorse.given for workhorse in workhorses)
