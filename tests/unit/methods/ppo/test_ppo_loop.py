"""PPO's loop over WholeModels that live in this process and answer with arrays worked out by hand: no Ray, no engine.

Every reply is one word and the end token. The reference lies 1.1 nats below the policy at each token, so the KL of a
reply is 2.2; four replies an iteration, two a minibatch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo.loop import MINIBATCH, REPLIES, World, attempt, logprob, plain, words
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.rollouts import PROBE_ROWS
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.rewards.config import reward_term


def test_the_order_of_calls(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World()
    attempt(inputs, tmp_path / "out", world)
    scores = ["policy score", "reference score", "rewards.0 score"]
    updates = ["policy train"] * (REPLIES // MINIBATCH)
    assert world.calls == [
        *["generator generate 0", *scores, *updates],
        *["generator follow 1", "generator generate 1", *scores, *updates],
        "policy save out",
    ]
    assert len(set(world.seeds)) == 2 * REPLIES
    # Three models score at the same time; one learns alone.
    assert world.shares == {"policy": (3, 1), "reference": (3, 1), "rewards.0": (3, 1)}


def test_a_generator_with_models_of_its_own_reads_what_was_published(inputs: PPOInputs, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"generator": GeneratorConfig(), "max_mismatch": 0.05}
    world = World(surer_by=0.1, updates_in_files=4)
    attempt(inputs, tmp_path / "out", world, **fields)
    assert world.calls[-4:] == ["policy save out", "generator load_checkpoint out", "generator probe 3", "policy score"]
    with pytest.raises(RuntimeError, match=r"^generator and trainer differ by 0\.1 nats per token"):
        attempt(inputs, tmp_path / "other", World(surer_by=0.1, updates_in_files=3), **fields)


@pytest.mark.parametrize("given", ["none", "the policy", "another"])
def test_a_policy_with_adapters_is_its_own_reference(inputs: PPOInputs, tmp_path: Path, given: str) -> None:
    """No second whole model is opened where the reference is what the policy was, and the policy learns the same."""
    (other := tmp_path / "other").mkdir()
    references = {"none": None, "the policy": inputs.policy, "another": Model(other)}
    whole, adapted = World(), World()
    attempt(inputs, tmp_path / "whole", whole)
    own = replace(inputs, reference=references[given])
    attempt(own, tmp_path / "adapted", adapted, lora=LoRAConfig(rank=2))
    assert ("reference score" in adapted.calls) == (given == "another")
    assert ("policy with its adapters off" in adapted.calls) == (given != "another")
    np.testing.assert_equal(list(map(plain, adapted.batches)), list(map(plain, whole.batches)))


def test_a_generator_gets_rounded_matrices_before_it_samples(inputs: PPOInputs, tmp_path: Path) -> None:
    """They are not those of the checkpoint that it begins with."""
    world = World()
    attempt(inputs, tmp_path / "out", world, lora=LoRAConfig(rank=2, quantize="nf4"))
    synced = [call for call in world.calls if call.startswith("generator")]
    assert synced == [f"generator {call} {version}" for version in range(2) for call in ("follow", "generate")]


def test_other_prompts_take_the_place_of_those_whose_replies_tie(inputs: PPOInputs, tmp_path: Path) -> None:
    """Two prompts, two replies each. A function gives the first four replies the same, and all others what differs."""
    groups = {"prompts_per_iteration": 2, "samples_per_prompt": 2, "minibatch_size": 2}
    fields: dict[str, Any] = groups | {"advantages": "rloo", "iterations": 1, "reward_scaling": "none"}
    given: list[int] = []

    def late(prompts: list[str], replies: list[str]) -> list[float]:
        first, count = len(given), len(replies)
        given.extend(range(count))
        return [0.0] * count if first == 0 else [float(n) for n in range(count)]

    def attempt_with(name: str, rounds: int) -> tuple[World, FakeRecorder]:
        given.clear()
        world, source = World(), reward_term(function="late")
        options = fields | {"resample_rounds": rounds, "rewards": [source]}
        return world, attempt(inputs, tmp_path / name, world, functions={"late": late}, **options)

    world, recorder = attempt_with("replaced", 2)
    # A first scoring, one of the others; those do not tie, so there is no second round.
    assert [call for call in world.calls if "generate" in call] == ["generator generate 0"] * 2
    assert recorder.points[0]["rollout/resampled_groups"] == 2
    assert recorder.points[0]["rollout/tied_groups"] == 0
    assert len(set(world.seeds)) == 8
    trained = [row for _, rows, *_ in world.batches for row in rows.id.tolist()]
    assert sorted(trained) == [4, 5, 6, 7]

    _, recorder = attempt_with("kept", 0)
    assert recorder.points[0]["rollout/tied_groups"] == 1
    assert "rollout/resampled_groups" not in recorder.points[0]


def test_the_order_of_calls_where_replies_are_sampled_beside_updates(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World()
    recorder = attempt(inputs, tmp_path / "out", world, lag=1, iterations=3)
    scores = ["policy score", "reference score", "rewards.0 score"]
    updates = ["policy train"] * (REPLIES // MINIBATCH)
    assert world.calls == [
        *["generator probe 0", "policy score", "generator generate 0", "generator generate 0", *scores, *updates],
        *["generator follow 1", "generator probe 1", "policy score", "generator generate 1", *scores, *updates],
        *["generator follow 2", "generator probe 2", "policy score", *scores, *updates],
        "policy save out",
    ]
    # Nothing is sampled twice, and no weights change while replies are sampled.
    assert len(set(world.seeds)) == 3 * REPLIES + 3 * PROBE_ROWS
    # The generator works beside all else.
    assert world.shares["policy"] == (4, 2)
    assert [point["rollout/version"] for point in recorder.points] == [0, 0, 1]
    assert [point["rollout/lag"] for point in recorder.points] == [0, 1, 1]


@pytest.mark.parametrize(("epochs", "trainer"), [(1, 120.0), (4, 360.0)], ids=["generator slower", "trainer slower"])
def test_beside_each_other_an_iteration_takes_the_longer_of_the_two(
    inputs: PPOInputs, tmp_path: Path, epochs: int, trainer: float
) -> None:
    """Time is counted: 64 tokens of 4 replies take 256, scores of 4 replies 40, an epoch of 4 replies 80."""
    seconds = {"generate": 1.0, "score": 10.0, "train": 20.0}
    taken = {}
    for lag in (0, 1):
        world = World(seconds=seconds)
        attempt(inputs, tmp_path / str(lag), world, lag=lag, iterations=5, epochs=epochs, max_new_tokens=64)
        taken[lag] = world.now
    assert taken[0] == 5 * (256 + trainer)
    # A probe: 4 tokens of 8 replies, and the policy's scores of them. The first rollout and the last update are alone.
    assert taken[1] == 5 * (32 + 80) + 256 + 4 * max(256, trainer) + trainer


def test_a_critic_of_its_own_learns_beside_the_policy(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World()
    recorder = attempt(inputs, tmp_path / "out", world, iterations=1, critic="separate", critic_lr=0.5, lr=0.25)
    assert world.calls == [
        "generator generate 0",
        *["policy score", "reference score", "critic score", "rewards.0 score"],
        *["policy train", "critic train"] * 2,
        *["policy save out", "critic save critic"],
    ]
    assert world.shares["policy"] == world.shares["critic"] == (4, 2)
    for policy, critic in zip(world.batches[::2], world.batches[1::2], strict=True):
        np.testing.assert_equal(plain(policy)[1:3], plain(critic)[1:3])
        # Each by its own peak, at the same point of the schedule.
        assert critic[3] == pytest.approx(2 * policy[3])
    assert recorder.points[0]["policy/grad_norm"] == 2.0
    assert recorder.points[0]["value/grad_norm"] == 3.0


def test_steps_begun_ahead_are_those_that_were_waited_for(inputs: PPOInputs, tmp_path: Path) -> None:
    """Without `stop_kl` no answer can end the update, so each step begins before the one before has answered."""
    given: dict[str, Any] = {"iterations": 2, "epochs": 3, "critic": "separate"}
    waits, ahead = (World(seconds={"train": 1.0}) for _ in range(2))
    first = attempt(inputs, tmp_path / "waits", waits, stop_kl=100.0, **given)
    second = attempt(inputs, tmp_path / "ahead", ahead, stop_kl=None, **given)
    np.testing.assert_equal([*map(plain, ahead.batches)], [*map(plain, waits.batches)])
    assert ahead.calls[:-2] == waits.calls[:-2]  # the last two save into other directories
    points = [
        [{k: v for k, v in p.items() if not k.startswith(("seconds", "speed"))} for p in r.points]
        for r in (first, second)
    ]
    assert points[0] == points[1]


def test_groups_are_compared_without_a_critic(inputs: PPOInputs, tmp_path: Path) -> None:
    """Two prompts with two replies each: the same four rows as above, and each group's advantages sum to 0."""
    world = World()
    recorder = attempt(
        inputs, tmp_path / "out", world, iterations=1, method="grpo", prompts_per_iteration=2, samples_per_prompt=2
    )
    assert world.calls == [
        "generator generate 0",
        *["policy score", "reference score", "rewards.0 score"],
        *["policy train"] * (REPLIES // MINIBATCH),
        "policy save out",
    ]
    advantages: dict[bytes, list[float]] = {}
    for _, rows, totals, _ in world.batches:
        assert totals == StepTotals(tokens=2.0 * MINIBATCH, rows=MINIBATCH, kl_coef=0.1)
        assert not {"values", "returns"} & rows.columns().keys()
        for ids, prompt, of_tokens in zip(rows.input_ids, rows.prompt_lengths, rows.advantages, strict=True):
            assert of_tokens[0] == of_tokens[1]
            advantages.setdefault(ids[:prompt].tobytes(), []).append(float(of_tokens[0]))
    assert [len(group) for group in advantages.values()] == [2, 2]
    # Of two replies the better one gets 1/√2, however much better it is; equal ones get nothing.
    for group in advantages.values():
        assert sorted(group) in ([0.0, 0.0], pytest.approx([-(0.5**0.5), 0.5**0.5]))
    assert any(group[0] for group in advantages.values())
    assert 0.0 <= recorder.points[0]["rollout/tied_groups"] < 1.0
    assert "value/mean" not in recorder.points[0]


def test_trained_models_sleep_while_replies_are_sampled(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World()
    attempt(inputs, tmp_path / "out", world, iterations=1, runtime=RuntimeConfig(trainer_sleeps=True))
    assert world.calls[:3] == ["policy sleep", "generator generate 0", "policy wake_up"]


@pytest.mark.parametrize(("rounds", "end"), [(0, "drop"), (1, "sleep")])
def test_a_cache_wakes_after_the_trained_models_sleep(inputs: PPOInputs, tmp_path: Path, rounds: int, end: str) -> None:
    """A sync comes before the generator's next turn, so its weights may be dropped: unless other prompts take the place
    of those whose replies tie."""
    world, runtime = World(), RuntimeConfig(device="cuda", generator_sleeps=True, trainer_sleeps=True)
    groups: dict[str, Any] = {"prompts_per_iteration": 2, "samples_per_prompt": 2, "advantages": "rloo"}
    fields = groups if rounds else {}
    attempt(inputs, tmp_path / "out", world, runtime=runtime, resample_rounds=rounds, **fields)
    first = world.calls.index("generator follow 1")
    turn = ["policy sleep", "generator wake_up", "generator generate 1", f"generator {end}", "policy wake_up"]
    assert world.calls[first + 1 : first + 1 + len(turn)] == turn


def test_the_weight_of_kl_is_steered_towards_its_target(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = attempt(inputs, tmp_path / "out", World())
    assert [point["kl/reference_k1"] for point in recorder.points] == pytest.approx([2.2, 2.2])
    # 2.2 / 2 − 1 = 0.1, times 4 replies / 8: each iteration adds 5%.
    assert [point["kl/coef"] for point in recorder.points] == pytest.approx([0.105, 0.11025])
    # What an iteration's rewards were charged with is the weight before: of the one score and −0.1 · 1.1 a token.
    _, rows, totals, _ = recorder_batches(inputs, tmp_path)[0]
    assert totals == StepTotals(tokens=2.0 * MINIBATCH, rows=MINIBATCH, kl_coef=0.1)
    expected = np.clip(words(rows) % 5, -5, 5) - 2 * 0.11
    np.testing.assert_allclose(rows.returns.dense()[:, 0], expected, rtol=1e-5)


def recorder_batches(inputs: PPOInputs, tmp_path: Path) -> list[tuple[str, TextBatch, dict[str, float], float]]:
    """Batches of a run without discounting: with values of 0 the return is the sum of the rewards to come."""
    world = World()
    attempt(inputs, tmp_path / "plain", world, iterations=1, gamma=1.0, gae_lambda=1.0)
    return world.batches


def test_updates_end_early_where_the_policy_has_moved_too_far(inputs: PPOInputs, tmp_path: Path) -> None:
    # Six updates are planned; the third reports more than is allowed. The next iteration begins anew.
    world = World(approx_kl=lambda update: 0.6 if update == 2 else 0.4)
    recorder = attempt(inputs, tmp_path / "out", world, epochs=3, stop_kl=0.5)
    assert [point["policy/updates"] for point in recorder.points] == [3.0, 6.0]
    assert [point["policy/stopped_early"] for point in recorder.points] == [1.0, 0.0]
    # (0.4 + 0.4 + 0.6) / 3 a token, all minibatches having the same number.
    assert recorder.points[0]["policy/approx_kl"] == pytest.approx(1.4 / 3)
    assert world.calls.count("policy train") == 9


@pytest.mark.parametrize("lag", [0, 1])
def test_a_generator_that_does_not_hold_the_policy_is_found(inputs: PPOInputs, tmp_path: Path, lag: int) -> None:
    world = World(generator_off_by=-0.2)
    with pytest.raises(RuntimeError, match=r"differ by 0\.2 nats per token"):
        attempt(inputs, tmp_path / "out", world, lag=lag)
    assert not world.batches


def test_changes_by_an_update_are_no_weight_mismatch(inputs: PPOInputs, tmp_path: Path) -> None:
    # Each update makes the policy 0.3 nats surer of every token. Replies one update old: weights e^0.3, and no error.
    world = World(surer_by=0.3 / (REPLIES // MINIBATCH))
    recorder = attempt(inputs, tmp_path / "out", world, lag=1, iterations=3)
    assert [point["rollout/mismatch"] for point in recorder.points] == pytest.approx([0.0, 0.3, 0.3], abs=1e-6)
    assert [point["sync/mismatch"] for point in recorder.points] == pytest.approx([0.0] * 3, abs=1e-6)
    weights = [batch[1].weights.values for batch in world.batches]
    np.testing.assert_allclose(np.concatenate(weights[:2]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(weights[2:]), 1.3498588, rtol=1e-6)
    # The proximal policy of the clipped ratio is the one that learns, not the one that sampled.
    last = world.batches[-1][1]
    tokens = np.concatenate([ids[n:] for ids, n in zip(last.input_ids, last.prompt_lengths, strict=True)])
    np.testing.assert_allclose(last.old_logprobs.values, logprob(tokens) + 0.6, rtol=1e-5)


def test_each_rollout_is_sampled_by_the_policy_of_as_many_updates_before(inputs: PPOInputs, tmp_path: Path) -> None:
    lag = 2
    world = World(surer_by=0.1 / (REPLIES // MINIBATCH))
    recorder = attempt(inputs, tmp_path / "out", world, lag=lag, iterations=7)
    ages = [min(iteration, lag) for iteration in range(7)]
    assert [point["rollout/lag"] for point in recorder.points] == ages
    assert [point["rollout/version"] for point in recorder.points] == [i - age for i, age in enumerate(ages)]
    assert [point["rollout/mismatch"] for point in recorder.points] == pytest.approx(0.1 * np.array(ages), abs=1e-6)
    # Each update makes the policy 0.1 nats surer: the weights are those of each rollout's own version.
    steps = REPLIES // MINIBATCH
    weights = [batch[1].weights.values for batch in world.batches]
    for iteration, age in enumerate(ages):
        of_iteration = np.concatenate(weights[iteration * steps : (iteration + 1) * steps])
        np.testing.assert_allclose(of_iteration, np.exp(0.1 * age), rtol=1e-5)
    versions = [call.split()[-1] for call in world.calls if call.startswith("generator generate")]
    # The first version samples those that nobody could sample before, and the last ones none.
    assert Counter(versions) == {"0": lag + 1} | {str(version): 1 for version in range(1, 7 - lag)}


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_resumed_stage_ends_with_the_same_bytes(inputs: PPOInputs, tmp_path: Path, lag: int) -> None:
    whole, resumed = World(surer_by=0.1), World(surer_by=0.1)
    fields: dict[str, Any] = {"iterations": 6, "epochs": 2, "reward_scaling": "running", "lag": lag}
    first = attempt(inputs, tmp_path / "whole", whole, **fields)
    # After the last step the checkpoint itself comes next.
    assert [snapshot.step for snapshot in first.snapshots] == [1, 2, 3, 4, 5]
    second = attempt(inputs, tmp_path / "resumed", resumed, newest=first.snapshots[-3], **fields)
    after = whole.calls.index("generator follow 3")
    assert resumed.calls == ["policy load_state", *[c.replace("whole", "resumed") for c in whole.calls[after:]]]
    found, expected = (list(map(plain, world.batches)) for world in (resumed, whole))
    np.testing.assert_equal(found, expected[-len(found) :])
    assert len(second.points) == 3
    for again, point in zip(second.points, first.points[3:], strict=True):
        for name, value in again.items():
            if not name.startswith(("seconds/", "speed/")):
                assert value == point[name], name


def test_a_stage_that_samples_other_prompts_resumes_exactly(inputs: PPOInputs, tmp_path: Path) -> None:
    """Which prompts were taken for others is in the snapshot with the cursor: the next iteration asks the same."""
    groups = {"prompts_per_iteration": 2, "samples_per_prompt": 2, "minibatch_size": 2, "resample_rounds": 2}
    fields: dict[str, Any] = groups | {"advantages": "rloo", "iterations": 3, "rewards": [reward_term(function="odd")]}

    def odd(prompts: list[str], replies: list[str]) -> list[float]:
        return [float(sum(map(ord, reply)) % 2) for reply in replies]

    whole, resumed, functions = World(surer_by=0.1), World(surer_by=0.1), {"odd": odd}
    first = attempt(inputs, tmp_path / "whole", whole, functions=functions, **fields)
    assert sum(point["rollout/resampled_groups"] for point in first.points[:2]) > 0
    newest = first.snapshots[-1]
    second = attempt(inputs, tmp_path / "resumed", resumed, newest=newest, functions=functions, **fields)
    found, expected = (list(map(plain, world.batches)) for world in (resumed, whole))
    np.testing.assert_equal(found, expected[-len(found) :])
    for name, value in second.points[0].items():
        if not name.startswith(("seconds/", "speed/")):
            assert value == first.points[2][name], name
