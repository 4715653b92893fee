"""PPO's loop over WholeModels that live in this process and answer with arrays worked out by hand: no Ray, no engine.

Every reply is one word and the end token. The reference lies 1.1 nats below the policy at each token, so the KL of a
reply is 2.2; four replies an iteration, two a minibatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import pytest

from tests.unit.rl.recorder import FakeRecorder
from xray_runtime.config.ppo import KLConfig, PPOConfig, RewardTerm
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.rows import Ragged, Rows, num_rows
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.graph.artifacts import Dataset, Model, RewardModel
from xray_runtime.graph.inputs import PPOInputs
from xray_runtime.graph.kind import Stage
from xray_runtime.rl.ppo import run
from xray_runtime.rl.rollouts import PROBE_ROWS
from xray_runtime.store.shared import SharedFolder
from xray_runtime.store.snapshots import Snapshot
from xray_runtime.workers.protocols import ModelHandle, Ready, get, get_all

P = ParamSpec("P")
T = TypeVar("T")

KL_PER_TOKEN = 1.1
REPLIES, MINIBATCH = 4, 2
MAX_NEW_TOKENS = 4


class Later(Ready[T]):
    """An answer that is there at a point of the world's time: whoever gets it before waits until then."""

    def __init__(self, world: World, at: float, answer: T) -> None:
        vars(self).update(world=world, at=at, answer=answer)

    @property
    def value(self) -> T:  # type: ignore[override]
        self.world.now = max(self.world.now, self.at)
        return self.answer


class Method(Generic[P, T]):
    """A method of one model, which runs its calls one after the other and takes `World.seconds` for each."""

    def __init__(self, model: PPOModel, name: str, function: Callable[P, T]) -> None:
        self._model, self._name, self._function = model, name, function

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Ready[T]:
        model, world = self._model, self._model.world
        answer = self._function(*args, **kwargs)
        work = num_rows(args[0]) if self._name in ("score", "train", "generate") else 1
        if self._name == "generate":
            work *= args[1].max_new_tokens
        model.busy_until = max(model.busy_until, world.now) + work * world.seconds.get(self._name, 0.0)
        return Later(world, model.busy_until, answer)


@dataclass
class World:
    """What all models of one attempt share."""

    now: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Method → how long it takes for a row, `generate` for a token that may be sampled."""

    calls: list[str] = field(default_factory=list)
    """Role and method of each call, in order; of `follow` and `generate` also the version."""
    batches: list[tuple[str, Rows, dict[str, float], float]] = field(default_factory=list)
    """Role and arguments of each `train`."""
    seeds: list[int] = field(default_factory=list)
    """Of the replies, in order."""
    shares: list[int] = field(default_factory=list)
    """Of each `score` and `train`: among how many models the threads are shared."""
    approx_kl: Callable[[int], float] = lambda update: 0.0
    """Number of the update → mean KL a token to the rollout's policy that the policy reports."""
    generator_off_by: float = 0.0
    """How much its log-probabilities differ from the policy's."""
    surer_by: float = 0.0
    """What a minibatch step adds to the policy's log-probabilities, and a sync to the generator's."""


def logprob(tokens: np.ndarray) -> np.ndarray:
    """What the policy gives a token: any function of it."""
    return (-0.25 * (tokens % 7) - 2.0).astype(np.float32)


def words(rows: Rows) -> np.ndarray:
    """The last token but one of each row [B]."""
    return np.array([ids[-2] for ids in rows["input_ids"]])


def plain(batch: tuple[str, Rows, dict[str, float], float]) -> tuple[Any, ...]:
    """What a model was asked to learn, in a form that can be compared."""
    role, rows, *rest = batch
    columns = {name: c if isinstance(c, np.ndarray) else [c.values, c.offsets] for name, c in rows.items()}
    return role, columns, *rest


class PPOModel:
    """A WholeModel, as far as PPO's loop uses it."""

    def __init__(self, role: str, world: World, eos_token_id: int) -> None:
        self.role, self.world, self.eos_token_id = role, world, eos_token_id
        self.version = self.updates = 0
        self.busy_until = 0.0
        self.score, self.train = Method(self, "score", self._score), Method(self, "train", self._train)
        self.generate, self.follow = Method(self, "generate", self._generate), Method(self, "follow", self._follow)
        self.save, self.save_state = Method(self, "save", self._save), Method(self, "save_state", self._save_state)
        self.load_state = Method(self, "load_state", self._load)
        self.sleep = Method(self, "sleep", lambda: self._note("sleep"))
        self.wake_up = Method(self, "wake_up", lambda: self._note("wake_up"))
        self.load_weights = Method(self, "load_weights", lambda update: pytest.fail("PPO syncs by `follow`"))

    @property
    def surer(self) -> float:
        return self.world.surer_by * self.updates

    def _note(self, what: str) -> None:
        self.world.calls.append(f"{self.role} {what}")

    def _follow(self, policy: ModelHandle, version: int) -> str:
        assert policy.role == "policy"  # type: ignore[attr-defined]
        self._note(f"follow {version}")
        self.version, self.updates = version, policy.updates  # type: ignore[attr-defined]
        return f"{self.updates} steps, {self.surer:g}"

    def _generate(self, rows: Rows, sampling: Any, version: int) -> Rows:
        probe = num_rows(rows) != REPLIES
        self._note(f"{'probe' if probe else 'generate'} {version}")
        assert version == self.version
        self.world.seeds += rows["seed"].tolist()
        tokens = Ragged.of([20 + seed % 50, sampling.stop_token_ids[0]] for seed in rows["seed"])
        logprobs = logprob(tokens.values) + np.float32(self.world.generator_off_by + self.surer)
        ended = np.ones(len(tokens), bool)
        return {"response_ids": tokens, "rollout_logprobs": Ragged(logprobs, tokens.offsets), "ended": ended}

    def _score(self, rows: Rows, at_once: int = 1) -> Rows:
        self._note("score")
        self.world.shares.append(at_once)
        if self.role == "rewards.0":
            # The word decides; the last token is the end token.
            return {"scores": (words(rows) % 5).astype(np.float32)}
        replies = [ids[n:] for ids, n in zip(rows["input_ids"], rows["prompt_lengths"], strict=True)]
        logprobs = Ragged.of(map(logprob, replies), np.float32)
        if self.role == "reference":
            return {"ref_logprobs": Ragged(logprobs.values - np.float32(KL_PER_TOKEN), logprobs.offsets)}
        zeros = Ragged(np.zeros_like(logprobs.values), logprobs.offsets)
        values = {"values": zeros, "final_values": np.zeros(len(logprobs), np.float32)}
        own = Ragged(logprobs.values + np.float32(self.surer), logprobs.offsets)
        return values if self.role == "critic" else {"logprobs": own} | values

    def _train(self, rows: Rows, totals: dict[str, float], lr: float, at_once: int = 1) -> dict[str, float]:
        self._note("train")
        self.world.shares.append(at_once)
        self.world.batches.append((self.role, rows, totals, lr))
        kl = self.world.approx_kl(self.updates) * totals["tokens"]
        self.updates += 1
        values = {"value_loss": 1.0, "value_clip_count": 0.0}
        if self.role == "critic":
            return values | {"grad_norm": 3.0}
        counts = dict.fromkeys(("policy_loss", "entropy_sum", "clip_count", "dual_clip_count"), 1.0)
        return counts | values | {"approx_kl_sum": kl, "grad_norm": 2.0}

    def _save(self, directory: Path, head_file: str | None = None) -> None:
        self._note(f"save {directory.name}")

    def _save_state(self, directory: Path) -> None:
        directory.write_text(str(self.updates))

    def _load(self, directory: Path) -> None:
        self._note("load_state")
        self.updates = int(directory.read_text())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    """A tokenizer, ten prompts, and a reward model whose scores are taken as they are."""
    root = tmp_path_factory.mktemp("inputs")
    for name in ("model", "data", "reward"):
        (root / name).mkdir()
    prompts = [f"question number {number}" for number in range(10)]
    for name in ("model", "reward"):
        train_tokenizer([*prompts, "an answer"] * 5, 300).save_pretrained(root / name)
    examples = [
        Example(str(i), "c", [{"role": "user", "content": text}], "an answer") for i, text in enumerate(prompts)
    ]
    write_pairs(root / "data" / "train.arrow", Example, examples)
    (root / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    (root / "reward" / "reward.json").write_text('{"mean": 0.0, "std": 1.0}')
    return PPOInputs(Model(root / "model"), Dataset(root / "data"), rewards=[RewardModel(root / "reward")])


def attempt(
    inputs: PPOInputs,
    out: Path,
    world: World,
    *,
    newest: Snapshot | None = None,
    runtime: RuntimeConfig | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    kept: Path | None = None,
    kept_shared: SharedFolder | None = None,
    model: type[PPOModel] = PPOModel,
    updates: int | None = None,
    ends_with_last: bool = True,
    **fields: Any,
) -> FakeRecorder:
    """Run the stage over fake models. `updates`: iterations that the policy it ends with has learned from; all."""
    config = PPOConfig(
        **{
            "iterations": 2,
            "prompts_per_iteration": REPLIES,
            "minibatch_size": MINIBATCH,
            "epochs": 1,
            "max_new_tokens": MAX_NEW_TOKENS,
            "rewards": [RewardTerm(model="rewards.0")],
            "kl": KLConfig(coef=0.1, target=2.0, horizon=8.0),
        }
        | fields
    )

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        yield {role: model(role, world, eos_token_id=1) for role in specs}  # type: ignore[misc]

    out.mkdir()
    recorder = FakeRecorder(out, newest)
    given = (runtime or RuntimeConfig(), open_models, functions or {}, kept, kept_shared)
    stage = Stage("ppo", 7, config, inputs, *given)
    done = run(stage, out, recorder)  # type: ignore[arg-type]
    assert done == (updates or config.iterations) or not ends_with_last
    return recorder


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
    assert world.shares == [3, 3, 3, 1, 1] * 2


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
        world, source = World(), RewardTerm(function="late")
        options = fields | {"resample_rounds": rounds, "rewards": [source]}
        return world, attempt(inputs, tmp_path / name, world, functions={"late": late}, **options)

    world, recorder = attempt_with("replaced", 2)
    # A first scoring, one of the others; those do not tie, so there is no second round.
    assert [call for call in world.calls if "generate" in call] == ["generator generate 0"] * 2
    assert recorder.points[0]["rollout/resampled_groups"] == 2
    assert recorder.points[0]["rollout/tied_groups"] == 0
    assert len(set(world.seeds)) == 8
    trained = [row for _, rows, *_ in world.batches for row in rows["id"].tolist()]
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
    # A probe is scored by the policy alone; the generator works beside all else.
    assert world.shares == [1, 4, 4, 4, 2, 2] * 3
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
    assert world.shares == [4, 4, 4, 4] + [2, 2] * 2
    for policy, critic in zip(world.batches[::2], world.batches[1::2], strict=True):
        np.testing.assert_equal(plain(policy)[1:3], plain(critic)[1:3])
        # Each by its own peak, at the same point of the schedule.
        assert critic[3] == pytest.approx(2 * policy[3])
    assert recorder.points[0]["policy/grad_norm"] == 2.0
    assert recorder.points[0]["value/grad_norm"] == 3.0


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
        assert totals == {"tokens": 2.0 * MINIBATCH, "rows": MINIBATCH, "kl_coef": 0.1}
        assert not {"values", "returns"} & set(rows)
        for ids, prompt, of_tokens in zip(rows["input_ids"], rows["prompt_lengths"], rows["advantages"], strict=True):
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


def test_the_weight_of_kl_is_steered_towards_its_target(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = attempt(inputs, tmp_path / "out", World())
    assert [point["kl/reference_k1"] for point in recorder.points] == pytest.approx([2.2, 2.2])
    # 2.2 / 2 − 1 = 0.1, times 4 replies / 8: each iteration adds 5%.
    assert [point["kl/coef"] for point in recorder.points] == pytest.approx([0.105, 0.11025])
    # What an iteration's rewards were charged with is the weight before: of the one score and −0.1 · 1.1 a token.
    _, rows, totals, _ = recorder_batches(inputs, tmp_path)[0]
    assert totals == {"tokens": 2.0 * MINIBATCH, "rows": MINIBATCH, "kl_coef": 0.1}
    expected = np.clip(words(rows) % 5, -5, 5) - 2 * 0.11
    np.testing.assert_allclose(rows["returns"].dense()[:, 0], expected, rtol=1e-5)


def recorder_batches(inputs: PPOInputs, tmp_path: Path) -> list[tuple[str, Rows, dict[str, float], float]]:
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
    with pytest.raises(RuntimeError, match=r"disagree by 0\.2 nats a token"):
        attempt(inputs, tmp_path / "out", world, lag=lag)
    assert not world.batches


def test_what_an_update_changed_is_weighed_and_not_taken_for_wrong_weights(inputs: PPOInputs, tmp_path: Path) -> None:
    # Each update makes the policy 0.3 nats surer of every token. Replies one update old: weights e^0.3, and no error.
    world = World(surer_by=0.3 / (REPLIES // MINIBATCH))
    recorder = attempt(inputs, tmp_path / "out", world, lag=1, iterations=3)
    assert [point["rollout/mismatch"] for point in recorder.points] == pytest.approx([0.0, 0.3, 0.3], abs=1e-6)
    assert [point["sync/mismatch"] for point in recorder.points] == pytest.approx([0.0] * 3, abs=1e-6)
    weights = [batch[1]["weights"].values for batch in world.batches]
    np.testing.assert_allclose(np.concatenate(weights[:2]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(weights[2:]), 1.3498588, rtol=1e-6)
    # The proximal policy of the clipped ratio is the one that learns, not the one that sampled.
    last = world.batches[-1][1]
    tokens = np.concatenate([ids[n:] for ids, n in zip(last["input_ids"], last["prompt_lengths"], strict=True)])
    np.testing.assert_allclose(last["old_logprobs"].values, logprob(tokens) + 0.6, rtol=1e-5)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_resumed_stage_goes_on_as_if_nothing_had_happened(inputs: PPOInputs, tmp_path: Path, lag: int) -> None:
    whole, resumed = World(surer_by=0.1), World(surer_by=0.1)
    fields: dict[str, Any] = {"iterations": 3, "epochs": 2, "reward_scaling": "running", "lag": lag}
    first = attempt(inputs, tmp_path / "whole", whole, **fields)
    # After the last step the checkpoint itself comes next.
    assert [snapshot.step for snapshot in first.snapshots] == [1, 2]
    second = attempt(inputs, tmp_path / "resumed", resumed, newest=first.snapshots[-1], **fields)
    after = whole.calls.index("generator follow 2")
    assert resumed.calls == ["policy load_state", *[c.replace("whole", "resumed") for c in whole.calls[after:]]]
    found, expected = (list(map(plain, world.batches)) for world in (resumed, whole))
    np.testing.assert_equal(found, expected[-len(found) :])
    assert len(second.points) == 1
    for name, value in second.points[0].items():
        if not name.startswith(("seconds/", "speed/")):
            assert value == first.points[2][name], name


def test_a_stage_that_samples_other_prompts_goes_on_as_if_nothing_had_happened(
    inputs: PPOInputs, tmp_path: Path
) -> None:
    """Which prompts were taken for others is in the snapshot with the cursor: the next iteration asks the same."""
    groups = {"prompts_per_iteration": 2, "samples_per_prompt": 2, "minibatch_size": 2, "resample_rounds": 2}
    fields: dict[str, Any] = groups | {"advantages": "rloo", "iterations": 3, "rewards": [RewardTerm(function="odd")]}

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


def test_references_of_values_at_hand() -> None:
    assert get(Ready(3)) == 3
    assert get_all([Ready("a"), Ready("b")]) == ["a", "b"]
    assert get_all([]) == []
