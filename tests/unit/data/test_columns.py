"""The list of columns holds the code to it: a small loop makes what is listed, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.loop import PPOModel, World, attempt, make_inputs
from xray_runtime.data.batch import (
    KINDS,
    PairBatch,
    PromptBatch,
    ReplyBatch,
    Rollout,
    Scores,
    StepTotals,
    TextBatch,
)
from xray_runtime.data.columnar import ColumnBatch
from xray_runtime.data.columns import GROUPS, LEDGER, STATISTICS, TOTALS
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.training import steps
from xray_runtime.methods.ppo import rollouts
from xray_runtime.methods.ppo.kind import PPOInputs


def test_every_field_of_a_batch_is_a_column() -> None:
    for kind in KINDS:
        assert {field.name for field in fields(kind)} == {*kind.declared(), "others"}
        for column in kind.declared().values():
            assert column.shape
            assert column.dtype
            assert column.writer
            assert column.readers
            assert column.meaning


def test_a_column_that_a_batch_lacks_is_an_error_when_it_is_read() -> None:
    rows = TextBatch.of([[1, 2]], [[3]])
    assert "id" not in rows
    with pytest.raises(AttributeError, match=r"^this TextBatch has no column 'id'$"):
        _ = rows.id
    with pytest.raises(TypeError, match="rejected_ids"):
        PairBatch(input_ids=rows.input_ids)
    assert "id" in rows.with_columns(id=np.arange(1))
    assert "id" not in rows.with_columns(id=np.arange(1)).with_columns(id=None)
    # A name that no field has may be a role's.
    assert list(rows.with_columns(**{"rewards.0": np.zeros(1)}).others) == ["rewards.0"]


def test_what_models_do_not_read_stays_off_the_wire() -> None:
    rows = TextBatch.of([[1, 2]], [[3]]).with_columns(alike=np.zeros(1, np.int64), id=np.arange(1), mine=np.ones(1))
    assert list(rows.on_wire().columns()) == ["input_ids", "prompt_lengths", "id", "mine"]


def test_numbers_of_a_step_are_the_fields_of_its_classes() -> None:
    def names(*kinds: Any) -> set[str]:
        return {field.name for kind in kinds for field in fields(kind)}

    assert names(StepTotals) == {column.name for column in TOTALS}
    assert names(steps.StepStatistics) - {"sums"} <= {column.name for column in STATISTICS}
    for columns in GROUPS.values():
        assert len({column.name for column in columns}) == len(columns)


OF_SAMPLING = {"route_ids", "route_weights", "topk_ids", "topk_logprobs", "kept_counts", "kept_ids", "kept_mass"}
"""Where something reads them alone: `methods.ppo.test_routed_loop` and `test_top_tokens_loop`."""
DTYPES = {**{name: name for name in ("int64", "int32", "float32", "float64", "bool")}, "str": "object"}
TOKENS = {"T": lambda of: of.input_ids.lengths, "R": lambda of: of.response_ids.lengths}
TOKENS["P"] = lambda of: of.prompt_ids.lengths


def check(rows: ColumnBatch) -> set[str]:
    """Hold rows to what is listed; returns the names that were there."""
    for name, found in rows.columns().items():
        column = rows.declared()[name]
        values = found.values if isinstance(found, Ragged) else found
        assert values.dtype == DTYPES[column.dtype], name
        assert isinstance(found, Ragged) == (column.shape != "[B]"), name
        assert len(found) == len(rows), name
    return set(rows.columns())


class Checked(PPOModel):
    """Holds all rows to the list: those it is given, and those it answers with."""

    def _score(self, rows: TextBatch) -> Scores:
        answer = super()._score(rows)
        check(rows)
        check(answer)
        self._same_tokens(rows, answer)
        return answer

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        answer = super()._generate(rows, sampling, version)
        check(rows)
        check(answer)
        return answer

    def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        check(rows)
        self._same_tokens(rows, rows)
        assert isinstance(totals, StepTotals)
        answer = super()._train(rows, totals, lr)
        assert answer.keys() <= {column.name for column in STATISTICS}
        return answer

    @staticmethod
    def _same_tokens(rows: TextBatch, answer: ColumnBatch) -> None:
        """[B, R] is one number a token of the reply."""
        replies = rows.input_ids.lengths - rows.prompt_lengths
        for name, found in answer.columns().items():
            if answer.declared()[name].shape == "[B, R]":
                np.testing.assert_array_equal(found.lengths, replies, name)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """The rollouts that the loop takes."""
    found: list[Rollout] = []
    take = rollouts.Rollouts.take

    def noted(self: rollouts.Rollouts) -> Rollout:
        found.append(take(self))
        return found[-1]

    monkeypatch.setattr(rollouts.Rollouts, "take", noted)
    return found


def check_ledger(out: Path, sources: set[str]) -> set[str]:
    """Hold the first shard to the list; returns its columns without those of `sources`."""
    listed, table = {column.name: column for column in LEDGER}, read_shard(shard_path(out / "ledger", 0)).table
    names = set()
    for field in table.schema:
        start, slash, source = field.name.partition("/")
        assert not slash or source in sources
        column = listed[f"{start}/SOURCE" if slash else field.name]
        assert pa.types.is_list(field.type) == (column.shape != "[B]"), field.name
        of_values = field.type.value_type if pa.types.is_list(field.type) else field.type
        assert str(of_values) == column.dtype, field.name
        names.add(column.name)
    return names


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_loop_makes_what_is_listed(inputs: PPOInputs, tmp_path: Path, made: list[Rollout], critic: str) -> None:
    attempt(inputs, tmp_path / "out", World(), model=Checked, lag=1, iterations=3, critic=critic, kl={"place": "loss"})
    assert len(made) == 3
    for rollout in made:
        assert check(rollout) == {*ReplyBatch.declared(), "seed", "version", "prompt"} - OF_SAMPLING
        np.testing.assert_array_equal(rollout.rollout_logprobs.offsets, rollout.response_ids.offsets)
    names = check_ledger(tmp_path / "out", {"rewards.0"})
    assert {"score/SOURCE", "advantages", "times_trained"} <= names


def test_episodes_make_what_is_listed(inputs: PPOInputs, tmp_path: Path, made: list[Rollout]) -> None:
    environment: dict[str, Any] = {"path": f"{sample_environments.__name__}:ThreeTurns", "max_tokens": 64}
    fields: dict[str, Any] = {"environment": environment, "rewards": [], "iterations": 1, "gold": "my:length"}
    functions = {"my:length": lambda prompts, replies: [float(len(reply)) for reply in replies]}
    fields |= {"functions": functions | {"my:even": lambda known: np.ones(len(known.draws))}}
    fields |= {"curriculum": {"by": "my:even"}}
    attempt(inputs, tmp_path / "out", World(), model=Checked, kept=tmp_path, **fields)
    [rollout] = made
    assert rollout.are_episodes
    elsewhere = {"branches", "ran_again", "seat", "teacher_logprobs", "token_versions", "group"} | OF_SAMPLING
    assert check(rollout) == set(Rollout.declared()) - elsewhere
    for name, column in Rollout.declared().items():
        if column.shape == "[B, R]" and name in rollout:
            np.testing.assert_array_equal(getattr(rollout, name).lengths, rollout.response_ids.lengths, name)
    assert check_ledger(tmp_path / "out", {"environment"}) == {c.name for c in LEDGER} - elsewhere - {"entropy"}
