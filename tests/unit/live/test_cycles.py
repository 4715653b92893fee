"""Which cycle `xray flywheel` works on, and what it works with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.live.cycles import config
from tests.unit.live.serving.recording import exchange, keep
from tests.unit.trust.commands import xray
from tests.unit.trust.promoting import promoted
from tests.unit.trust.synthetic import Lifecycle, weights
from xray.cli.main import app
from xray.flows import flywheel
from xray.flows.cycles import Cycle, cycle_directory, read_cycles, write_cycle
from xray.flows.flywheel import begin_cycle
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.live.flywheel import FlywheelConfig
from xray_runtime.live.withdrawal import refusal
from xray_runtime.methods.curate.kind import CURATE
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.rewards.config import reward_term


def recorded(output: Path, number: int) -> None:
    keep(output, exchange(number, model=resolve("ppo-2", output, None)[1].sha256))


def begun(output: Path, release: bool = False, **fields: Any) -> Cycle:
    cycle = begin_cycle(output, config(**fields), release)
    assert cycle is not None
    return cycle


def ended(output: Path, cycle: Cycle, state: str) -> None:
    done = cycle.model_copy(update={"state": state})
    write_cycle(output, done)


def test_a_cycle_collects_what_was_recorded_since_the_last(fresh: Callable[[], Path]) -> None:
    output = fresh()
    assert begin_cycle(output, config(), False) is None
    recorded(output, 1)
    first = begun(output)
    nodes = open_lineage_store(output, None).graph.nodes
    assert (first.number, first.first, first.last, first.verdicts) == (1, 1, 1, None)
    assert [nodes[sha].manifest.kind for sha in first.feedback] == ["feedback"]
    assert nodes[first.start].manifest.stage == "ppo-2"
    assert nodes[first.data].manifest.stage == "prepare"
    # A cycle that was killed goes on with the same feedback, whatever was recorded since, and the same policy.
    recorded(output, 2)
    assert begun(output, start="sft") == first
    ended(output, first, "candidate")
    second = begun(output)
    assert (second.number, second.first, second.last) == (2, 2, 2)
    assert second.feedback[:-1] == first.feedback
    ended(output, second, "refused")
    assert begin_cycle(output, config(), False) is None
    recorded(output, 3)
    third = begun(output, cycles=2)
    assert third.feedback[:-1] == second.feedback[-1:]


@pytest.mark.parametrize(
    ("way", "roles"),
    [
        ("dpo", {"policy": "start", "preferences": "preferences"}),
        ("kto", {"policy": "start", "verdicts": "curate", "data": "data"}),
        ("ppo", {"policy": "start", "prompts": "data", "reference": "start", "rewards.0": "reward"}),
    ],
)
def test_each_way_learns_from_what_was_curated(way: str, roles: dict[str, str]) -> None:
    lifecycle = LifecycleConfig(rewards=[reward_term(service={"url": "http://127.0.0.1:1/score"})])
    with recording(lifecycle.seed, lifecycle.runtime) as graph:
        start, data, feedback = (graph.checkpoint(name) for name in ("start", "data", "feedback"))
        curated = CURATE(feedback=[feedback], name="curate")
        chosen = FlywheelConfig.model_validate({way: {}})
        policy = flywheel._trained(lifecycle, chosen, curated, start, data)
    known = {start: "start", data: "data"}
    assert policy.call is not None
    assert {role: known.get(each, each.name) for role, each in policy.call.parents.items()} == roles
    made = {call.name: call for call in graph.calls.values()}
    if way == "ppo":
        reward = made["reward"].parents
        assert {role: known.get(each, each.name) for role, each in reward.items()} == {
            "policy": "start",
            "data": "preferences",
        }
        assert [list(term.roles) for term in policy.call.config.rewards] == [["rewards.0"], []]


def test_no_stage_learns_from_a_held_cycle(fresh: Callable[[], Path]) -> None:
    output = fresh()
    recorded(output, 1)
    with pytest.raises(ConfigError, match=r"^--release: is not allowed: the last cycle is not held$"):
        begin_cycle(output, config(), True)
    first = begun(output)
    ended(output, first, "held")
    assert begun(output, release=True).number == 1
    recorded(output, 2)
    second = begun(output)
    assert (second.number, len(second.feedback)) == (2, 1)
    assert second.feedback != first.feedback
    ended(output, second, "candidate")
    with pytest.raises(ConfigError, match="the last cycle is not held"):
        begin_cycle(output, config(), True)
    assert [cycle.number for cycle in read_cycles(output)] == [1, 2]


def test_a_withdrawal_makes_a_cycle_without_it_due(fresh: Callable[[], Path]) -> None:
    output = fresh()
    model = resolve("ppo-2", output, None)[1].sha256
    keep(output, exchange(1, "ann", "a long secret of ann's own", model=model), exchange(2, "bob", model=model))
    first = begun(output)
    life = Lifecycle.resumed(output)
    files = {"config.json": b"{}", "model.safetensors": weights("cycle")}
    tainted = life.add("dpo-cycle", "dpo", files, {"policy": "ppo-2", "preferences": "feedback"}).sha256
    life.evaluate([f"question {i}" for i in range(50, 56)], "dpo-cycle", "evaluate-cycle", win_rate=0.9)
    life.register("dpo-cycle")
    ended(output, first.model_copy(update={"policy": tainted}), "candidate")
    promoted(output, "dpo-cycle", min_win_rate=None, max_kl=None)
    # The champion answers, and its answer becomes feedback too.
    keep(output, exchange(3, "bob", "another question", model=tainted))
    withdrawn = xray("withdraw", "--output", output, "--user", "ann", "--yes")
    assert (withdrawn.exit_code, "the next cycle trains without it" in withdrawn.output) == (0, True), withdrawn.output
    assert xray("withdraw", "--output", output, "--verify").exit_code == 1

    second = begun(output)
    assert (second.number, second.start) == (2, model)
    store = open_lineage_store(output, None)
    assert not {*second.feedback} & {*first.feedback}
    for sha in (*second.feedback, second.start, second.data):
        assert refusal(store, store.graph.nodes[sha]) is None
    # Bob's row of the first cycle is there; ann's, and the answer of a model that learned from hers, are not.
    rows = [(store.graph.nodes[sha].directory / "answers.jsonl").read_text().splitlines() for sha in second.feedback]
    assert [[json.loads(row)["id"][-1] for row in cycle] for cycle in rows] == [["2"], []]
    assert begun(output) == second
    # Once a cycle has been without it, none is due until something is recorded, whoever is champion.
    ended(output, second, "refused")
    assert begin_cycle(output, config(), False) is None
    life.add("dpo-clean", "dpo", files | {"model.safetensors": weights("clean")}, {"policy": "ppo-2"})
    life.evaluate([f"question {i}" for i in range(50, 56)], "dpo-clean", "evaluate-clean", win_rate=0.9)
    life.register("dpo-clean")
    promoted(output, "dpo-clean", min_win_rate=None, max_kl=None, max_regression=None)
    verified = xray("withdraw", "--output", output, "--verify")
    assert (verified.exit_code, verified.output) == (
        0,
        "no live model descends from what was withdrawn, and what was erased is gone\n",
    )


def test_an_unfinished_cycle_restarts_after_a_withdrawal(fresh: Callable[[], Path]) -> None:
    output = fresh()
    model = resolve("ppo-2", output, None)[1].sha256
    keep(output, exchange(1, "ann", "a long secret of ann's own", model=model), exchange(2, "bob", model=model))
    first = begun(output)
    assert xray("withdraw", "--output", output, "--user", "ann", "--yes").exit_code == 0
    again = begun(output)
    assert (again.number, again.first, again.last) == (1, 1, 1)
    assert again.feedback != first.feedback
    assert begun(output) == again


def test_bad_input_is_one_line(fresh: Callable[[], Path]) -> None:
    output = fresh()
    recorded(output, 1)

    def ran(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["flywheel", "--output", str(output), *arguments])
        return done.exit_code, done.output

    for arguments, said in (
        ((), "dpo: exactly one of dpo, kto and ppo must be set, such as dpo.epochs=1; none is"),
        (("--set", "dpo.epochs=1", "--set", "kto.epochs=1"), "dpo.epochs=1; dpo and kto are"),
        (("--set", "ppo.iterations=1", "--set", "kto.epochs=1"), "dpo.epochs=1; kto and ppo are"),
        (("--set", "ppo.reward.epochs=0"), "ppo.reward.epochs: 0 is not allowed"),
        (("--set", "ppo.minibatch_size=7"), "minibatch_size = 7 must divide"),
        (("--set", "dpo.epochs=0"), "dpo.epochs: 0 is not allowed"),
        (("--set", "dpo.epochs=1"), "start: is required: synthetic-policy has no champion"),
        (("--set", "dpo.epochs=1", "--set", "rules.max_share=2"), "rules.max_share: 2"),
        (("--set", "dpo.epochs=1", "--set", "start=reward"), "must be a Model"),
        (("--set", "dpo.epochs=1", "--set", "start=ppo-2", "--release", "fine"), "--release: is not allowed"),
        (("nothing.yaml",), "nothing.yaml: no such file"),
    ):
        code, text = ran(*arguments)
        assert code == 2, text
        assert said in text
        assert "Traceback" not in text
    (output / RECORDED / "00000001.parquet").write_bytes(b"forged")
    code, text = ran("--set", "dpo.epochs=1", "--set", "start=ppo-2")
    assert (code, "recorded/00000001.parquet: its bytes were changed" in text.replace("\n", " ")) == (2, True)
    assert read_cycles(output) == []
    place = output / "flywheel" / "0001"
    place.mkdir(parents=True)
    (place / "cycle.json").write_text("{")
    code, text = ran("--set", "dpo.epochs=1")
    assert (code, "cycle.json: is not what the signed log has" in text.replace("\n", " ")) == (2, True)


def test_a_tampered_cycle_is_refused(fresh: Callable[[], Path]) -> None:
    output = fresh()
    recorded(output, 1)
    first = begun(output)
    path = cycle_directory(output, first) / "cycle.json"
    content = path.read_text()
    path.write_text(content.replace('"begun"', '"candidate"'))
    with pytest.raises(ConfigError, match=r"cycle\.json: is not what the signed log has"):
        begin_cycle(output, config(), False)
    # A crash, or whoever moves it away, leaves none: the signed log has it.
    path.unlink()
    assert begun(output) == first
    assert path.read_text() == content
    log = output / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"payload":"', b'"payload":"A', 1))
    with pytest.raises(ConfigError, match=r"^--output: log\.jsonl"):
        begin_cycle(output, config(), False)
