"""The order of minibatches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from xray_runtime.data.ragged import first_alike
from xray_runtime.methods.ppo.update import shuffled


@given(groups=st.lists(st.integers(0, 5), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_groups_are_shuffled_whole(groups: list[int], seed: int) -> None:
    places = shuffled(first_alike(groups), np.random.default_rng(seed)).tolist()
    assert sorted(places) == list(range(len(groups)))
    order = [groups[place] for place in places]
    # Each group once, one after the other, its rows in their order.
    assert sum(a != b for a, b in pairwise(order)) == len(set(groups)) - 1
    assert all(a < b for a, b in pairwise(places) if groups[a] == groups[b])


def test_rows_of_different_prompts_are_shuffled_one_by_one() -> None:
    order = np.random.default_rng(3).permutation(9)
    assert shuffled(np.arange(9), np.random.default_rng(3)).tolist() == order.tolist()
    assert order.tolist() != list(range(9))
