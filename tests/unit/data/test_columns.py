"""The list of columns holds the code to it: what is used by name is listed, and a small loop makes what is listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import xray_runtime
from tests.unit.rl import sample_environments
from tests.unit.rl.loop import PPOModel, World, attempt, make_inputs
from xray_runtime.data.columns import EXPERIENCE, GROUPS, LEDGER, ROLLOUT, SCORES, STATISTICS, TEXT, TOTALS
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.rows import Ragged, Rows, num_rows
from xray_runtime.graph.inputs import PPOInputs
from xray_runtime.rl import rollouts
from xray_runtime.rl.types import EpisodeColumns, Rollout, Scores, Text, UpdateRows, to_rows
from xray_runtime.training import steps

ROOT = Path(xray_runtime.__file__).parent
FOLDERS = ("rl", "training", "models")
NAMES = {column.name for group in GROUPS.values() for column in group}
ROW_TYPES = {"Rows", "Tensors", "Scores"}
"""Names of types whose keys are columns."""
TOTALS_NAME = "totals"


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, key) of every key, written as a string, of rows, tensors of rows, scores and totals."""
    makers = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.returns and _are_rows(n.returns)}
    makers |= {"take", "join", "text_rows", "load_rows", "to_rows", "columns_of", "remote"}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _used_in(function, makers)


def _are_rows(annotation: ast.expr) -> bool:
    return bool(ROW_TYPES & {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)})


def _used_in(function: ast.FunctionDef, makers: set[str]) -> Iterator[tuple[int, str]]:
    known = {TOTALS_NAME}
    known |= {
        a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg) and a.annotation and _are_rows(a.annotation)
    }

    def rows(node: ast.expr) -> bool:
        """Whether an expression is rows, as far as its names tell."""
        match node:
            case ast.Name(id=name):
                return name in known
            case ast.Call(func=ast.Name(id="get" | "get_all"), args=[argument]):
                return rows(argument)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                return name in makers
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return rows(left) or rows(right)
        return False

    nodes = list(ast.walk(function))
    for _ in range(3):  # a name that is made from a name that is made from rows
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if rows(value):
                    known.add(name)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if _are_rows(annotation):
                    known.add(name)
    for node in nodes:
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(value=str(key))) if rows(value):
                yield node.lineno, key
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[value]) if rows(value):
                yield node.lineno, key
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop"), args=[ast.Constant(value=str(key)), *_]):
                if rows(value):
                    yield node.lineno, key
            case ast.BinOp(op=ast.BitOr()) if rows(node):
                yield from (pair for side in (node.left, node.right) for pair in _keys(side))
            case ast.AugAssign(target=ast.Name(id=name), value=value) if name in known:
                yield from _keys(value)
            case ast.AnnAssign(annotation=annotation, value=ast.Dict() as value) if _are_rows(annotation):
                yield from _keys(value)
            case ast.Call(func=ast.Attribute(attr="remote"), args=[ast.Dict() as value, *_]):
                yield from _keys(value)
            case ast.Return(value=value) if value is not None and function.returns and _are_rows(function.returns):
                yield from (pair for part in ast.walk(value) if isinstance(part, ast.Dict) for pair in _keys(part))


def _keys(node: ast.expr) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Dict):
        yield from ((node.lineno, key.value) for key in node.keys if isinstance(key, ast.Constant))


def test_keys_of_rows_are_found() -> None:
    code = """
def f(rows: Rows, other: dict[str, float], totals) -> Rows:
    batch = take(rows, [0]) | {"a": 1}
    more = batch
    more |= {"b": 2}
    if "c" in more: rows["d"], more.get("e"), other["no"], totals["f"]
    made: Rows = {"g": 1}
    found = get(model.score.remote({"h": 1}))["i"]
    answer = get(model.generate.remote(rows))
    answer["j"]
    return {"k": 1}
"""
    assert sorted(key for _, key in used_names(ast.parse(code))) == list("abcdefghijk")


def test_every_column_that_code_names_is_listed() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), line, key)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, key in used_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {"added_ends", "desirable", "ref_chosen", "old_logprobs", "trunk", "returns"} <= {key for *_, key in found}
    assert [place for place in sorted(found) if place[2] not in NAMES] == []


def test_columns_and_fields_are_the_same() -> None:
    """Each dataclass of the loop has the columns of its group, and each group only what a dataclass has."""

    def names(*kinds: Any) -> set[str]:
        return {field.name for kind in kinds for field in fields(kind)}

    listed = {group: {column.name for column in columns} for group, columns in GROUPS.items()}
    assert names(Text) <= listed["Text"]
    assert names(Rollout, EpisodeColumns) - {"episodes", "response_mask"} == listed["Rollout"]
    assert names(Scores) <= listed["Scores"]
    others = {"text", "values", "ref_logprobs", "rollout_logprobs", "response_mask", "branches"}
    assert names(UpdateRows) - others == listed["Experience"]
    assert names(steps.StepTotals) == listed["Totals of a step"]
    kinds = (steps.SFTSums, steps.PairSums, steps.DPOSums, steps.KTOSums, steps.ValueSums, steps.PolicySums)
    assert names(*kinds) | names(steps.StepStatistics) - {"sums"} == listed["Statistics of a step"]
    for columns in GROUPS.values():
        assert len({column.name for column in columns}) == len(columns)


DTYPES = {**{name: name for name in ("int64", "int32", "float32", "float64", "bool")}, "str": "object"}
TOKENS = {"T": lambda of: of["input_ids"].lengths, "R": lambda of: of["response_ids"].lengths}
TOKENS["P"] = lambda of: of["prompt_ids"].lengths


def check(rows: Rows, *groups: Any) -> set[str]:
    """Hold rows to what is listed; returns the names that were there."""
    listed = {column.name: column for group in reversed(groups) for column in group}
    for name, found in rows.items():
        column = listed[name]
        values = found.values if isinstance(found, Ragged) else found
        assert values.dtype == DTYPES[column.dtype], name
        assert isinstance(found, Ragged) == (column.shape != "[B]"), name
        assert len(found) == num_rows(rows), name
    return set(rows)


class Checked(PPOModel):
    """Holds all rows to the list: those it is given, and those it answers with."""

    def _score(self, rows: Rows, at_once: int = 1) -> Rows:
        answer = super()._score(rows, at_once)
        check(rows, TEXT)
        check(answer, SCORES)
        self._same_tokens(rows, answer)
        return answer

    def _generate(self, rows: Rows, sampling: Any, version: int) -> Rows:
        answer = super()._generate(rows, sampling, version)
        check(rows, TEXT, ROLLOUT)
        check(answer, ROLLOUT)
        return answer

    def _train(self, rows: Rows, totals: dict[str, float], lr: float, at_once: int = 1) -> dict[str, float]:
        check(rows, EXPERIENCE, TEXT, SCORES, ROLLOUT)
        self._same_tokens(rows, rows)
        assert totals.keys() <= {column.name for column in TOTALS}
        answer = super()._train(rows, totals, lr, at_once)
        assert answer.keys() <= {column.name for column in STATISTICS}
        return answer

    @staticmethod
    def _same_tokens(rows: Rows, columns: Rows) -> None:
        """[B, R] is one number a token of the reply."""
        shapes = {column.name: column.shape for group in (SCORES, EXPERIENCE) for column in group}
        replies = rows["input_ids"].lengths - rows["prompt_lengths"]
        for name, found in columns.items():
            if shapes.get(name) == "[B, R]":
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
        assert check(to_rows(rollout), ROLLOUT) == {column.name for column in ROLLOUT[:6]}
        np.testing.assert_array_equal(rollout.rollout_logprobs.offsets, rollout.response_ids.offsets)
    names = check_ledger(tmp_path / "out", {"rewards.0"})
    assert {"score/SOURCE", "advantages", "times_trained"} <= names


def test_episodes_make_what_is_listed(inputs: PPOInputs, tmp_path: Path, made: list[Rollout]) -> None:
    environment: dict[str, Any] = {"path": f"{sample_environments.__name__}:ThreeTurns", "max_tokens": 64}
    fields: dict[str, Any] = {"environment": environment, "rewards": [], "iterations": 1, "gold": "my:length"}
    fields |= {"functions": {"my:length": lambda prompts, replies: [float(len(reply)) for reply in replies]}}
    attempt(inputs, tmp_path / "out", World(), model=Checked, kept=tmp_path, **fields)
    [rollout] = made
    assert rollout.episodes is not None
    rows = to_rows(rollout)
    listed = {column.name for column in ROLLOUT} - {"branches", "ran_again"}  # of agents alone
    assert check(rows, ROLLOUT, TEXT) == listed | {"response_mask"}
    for column in ROLLOUT:
        if column.shape == "[B, R]":
            np.testing.assert_array_equal(rows[column.name].lengths, rollout.response_ids.lengths, column.name)
    assert check_ledger(tmp_path / "out", {"environment"}) == {column.name for column in LEDGER}
