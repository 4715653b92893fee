"""Review in a real MLflow: what is shown there, what is taken from there, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.live.serving.recording import KEYS, exchange, keep, with_recorder
from tests.unit.trust.commands import xray
from tests.unit.trust.synthetic import copied
from xray.flows.flywheel import BY
from xray_runtime.kernel.graph.artifacts import FEEDBACK
from xray_runtime.kernel.history.recorded import RecordedReader
from xray_runtime.kernel.history.recorded_rows import KEYS as KEY_FILES, RECORDED, UserKeys
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.kernel.tracking.traces import AnswerTraces
from xray_runtime.live.feedback.collection import collect
from xray_runtime.live.serving.middleware import key_digest

SECRET = 'my "secret" in Zürich,\nin two lines'
ID = "{:032x}".format


class Mlflow:
    """A person on MLflow's pages."""

    def __init__(self, output: Path) -> None:
        from mlflow.tracing.client import TracingClient

        store = open_lineage_store(output, None)
        assert store.tracking_uri is not None
        self.traces = TracingClient(store.tracking_uri)
        self.answers = AnswerTraces(store.tracking_uri, "synthetic", store.artifacts)

    def say(self, number: int, name: str, value: Any, judge: str = "ada", **more: Any) -> str:
        from mlflow.entities import AssessmentSource, Expectation, Feedback

        kind = Expectation if name in ("correction", "better") else Feedback
        source = AssessmentSource(more.pop("source", "HUMAN"), judge)
        made = self.traces.log_assessment(f"tr-{ID(number)}", kind(name=name, value=value, source=source, **more))
        assert made.assessment_id is not None
        return made.assessment_id


@pytest.fixture(scope="module")
def asked(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = copied(untouched, tmp_path_factory.mktemp("reviews") / "run")
    model = resolve("ppo-2", output, None)[1].sha256
    keep(output, *(exchange(n, u, t, model=model) for n, u, t in ((1, "ann", SECRET), (2, "bob", "a question"))))
    keep(output, exchange(3, "bob", "kept for the shop", model=model, application="shop"))
    return output


@pytest.fixture
def output(asked: Path, tmp_path: Path) -> Path:
    return copied(asked, tmp_path / "run")


def synced(output: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    done = xray("reviews", "--output", output, "--judge", "ada", "--judge", "ben", "--json", *arguments)
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout), " ".join(done.stderr.split())


def said(output: Path) -> list[tuple[int, str, dict[str, Any]]]:
    """(answer, judge, signals) of all feedback in the store, the oldest first."""
    keys = UserKeys(output / RECORDED / KEY_FILES, writable=False)
    names = {keys.pseudonym(name): name for name in ("ada", "ben", "eve", "carl")}
    rows = [row for row in RecordedReader(output).rows(None, (), None) if row["kind"] == "feedback"]
    return [(int(r["answer"], 16), names[r["user"]], r["texts"]["feedback"]) for r in reversed(rows) if r["texts"]]


def by_api(output: Path, number: int, **signals: Any) -> None:
    body = json.dumps({"answer": ID(number), **signals}).encode()
    assert with_recorder(output, lambda recorder: recorder.feedback(body, key_digest(KEYS["desk"])))[0] == 200


def test_answers_and_feedback_are_shown_and_what_people_say_is_taken_once(output: Path) -> None:
    by_api(output, 2, user="carl", score=0.25, correction="a better text")
    code, done, _ = synced(output)
    assert (code, done["written"], done["assessed"], done["taken"]) == (0, 2, 2, 0)
    assert done["queue"] == {"pending": 1}
    people = Mlflow(output)
    shown = people.answers.read()
    assert shown.keys() == {ID(1), ID(2)}
    assert {a.name: a.value for a in shown[ID(2)].assessments} == {"score": 0.25, "correction": "a better text"}
    trace = people.traces.get_trace(f"tr-{ID(1)}")
    assert trace.data.spans[0].inputs == {"messages": [{"role": "user", "content": SECRET}]}
    assert "ann" not in trace.to_json()

    thumb = people.say(1, "thumb", "up", rationale="it is kind")
    people.say(2, "better", "another answer", "ben")
    people.say(2, "thumb", "up", "a-model", source="LLM_JUDGE")
    people.say(2, "relevance", "low")
    code, done, _ = synced(output)
    assert (code, done["written"], done["assessed"], done["taken"]) == (0, 0, 0, 2)
    mine = [(1, "ada", {"thumb": "up", "text": "it is kind"}), (2, "ben", {"better": "another answer"})]
    assert said(output)[1:] == mine
    code, done, _ = synced(output)
    assert (code, done["assessed"], done["taken"], done["queue"]) == (0, 0, 0, {"complete": 1})
    assert said(output)[1:] == mine
    assert xray("recorded", "--output", output).exit_code == 0

    # Somebody changes their mind, and back.
    from mlflow.entities import AssessmentSource, Feedback

    for value, taken, finding in (("down", 1, ""), ("up", 0, "went back to an earlier verdict")):
        changed = Feedback(name="thumb", value=value, source=AssessmentSource("HUMAN", "ada"), rationale="it is kind")
        people.traces.update_assessment(f"tr-{ID(1)}", thumb, changed)
        code, done, text = synced(output)
        assert (done["taken"], finding in text, code) == (taken, True, 1 - taken)
    assert said(output)[-1] == (1, "ada", {"thumb": "down", "text": "it is kind"})

    # A cycle learns from them as from any other.
    collected = collect(open_lineage_store(output, None), "synthetic", BY, 1, 99).path / FEEDBACK
    assert len(collected.read_text().splitlines()) == 4


def test_reviews_without_a_known_judge_are_named_and_left_out(output: Path) -> None:
    by_api(output, 2, user="carl", thumb="down")
    synced(output)
    people, before = Mlflow(output), said(output)
    [ours] = people.answers.read()[ID(2)].assessments
    people.say(1, "thumb", "up", "eve")
    people.say(1, "score", 7.0)
    people.say(1, "thumb", "maybe", "ben")
    # Forged: it says that it is a feedback that says otherwise, or is nobody's.
    people.say(2, "thumb", "up", ours.judge, metadata={"xray.feedback": ours.feedback})
    people.say(2, "correction", "poison", metadata={"xray.feedback": "f" * 32})
    model = resolve("sft", output, None)[1].sha256
    keep(output, exchange(4, "bob", "an answer of another model", model=model))
    code, done, text = synced(output)
    assert (code, done["taken"], said(output)) == (1, 0, before)
    people.say(4, "thumb", "up")
    people.traces.set_trace_tag(f"tr-{ID(4)}", "xray.model", "0" * 64)
    people.traces.set_trace_tag(f"tr-{ID(1)}", "xray.model", "")
    code, done, text = synced(output)
    assert (code, done["taken"], said(output)) == (1, 0, before)
    for finding in (
        f"thumb by {ours.judge} on tr-{ID(2)}: it is not the feedback '{ours.feedback}' that it names",
        f"correction by ada on tr-{ID(2)}: it is not the feedback",
        f"trace tr-{ID(4)}: it names the model '000000000000', and {model[:12]} answered",
        f"trace tr-{ID(1)}: it names the model '', and",
    ):
        assert finding in text, (finding, text)


def test_findings_name_the_judge_and_the_value(output: Path) -> None:
    synced(output)
    people = Mlflow(output)
    people.say(1, "thumb", "up", "eve")
    people.say(1, "score", 7.0)
    people.say(2, "thumb", "maybe", "ben")
    code, done, text = synced(output)
    assert (code, done["taken"], said(output)) == (1, 0, [])
    assert f"thumb by eve on tr-{ID(1)}: the judge is not one of ada, ben" in text
    assert "score: 7.0 is not allowed" in text
    assert 'thumb: "maybe" is not allowed' in text
    for number in (1, 2):
        people.say(number, "correction", f"text {number}", "ben")
    code, done, _ = synced(output, "--most-of-one", "1")
    assert (done["taken"], done["waiting"]) == (1, 1)
    assert synced(output)[1]["taken"] == 1


def test_a_trace_of_an_answer_that_was_never_recorded_is_a_finding(output: Path) -> None:
    synced(output)
    people = Mlflow(output)
    from xray_runtime.kernel.tracking.traces import ShownAnswer

    forged = ShownAnswer(ID(9), "ab" * 32, "x", 1_700_000_000_009, 0.1, "p", "r", {"prompt": "p"}, {})
    people.answers.write(forged, None)
    people.say(9, "thumb", "up")
    code, done, text = synced(output)
    assert (code, done["taken"], said(output)) == (1, 0, [])
    assert f"trace tr-{ID(9)}: no such answer was recorded" in text


def test_a_withdrawal_reaches_mlflow_and_nothing_comes_back(output: Path) -> None:
    synced(output)
    people = Mlflow(output)
    people.say(1, "correction", f"{SECRET} better", "ben")
    people.say(2, "thumb", "up", "ann")
    synced(output)
    parts = [part.encode() for part in ("Zürich", "Z\\u00fcrich", "in two lines")]
    database = output / "mlflow.db"
    assert any(part in database.read_bytes() for part in parts)
    assert xray("withdraw", "--output", output, "--user", "ann", "--yes").exit_code == 0
    assert not any(part in database.read_bytes() for part in parts)
    shown = people.answers.read()
    assert shown.keys() == {ID(2)}
    assert shown[ID(2)].assessments == ()
    code, done, _ = synced(output)
    assert (code, done["written"], done["taken"]) == (0, 0, 0)
    assert xray("audit", "--output", output, "--all").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "judges: [] is not allowed: must have at least 1"),
        (("--judge", "ada", "--limit", "0"), "limit: 0 is not allowed"),
        (("--judge", "ada"), "nothing is recorded in"),
    ],
)
def test_bad_input_is_one_line(fresh: Callable[[], Path], arguments: tuple[str, ...], text: str) -> None:
    done = xray("reviews", "--output", fresh(), *arguments)
    assert (done.exit_code, text in " ".join(done.output.split())) == (2, True), done.output
