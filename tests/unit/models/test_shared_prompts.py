"""A prompt that is computed once for all its replies, against rows that are computed each by itself, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.models.exact import (
    OBJECTIVES,
    assert_equal_outcomes,
    exact,
    headed,
    outcome,
    rows_of,
)
from tests.unit.models.families import MIXTURES, PACKED
from xray_runtime.cluster.micro_batches import as_tensors, row_groups
from xray_runtime.data.batch import PairBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models import packing
from xray_runtime.models.heads import Branch
from xray_runtime.models.objectives import ReferenceObjective, num_computed_tokens
from xray_runtime.models.packing import Prompts, Trees
from xray_runtime.models.reward_objective import RewardObjective


def test_trees_by_hand() -> None:
    """Texts a b c, d, a b e, a b f g: the prompt a b of three of them is a stem, d another."""
    trees = Trees.of(torch.tensor([3, 1, 3, 4]), Prompts(torch.tensor([0, 1, 0, 0]), torch.tensor([2, 1, 2, 2])))
    assert trees.prefixes.tolist() == [1, 2]
    assert (trees.suffixes.tolist(), trees.prefix_of.tolist()) == ([1, 1, 2], [1, 1, 1])
    # Row: d | a b | c | e | f g.
    assert trees.computed.tolist() == [3, 0, 1, 2, 6, 9, 10]
    assert trees.positions.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert trees.given.tolist() == [1, 2, 3, 0, 1, 2, 4, 1, 2, 5, 6]
    # Keys of the branches c, e and f g, each after those of a b.
    assert trees.keys.tolist() == [1, 2, 3, 1, 2, 4, 1, 2, 5, 6]


@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    prompts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    replies=st.lists(st.integers(1, 4), min_size=9, max_size=9),
)
def test_every_token_finds_itself_in_the_row(groups: list[int], prompts: list[int], replies: list[int]) -> None:
    """A token is its prompt's or its row's, at a position; empty prompts share nothing."""
    lengths = torch.tensor([prompts[group] + reply for group, reply in zip(groups, replies, strict=False)])
    of_rows = torch.tensor([prompts[group] for group in groups])
    trees = Trees.of(lengths, Prompts(torch.tensor([groups.index(group) for group in groups]), of_rows))
    tokens = [
        (("prompt", group) if place < prompts[group] else ("reply", row), place)
        for row, group in enumerate(groups)
        for place in range(int(lengths[row]))
    ]
    row = [tokens[i] for i in trees.computed]
    assert [row[i] for i in trees.given] == tokens
    assert [place for _, place in row] == trees.positions.tolist()
    assert len(row) == len(set(tokens))
    assert len(row) == int(trees.prefixes.sum() + trees.suffixes.sum())


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in OBJECTIVES), *((family, "policy") for family in PACKED if family != "llama")],
)
def test_losses_and_gradients_are_those_of_separate_rows(family: str, name: str) -> None:
    module, objective = headed(family), OBJECTIVES[name]()
    rows = rows_of(objective)
    whole = [list(range(7))]
    expected = outcome(module, objective, rows, whole, shared=False)
    # Routers give weights in float32.
    rel = 1e-6 if family in MIXTURES else 1e-12
    assert_equal_outcomes(outcome(module, objective, rows, whole, shared=True), expected, rel)


@pytest.mark.parametrize(("call_scores", "num_blocks"), [(0, 5), (4096, 2)])
def test_how_many_sequences_attend_in_one_call_does_not_show(
    monkeypatch: pytest.MonkeyPatch, call_scores: int, num_blocks: int
) -> None:
    module, objective = headed(), OBJECTIVES["policy"]()
    rows, whole = rows_of(objective), [list(range(7))]
    expected = outcome(module, objective, rows, whole, shared=False)
    monkeypatch.setattr(packing, "CALL_SCORES", call_scores)
    blocks = []
    original = Trees.blocks.func
    monkeypatch.setattr(Trees, "blocks", property(lambda trees: blocks.append(original(trees)) or blocks[-1]))
    assert_equal_outcomes(outcome(module, objective, rows, whole, shared=True), expected)
    assert {len(found) for found in blocks} == {num_blocks}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("max_tokens", [1, 12])
def test_micro_batches_and_recomputation_do_not_show(name: str, max_tokens: int) -> None:
    module, objective = headed(), OBJECTIVES[name]()
    rows = rows_of(objective)
    expected = outcome(module, objective, rows, [[row] for row in range(7)], shared=False)
    batches = row_groups(rows, max_tokens, packed=True)
    assert sorted(row for batch in batches for row in batch) == list(range(7))
    module.checkpoint_activations()
    assert_equal_outcomes(outcome(module, objective, rows, batches, shared=True), expected)


def test_trunks_and_their_branches() -> None:
    """A frozen trunk, given or computed, the layers above it, and a reference above the same trunk."""
    rows = rows_of(OBJECTIVES["policy"]())
    objective = PPOObjective(PPOStageConfig())
    module = headed(trainable_layers=1, branches=[Branch("reference", exact())])
    whole = headed()
    tensors = as_tensors(rows)
    trunk = module.trunk(tensors.input_ids.values, tensors.input_ids.lengths)
    with torch.no_grad():
        apart = tensors.with_columns(alike=None)
        expected = objective.score(whole, apart).columns() | ReferenceObjective(1.0).score(whole, apart).columns()
        found = objective.score(module, tensors.with_columns(trunk=tensors.input_ids.like(trunk))).columns()
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        theirs, ours = (of.values if isinstance(of, Ragged) else of for of in (column, found[name]))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    batches = [list(range(7))]
    expected_outcome = outcome(module, objective, rows, batches, shared=False)
    assert_equal_outcomes(outcome(module, objective, rows, batches, shared=True), expected_outcome)


def test_computed_tokens_by_hand() -> None:
    """Prompts of 4, 3 and 1 tokens once, replies of 15; of pairs also 11 tokens of the rejected ones."""
    module = headed()
    assert num_computed_tokens(module, as_tensors(rows_of(OBJECTIVES["policy"]()))) == 8 + 15
    assert num_computed_tokens(module, as_tensors(rows_of(OBJECTIVES["pairs"]()))) == 8 + 15 + 11
    tensors = as_tensors(rows_of(OBJECTIVES["policy"]()))
    seen: list[int] = []
    module.lm.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    ids, prompts = tensors.input_ids, Prompts(tensors.alike, tensors.prompt_lengths)
    module.hidden(ids.values, ids.lengths, None, prompts)
    assert seen == [8 + 15]
    module.packs = False
    assert num_computed_tokens(module, tensors) == 7 * 7


def test_groups_stay_together() -> None:
    """Rows of 7, 4, 7, 3, 5, 5, 7 tokens: the first prompt's compute 4 + 3 + 3 + 1 + 3, the second's 3 + 1 + 2."""
    rows = rows_of(OBJECTIVES["policy"]())
    assert row_groups(rows, 100, packed=True) == [[0, 2, 6, 5, 4, 1, 3]]
    assert row_groups(rows, 14, packed=True) == [[0, 2, 6, 5], [4, 1, 3]]
    # A group that fits nowhere is cut, and its prompt computed again.
    assert row_groups(rows, 10, packed=True) == [[0, 2], [6, 5], [4, 1, 3]]
    assert row_groups(rows, 4, packed=True) == [[0], [2], [6], [5], [4], [1], [3]]


@pytest.mark.parametrize("packed", [True, False])
@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=24))
def test_micro_batches_at_once_are_even(packed: bool, lengths: list[tuple[int, int, int]]) -> None:
    """Every row once; no larger than without, and where there are several, as many as run at once or a multiple."""
    prompts = [[group] * length for length, _, group in lengths]
    rows = TextBatch.of(prompts, [[99] * length for _, length, _ in lengths])
    for max_tokens in (4, 30, 400):
        fewest = row_groups(rows, max_tokens, packed=packed)
        even = row_groups(rows, max_tokens, packed=packed, at_once=2)
        assert sorted(row for group in even for row in group) == list(range(len(lengths)))
        assert len(fewest) <= len(even) <= len(fewest) + 1 or even == fewest
    similar = TextBatch.of([[row] * 5 for row in range(40)], [[99] * 6] * 40)
    assert [len(group) for group in row_groups(similar, 10_000, packed=packed, at_once=2)] == [20, 20]


def test_pairs_count_both_replies() -> None:
    """The pair of row 1: 3 + 1 + 2 tokens, and of row 4 in the same group 2 + 1 more; with nothing shared 9 and 9."""
    pairs = rows_of(RewardObjective()).take([1, 4])
    assert row_groups(pairs, 9, packed=True) == [[0, 1]]
    assert row_groups(pairs, 8, packed=True) == [[0], [1]]
    apart = PairBatch.of_columns(pairs.pick("input_ids", "rejected_ids"))
    assert row_groups(apart, 18, packed=True) == [[0, 1]]
    assert row_groups(apart, 17, packed=True) == [[0], [1]]
    assert row_groups(apart, 20, packed=False) == [[0, 1]]
    assert row_groups(apart, 19, packed=False) == [[0], [1]]
