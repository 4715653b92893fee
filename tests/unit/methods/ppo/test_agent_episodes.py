"""PPO's loop over agents: real worker processes and a real gateway, models in this process."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from tests.unit.agents import sample_agents
from tests.unit.agents.parts import FakeGenerator
from tests.unit.methods.ppo.loop import World
from tests.unit.methods.ppo.played_agents import HERE, Policy, played
from tests.unit.methods.ppo.recorder import FakeRecorder
from tests.unit.methods.stages import ran
from xray_runtime.agents.agent_records import agent_metrics, read_episodes
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import PolicyBatch, PromptBatch, ReplyBatch, Rollout, Scores
from xray_runtime.data.ledger import readable
from xray_runtime.data.pairs import Example, Pairs, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.graph.artifacts import EPISODES, Dataset
from xray_runtime.methods.best_of_n import body as best_of_n
from xray_runtime.methods.best_of_n.config import BestOfNConfig
from xray_runtime.methods.best_of_n.kind import BestOfNInputs
from xray_runtime.methods.common.sampling.agent_rows import BranchRows, decoded_branches
from xray_runtime.methods.common.sampling.episode_source import SamplerSetup
from xray_runtime.methods.common.sampling.policy_replies import sample_policy
from xray_runtime.methods.common.sampling.sampled_replies import sampling_of
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.journal import ANSWERS, Journal
from xray_runtime.trust.replay_answers import restore_recorded


@dataclass(frozen=True)
class Whole:
    """A stage that was played to its end, which tests only read."""

    out: Path
    kept: Path
    world: World
    recorder: FakeRecorder
    table: Any


def whole_of(inputs: PPOInputs, root: Path, agent: str = "two_turns", **fields: Any) -> Whole:
    (root / "kept").mkdir()
    return Whole(root / "out", root / "kept", *played(inputs, root / "out", agent, kept=root / "kept", **fields))


@pytest.fixture(scope="module")
def whole(inputs: PPOInputs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole_of(inputs, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def failing(inputs: PPOInputs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Six of ten agents fail."""
    return whole_of(inputs, tmp_path_factory.mktemp("failing"), "by_number", prompts_per_iteration=10, max_failed=0.9)


def published(inputs: PPOInputs, whole: Whole, to: Path) -> Path:
    """A copy of what a stage wrote, with the policy's files."""
    shutil.copytree(inputs.policy.path, to)
    return Path(shutil.copytree(whole.out, to, dirs_exist_ok=True))


def test_branches_are_rows_for_the_models_and_one_row_in_the_ledger(whole: Whole) -> None:
    world, recorder, table = whole.world, whole.recorder, whole.table
    assert len(table) == 4
    records = [json.loads(text) for text in table["answers"].to_pylist()]
    rewards = table["score/environment"].to_pylist()
    for row, (record, reward) in enumerate(zip(records, rewards, strict=True)):
        ids, mask = table["reply_ids"][row].as_py(), table["response_mask"][row].as_py()
        sampled = [token for token, own in zip(ids, mask, strict=True) if own]
        assert sorted(sampled) == sorted(token for call in record["calls"] for token in call["ids"])
        assert len(record["calls"]) == 3
        # Two of three replies are counted by the agent, whose letters are one token each.
        assert 2 <= reward < len(sampled)
    # A batch of two episodes is four rows, each with the episode's advantage on its sampled tokens alone.
    for _, rows, totals, _ in world.batches:
        assert len(rows.input_ids) == 4
        assert len(set(rows.id.tolist())) == 4
        assert "branches" not in rows
        assert totals.tokens == rows.response_mask.values.sum()
        for advantage, mask in zip(rows.advantages, rows.response_mask, strict=True):
            assert len(set(advantage[mask].tolist())) == 1
            assert not advantage[~mask].any()
    sampled = [
        token
        for _, rows, *_ in world.batches
        for ids, start, mask in zip(rows.input_ids, rows.prompt_lengths, rows.response_mask, strict=True)
        for token in ids[start:][mask].tolist()
    ]
    assert sorted(sampled) == sorted(token for record in records for call in record["calls"] for token in call["ids"])
    [point] = recorder.points
    counts = {name: point[f"rollout/agent/{name}"] for name in ("calls", "branches", "broke", "begun_anew", "retries")}
    assert counts == {"calls": 12, "branches": 4, "broke": 0, "begun_anew": 0, "retries": 0}
    assert point["rollout/mismatch"] == 0


def test_a_split_into_branches_is_undone() -> None:
    branches = Ragged.of([[2, 3, 1, 2, 3, 1, 1, 2, 4], [1, 1, 3]])
    rows = PolicyBatch(
        input_ids=Ragged.of([[1, 2, 5, 6, 7, 8], [3, 9]]),
        prompt_lengths=np.array([2, 1]),
        id=np.array([10, 11]),
        response_mask=Ragged.of([[True, False, True, True], [True]], np.bool_),
        branches=branches,
    )
    split = BranchRows.of(rows, branches)
    assert "branches" not in split.rows
    assert [row.tolist() for row in split.rows.input_ids] == [[1, 2, 5, 6, 7], [1, 2, 4, 8], [3, 9]]
    assert split.rows.prompt_lengths.tolist() == [2, 3, 1]
    assert [row.tolist() for row in split.rows.response_mask] == [[True, False, True], [True], [True]]
    assert len(set(split.rows.id.tolist())) == 3
    logprobs = Ragged.of([[0.1, 0.2, 0.3], [0.4], [0.5]], np.float32)
    merged = split.merged(Scores(logprobs=logprobs, final_values=np.array([1.0, 2.0, 3.0])))
    assert [row.tolist() for row in merged.logprobs] == [pytest.approx([0.1, 0.2, 0.3, 0.4]), pytest.approx([0.5])]
    assert merged.final_values.tolist() == [2.0, 3.0]
    assert [length for _, length in decoded_branches(branches.values[:9])] == [3, 1]


def test_a_run_again_reads_the_journal_and_gives_the_same_bytes(
    inputs: PPOInputs, tmp_path: Path, whole: Whole
) -> None:
    """Of one that was killed after some calls: the ended episodes are read, the others run and are answered from it."""
    kept = tmp_path / "kept"
    kept.mkdir()
    lines = (whole.kept / ANSWERS).read_bytes().splitlines(keepends=True)
    assert len(lines) == 4 * (3 + 1)
    for count in (16, 6):
        (kept / ANSWERS).write_bytes(b"".join(lines[:count]))
        world, _, again = played(inputs, tmp_path / f"after-{count}", kept=kept)
        assert again.equals(whole.table)
        assert len(world.seeds) == 12 - sum(b'"call"' in line for line in lines[:count])


def test_calls_that_differ_from_the_journals_begin_the_episode_anew_or_fail(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    played(inputs, tmp_path / "whole", "says", kept=kept)
    lines = (kept / ANSWERS).read_bytes().splitlines(keepends=True)
    (kept / ANSWERS).write_bytes(b"".join(line for line in lines if b'"call"' in line))
    monkeypatch.setenv("XRAY_TEST_SAYS", "other")
    with pytest.raises(RuntimeError, match=r"sample-0-\d: a call differs from the journal's: .*same.* became .*other"):
        played(inputs, tmp_path / "fails", "says", kept=kept, limits={"changed": "fail"})
    _, recorder, table = played(inputs, tmp_path / "anew", "says", kept=kept)
    assert recorder.points[0]["rollout/agent/begun_anew"] == 4
    # Nothing of the journal is in what was begun anew.
    assert all(len(json.loads(text)["calls"]) == 1 for text in table["answers"].to_pylist())


def test_a_replay_samples_again_and_needs_no_agent(inputs: PPOInputs, tmp_path: Path, whole: Whole) -> None:
    kept = tmp_path / "replayed"
    kept.mkdir()
    config = PPOConfig(
        environment={"agent": f"{HERE}:two_turns"}, rewards=[], prompts_per_iteration=4, minibatch_size=2
    )
    checkpoint = published(inputs, whole, tmp_path / "whole")
    assert restore_recorded(checkpoint, config, 0, Journal(kept)) == ["environment"]
    world, _, replayed = played(inputs, tmp_path / "again", "is_gone", kept=kept)
    assert replayed.equals(whole.table)
    assert len(world.seeds) == 12


@pytest.fixture(scope="module")
def validated(inputs: PPOInputs, tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    """The same inputs, with two prompts to choose by."""
    data = tmp_path_factory.mktemp("validated") / "data"
    shutil.copytree(inputs.prompts.path, data)
    rows = [Example(f"v{n}", "v", [{"role": "user", "content": f"validation {n}"}], "x") for n in range(2)]
    write_pairs(data / "validation.arrow", Example, rows)
    return replace(inputs, prompts=Dataset(data))


VALIDATED: dict[str, Any] = {"iterations": 2, "validation": {"every": 1, "num_prompts": 2}, "ends_with_last": False}


@pytest.fixture(scope="module")
def looked_at(validated: PPOInputs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole_of(validated, tmp_path_factory.mktemp("looked-at"), **VALIDATED)


def test_a_replay_of_validations_needs_no_agent(validated: PPOInputs, tmp_path: Path, looked_at: Whole) -> None:
    checkpoint, kept = published(validated, looked_at, tmp_path / "whole"), tmp_path / "replayed"
    rollouts = Counter(rollout for rollout, _ in read_episodes(checkpoint / EPISODES))
    assert rollouts == {"validation-0-0": 2, "validation-0-1": 2, "validation-0-2": 2}
    kept.mkdir()
    config = PPOConfig(
        environment={"agent": f"{HERE}:two_turns"}, rewards=[], prompts_per_iteration=4, minibatch_size=2
    )
    journal = Journal(kept)
    assert restore_recorded(checkpoint, config, 1, journal) == ["environment"]
    played(validated, tmp_path / "again", "is_gone", kept=kept, **VALIDATED)
    for name in (EPISODES, "ledger/000000.parquet", "ledger/000001.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()
    (checkpoint / EPISODES).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"^REF: .*episodes.jsonl: damaged"):
        restore_recorded(checkpoint, config, 1, journal)


def test_a_resumed_stage_keeps_the_validations_before_its_snapshot(
    validated: PPOInputs, tmp_path: Path, looked_at: Whole
) -> None:
    kept, newest = shutil.copytree(looked_at.kept, tmp_path / "kept"), deepcopy(looked_at.recorder.snapshots[0])
    world, _, _ = played(validated, tmp_path / "resumed", kept=kept, newest=newest, **VALIDATED)
    assert world.seeds == []
    assert (tmp_path / "resumed" / EPISODES).read_bytes() == (looked_at.out / EPISODES).read_bytes()


def test_hashed_tokens_are_not_kept_as_episodes_either(validated: PPOInputs, tmp_path: Path) -> None:
    data = Path(shutil.copytree(validated.prompts.path, tmp_path / "data"))
    (data / "manifest.json").write_text("{}")
    hashed = VALIDATED | {"iterations": 1, "ledger": {"tokens": "hashed"}}
    played(replace(validated, prompts=Dataset(data)), tmp_path / "out", **hashed)
    assert not (tmp_path / "out" / EPISODES).exists()


def test_two_sides_of_a_comparison_are_two_rollouts(inputs: PPOInputs, tmp_path: Path) -> None:
    """Both are version 0, and have the same seeds, prompts and journal."""
    config = EvaluationConfig(environment={"agent": f"{HERE}:two_turns", "max_tokens": 256}, max_new_tokens=16)
    stage: Any = Stage("compare", 7, config, inputs, RuntimeConfig(), None, kept=tmp_path)  # type: ignore[arg-type]
    tokenizer, texts = load_tokenizer(inputs.policy.path), {"champion": "ti", "candidate": "ha"}
    prompts = [([{"role": "user", "content": "question number 1"}], [5, 6])]

    class Says(Policy):
        def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
            return FakeGenerator(tokenizer, texts[self.role])(rows, sampling, version)

    for side, text in texts.items():
        world = World()
        sampling = sampling_of(config, inputs.policy.path, tokenizer)
        setup = SamplerSetup(stage, Says(side, world, 1), sampling, tokenizer, 64, tmp_path, tmp_path)  # type: ignore[arg-type]
        [said] = sample_policy(setup, prompts, {}, side).texts
        assert said.replace("\n", "") == text * 3
    assert {rollout for rollout, _ in read_episodes(tmp_path / EPISODES)} == {f"sample-0-0-{side}" for side in texts}


def test_the_best_of_an_agents_episodes_becomes_data(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World()
    world.tokenizer = load_tokenizer(inputs.policy.path)  # type: ignore[attr-defined]
    agent = {"agent": f"{HERE}:two_turns", "max_tokens": 256}
    config = BestOfNConfig(environment=agent, samples=3, num_prompts=4, max_new_tokens=16)
    (inputs.prompts.path / "heldout.arrow").write_bytes(b"")

    given = BestOfNInputs(inputs.policy, inputs.prompts)
    out, _ = ran(best_of_n.run, tmp_path, config, given, lambda role: Policy(role, world, 1), ["generator"], "kept")
    examples = list(Pairs(out / "train.arrow", Example))
    records = read_episodes(out / EPISODES)
    assert len(records) == 12
    assert len(examples) == 4 * 3
    rewards = np.array([records["sample-0-0", row]["reward"] for row in range(12)]).reshape(4, 3)
    stats = json.loads((out / "stats.json").read_text())
    assert stats["reward_best"] == rewards.max(1).mean() > stats["reward"]
    for first, *others in zip(*[iter(examples)] * 3, strict=True):
        said = [*first.prompt, {"role": "assistant", "content": first.response}]
        assert [m["role"] for m in first.prompt] == ["user"]
        assert [other.prompt[:2] for other in others] == [said] * 2
        assert {other.prompt[2]["content"] for other in others} == {"go on", "another way"}
        # Two of three replies are paid, by their letters.
        paid = next(other for other in others if other.prompt[2]["content"] == "go on")
        assert len(first.response + paid.response) in rewards.max(1)


def test_a_row_is_shown_as_a_conversation_with_its_branches(whole: Whole, failing: Whole) -> None:
    world, table = whole.world, whole.table
    row = next(readable(table, world.tokenizer))  # type: ignore[attr-defined]
    assert [(call["call"], call["after"], call["branch"]) for call in row["calls"]] == [
        (1, None, False),
        (2, 1, False),
        (3, 1, True),
    ]
    record = json.loads(table["answers"][0].as_py())
    seeds = {call["key"]: call["seed"] for call in record["calls"]}
    assert {call["seed"] for call in row["calls"]} == set(seeds.values())
    assert {call["messages"][0]["content"] for call in row["calls"][1:]} == {"go on", "another way"}
    lines = row["reply"].split("\n")
    first, _, third = row["calls"]
    assert lines[0] == f"call 1 (seed {first['seed']}, version 0)"
    assert lines[1].startswith("  user: question number ")
    assert lines[2] == f"  policy: {first['reply']}"
    assert lines[6] == f"call 3 after call 1, a branch (seed {third['seed']}, version 0)"
    assert lines[-1] == f"reward {record['reward']:g}; branches 1; calls 3"
    shown = [one["reply"] for one in readable(failing.table, world.tokenizer)]  # type: ignore[attr-defined]
    assert sum("failed, broke: it raised OSError: the page is gone" in text for text in shown) == 2


def test_failures_have_no_reward_and_are_counted_by_sort(failing: Whole) -> None:
    recorder, table = failing.recorder, failing.table
    whys = table["failure/environment"].to_pylist()
    assert sorted(why for why in whys if why) == [
        *["broke: it raised OSError: the page is gone"] * 2,
        *["broke: the agent ended without a reward"] * 2,
        *["unusable: the site was down"] * 2,
    ]
    failed = [why is not None for why in whys]
    assert [reward is None for reward in table["reward"].to_pylist()] == failed
    assert [trained == 0 for trained in table["times_trained"].to_pylist()] == failed
    [point] = recorder.points
    counts = {name: point[f"rollout/agent/{name}"] for name in ("broke", "failed_unusable", "failed_infrastructure")}
    assert counts == {"broke": 4, "failed_unusable": 2, "failed_infrastructure": 0}


def test_each_fault_costs_its_episode_alone_and_nothing_of_it_is_trained(inputs: PPOInputs, tmp_path: Path) -> None:
    """The same gateway and worker for all ten. One steals and is refused, one posts after its end."""
    world, recorder, table = played(
        inputs,
        tmp_path / "out",
        "of_table",
        prompts_per_iteration=10,
        max_failed=0.9,
        limits={"max_calls": 20, "max_tokens": 512},
    )
    texts = [world.tokenizer.decode(ids) for ids in table["prompt_ids"].to_pylist()]  # type: ignore[attr-defined]
    faults = [sample_agents.FAULTS[int(next(c for c in reversed(text) if c.isdigit()))] for text in texts]
    invalid = "broke: the agent returned no valid result: the reward is {}: must be a finite number"
    whys = {
        "nothing": "broke: the agent ended without a reward",
        "raises": "broke: it raised OSError: the page is gone",
        "boolean": invalid.format("True"),
        "list": invalid.format("[1.0]"),
        "text": invalid.format("'1.0'"),
        "nan": invalid.format("nan"),
        "calls": "broke: more than max_calls = 20 calls",
    }
    rewards = {"none": 1.0, "another": 1.0, "after": 0.25}
    columns = (table[name].to_pylist() for name in ("failure/environment", "reward", "times_trained"))
    found = {fault: values for fault, *values in zip(faults, *columns, strict=True)}
    assert sorted(faults) == sorted(sample_agents.FAULTS)
    for fault, (why, reward, trained) in found.items():
        assert (why, reward, trained > 0) == (whys.get(fault), rewards.get(fault), fault in rewards), fault
    [point] = recorder.points
    assert point["rollout/agent/broke"] == len(whys)
    # The ledger has no call that was made with a stolen token or after the end.
    records = [json.loads(text) for text in table["answers"].to_pylist()]
    assert {len(record["calls"]) for record, fault in zip(records, faults, strict=True) if fault != "calls"} == {1}


def test_a_worker_that_dies_is_infrastructure_and_no_reward(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XRAY_TEST_MARKER", str(tmp_path / "marker"))
    _, recorder, table = played(inputs, tmp_path / "out", "kills_once", limits={"retries": 5})
    assert table["failure/environment"].to_pylist() == [None] * 4
    [point] = recorder.points
    assert 1 <= point["rollout/agent/failed_infrastructure"] <= 4
    assert point["rollout/agent/broke"] == 0
    # With the marker in place nothing dies, and the ledger is the same.
    _, recorder, undisturbed = played(inputs, tmp_path / "undisturbed", "kills_once", limits={"retries": 5})
    assert recorder.points[0]["rollout/agent/failed_infrastructure"] == 0
    assert undisturbed["answers"] == table["answers"]


@pytest.mark.parametrize(
    "environment",
    [
        {"agent": "a:b", "url": "http://h"},
        {"url": "http://h", "venv": "v"},
        {"agent": "a:b", "sandbox": "http://h", "venv": "v"},
        {"command": ["a"], "sandbox": "http://h", "venv": "v"},
        {"agent": "a:b", "max_turns": 3},
        {"agent": "a:b", "max_tokens": 2},
    ],
)
def test_an_agents_config_is_refused_in_one_line(environment: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(PPOConfig, {"environment": environment}, "ppo")


def test_metrics_sum_over_episodes() -> None:
    records = [{"counts": {"calls": 2}, "failure": ""}, {"counts": {"calls": 3}, "failure": "broke: it hung"}]
    answers = np.array([json.dumps(record) for record in records], object)
    found = agent_metrics(Rollout(response_ids=Ragged.of([[1], [1]]), answers=answers, ran_again=np.array([2, 0])))
    assert found == {
        "rollout/agent/calls": 5,
        "rollout/agent/broke": 1,
        "rollout/agent/failed_infrastructure": 2,
        "rollout/agent/failed_unusable": 0,
    }
