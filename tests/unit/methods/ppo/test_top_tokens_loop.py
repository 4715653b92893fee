"""PPO's loop with the sampler's likeliest tokens and kept sets: whose rows have them, and what is kept of them.

Both are functions of the sampled token, so that a row that is one off is found wherever it is read.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.message_texts import Messages
from tests.unit.methods.ppo.loop import PPOModel, World, attempt, make_inputs
from xray_runtime.algorithms.estimators import AdvantageInputs
from xray_runtime.algorithms.logprobs import NO_LOGPROB
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Reply, Sampling
from xray_runtime.engines.top_tokens import TopTokens, top_columns
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.ledger_config import LedgerConfig

NUM_TOP = 3
MASS = 0.75
FIELDS: dict[str, Any] = {"top_p": 0.9, "score_centering": True, "top_logprobs": NUM_TOP}


def reported(tokens: np.ndarray, count: int = 8) -> TopTokens:
    """Of each token t itself, t + 1, …, of which 2 + t % 4 are kept, each half as likely as the one before."""
    ids = tokens[:, None] + np.arange(count)
    logprobs = -np.log(2.0) * (1 + np.arange(count)) + np.zeros_like(ids)
    logprobs[np.arange(count) >= (2 + tokens % 4)[:, None]] = -np.inf
    return TopTokens(ids.astype(np.int32), logprobs.astype(np.float32))


def columns_of(tokens: Ragged, num_top: int = NUM_TOP) -> dict[str, Ragged]:
    return top_columns([reported(row) for row in tokens], tokens.lengths.tolist(), 256, num_top, kept=True)


def replies_of(rows: TextBatch) -> Ragged:
    return Ragged.of(ids[n:] for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True))


def assert_aligned(rows: TextBatch, *names: str) -> None:
    expected = columns_of(replies_of(rows))
    assert {name for name in expected if name in rows} == {*names}
    for name in names:
        np.testing.assert_array_equal(getattr(rows, name).offsets, expected[name].offsets)
        np.testing.assert_array_equal(getattr(rows, name).values, expected[name].values)


KEPT = ("kept_counts", "kept_ids")
FOLLOWED: dict[str, tuple[str, ...]] = {"policy": KEPT, "reference": KEPT, "critic": ()}


class Cut(PPOModel):
    """Says the likeliest tokens of what it samples, and holds those that it is given to their tokens."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        answer = super()._generate(rows, sampling, version)
        assert (sampling.top_p, sampling.top_k, sampling.kept, sampling.top_logprobs) == (0.9, 128, True, NUM_TOP)
        return answer.with_columns(**columns_of(answer.response_ids))

    def _score(self, rows: TextBatch) -> Scores:
        if self.role in FOLLOWED:
            assert_aligned(rows, *FOLLOWED[self.role])
        answer = super()._score(rows)
        if self.role != "policy":
            return answer
        return answer.with_columns(kept_mass=answer.logprobs.like(np.full_like(answer.logprobs.values, MASS)))

    def _reference(self, rows: TextBatch) -> Scores:
        assert_aligned(rows, *KEPT)
        return super()._reference(rows)

    def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        assert_aligned(rows, *KEPT, "topk_ids", "topk_logprobs")
        return super()._train(rows, totals, lr)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    made = make_inputs(tmp_path_factory.mktemp("inputs"))
    (made.prompts.path / "manifest.json").write_text("{}")
    return made


def shard(out: Path, iteration: int) -> Any:
    return read_shard(shard_path(out / "ledger", iteration)).table


@pytest.mark.parametrize("fields", [{"lag": 1}, {"critic": "separate"}, {"lora": {"rank": 2}}], ids=str)
def test_they_stay_with_their_tokens_from_the_reply_to_the_ledger(
    inputs: PPOInputs, tmp_path: Path, fields: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    recorder = attempt(inputs, out, World(), model=Cut, iterations=3, kl={"place": "loss"}, **FIELDS | fields)
    assert [point["rollout/kept_mass"] for point in recorder.points] == [MASS] * 3
    for iteration in range(3):
        table = shard(out, iteration)
        expected = columns_of(Ragged.of(table["reply_ids"].to_pylist()))
        counts = [row.tolist() for row in expected["kept_counts"]]
        assert [[len(ids) for ids in row] for row in table["kept_ids"].to_pylist()] == counts
        flat = [[*chain(*row)] for row in table["kept_ids"].to_pylist()]
        assert flat == [row.tolist() for row in expected["kept_ids"]]
        for name in ("topk_ids", "topk_logprobs"):
            assert table[name].to_pylist() == [row.tolist() for row in expected[name]]
        assert table["kept_mass"].to_pylist() == [[MASS] * len(row) for row in counts]


def surest(rollout: AdvantageInputs) -> Tensor:
    """The sampler's probability of its likeliest token in each place, plus that token's id."""
    return rollout.topk_logprobs[..., 0].exp() + rollout.topk_ids[..., 0]


def test_advantages_read_them_too(inputs: PPOInputs, tmp_path: Path) -> None:
    """The generator tells them because the function reads them, and the update, whose loss does not, gets none."""

    class Noted(PPOModel):
        def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
            answer = super()._generate(rows, sampling, version)
            assert (sampling.top_logprobs, sampling.kept) == (NUM_TOP, False)
            found = columns_of(answer.response_ids)
            return answer.with_columns(topk_ids=found["topk_ids"], topk_logprobs=found["topk_logprobs"])

        def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
            assert not {"topk_ids", "topk_logprobs"} & {*rows.columns()}
            return super()._train(rows, totals, lr)

    given: dict[str, Any] = {"advantages": "mine:surest", "functions": {"mine:surest": surest}}
    given |= {"top_logprobs": NUM_TOP, "whiten_advantages": False}
    attempt(inputs, tmp_path / "out", World(), model=Noted, iterations=1, **given)
    table = shard(tmp_path / "out", 0)
    # The likeliest is the sampled token itself, of half of the probability.
    expected = np.array(table["reply_ids"].to_pylist()) + 0.5
    assert table["advantages"].to_pylist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_stage_has_the_same(inputs: PPOInputs, tmp_path: Path, lag: int) -> None:
    options: dict[str, Any] = {"model": Cut, "iterations": 4, "lag": lag, **FIELDS}
    whole = attempt(inputs, tmp_path / "whole", World(), **options)
    snapshot: Snapshot = whole.snapshots[1]
    attempt(inputs, tmp_path / "resumed", World(), newest=snapshot, **options)
    for iteration in range(4):
        paths = (shard_path(tmp_path / name / "ledger", iteration) for name in ("whole", "resumed"))
        first, second = (path.read_bytes() for path in paths)
        assert first == second


def test_hashed_ledgers_hold_digests(inputs: PPOInputs, tmp_path: Path) -> None:
    attempt(inputs, tmp_path / "out", World(), model=Cut, iterations=1, ledger=LedgerConfig(tokens="hashed"), **FIELDS)
    names = {*shard(tmp_path / "out", 0).column_names}
    assert {"topk_hash", "topk_logprobs_hash", "kept_hash", "kept_mass_hash", "kept_mass_mean"} <= names
    assert not {"topk_ids", "topk_logprobs", "kept_ids", "kept_mass"} & names


def test_nothing_is_reported_where_nothing_reads_it(inputs: PPOInputs, tmp_path: Path) -> None:
    seen: list[Sampling] = []

    class Noted(PPOModel):
        def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
            seen.append(sampling)
            return super()._generate(rows, sampling, version)

    attempt(inputs, tmp_path / "out", World(), model=Noted, iterations=1)
    assert {sampling.reported for sampling in seen} == {0}
    assert not {"topk_ids", "kept_ids"} & {*shard(tmp_path / "out", 0).column_names}


def test_columns_by_hand() -> None:
    logprobs = np.array([[*np.log([0.5, 0.3, 0.2]), -np.inf]], np.float32)
    top = TopTokens(np.array([[7, 3, 9, 1]], np.int32), logprobs)
    found = top_columns([top], [1], 256, 4, kept=True)
    assert found["topk_ids"].values.tolist() == [[7, 3, 9, -1]]
    np.testing.assert_allclose(np.exp(found["topk_logprobs"].values), [[0.5, 0.3, 0.2, 0.0]], rtol=1e-6)
    assert found["topk_logprobs"].values[0, 3] == np.float32(NO_LOGPROB)
    assert found["kept_counts"].values.tolist() == [3]
    assert found["kept_ids"].values.tolist() == [3, 7, 9]
    assert top_columns([top], [1], 256, 2, kept=False)["topk_ids"].values.tolist() == [[7, 3]]
    # As many as were asked for, and none of them outside: there may be more.
    full = TopTokens(top.ids[:, :3], top.logprobs[:, :3])
    with pytest.raises(RuntimeError, match="kept 3 tokens or more at a place"):
        top_columns([full], [1], 3, 0, kept=True)
    with pytest.raises(RuntimeError, match="did not return the likeliest tokens"):
        top_columns([top, None], [1, 1], 256, 4, kept=True)
    two = TopTokens(np.repeat(top.ids, 2, 0), np.repeat(top.logprobs, 2, 0))
    first = Reply([7, 3], [-1.0, -1.0], top=two).first(1).top
    assert first is not None
    assert len(first.ids) == len(first.logprobs) == 1


SAMPLING = Sampling(4, 1.0, (1,), 0, top_k=8, kept=True, top_logprobs=NUM_TOP)


def answer(**columns: Any) -> ReplyBatch:
    tokens = Ragged.of([[8, 9], [3]])
    logprobs = tokens.like(np.full(3, -1.0, np.float32))
    found = ReplyBatch(response_ids=tokens, rollout_logprobs=logprobs, ended=np.zeros(2, bool))
    return found.with_columns(**columns_of(tokens) | columns)


def test_an_answer_that_cannot_be_is_refused() -> None:
    good = answer()
    check_rollout(good, 2, SAMPLING)
    for columns, fault in (
        ({"kept_ids": good.kept_ids.like(good.kept_ids.values + 1)}, "a token is not in its kept set"),
        ({"kept_counts": good.kept_counts.like(good.kept_counts.values + 1)}, "kept sets and replies differ"),
        ({"topk_ids": good.topk_ids[:1]}, "likeliest tokens and replies differ"),
        ({"topk_logprobs": good.topk_logprobs.like(-good.topk_logprobs.values)}, "log-probability is above 0"),
    ):
        with pytest.raises(RuntimeError, match=rf"the rollout is corrupt: .*{fault}"):
            check_rollout(answer(**columns), 2, SAMPLING)


@pytest.mark.parametrize(
    "fields",
    [
        {"score_centering": True, "importance_level": "reply"},
        {"score_centering": True, "loss": "gspo"},
        {"score_centering": True, "method": "dppo_tv"},
        {"top_p": 0.9, "distillation": {}},
        {"top_p": 0.9, "in_flight_updates": True, "lag": 1},
        {"top_k": 129},
        {"top_logprobs": 257},
        {"top_p": 0.9, "environment": {"path": "mine:Env"}},
        {"score_centering": True, "environment": {"path": "mine:Env"}},
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(PPOConfig, {"rewards": [{"function": "mine:scores"}]} | fields, "ppo")
