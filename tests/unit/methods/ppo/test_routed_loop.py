"""PPO's loop with routes: whose rows have them, with which tokens, and what is kept of them.

The route of a token is a function of the token, so that a row that is one off is found wherever it is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from tests.unit.methods.ppo.loop import PPOModel, World, attempt, make_inputs
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.routes import Routes
from xray_runtime.engines.generation import _route_columns, up_to_stop
from xray_runtime.engines.sampling import Reply, Sampling
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.ledger_config import LedgerConfig

LAYERS, EXPERTS, UNKNOWN = 3, 2, 255
OFF = 0.25
"""How far the policy's log-probabilities by its own routes are from those by the generator's."""


def routes(tokens: np.ndarray) -> np.ndarray:
    """The ids of tokens [N, L, K]: two different ones of eleven."""
    shifts = np.add.outer(np.arange(LAYERS), 5 * np.arange(EXPERTS))
    return ((tokens[:, None, None] + shifts) % 11).astype(np.uint8)


def routed(texts: TextBatch) -> tuple[Ragged, Ragged]:
    """(ids, weights) of rows, whose last tokens have none."""
    ids, last = routes(texts.input_ids.values), texts.input_ids.offsets[1:] - 1
    weights = (ids + 0.5).astype(np.float32)
    ids[last], weights[last] = UNKNOWN, 0
    return texts.input_ids.like(ids), texts.input_ids.like(weights)


class Routed(PPOModel):
    """Says the routes of what it samples, and holds those that it is given to their tokens."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        answer = super()._generate(rows, sampling, version)
        if not sampling.routes:
            return answer
        ids, weights = routed(TextBatch.of(list(rows.input_ids), answer.response_ids))
        return answer.with_columns(route_ids=ids, route_weights=weights)

    def _score(self, rows: TextBatch) -> Scores:
        assert ("route_ids" in rows) == (self.role == "policy")
        answer = super()._score(rows)
        if self.role != "policy":
            return answer
        assert_aligned(rows)
        own = answer.logprobs.like(answer.logprobs.values + np.float32(OFF))
        return answer.with_columns(own_route_logprobs=own)

    def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        assert_aligned(rows)
        return super()._train(rows, totals, lr)


def assert_aligned(rows: TextBatch) -> None:
    ids, _ = routed(rows)
    np.testing.assert_array_equal(rows.route_ids.offsets, ids.offsets)
    np.testing.assert_array_equal(rows.route_ids.values, ids.values)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    made = make_inputs(tmp_path_factory.mktemp("inputs"))
    (made.policy.path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (made.prompts.path / "manifest.json").write_text("{}")
    return made


def lists(out: Path, iteration: int, name: str) -> list[Any]:
    found: list[Any] = read_shard(shard_path(out / "ledger", iteration)).table[name].to_pylist()
    return found


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("lag", [0, 1])
def test_routes_stay_with_their_tokens_from_the_reply_to_the_ledger(
    inputs: PPOInputs, tmp_path: Path, critic: str, lag: int
) -> None:
    out, world = tmp_path / "out", World()
    recorder = attempt(
        inputs, out, world, model=Routed, routing="replay", critic=critic, iterations=3, lag=lag, kl={"place": "loss"}
    )
    assert {role for role, *_ in world.batches} == {"policy", *(["critic"] if critic == "separate" else [])}
    assert [point["rollout/mismatch"] for point in recorder.points] == pytest.approx([0.0] * 3, abs=1e-6)
    assert [point["rollout/mismatch_own_routes"] for point in recorder.points] == pytest.approx([OFF] * 3, abs=1e-6)
    for iteration in range(3):
        prompts, replies = lists(out, iteration, "prompt_ids"), lists(out, iteration, "reply_ids")
        ids, weights = routed(TextBatch.of(prompts, replies))
        for name, column in (("route_ids", ids), ("route_weights", weights)):
            assert lists(out, iteration, name) == [row.reshape(len(row), -1).tolist() for row in column]


def test_rows_that_are_dropped_or_replaced_keep_their_routes(inputs: PPOInputs, tmp_path: Path) -> None:
    def scores(prompts: list[str], replies: list[str]) -> list[float | None]:
        """The first pair of replies ties and is replaced; one later reply has no reward."""
        return [None if place == 3 else float(place > 1 and place % 2) for place in range(len(replies))]

    out, name = tmp_path / "out", "my:scores"
    fields: dict[str, Any] = {"samples_per_prompt": 2, "prompts_per_iteration": 2, "advantages": "grpo"}
    fields |= {"resample_rounds": 1, "max_failed": 0.5, "rewards": [{"function": name}], "functions": {name: scores}}
    attempt(inputs, out, World(), model=Routed, routing="replay", reward_scaling="none", iterations=1, **fields)
    table = read_shard(shard_path(out / "ledger", 0)).table
    assert len(table) > 4
    ids, _ = routed(TextBatch.of(table["prompt_ids"].to_pylist(), table["reply_ids"].to_pylist()))
    assert table["route_ids"].to_pylist() == [row.reshape(len(row), -1).tolist() for row in ids]


def test_without_replay_nothing_has_routes(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = attempt(inputs, tmp_path / "out", World(), iterations=1)
    assert "rollout/mismatch_own_routes" not in recorder.points[0]
    assert "route_ids" not in read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table.column_names


def test_hashed_ledgers_hold_digests_of_routes(inputs: PPOInputs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hashed = LedgerConfig(tokens="hashed")
    attempt(inputs, out, World(), model=Routed, routing="replay", iterations=1, ledger=hashed)
    names = read_shard(shard_path(out / "ledger", 0)).table.column_names
    assert {"route_hash", "route_weights_hash"} <= {*names}
    assert not {"route_ids", "route_weights", "route_weights_mean"} & {*names}


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_stage_has_the_same_routes(inputs: PPOInputs, tmp_path: Path, lag: int) -> None:
    options: dict[str, Any] = {"model": Routed, "routing": "replay", "iterations": 4, "lag": lag}
    whole = attempt(inputs, tmp_path / "whole", World(), **options)
    snapshot: Snapshot = whole.snapshots[1]
    attempt(inputs, tmp_path / "resumed", World(), newest=snapshot, **options)
    for iteration in range(4):
        paths = (shard_path(tmp_path / name / "ledger", iteration) for name in ("whole", "resumed"))
        first, second = (path.read_bytes() for path in paths)
        assert first == second


def test_a_family_that_has_no_routes_is_refused_first(
    inputs: PPOInputs, tmp_path: Path, message_texts: Messages
) -> None:
    other = make_inputs(tmp_path)
    (other.policy.path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    world = World()
    with message_texts.raises(ValueError):
        attempt(other, tmp_path / "out", world, model=Routed, routing="replay")
    assert not world.calls


SAMPLING = Sampling(max_new_tokens=3, temperature=1.0, stop_token_ids=(1,), pad_token_id=0, routes=True)


def answer(**columns: Any) -> ReplyBatch:
    prompts, replies = [[5, 6], [7]], [[8, 9], [3]]
    ids, weights = routed(TextBatch.of(prompts, replies))
    found = ReplyBatch(
        response_ids=Ragged.of(replies),
        rollout_logprobs=Ragged.of([[-1.0, -1.0], [-1.0]], np.float32),
        ended=np.array([False, False]),
        route_ids=ids,
        route_weights=weights,
    )
    return found.with_columns(**columns)


def test_an_answer_with_routes_that_cannot_be_is_refused() -> None:
    check_rollout(answer(), 2, SAMPLING)
    good = answer()
    twice, missing, infinite = good.route_ids.values.copy(), good.route_ids.values.copy(), good.route_weights.values * 1
    twice[0, 0] = 4
    missing[1] = UNKNOWN
    infinite[0, 0, 0] = np.nan
    ids, weights = good.route_ids, good.route_weights
    short = Ragged(ids.values[[0, 3, 4]], np.array([0, 2, 3]))
    for columns, fault in (
        ({"route_ids": ids.like(twice)}, "chosen twice"),
        ({"route_ids": ids.like(missing)}, "an expert is unknown"),
        ({"route_weights": weights.like(infinite)}, "weight is not finite"),
        ({"route_weights": Ragged(weights.values[:, :2], weights.offsets)}, "differ in number"),
        ({"route_ids": short}, "routes end before the reply"),
    ):
        with pytest.raises(RuntimeError, match=rf"the rollout is corrupt: .*{fault}"):
            check_rollout(answer(**columns), 2, SAMPLING)


class Letters:
    """Token n is the n-th letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def test_a_reply_that_is_cut_keeps_the_routes_of_what_is_left() -> None:
    prompt, tokens = [20, 21], [0, 1, 2, 3]
    ids = routes(np.array([*prompt, *tokens[:-1]]))
    whole = Reply(tokens, [-0.1] * 4, Routes(ids, ids.astype(np.float32)))
    cut = up_to_stop(whole, ("bc",), Letters())
    assert cut is not None
    columns = _route_columns([prompt, prompt], [whole, cut])
    found = columns["route_ids"]
    assert found.lengths.tolist() == [6, 5]
    texts = TextBatch.of([prompt, prompt], [tokens, tokens[:3]])
    np.testing.assert_array_equal(found.values, routed(texts)[0].values)
    assert (columns["route_weights"].values[[5, 10]] == 0).all()
    short = Reply(tokens, [-0.1] * 4, Routes(ids[1:], ids[1:].astype(np.float32)))
    for wrong in (short, Reply(tokens, [-0.1] * 4)):
        with pytest.raises(RuntimeError, match="the generator did not return the experts of every token"):
            _route_columns([prompt], [wrong])
