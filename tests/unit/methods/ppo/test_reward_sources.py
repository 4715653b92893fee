"""Sources of reward in a stage: what fails is masked, counted and bounded, and answers outlive an attempt."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.methods.ppo.loop import MINIBATCH, REPLIES, PPOModel, World, attempt, plain
from tests.unit.methods.ppo.sources import sources
from xray_runtime.algorithms.groups import group_advantages
from xray_runtime.algorithms.rewards import SourceScores
from xray_runtime.cluster.protocols import Local, Ready
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, TextBatch
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD, Dataset, Model, RewardModel
from xray_runtime.kernel.store.shared import SharedFolder, SharedStore
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.config import JudgingConfig, reward_term
from xray_runtime.rewards.journal import ANSWERS
from xray_runtime.rewards.kinds.judge.config import JudgeConfig
from xray_runtime.rewards.kinds.service import ServiceConfig
from xray_runtime.rewards.reward_sources import RewardSources
from xray_runtime.rewards.term import SourceRoute
from xray_runtime.rewards.verifier_config import JSONSchemaVerifier, RegexVerifier

NAN = math.nan
PROMPT = [{"role": "user", "content": "p"}]
Function = Callable[[list[str], list[str]], list[Any]]


def score(found: RewardSources, replies: Sequence[str], answers: Sequence[Scores] = (), **more: Any) -> SourceScores:
    given = {"prompts": [PROMPT] * len(replies), "columns": {}} | more
    return found.scores([Ready(answer) for answer in answers], replies=replies, **given)


def as_is(prompts: list[str], replies: list[str]) -> list[Any]:
    return [None if reply == "lost" else float(reply) for reply in replies]


def test_replies_a_source_does_not_score_are_masked() -> None:
    terms = reward_term(function="f"), reward_term(function="g", weight=0.5)
    found = sources(*terms, f=as_is, g=lambda prompts, replies: [2.0] * 3)
    scores = score(found, ["1", "lost", "3"])
    assert found.scaled(scores)[[0, 2]].tolist() == [2.0, 4.0]
    assert found.scaled(scores)[1].isnan()
    assert scores.failed("f").tolist() == [False, True, False]
    assert scores.failed("g").tolist() == [False] * 3


@pytest.mark.parametrize(
    ("replies", "max_failed", "says"),
    [
        (["1", "lost", "3", "4"], 0.2, "1 of 4 replies have no reward; f failed for 1: it returned None"),
        (["1", "lost", "3", "4"], 0.25, None),
        (["lost"] * 4, 1.0, "4 of 4 replies have no reward; f failed for 4: it returned None"),
        (["1", "2", "3", "x"], 0.2, "1 of 4 replies have no reward; f failed for 1: ValueError: could not convert"),
        (["1", "2", "3", "x"], 0.25, None),
    ],
)
def test_the_budget_and_the_cause(replies: list[str], max_failed: float, says: str | None) -> None:
    found = sources(reward_term(function="f", retries=1), max_failed=max_failed, f=as_is)
    if says is None:
        score(found, replies)
        return
    with pytest.raises(RuntimeError) as caught:
        score(found, replies)
    assert str(caught.value).startswith(f"s: {says}")
    assert str(caught.value).endswith(f"(max_failed = {max_failed:g})")


def test_a_source_that_is_only_logged_costs_no_reply() -> None:
    found = sources(
        reward_term(function="f"),
        reward_term(function="g", weight=0.0),
        max_failed=0.0,
        f=as_is,
        g=lambda prompts, replies: [None] * 2,
    )
    assert found.scaled(score(found, ["1", "2"])).tolist() == [1.0, 2.0]


def test_rows_go_to_the_sources_that_apply_to_them() -> None:
    seen: list[list[str]] = []

    def math_only(prompts: list[str], replies: list[str], task: list[str]) -> list[float]:
        seen.append([*replies, *task])
        return [10.0] * len(replies)

    when = SourceRoute(column="task", equals="math")
    found = sources(
        reward_term(function="f", when=when),
        reward_term(function="g", when=SourceRoute(column="task", equals=1)),
        reward_term(verifier=RegexVerifier(pattern="b"), when=when, weight=5.0),
        f=math_only,
        g=lambda prompts, replies: [3.0] * len(replies),
    )
    columns = {"task": ["math", 1, "math"]}
    assert found.scaled(score(found, ["a", "b", "b"], columns=columns)).tolist() == [10.0, 3.0, 15.0]
    assert seen == [["a", "b", "math", "math"]]
    # A row that no source applies to has no reward: it counts as lost.
    lost = score(found, ["a", "b", "b"], columns={"task": ["math", None, "math"]})
    assert found.scaled(lost).isnan().tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match="3 of 3 replies have no reward; no reward source applies to them"):
        score(found, ["a", "b", "b"], columns={"task": [None] * 3})
    with pytest.raises(ValueError, match=r"s\.rewards\.0\.when\.column: 'task' is not a column of the dataset: add it"):
        score(found, ["a"])


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Reward models of deviations 1, 2 and 4."""
    for number, std in enumerate((1.0, 2.0, 4.0)):
        directory = tmp_path / f"reward-{number}"
        directory.mkdir()
        train_tokenizer(["a"] * 5, 300).save_pretrained(directory)
        (directory / "reward.json").write_text(json.dumps({"mean": 1.0, "std": std}))
    return [tmp_path / f"reward-{number}" for number in range(3)]


def test_models_are_opened_with_their_heads(models: list[Path]) -> None:
    """Those that a term names, spread as the config says."""
    frozen = FrozenConfig(precision="bfloat16")
    config = JudgingConfig(rewards=[reward_term(model="rewards.1")], frozen=frozen)
    given: Any = SimpleNamespace(rewards=[RewardModel(path) for path in models])
    stage: Any = Stage("s", 0, config, given, RuntimeConfig(), None)  # type: ignore[arg-type]
    [(role, spec)] = RewardSources(stage).specs().items()
    assert (role, spec.directory, spec.head) == ("rewards.1", models[1], models[1] / REWARD_HEAD)
    assert (spec.training, spec.frozen) == (None, frozen)


def test_a_source_by_itself_has_its_weight_and_its_deviations(models: list[Path]) -> None:
    terms = reward_term(model="rewards.1", weight=-0.5), reward_term(function="f", weight=0.0)
    found = sources(*terms, models=models, f=as_is)
    each = found.each(score(found, ["3", "lost"], [Scores(scores=np.array([5.0, 1.0], np.float32))]))
    # Mean 1 and deviation 2: −½ · (5 − 1) / 2. What is only logged is as it scores.
    assert each["rewards.1"].tolist() == [-1.0, 0.0]
    assert each["f"][0] == 3.0
    assert each["f"][1].isnan()


def test_functions_score_while_models_do(models: list[Path]) -> None:
    """A model that answers only after the function was called."""
    called = []

    class Later(Future[Scores]):
        def result(self, timeout: float | None = None) -> Scores:
            assert called == [["3", "4"]]
            return Scores(scores=np.array([5.0, 1.0], np.float32))

    def function(prompts: list[str], replies: list[str]) -> list[Any]:
        called.append(replies)
        return [1.0, 2.0]

    found = sources(reward_term(model="rewards.1"), reward_term(function="f"), models=models, f=function)
    scores = found.scores([Local(Later())], [PROMPT] * 2, ["3", "4"], {})
    # Mean 1 and deviation 2: (5 − 1) / 2 + 1 and (1 − 1) / 2 + 2.
    assert found.scaled(scores).tolist() == [3.0, 2.0]


def test_an_ensemble_is_one_source(models: list[Path]) -> None:
    roles = [f"rewards.{n}" for n in range(3)]
    ensemble = reward_term(models=roles, uncertainty=0.5, weight=2.0)
    found = sources(ensemble, reward_term(model="rewards.1"), models=models)
    assert found.roles == roles
    # In their own deviations 1, 2, 3: mean 2 − ½ · 2/3; the second by itself is 2.
    answers = [Scores(scores=np.array(raw, np.float32)) for raw in ([2.0, 1.0], [5.0, 1.0], [13.0, 4.0])]
    scores = score(found, ["a", "b"], answers)
    assert list(scores.values) == ["rewards.0+rewards.1+rewards.2", "rewards.1"]
    assert float(scores.values["rewards.0+rewards.1+rewards.2"][0]) == pytest.approx(5 / 3)
    assert float(found.scaled(scores)[0]) == pytest.approx(2 * 5 / 3 + 2)
    # Deviation of 1, 2, 3.
    apart = scores.disagreements["rewards.0+rewards.1+rewards.2"]
    assert float(apart[0]) == pytest.approx((2 / 3) ** 0.5)
    # A member that computes NaN is broken, which is no reply's fault.
    answers[2] = Scores(scores=np.array([13.0, NAN], np.float32))
    with pytest.raises(NonFiniteError, match=r"the reward model rewards.2: scores of 1 of 2 rows"):
        score(found, ["a", "b"], answers)


def test_equal_replies_have_one_score_in_any_batch(models: list[Path]) -> None:
    """A model's last bits depend on the rows beside; divided by a group's deviation they would be advantages of 1."""
    found = sources(reward_term(model="rewards.0"), reward_term(models=["rewards.0", "rewards.1"]), models=models)
    raw = np.array([0.5, 0.5, 0.5, 1.5], np.float32)
    raw[1:3] = np.nextafter(raw[1:3], np.float32(1.0))
    replies, answers = ["yes", "yes", "yes", "no"], [Scores(scores=raw), Scores(scores=raw[::-1].copy())]

    def rewards(**more: Any) -> torch.Tensor:
        scaled = found.scaled(score(found, replies, answers, **more))
        assert scaled[3] != scaled[0]
        return scaled

    assert len(set(rewards()[:3].tolist())) == 1
    groups = torch.tensor([0, 0, 0, 1])
    assert group_advantages(rewards(), groups, "grpo").tolist() == [0.0] * 4
    # To other prompts they are other replies; and so they are in other tokens, of what was said between the turns, say.
    texts = [[{"role": "user", "content": text}] for text in "aabb"]
    alike = rewards(prompts=texts)[:3].tolist()
    assert alike[0] == alike[1] != alike[2]
    ids = TextBatch(input_ids=Ragged.of([[5, 6], [5, 7], [5, 6], [5, 6]]), prompt_lengths=np.array([1, 1, 1, 2]))
    alike = rewards(tokens=ids)[:3].tolist()
    assert alike[0] == alike[2] != alike[1]


def test_a_source_that_is_there_twice_is_two_sources() -> None:
    same = reward_term(function="f")
    assert list(sources(same, same, f=as_is).weights) == ["f", "f-2"]
    schema = reward_term(verifier=JSONSchemaVerifier(definition={}))
    assert list(sources(schema, schema).weights) == ["json_schema", "json_schema-2"]


def test_answers_outlive_an_attempt(tmp_path: Path) -> None:
    """Of a service: the next attempt asks for what it does not know, and a failure stands once the stage went on."""
    asked: list[list[str]] = []
    lose: set[str] = {"b", "c"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            replies = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["replies"]
            asked.append(replies)
            scores = [None if reply in lose else len(asked) for reply in replies]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"scores": scores}).encode())

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    service = ServiceConfig(url=f"http://127.0.0.1:{server.server_port}", retries=0)
    replies = ["a", "b", "c", "d"]

    def attempt(max_failed: float = 0.3) -> list[float]:
        found = sources(reward_term(service=service), kept=tmp_path, max_failed=max_failed)
        return found.scaled(score(found, replies, step=3)).tolist()

    with pytest.raises(RuntimeError, match="2 of 4 replies have no reward; service failed for 2: the service gave no"):
        attempt()
    # The failures were not kept, since nothing was made of them.
    lose.remove("b")
    first = attempt()
    assert asked == [replies, ["b", "c"]]
    np.testing.assert_equal(first, [1.0, 2.0, NAN, 1.0])
    # Now something was: asking again would give other bytes.
    lose.clear()
    np.testing.assert_equal(attempt(), first)
    assert len(asked) == 2
    # Another iteration asks anew.
    found = sources(reward_term(service=service), kept=tmp_path)
    assert found.scaled(score(found, replies, step=4)).tolist() == [3.0] * 4
    server.shutdown()


def test_comparisons_outlive_an_attempt(tmp_path: Path) -> None:
    """Where one score of a group is lost with the attempt, all are asked for again: they hang together."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"])
            first, second = (asked[-1].split(f"<reply_{name}>\n")[1].split("\n<")[0] for name in "ab")
            said = f"Winner: {'A' if first > second else 'B'}"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    comparing = reward_term(judge=JudgeConfig(url=url, model="m", rubric="the later letter", opponents=2, retries=0))

    def attempt() -> list[float]:
        found = sources(comparing, kept=tmp_path)
        return found.scaled(score(found, ["a", "b", "c"])).tolist()

    def unsealed() -> list[str]:
        lines = map(json.loads, (tmp_path / ANSWERS).read_text().splitlines())
        return [json.dumps(line | {"seal": ""}) for line in lines]

    assert attempt() == [0.0, 0.5, 1.0]
    assert attempt() == [0.0, 0.5, 1.0]
    assert len(asked) == 6
    lines = (tmp_path / ANSWERS).read_bytes().splitlines(keepends=True)
    before = unsealed()
    (tmp_path / ANSWERS).write_bytes(b"".join(lines[:2]))
    assert attempt() == [0.0, 0.5, 1.0]
    assert len(asked) == 12
    # Judges answer in any order, and no two seals are the same.
    assert sorted(unsealed()) == sorted(before)
    server.shutdown()


# In PPO's loop


def test_a_flaky_source_is_masked_counted_and_bounded(inputs: PPOInputs, tmp_path: Path) -> None:
    """The first reply of the second iteration has no score; the first call of each fails."""
    calls = 0

    def flaky(prompts: list[str], replies: list[str], metadata: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise ConnectionError("away")
        scores: list[Any] = [float(len(reply)) for reply in replies]
        return [None, *scores[1:]] if metadata["step"] else scores

    world = World()
    fields: dict[str, Any] = {"rewards": [reward_term(function="flaky")], "reward_scaling": "none"}
    recorder = attempt(inputs, tmp_path / "out", world, functions={"flaky": flaky}, max_failed=0.25, **fields)
    assert calls == 4
    assert [point["reward/failed"] for point in recorder.points] == [0.0, 1.0]
    assert [point["reward/source/flaky/failed"] for point in recorder.points] == [0.0, 1.0]
    # Two minibatches as before, one of them a row short; no NaN in any.
    assert [len(rows) for _, rows, _, _ in world.batches] == [MINIBATCH] * 3 + [MINIBATCH - 1]
    assert sorted(np.concatenate([rows.id for _, rows, _, _ in world.batches[2:]])) == [1, 2, 3]
    assert all(totals.rows == len(rows) for _, rows, totals, _ in world.batches)
    assert all(
        np.isfinite(getattr(rows, name).values).all()
        for _, rows, _, _ in world.batches
        for name in ("advantages", "returns")
    )
    # KL of 2.2 where 2 are wanted: 10%, times 4 replies and then 3, of 8.
    assert [point["kl/coef"] for point in recorder.points] == pytest.approx([0.105, 0.105 * (1 + 0.1 * 3 / 8)])
    with pytest.raises(
        RuntimeError, match=r"^ppo: 1 of 4 replies have no reward; flaky failed for 1: it returned None"
    ):
        attempt(inputs, tmp_path / "other", World(), functions={"flaky": flaky}, max_failed=0.2, **fields)


def test_a_service_that_fails_in_every_way_costs_rows_and_not_the_loop(inputs: PPOInputs, tmp_path: Path) -> None:
    """An iteration each, of whose four requests, a reply each, the first goes wrong. Then all do: the cause is said."""
    ways = ("hangs", "crashes", "is away", "answers nonsense", "nests", "gives NaN", "is slow")
    asked, stuck, all_lost = 0, threading.Event(), False

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal asked
            self.rfile.read(int(self.headers["Content-Length"]))
            number, asked = asked, asked + 1
            way = "is away" if all_lost else ways[number // REPLIES] if number % REPLIES == 0 else ""
            said = {"answers nonsense": b"<html>", "nests": b"[" * 60_000, "gives NaN": b'{"scores": [NaN]}'}
            if way == "hangs":
                stuck.wait(60.0)
            elif way == "crashes":
                self.connection.close()
            elif way == "is away":
                self.send_error(503)
            else:
                if way == "is slow":
                    stuck.wait(0.2)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(said.get(way, b'{"scores": [%d]}' % (number % 3)))

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    limits: dict[str, Any] = {"timeout_s": 4.0, "retries": 0, "batch_size": 1, "concurrency": 1}
    source = reward_term(service=ServiceConfig(url=f"http://127.0.0.1:{server.server_port}", **limits))
    fields: dict[str, Any] = {"rewards": [source], "reward_scaling": "none", "max_failed": 0.25}
    world = World()
    recorder = attempt(inputs, tmp_path / "out", world, iterations=len(ways), **fields)
    lost = [0.0 if way == "is slow" else 1.0 for way in ways]
    assert [point["reward/source/service/failed"] for point in recorder.points] == lost
    assert [point["reward/failed"] for point in recorder.points] == lost
    # Whose score failed is in no minibatch, nor in a mean: the others scored 1, 2, 0 or so by their numbers.
    trained = [sum(len(rows) for _, rows, _, _ in world.batches[i : i + 2]) for i in range(0, 2 * len(ways), 2)]
    assert trained == [REPLIES - int(one) for one in lost]
    assert [point["reward/raw"] for point in recorder.points[:2]] == [1.0, pytest.approx(1.0)]
    assert all(math.isfinite(value) for point in recorder.points for value in point.values())
    all_lost = True
    with pytest.raises(RuntimeError, match=r"^ppo: 4 of 4 replies have no reward; service failed for 4: .*status 503"):
        attempt(inputs, tmp_path / "lost", World(), **fields)
    stuck.set()
    server.shutdown()


def test_too_few_replies_for_a_minibatch_each(inputs: PPOInputs, tmp_path: Path) -> None:
    world = World()
    one: Function = lambda prompts, replies: [1.0, *[None] * (REPLIES - 1)]  # noqa: E731
    recorder = attempt(
        *(inputs, tmp_path / "out", world),
        functions={"one": one},
        max_failed=0.9,
        iterations=1,
        rewards=[reward_term(function="one")],
    )
    assert [len(rows) for _, rows, _, _ in world.batches] == [1]
    assert recorder.points[0]["policy/updates"] == 1.0


@pytest.mark.parametrize("scaling", ["none", "running"])
def test_a_source_that_never_answers_twice_the_same_is_resumed_to_the_same_bytes(
    inputs: PPOInputs, tmp_path: Path, scaling: Any
) -> None:
    draws = np.random.default_rng(0)

    def moody(prompts: list[str], replies: list[str]) -> list[Any]:
        scores: list[Any] = draws.normal(size=len(replies)).tolist()
        return [*scores[:-1], None] if draws.random() < 0.5 else scores

    def go(name: str, **more: Any) -> tuple[World, Any]:
        world = World()
        terms = [reward_term(function="moody")]
        fields: dict[str, Any] = {"iterations": 4, "rewards": terms, "max_failed": 0.25, "reward_scaling": scaling}
        return world, attempt(inputs, tmp_path / name, world, functions={"moody": moody}, **fields, **more)

    kept = tmp_path / "kept"
    kept.mkdir()
    whole, first = go("whole", kept=kept)
    # The kill: what the journal had not taken whole is gone, the snapshot after the second iteration is the newest.
    path = kept / ANSWERS
    path.write_bytes(path.read_bytes() + b'{"key": "0')
    resumed, second = go("resumed", kept=kept, newest=first.snapshots[1])
    again, _ = go("again", newest=first.snapshots[1])
    after = [list(map(plain, world.batches[-len(resumed.batches) :])) for world in (whole, resumed, again)]
    np.testing.assert_equal(after[1], after[0])
    with pytest.raises(AssertionError):
        np.testing.assert_equal(after[2], after[0])
    # On a machine that has nothing but the shared store it is the same.
    shared = SharedFolder(SharedStore((tmp_path / "shared").as_uri()), "snapshots/ppo-1/kept")
    machines = [tmp_path / "one" / "ppo-1", tmp_path / "other" / "ppo-1"]
    for machine in machines:
        machine.mkdir(parents=True)
    on_one, third = go("on-one", kept=machines[0], kept_shared=shared)
    on_other, _ = go("on-other", kept=machines[1], kept_shared=shared, newest=third.snapshots[1])
    both = [list(map(plain, world.batches[-len(on_other.batches) :])) for world in (on_one, on_other)]
    np.testing.assert_equal(both[1], both[0])
    for one, other in zip(second.points, first.points[2:], strict=True):
        assert {k: v for k, v in one.items() if k.startswith("reward/")} == {
            k: v for k, v in other.items() if k.startswith("reward/")
        }


def test_ground_truth_comes_with_the_prompts(inputs: PPOInputs, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        Example(
            str(i), "c", [{"role": "user", "content": f"question number {i}"}], "r", columns=json.dumps({"answer": i})
        )
        for i in range(10)
    ]
    write_pairs(data / TRAIN, Example, rows)
    (data / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    seen: list[tuple[str, int, str]] = []

    def right(prompts: list[str], replies: list[str], answer: list[int], messages: Any) -> list[float]:
        seen.extend((p, a, m[-1]["content"]) for p, a, m in zip(prompts, answer, messages, strict=True))
        return [1.0] * len(replies)

    attempt(
        *(PPOInputs(Model(inputs.policy.path), Dataset(data)), tmp_path / "out", World()),
        functions={"right": right},
        rewards=[reward_term(function="right")],
    )
    assert len(seen) == 2 * REPLIES
    assert all(prompt == f"question number {answer}" == said for prompt, answer, said in seen)


GOOD = ":"


class Wordier(PPOModel):
    """Each version replies with one good sign less and three others more."""

    tokenizer: Any = None

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        found = super()._generate(rows, sampling, version)
        good, other = (self.tokenizer.encode(sign)[0] for sign in (GOOD, "D"))
        ids = [[good] * (6 - version) + [other] * 3 * version + [sampling.stop_token_ids[0]]] * len(rows)
        tokens = Ragged.of(ids)
        logprobs = Ragged((-0.25 * (tokens.values % 7) - 2.0).astype(np.float32), tokens.offsets)
        return found.with_columns(response_ids=tokens, rollout_logprobs=logprobs)


def test_a_planted_length_bonus_is_seen_in_the_statistics_of_the_sources(inputs: PPOInputs, tmp_path: Path) -> None:
    """The reward rises all the while: only the sources by themselves show that it is bought by length."""

    def quality(prompts: list[str], replies: list[str]) -> list[float]:
        return [float(reply.count(GOOD)) for reply in replies]

    def length(prompts: list[str], replies: list[str]) -> list[float]:
        return [float(len(reply)) for reply in replies]

    Wordier.tokenizer = load_tokenizer(inputs.policy.path)
    recorder = attempt(
        *(inputs, tmp_path / "out", World()),
        functions={"quality": quality, "length": length},
        model=Wordier,
        iterations=3,
        max_new_tokens=16,
        rewards=[reward_term(function="quality"), reward_term(function="length")],
        reward_scaling="none",
        reward_clip=None,
    )

    def curve(name: str) -> list[float]:
        return [point[name] for point in recorder.points]

    for statistic in ("mean", "min", "max"):
        assert curve(f"reward/source/quality/{statistic}") == [6.0, 5.0, 4.0]
        assert curve(f"reward/source/length/{statistic}") == [6.0, 8.0, 10.0]
    assert curve("reward/raw") == [12.0, 13.0, 14.0]
    assert curve("reward/source/length/std") == [0.0] * 3


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_score_of_a_model_that_is_no_number_is_a_fault(models: list[Path], value: float) -> None:
    found = sources(reward_term(model="rewards.0"), models=models[:1])
    answers = [Scores(scores=np.array([2.0, value, 3.0], np.float32))]
    with pytest.raises(NonFiniteError, match=r"the reward model rewards.0: scores of 1 of 3 rows \(the first: row 1"):
        score(found, ["a", "b", "c"], answers)
