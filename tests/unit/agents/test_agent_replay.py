"""Agents' calls that a replay takes from a ledger's row, against the calls that made it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xray_runtime.agents.agent_records import Planned, Played, rollout_of_records, written_calls
from xray_runtime.agents.agent_replay import ReplayedEpisodes, record_line
from xray_runtime.agents.segments import PolicyCall
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling

PLACE = "train-0", 3
PLANNED = Planned("one", *PLACE, {}, 7, [1, 2], keep=False)
TREE = {"d": None, "b": "d", "a": "d", "c": "a", "e": None, "f": "e"}
"""Call → its parent: two histories, the first with a branch."""


def call(key: str, calls: dict[str, PolicyCall], rng: np.random.Generator) -> PolicyCall:
    parent = TREE[key]
    before = calls[parent].tokens if parent is not None else []
    size = int(rng.integers(1, 4))
    prompt = before + rng.integers(10, 99, 2).tolist()
    logprobs = (-rng.random(size)).astype(np.float32).tolist()
    versions: Any = [[5, 1], [6, size - 1]] if size > 1 else [[5, 1]]
    return PolicyCall(key, parent, prompt, 1, rng.integers(10, 99, size).tolist(), logprobs, True, versions, True, {})


def played(trained: str, seed: int) -> Played:
    rng, calls = np.random.default_rng(seed), dict[str, PolicyCall]()
    for key in ("d", "e", "a", "b", "c", "f"):
        calls[key] = call(key, calls, rng)
    record = {
        "calls": written_calls(list(calls.values())),
        "trained": sorted(trained),
        "reward": 1.0,
        "info": {},
        "failure": "",
        "counts": {},
    }
    return Played(record, list(calls.values()))


def replays(line: dict[str, Any]) -> tuple[ReplayedEpisodes, list[PromptBatch]]:
    asked: list[PromptBatch] = []

    def generate(rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        asked.append(rows)
        ids = Ragged.of([[50 + n] for n in range(len(rows))])
        return ReplyBatch(response_ids=ids, rollout_logprobs=ids.like(np.full(len(rows), -0.5, np.float32)))

    return ReplayedEpisodes(generate, Sampling(4, 1.0, (0,), 0), [line]), asked


@pytest.mark.parametrize("trained", ["abcdef", "cf", "b", "ae", "acd", ""])
def test_an_episode_in_flight_is_as_it_was(trained: str) -> None:
    for seed in range(5):
        was = played(trained, seed)
        rollout = rollout_of_records([PLANNED], [was], 0, 4)
        [logprobs] = rollout.rollout_logprobs
        found, asked = replays(record_line(*PLACE, 0, was.record, logprobs.tolist()))
        found.sample_again(5, [PLACE])
        again = found.played(PLACE)
        assert again is not None
        assert asked == []
        assert again.record == was.record
        repeated = rollout_of_records([PLANNED], [again], 0, 4)
        for name, column in rollout.columns().items():
            other = repeated.columns()[name]
            values = [x.values if isinstance(x, Ragged) else x for x in (column, other)]
            np.testing.assert_array_equal(*values, err_msg=name)


def test_calls_of_one_version_are_sampled_again() -> None:
    """Those in the loss; `played` has what was sampled."""
    was = played("abcdef", 0)
    found, asked = replays(record_line(*PLACE, 0, was.record))
    found.sample_again(5, [("train-0", 4), PLACE])
    [rows] = asked
    prompts = {each.key: each.prompt for each in was.calls}
    assert sorted(ids.tolist() for ids in rows.input_ids) == sorted(prompts.values())
    again = found.played(PLACE)
    assert again is not None
    assert all(len(each.ids) == 1 and each.logprobs == [-0.5] for each in again.calls)
    assert {tuple(each["ids"]) for each in again.record["calls"]} == {(50 + n,) for n in range(6)}
    assert found.played(("train-0", 4)) is None
