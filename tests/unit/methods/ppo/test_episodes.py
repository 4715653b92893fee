"""PPO's loop over episodes of many turns: real worker processes, models in this process.

A turn is a word and the end token. The template writes what is read between two turns in a few tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import xray
from tests.message_texts import Messages
from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.loop import MINIBATCH, REPLIES, World, attempt, plain
from tests.unit.methods.ppo.played_environments import HERE, Policy, played
from xray_runtime.agents.environments import worker
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.ledger import read_shard, readable, shard_path
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.journal import Journal
from xray_runtime.trust.replay_answers import restore_recorded

OF_TURNS = (0.0, 0.5, 1.0)


def taught(world: World) -> list[Any]:
    return [plain(batch) for batch in world.batches]


def test_turns_and_observations_lie_in_one_row(inputs: PPOInputs, tmp_path: Path) -> None:
    world, recorder = played(inputs, tmp_path / "out", "ThreeTurns")
    tokenizer = world.tokenizer  # type: ignore[attr-defined]
    word = tokenizer.convert_tokens_to_ids(["a", "n"])
    assert tokenizer.encode("an") != word  # encoded again it would be other tokens
    turn = [*word, tokenizer.eos_token_id]
    for _, rows, totals, _ in world.batches:
        assert totals.tokens == 2 * 9
        masks = list(rows.response_mask)
        for ids, start, mask in zip(rows.input_ids, rows.prompt_lengths, masks, strict=True):
            assert ids[start:][mask].tolist() == turn * 3
            between = tokenizer.decode(ids[start:][~mask])
            assert between.count("go on") == 2
            # λ = 1, values 0: each token returns what is still to come, 0 + ½ + 1, ½ + 1 and 1.
        returns = [of_row[mask].tolist() for of_row, mask in zip(rows.returns, masks, strict=True)]
        assert returns == [[1.5] * 3 + [1.5] * 3 + [1.0] * 3] * 2
        for name in ("advantages", "returns", "weights"):
            assert all((of_row[~mask] == 0).all() for of_row, mask in zip(getattr(rows, name), masks, strict=True))
    [point] = recorder.points
    assert point["rollout/turns"] == 3
    assert point["reward/source/environment/mean"] == sum(OF_TURNS)
    assert point["rollout/length"] == 9
    assert len(set(world.seeds)) == 4 * 3
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    assert [list(np.array(row)[mask]) for row, mask in _of(table)] == [[0, 0, 0, 0, 0, 0.5, 0, 0, 1]] * 4
    assert table["turns"].to_pylist() == [3] * 4
    for row in readable(table, tokenizer):
        assert re.fullmatch(r"an \[go on (\d)\] an \[go on \1\] an", row["reply"])
    # Its own nine tokens have eight pairs of neighbours, three of them different; what it read does not count.
    assert point["rollout/distinct_in_reply"] == pytest.approx(3 / 8)


def _of(table: Any) -> list[tuple[list[float], np.ndarray]]:
    masks = [np.array(row) for row in table["response_mask"].to_pylist()]
    return list(zip(table["turn_rewards"].to_pylist(), masks, strict=True))


def test_an_environments_opening_replaces_the_prompt(inputs: PPOInputs, tmp_path: Path) -> None:
    world, _ = played(inputs, tmp_path / "out", "Opens")
    [opening] = chat_format(world.tokenizer).prompts(  # type: ignore[attr-defined]
        [[{"role": "system", "content": "a game"}, {"role": "user", "content": "your move"}]]
    )
    for _, rows, *_ in world.batches:
        starts = zip(rows.input_ids, rows.prompt_lengths, strict=True)
        assert [ids[:length].tolist() for ids, length in starts] == [opening] * MINIBATCH
    assert read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table["prompt_ids"].to_pylist() == [opening] * REPLIES


def test_a_turn_has_a_seed_of_its_own_and_a_group_one_environment(inputs: PPOInputs, tmp_path: Path) -> None:
    """Derived from the names of who asks alone, turns counted from 0: a replay has to draw the same."""
    groups = {"prompts_per_iteration": 2, "samples_per_prompt": 2, "minibatch_size": 2, "advantages": "rloo"}
    world, _ = played(inputs, tmp_path / "out", "ThreeTurns", **groups)
    turns = [(row, turn) for row in range(4) for turn in range(3)]
    assert sorted(world.seeds) == sorted(derive_seed(7, "ppo", "sample", 0, *turn) for turn in turns)
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    environments = [derive_seed(7, "ppo", "sample", "environment", 0, group) for group in (0, 1)]
    assert table["seed"].to_pylist() == [seed for seed in environments for _ in range(2)]


def test_the_order_of_an_environments_numbers_does_not_change_the_ledger(inputs: PPOInputs, tmp_path: Path) -> None:
    played(inputs, tmp_path / "out", "Tells", max_failed=0.5)
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    infos, answers = table["info"].to_pylist(), table["answers"].to_pylist()
    assert '{"is_last": 1.0, "tool_errors": 3.0}' in infos
    told = [each["answer"]["info"] for text in answers for each in json.loads(text) if "info" in each.get("answer", {})]
    assert ["is_last", "no name", "said", "tool_errors"] in map(list, told)
    assert all(list(info) == sorted(info) for info in told)


def test_tokens_between_turns_are_those_of_the_template(inputs: PPOInputs) -> None:
    tokenizer = load_tokenizer(inputs.policy.path)
    chat = chat_format(tokenizer)
    asked, said = {"role": "user", "content": "question"}, {"role": "assistant", "content": "an answer"}
    more = [{"role": "tool", "content": "<|end|> is text"}, {"role": "user", "content": "and?"}]
    [begin], [whole] = chat.prompts([[asked]]), chat.prompts([[asked, said, *more]])
    [reply] = chat.replies([([asked], said)])
    assert begin + reply + chat.observations(more, reply[-1]) == whole
    assert begin + reply + chat.observations(more, reply[0]) == [
        *begin,
        *reply,
        chat.end_of_turn,
        *whole[len(begin + reply) :],
    ]


def test_neither_delays_nor_processes_change_a_byte(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, _ = played(inputs, tmp_path / "at-once", "ThreeTurns")
    monkeypatch.setenv(sample_environments.DELAYS, "0.05")
    slowly, _ = played(inputs, tmp_path / "slowly", "ThreeTurns", limits={"num_workers": 3})
    np.testing.assert_equal(taught(slowly), taught(at_once))


def test_recorded_times_are_read_by_the_next_attempt(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first turns of all: their answers stand, and the environments are brought where they were."""
    steps, kept = tmp_path / "steps", tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setenv(sample_environments.STEPS, str(steps))
    first, _ = played(inputs, tmp_path / "first", "Clock", kept=kept)
    assert len(steps.read_text().splitlines()) == 4 * 3
    again, _ = played(inputs, tmp_path / "again", "Clock", kept=kept)
    assert len(steps.read_text().splitlines()) == 4 * 3
    np.testing.assert_equal(taught(again), taught(first))
    other, _ = played(inputs, tmp_path / "other", "Clock")
    with pytest.raises(AssertionError):
        np.testing.assert_equal(taught(other), taught(first))
    # Resets and first steps of four episodes are kept, the rest was not written when it was killed.
    journal = kept / "answers.jsonl"
    whole = journal.read_text().splitlines(keepends=True)
    cut = [line for line in whole if '"messages": null' in line or '"reward": 0.0' in line]
    assert len(cut) == 4 + 4
    journal.write_text("".join(cut))
    steps.unlink()
    played(inputs, tmp_path / "killed", "Clock", kept=kept)
    assert len(steps.read_text().splitlines()) == 4 * 3
    assert journal.read_text().startswith("".join(cut))
    assert len(journal.read_text().splitlines()) == len(whole)


@pytest.mark.parametrize("environment", ["Clock", "Breaks", "HasTools"])
def test_a_replay_reads_the_answers_in_the_ledger(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    steps, scratch = tmp_path / "steps", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv(sample_environments.STEPS, str(steps))
    fields: dict[str, Any] = {"prompts_per_iteration": 10, "minibatch_size": 10, "max_failed": 0.2}
    first, _ = played(inputs, tmp_path / "first", environment, **fields)
    steps.unlink()
    config = PPOConfig(environment={"path": f"{HERE}:{environment}"}, rewards=[], **fields)  # type: ignore[arg-type]
    load_tokenizer(inputs.policy.path).save_pretrained(tmp_path / "first")
    assert restore_recorded(tmp_path / "first", config, 0, Journal(scratch)) == ["environment"]
    again, _ = played(inputs, tmp_path / "again", environment, kept=scratch, **fields)
    assert not steps.exists()
    np.testing.assert_equal(taught(again), taught(first))
    shards = [shard_path(tmp_path / name / "ledger", 0).read_bytes() for name in ("first", "again")]
    assert shards[0] == shards[1]


def test_beside_updates_the_next_episodes_are_played(inputs: PPOInputs, tmp_path: Path) -> None:
    """With a lag; and an attempt that goes on has those that were played and not trained on, failed ones too."""
    fields: dict[str, Any] = {"prompts_per_iteration": 10, "minibatch_size": 10, "max_failed": 0.2, "lag": 1}
    whole, first = played(inputs, tmp_path / "whole", "Breaks", **fields | {"iterations": 3})
    assert [point["rollout/version"] for point in first.points] == [0, 0, 1]
    assert [point["reward/failed"] for point in first.points] == [1, 1, 1]
    resumed, second = played(
        inputs, tmp_path / "resumed", "Breaks", newest=first.snapshots[-1], **fields | {"iterations": 3}
    )
    np.testing.assert_equal(taught(resumed), taught(whole)[-len(resumed.batches) :])
    assert len(second.points) == 1
    shards = [shard_path(tmp_path / name / "ledger", 2).read_bytes() for name in ("whole", "resumed")]
    assert shards[0] == shards[1]


def test_answers_of_ending_environments_are_discarded(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update fails while the next episodes are played: what is kept of them are whole answers alone."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setenv(sample_environments.DELAYS, "0.3")

    class Failing(Policy):
        def _train(self, *args: Any) -> Any:
            raise OSError("the learner is gone")

    world = World()
    world.tokenizer = load_tokenizer(inputs.policy.path)  # type: ignore[attr-defined]
    options: dict[str, Any] = {"environment": {"path": f"{HERE}:ThreeTurns"}, "rewards": [], "lag": 1}
    with pytest.raises(OSError, match="the learner is gone"):
        attempt(inputs, tmp_path / "out", world, model=Failing, kept=kept, iterations=3, **options)
    lines = [json.loads(line) for line in (kept / "answers.jsonl").read_text().splitlines()]
    assert len(lines) >= 4 * 4  # the first rollout's
    assert not [line for line in lines if "failure" in line]


@pytest.mark.parametrize("call", [1, 4])
def test_a_death_within_an_episode_changes_no_byte(inputs: PPOInputs, tmp_path: Path, call: int) -> None:
    """At one of six calls of the generator, three turns of two cohorts, it is lost, with the environment's process;
    the next attempt loses that process once more."""
    calm, _ = played(inputs, tmp_path / "calm", "ThreeTurns")
    kept, killed = tmp_path / "kept", list[int]()
    kept.mkdir()

    class Struck(Policy):
        calls, generator_dies = 0, True

        def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
            Struck.calls += 1
            if Struck.calls == call:
                [process] = [p for p in psutil.Process().children() if worker.__name__ in p.cmdline()]
                process.kill()
                killed.append(process.pid)
                if Struck.generator_dies:
                    raise RuntimeError("the generator has died")
            return super()._generate(rows, sampling, version)

    with pytest.raises(RuntimeError, match="the generator has died"):
        played(inputs, tmp_path / "first", "ThreeTurns", kept=kept, model=Struck)
    Struck.calls, Struck.generator_dies = 0, False
    again, recorder = played(inputs, tmp_path / "again", "ThreeTurns", kept=kept, model=Struck)
    assert len(set(killed)) == 2
    assert recorder.points[0]["reward/failed"] == 0
    np.testing.assert_equal(taught(again), taught(calm))


def test_an_episode_that_fails_costs_its_row_alone(inputs: PPOInputs, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"prompts_per_iteration": 10, "minibatch_size": 10}
    world, recorder = played(inputs, tmp_path / "out", "Breaks", max_failed=0.2, **fields)
    [point] = recorder.points
    assert point["reward/failed"] == 1
    [(_, rows, _, _)] = world.batches
    assert len(rows.id) == 9
    with pytest.raises(RuntimeError, match=r"1 of 10 replies have no reward; environment failed for 1: .*OSError: the"):
        played(inputs, tmp_path / "strict", "Breaks", max_failed=0.05, **fields)


def test_limits_cut_episodes(inputs: PPOInputs, tmp_path: Path) -> None:
    _, recorder = played(inputs, tmp_path / "turns", "ThreeTurns", limits={"max_turns": 2})
    assert recorder.points[0]["rollout/turns"] == 2
    assert recorder.points[0]["rollout/truncated"] == 1
    # A turn of 3 tokens and what is read after it leave no room for another of up to 4.
    _, recorder = played(inputs, tmp_path / "tokens", "ThreeTurns", limits={"max_tokens": 8})
    assert recorder.points[0]["rollout/turns"] == 1


def test_only_what_is_allowed_is_imported() -> None:
    with recording():
        data, model = xray.prepare(source="x.jsonl"), xray.base(model="m")
        with pytest.raises(ConfigError, match=r"'os:getcwd' is not allowed: it would import os"):
            xray.ppo(model, data, environment={"path": "os:getcwd"})
        for where, name in (("__main__", "Mine"), (HERE, "test.<locals>.Mine")):
            mine = type("Mine", (), {"__module__": where, "__qualname__": name})
            with pytest.raises(
                ConfigError, match=r"ppo\.environment\.path: '.*Mine' is not allowed: environments run in"
            ):
                xray.ppo(model, data, environment={"path": mine})
        # Who hands over the class itself has imported it.
        handle = xray.ppo(model, data, environment={"path": sample_environments.ThreeTurns})
    assert handle.call.config.environment.path == f"{HERE}:ThreeTurns"  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"reward_scaling": "running"}, {"max_new_tokens": 16}])
def test_options_that_exclude_an_environment_are_named(fields: dict[str, Any], message_texts: Messages) -> None:
    environment = {"path": f"{HERE}:ThreeTurns", "max_tokens": 8}
    with message_texts.raises(ValueError):
        PPOConfig(**{"environment": environment, "max_new_tokens": 4} | fields)
