"""How a canary ends: by what was recorded, never by what cannot be verified; and what a promotion makes of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.live.cycles import config
from tests.unit.live.serving.recording import KEYS, exchange, with_recorder
from tests.unit.trust.promoting import promoted, second_candidate
from tests.unit.trust.synthetic import NAME, copied
from xray.flows.cycles import CANARY, Cycle, read_cycles, write_cycle
from xray.flows.flywheel import begin_cycle
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.canary import Canaries, Canary, CanaryConfig
from xray_runtime.kernel.evidence.log import LOG, view
from xray_runtime.kernel.history.recorded_rows import RECORDED, segment_name
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.live.canary import begin, canary_of, end, running
from xray_runtime.live.feedback.canary import ALPHA, Arm, Monitor, decide
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.canary import CanaryFollower
from xray_runtime.live.serving.canary_metrics import CanaryCollector, CanaryState
from xray_runtime.live.serving.choice import ModelChoice
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder
from xray_runtime.live.serving.server import ModelServer
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.gates import NotPromoted
from xray_runtime.trust.promotion import review

Answered = Iterable[tuple[str, str, str]]
"""(stage that answered, user, thumb)."""


def record(output: Path, answered: Answered, begin_at: int = 0, complete: bool = True, drawn: bool = True) -> None:
    """Answers to users who were randomly assigned, and their thumbs: two segments or more."""
    store = open_lineage_store(output, None)
    models = {node.manifest.stage: sha for sha, node in store.graph.nodes.items()}
    rows = [
        (exchange(n, user, model=models[stage], complete=complete, canary=models["ppo-3"] if drawn else ""), thumb)
        for n, (stage, user, thumb) in enumerate(answered, start=begin_at)
    ]

    async def work(recorder: AnswerRecorder) -> None:
        await recorder.keep([row for row, _ in rows], {}, True)
        bodies = [json.dumps({"answer": row.id, "thumb": thumb}).encode() for row, thumb in rows if thumb]
        taken = await asyncio.gather(*(recorder.feedback(body, key_digest(KEYS["shop"])) for body in bodies))
        assert {status for status, _ in taken} <= {200}

    with_recorder(output, work)


def both(count: int, candidate: str, champion: str) -> list[tuple[str, str, str]]:
    """`count` users of each model, each with one thumb."""
    sides = (("ppo-3", candidate), ("ppo-2", champion))
    return [(stage, f"{stage} {n}", thumb) for n in range(count) for stage, thumb in sides]


@pytest.fixture(scope="module")
def begun(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Canary]:
    output = copied(untouched, tmp_path_factory.mktemp("canary") / "run")
    promoted(output, "ppo-2", min_win_rate=None)
    second_candidate(output)
    candidate, champion = (resolve(stage, output, None)[1].sha256 for stage in ("ppo-3", "ppo-2"))
    return output, begin(output, NAME, candidate, champion, 1, CanaryConfig(min_feedback=20))


@pytest.fixture
def live(begun: tuple[Path, Canary], tmp_path: Path) -> tuple[Path, Canary]:
    """ppo-2 is champion, and ppo-3's canary has begun."""
    return copied(begun[0], tmp_path / "run"), begun[1]


def ended(output: Path, canary: Canary, **late: float) -> tuple[str, str] | None:
    found = Monitor(open_lineage_store(output, None), canary).check(datetime.now(UTC) + timedelta(**late))
    return (found.outcome, found.reason) if found is not None else None


def test_a_worse_candidate_is_rolled_back_and_an_equal_one_passes(live: tuple[Path, Canary]) -> None:
    output, canary = live
    assert ended(output, canary) is None
    record(output, both(10, "down", "up"))
    assert ended(output, canary) is None
    record(output, both(50, "down", "up"), begin_at=1000)
    outcome = ended(output, canary)
    assert outcome is not None
    assert outcome[0] == "rolled back"
    # One that is made anew decides the same, whatever comes later; so does one that looks again and again.
    record(output, both(200, "up", "down"), begin_at=2000)
    assert ended(output, canary) == outcome
    found = decide(open_lineage_store(output, None), canary)
    assert found is not None
    assert (found.outcome, found.reason) == outcome
    other = found.model_copy(update={"outcome": "passed"})
    assert end(output, other).outcome == "rolled back"
    assert running(view(output), NAME) is None
    with pytest.raises(NotPromoted, match="canary rolled back: its feedback is at best -"):
        reviewed(output)
    assert [gate.name for gate in reviewed(output, canary=False)] == ["max_kl", "max_length_ratio"]


def reviewed(output: Path, **gates: Any) -> list[Any]:
    place, node = resolve("ppo-3", output, None)
    off = {"min_win_rate": None, "max_judge_drop": None, "max_regression": None}
    return review(place, node, name=NAME, gates=PromotionConfig(**off | gates)).gates


def test_an_equal_candidate_passes_and_a_person_sees_the_numbers(live: tuple[Path, Canary]) -> None:
    output, canary = live
    with pytest.raises(NotPromoted, match=r"canary running since .*: not decided yet"):
        reviewed(output)
    record(output, both(150, "up", "up"))
    found = decide(open_lineage_store(output, None), canary)
    assert found is not None
    assert (found.outcome, found.arms["candidate"].judges, found.arms["candidate"].feedback) == ("passed", 150, 1.0)
    gate = reviewed(output)[-1]
    assert gate.name == "canary"
    assert "passed: " in gate.reason
    assert "candidate: 150 answers, feedback 1.000 [0.9" in gate.reason


def test_a_flood_by_one_user_decides_nothing(live: tuple[Path, Canary]) -> None:
    output, canary = live
    record(output, [("ppo-3", "flooder", "down")] * 19 + [("ppo-2", f"user {n}", "up") for n in range(100)])
    record(output, [("ppo-3", "flooder", "")] * 300, begin_at=1000, complete=False)
    monitor = Monitor(open_lineage_store(output, None), canary)
    assert monitor.check() is None
    arm = monitor.comparison.arms["candidate"].result()
    assert (arm.answers, arm.judges, arm.users, arm.errors) == (319, 1, 1, 0.0)
    # Nor do 300 judges of one person's answers.
    flooded = Arm()
    for n in range(300):
        flooded.add_feedback(f"judge {n}", "flooder", 0.0)
    assert flooded.feedback.count == 1


def test_failures_roll_back_and_undrawn_requests_do_not_count(live: tuple[Path, Canary]) -> None:
    output, canary = live
    record(output, both(60, "down", "up"), drawn=False)
    assert ended(output, canary) is None
    record(output, [("ppo-2", f"user {n}", "") for n in range(60)], begin_at=1000)
    record(output, [("ppo-3", f"user {n}", "") for n in range(60)], begin_at=2000, complete=False)
    outcome = ended(output, canary)
    assert outcome is not None
    assert (outcome[0], "it fails" in outcome[1]) == ("rolled back", True)


def test_an_undecided_canary_is_said_to_be_undecided(live: tuple[Path, Canary]) -> None:
    output, canary = live
    record(output, both(5, "up", "up"))
    assert ended(output, canary, hours=23) is None
    assert ended(output, canary, hours=25) == ("undecided", "24 hours were not enough")
    settled = Monitor(open_lineage_store(output, None), canary).check(datetime.now(UTC) + timedelta(hours=25))
    assert settled is not None
    end(output, settled)
    with pytest.raises(NotPromoted, match="canary undecided"):
        reviewed(output)


@pytest.mark.parametrize("attack", ["edited", "removed", "cut", "log", "forged"])
def test_records_that_cannot_be_verified_end_it(live: tuple[Path, Canary], attack: str) -> None:
    output, canary = live
    record(output, both(3, "up", "up"))
    segment, chain, log = output / RECORDED / segment_name(1), output / RECORDED / "chain.jsonl", output / LOG
    if attack == "edited":
        segment.write_bytes(segment.read_bytes()[:-1] + b"x")
    elif attack == "removed":
        segment.unlink()
    elif attack == "cut":
        chain.write_bytes(chain.read_bytes().splitlines(keepends=True)[0])
    elif attack == "log":
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join(line for line in lines if line not in lines[-3:-1]))
    else:
        lines = log.read_bytes().splitlines(keepends=True)
        forged = json.loads(lines[-1])
        forged["signatures"] = json.loads(lines[0])["signatures"]
        log.write_bytes(b"".join(lines[:-1]) + json.dumps(forged).encode() + b"\n")
    outcome = ended(output, canary)
    assert outcome is not None
    assert outcome[0] == "rolled back"


def test_a_cycle_waits_for_its_canary_and_two_never_run(live: tuple[Path, Canary]) -> None:
    output, canary = live
    with pytest.raises(ConfigError, match="must wait: the canary of"):
        begin(output, NAME, "c" * 64, canary.began.champion, 1, canary.began.rules)
    assert begin(output, NAME, canary.began.candidate, canary.began.champion, 9, CanaryConfig()) == canary
    champion = canary.began.champion
    cycle = Cycle(number=1, first=1, last=0, feedback=[champion], verdicts=None, start=champion, data=champion)
    cycle = cycle.model_copy(update={"state": CANARY, "canary": canary.id, "policy": canary.began.candidate})
    write_cycle(output, cycle)
    record(output, both(5, "up", "up"))
    assert begin_cycle(output, config(), False) == cycle
    record(output, both(60, "down", "up"), begin_at=1000)
    following = begin_cycle(output, config(), False)
    first = read_cycles(output)[0]
    assert (first.state, first.reasons[0][:33]) == ("rolled back", "canary: its feedback is at best -")
    assert following is not None
    assert (following.number, canary_of(view(output), canary.began.candidate).ended is None) == (2, False)  # type: ignore[union-attr]


def test_under_repeated_looks_an_equal_candidate_is_rarely_rolled_back() -> None:
    draw, trials = random.Random(2), 200

    def simulate(allowed: float) -> int:
        rolled_back = 0
        for _ in range(trials):
            candidate, champion = Arm(), Arm()
            for n in range(400):
                candidate.add_feedback(f"{n}", f"{n}", float(draw.random() < 0.6))
                champion.add_feedback(f"{n}", f"{n}", float(draw.random() < 0.6))
                if candidate.feedback.high - champion.feedback.low < -allowed:
                    rolled_back += 1
                    break
        return rolled_back

    # The hardest case: nothing is allowed. 200 · 0.05 = 10, and a standard deviation is 3.1.
    assert simulate(0.0) <= trials * ALPHA + 9


class Replicas:
    """Takes the part of `ModelServer`: notes what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.candidate_failure: str | None = None
        self.canary: CanaryState | None = None
        self.fails = False

    def shown(self) -> dict[tuple[str, str], float]:
        """(metric, arm) → value, as replicas show it."""
        collector = CanaryCollector()
        collector.state = self.canary
        return {(s.name, s.labels.get("arm", "")): s.value for family in collector.collect() for s in family.samples}

    def begin_canary(self, model: str, share: float) -> None:
        if self.fails:
            raise NotServedError("no memory")
        self.said.append(f"begin {model} {share}")

    def end_canary(self) -> None:
        self.said.append("end")


def follower(output: Path, server: Replicas, records: bool = True) -> CanaryFollower:
    def load(choice: ModelChoice) -> Any:
        return choice.node.manifest.stage

    now = iter(float(10 * n) for n in range(1000))
    store = open_lineage_store(output, None)
    return CanaryFollower(cast(ModelServer, server), store, NAME, load, records, None, clock=lambda: next(now))


def test_a_server_follows_a_canary_from_its_beginning_to_its_end(live: tuple[Path, Canary]) -> None:
    output, canary = live
    server, champion = Replicas(), canary.began.champion
    without = follower(output, Replicas(), records=False)
    assert "needs --record" in str(without.step(champion))
    assert without.step(champion) is None
    following = follower(output, server)
    assert server.shown() == {}
    assert "answers 10% of users" in str(following.step(champion))
    assert following.step(champion) is None
    found = server.shown()
    assert (found["xray_canary_running", ""], found["xray_canary_answers", "candidate"]) == (1, 0)
    record(output, both(5, "down", "up"))
    assert following.step(champion) is None
    found = server.shown()
    assert [found["xray_canary_answers", arm] for arm in ("candidate", "champion")] == [5, 5]
    assert [found["xray_canary_feedback", arm] for arm in ("candidate", "champion")] == [0, 1]
    record(output, both(60, "down", "up"), begin_at=1000)
    assert "rolled back: its feedback" in str(following.step(champion))
    assert server.said == ["begin ppo-3 0.1", "end"]
    assert server.shown()["xray_canary_running", ""] == 0
    assert following.step(champion) is None
    assert view(output).state(Canaries)[canary.id].ended is not None
    # A decision is not made twice.
    assert follower(output, Replicas()).step(champion) is None


@pytest.mark.parametrize("case", ["dies", "cannot load", "damaged", "promoted"])
def test_a_candidate_that_cannot_answer_is_taken_away(live: tuple[Path, Canary], case: str) -> None:
    output, canary = live
    server, champion = Replicas(), canary.began.champion
    following = follower(output, server)
    server.fails = case == "cannot load"
    if case == "damaged":
        weights = resolve("ppo-3", output, None)[1].directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[::-1])
    line = following.step(champion)
    if case in ("dies", "promoted"):
        server.candidate_failure = "it was killed" if case == "dies" else None
        line = following.step(champion if case == "dies" else "f" * 64)
    ended = view(output).state(Canaries)[canary.id].ended
    assert ended is not None
    assert ended.outcome == ("undecided" if case == "promoted" else "rolled back")
    assert str(line).count("\n") == 0
    assert server.said[-1] == "end"
