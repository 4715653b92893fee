"""The ledger that PPO's loop writes, over models whose answers `unit.methods.ppo.loop` gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo.loop import KL_PER_TOKEN, MINIBATCH, REPLIES, World, attempt, logprob
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.ledger import LedgerShard, iterations, read_shard, shard_path
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.ledger_config import LedgerConfig
from xray_runtime.rewards.config import reward_term

GROUPS: dict[str, Any] = {
    "prompts_per_iteration": 2,
    "samples_per_prompt": 2,
    "minibatch_size": 2,
    "advantages": "rloo",
    "whiten_advantages": False,
}


def shards(out: Path) -> list[LedgerShard]:
    return [read_shard(shard_path(out / "ledger", number)) for number in iterations(out / "ledger")]


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "ledger").iterdir())}


def test_a_row_says_what_was_sampled_scored_and_learned(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World(surer_by=0.1, generator_off_by=0.01)
    attempt(inputs, tmp_path / "out", world, epochs=3, importance_cap=2.0, max_mismatch=0.1)
    first, second = shards(tmp_path / "out")
    # The first policy is the parent; the second is what a sync sent after two minibatches in three epochs.
    assert (first.policy, second.policy) == (None, "6 steps, 0.6")
    seeds = [seed for shard in (first, second) for seed in shard.table["seed"].to_pylist()]
    assert seeds == world.seeds
    learned = [batch for batch in world.batches if batch[0] == "policy"]
    for number, shard in enumerate((first, second)):
        rows = shard.table.to_pylist()
        assert [row["row"] for row in rows] == list(range(REPLIES))
        of_iteration = learned[number * 6 : number * 6 + 2]
        trained = {int(id): (batch, i) for _, batch, *_ in of_iteration for i, id in enumerate(batch.id)}
        for row in rows:
            assert (row["iteration"], row["version"], row["round"], row["ended"]) == (number, number, 0, True)
            assert row["reply_ids"][0] == 20 + row["seed"] % 50
            tokens = np.array(row["reply_ids"])
            own = logprob(tokens) + np.float32(0.6 * number)
            np.testing.assert_allclose(row["logprobs"], own, rtol=1e-6)
            np.testing.assert_allclose(row["rollout_logprobs"], own + 0.01, rtol=1e-6)
            np.testing.assert_allclose(row["ref_logprobs"], logprob(tokens) - KL_PER_TOKEN, rtol=1e-6)
            assert row["score/rewards.0"] == row["reward"] == row["reply_ids"][0] % 5
            assert row["scaled_reward"] == row["reward"]
            batch, place = trained[row["row"]]
            for name in ("advantages", "weights"):
                np.testing.assert_array_equal(row[name], list(getattr(batch, name))[place])
            ids, length = list(batch.input_ids)[place], batch.prompt_lengths[place]
            assert row["prompt_ids"] + row["reply_ids"] == ids.tolist()
            assert len(row["prompt_ids"]) == length
            assert row["times_trained"] == 3


def test_rows_that_updates_did_not_come_to_are_marked(inputs: PPOInputs, tmp_path: Path) -> None:
    # The very first update says too much: its minibatch alone was trained on, and once.
    world = World(approx_kl=lambda update: 0.6 if update == 0 else 0.4)
    attempt(inputs, tmp_path / "out", world, epochs=3, stop_kl=0.5)
    first, second = shards(tmp_path / "out")
    assert sorted(first.table["times_trained"].to_pylist()) == [0] * MINIBATCH + [1] * MINIBATCH
    used = first.table["row"].to_numpy()[first.table["times_trained"].to_numpy() == 1]
    assert sorted(used) == sorted(world.batches[0][1].id)
    assert second.table["times_trained"].to_pylist() == [3] * REPLIES


def test_a_reply_without_a_score_and_a_source_that_does_not_apply(inputs: PPOInputs, tmp_path: Path) -> None:
    def half(prompts: list[str], replies: list[str]) -> list[float | None]:
        return [None if number == 1 else 0.5 for number in range(len(replies))]

    terms = [reward_term(model="rewards.0"), reward_term(function="half", weight=2.0, retries=0)]
    world = World()
    attempt(inputs, tmp_path / "out", world, rewards=terms, functions={"half": half}, max_failed=0.5, iterations=1)
    rows = shards(tmp_path / "out")[0].table.to_pylist()
    assert np.isnan(rows[1]["score/half"])
    assert (rows[1]["reward"], rows[1]["scaled_reward"], rows[1]["times_trained"]) == (None, None, 0)
    assert rows[1]["advantages"] == rows[1]["weights"] == []
    assert rows[1]["failure/half"] == "it returned None"
    assert all(f"failure/{model}" not in rows[1] for model in ("rewards.0",))
    for row in (rows[0], rows[2], rows[3]):
        assert (row["score/half"], row["failure/half"]) == (0.5, None)
        assert row["reward"] == row["score/rewards.0"] + 1.0
        assert len(row["advantages"]) == len(row["reply_ids"]) == 2
        assert row["times_trained"] == 1


@pytest.mark.parametrize("tokens", ["kept", "hashed"])
def test_rows_that_others_took_the_place_of_stay_in_the_ledger(inputs: PPOInputs, tmp_path: Path, tokens: Any) -> None:
    calls: list[int] = []
    (inputs.prompts.path / MANIFEST).write_text("one")

    def late(prompts: list[str], replies: list[str]) -> list[float]:
        calls.append(len(replies))
        return [0.0] * len(replies) if len(calls) == 1 else [float(n) for n in range(len(replies))]

    attempt(
        inputs,
        tmp_path / "out",
        World(),
        rewards=[reward_term(function="late")],
        gold="own:length",
        functions={"late": late, "own:length": lambda prompts, replies: [len(reply) for reply in replies]},
        resample_rounds=2,
        iterations=1,
        ledger=LedgerConfig(tokens=tokens),
        **GROUPS,
    )
    rows = shards(tmp_path / "out")[0].table.to_pylist()
    assert [(row["row"], row["round"], row["times_trained"]) for row in rows] == [
        *[(id, 1, 1) for id in range(4, 8)],
        *[(id, 0, 0) for id in range(4)],
    ]
    assert [row["reward"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["scaled_reward"] for row in rows[4:]] == [None] * 4
    # Of what is trained on: nobody asks how good it was what others took the place of.
    assert all(row["gold"] > 0 for row in rows[:4])
    assert [row["gold"] for row in rows[4:]] == [None] * 4
    assert len({row["seed"] for row in rows}) == 8
    # Nobody worked out advantages of those; what is hashed has their mean.
    advantages = [row["advantages_mean" if tokens == "hashed" else "advantages"] for row in rows]
    assert [bool(found) for found in advantages] == [True] * 4 + [False] * 4
    assert advantages[4:] == [None if tokens == "hashed" else []] * 4


@pytest.mark.parametrize(("lag", "snapshot", "keep"), [(0, 1, "all"), (1, 0, 2), (2, 0, "all"), (2, 1, 2)])
def test_a_resumed_stage_has_the_same_ledger(
    inputs: PPOInputs, tmp_path: Path, lag: int, snapshot: int, keep: Any
) -> None:
    """Killed with later shards written, and those of its snapshot alone there: they are made again."""
    fields: dict[str, Any] = {"iterations": 3, "reward_scaling": "running", "lag": lag}
    fields["ledger"] = LedgerConfig(keep=keep)
    first = attempt(inputs, tmp_path / "whole", World(surer_by=0.1), **fields)
    attempt(inputs, tmp_path / "resumed", World(surer_by=0.1), newest=first.snapshots[snapshot], **fields)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")
    assert iterations(tmp_path / "whole" / "ledger") == [0, 1, 2][-3 if keep == "all" else -2 :]


def test_a_snapshot_stays_as_it_was_when_the_stage_goes_on(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = attempt(inputs, tmp_path / "out", World(), iterations=3, ledger=LedgerConfig(keep=1))
    assert [iterations(snapshot.directory / "ledger") for snapshot in recorder.snapshots] == [[0], [1]]
    assert iterations(tmp_path / "out" / "ledger") == [2]


def test_nothing_is_kept_where_the_config_says_so(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = attempt(inputs, tmp_path / "out", World(), ledger=LedgerConfig(keep="none"))
    assert not (tmp_path / "out" / "ledger").exists()
    assert not recorder.tables
    assert "seconds/ledger" in recorder.points[0]


@pytest.mark.parametrize("gold", [None, "vader"])
def test_a_few_rows_are_shown(inputs: PPOInputs, tmp_path: Path, gold: str | None) -> None:
    recorder = attempt(inputs, tmp_path / "out", World(), iterations=5, gold=gold)
    columns, rows = recorder.tables["rollouts"]
    apart = ["gold"] if gold else []
    assert columns == ["iteration", "prompt", "reply", "reward", "advantage", "used", *apart, "rewards.0"]
    assert all(len(row) == len(columns) for row in rows)
    assert sorted({row[0] for row in rows}) == [0, 2, 4]
    shown = shards(tmp_path / "out")[2].table["reward"].to_pylist()
    assert {row[3] for row in rows if row[0] == 2} == {min(shown), max(shown)}
    assert all(row[1].startswith("question number") for row in rows)


def test_hashed_rows_say_nothing_and_can_be_compared(inputs: PPOInputs, tmp_path: Path) -> None:
    dataset = inputs.prompts.path / MANIFEST
    dataset.write_text("one")
    fields: dict[str, Any] = {"ledger": LedgerConfig(tokens="hashed"), "iterations": 3}

    def hashed(name: str, **more: Any) -> tuple[FakeRecorder, list[dict[str, Any]]]:
        recorder = attempt(inputs, tmp_path / name, World(), **fields | more)
        return recorder, [row for shard in shards(tmp_path / name) for row in shard.table.to_pylist()]

    attempt(inputs, tmp_path / "plain", World(), iterations=3)
    plain = [row for shard in shards(tmp_path / "plain") for row in shard.table.to_pylist()]
    recorder, rows = hashed("hashed")
    assert not recorder.tables
    # Nothing of which a row has several values, so no token and no number of a single token; and no text.
    assert all(not isinstance(value, list) for row in rows for value in row.values())
    assert not {"prompt_ids", "reply_ids", "logprobs"} & set(rows[0])
    for left, right in zip(plain, rows, strict=True):
        for name in ("seed", "prompt", "reward", "score/rewards.0", "times_trained"):
            assert left[name] == right[name]
        assert right["logprobs_mean"] == pytest.approx(np.mean(left["logprobs"]))
        json.dumps(right)
    for name in ("prompt_ids", "reply_ids"):
        digests: dict[tuple[int, ...], set[str]] = {}
        for left, right in zip(plain, rows, strict=True):
            digests.setdefault(tuple(left[name]), set()).add(right[f"{name.removesuffix('_ids')}_hash"])
        assert all(len(found) == 1 for found in digests.values())
        assert len(set.union(*digests.values())) == len(digests) > 1
    # Again the same; of other data other digests, though the rows are the same.
    assert files(tmp_path / "hashed") == (hashed("again"), files(tmp_path / "again"))[1]
    dataset.write_text("two")
    other = hashed("other")[1]
    assert not {row["reply_hash"] for row in rows} & {row["reply_hash"] for row in other}
    assert [row["seed"] for row in rows] == [row["seed"] for row in other]
