"""A cycle's recorded feedback as data: collected from sound segments alone, then curated into pairs and labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.live.cycles import ran
from tests.unit.live.serving.recording import KEYS, exchange, with_recorder
from tests.unit.trust.synthetic import copied, examples
from xray_runtime.data.pairs import Example, Pairs, PreferenceExample, prompt_text, write_pairs
from xray_runtime.data.replies import from_verdicts
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Curated, Dataset, Feedback
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.live.feedback.collection import collect
from xray_runtime.live.serving.exchange import Exchange
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder
from xray_runtime.live.withdrawal import plan_user
from xray_runtime.methods.curate import body as curate, recorded_data
from xray_runtime.methods.curate.config import CurateConfig, RecordedPromptsConfig
from xray_runtime.methods.curate.kind import CurateInputs, DemonstrationsInputs, RecordedPromptsInputs
from xray_runtime.methods.preferences import body as preferences
from xray_runtime.methods.preferences.config import CuratedPreferences
from xray_runtime.methods.preferences.kind import PreferencesInputs
from xray_runtime.trust.audit.checkpoints import audit

PEOPLE = [f"person {n}" for n in range(30)]


def record(output: Path, answers: list[Exchange], said: list[dict[str, Any]]) -> None:
    """Record answers, then feedback about them, each in a segment of its own."""

    async def work(recorder: AnswerRecorder) -> None:
        await recorder.keep(answers, {}, True)
        for each in said:
            status, content = await recorder.feedback(json.dumps(each).encode(), key_digest(KEYS["shop"]))
            assert status == 200, content

    with_recorder(output, work, feedback_per_hour=1000)


def cycle(output: Path, model: str) -> None:
    """Every person asks two questions of their own and one that all ask; each thumbs, a few correct."""
    answers, said = [], []
    for n, person in enumerate(PEOPLE):
        for k, text in enumerate(
            (f"{person} wonders about {n * 7919}", f"what of {n * 104729} then", "the same question")
        ):
            number = 10 * n + k
            answers.append(exchange(number, person, text, model=model))
            said.append({"answer": f"{number:032x}", "thumb": "up" if (n + k) % 2 else "down"})
        said[-3]["correction"] = f"better words, {n * 7919} of them"
    record(output, answers, said)


@pytest.fixture(scope="module")
def asked(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = copied(untouched, tmp_path_factory.mktemp("cycle") / "run")
    cycle(output, resolve("ppo-2", output, None)[1].sha256)
    return output


@pytest.fixture
def recorded(asked: Path, tmp_path: Path) -> Path:
    return copied(asked, tmp_path / "run")


def collected(output: Path) -> CheckpointRef:
    return collect(open_lineage_store(output, None), "synthetic", "ann", 1, 1000)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_is_collected_once_signed_and_sound(recorded: Path) -> None:
    first = collected(recorded)
    assert collected(recorded).sha256 == first.sha256
    assert json.loads((first.path / "stats.json").read_text()) == {"answers": 90, "feedback": 90}
    one = rows(first.path / "feedback.jsonl")[0]
    assert (one["prompt"], one["reply"]) == ([{"role": "user", "content": "person 0 wonders about 0"}], "fine 0")
    assert one["signals"] == {"thumb": "down", "correction": "better words, 0 of them"}
    assert one["judge"] == one["asker"] != "person 0"
    assert audit(open_lineage_store(recorded, None)).is_sound


def test_a_withdrawal_finds_it_even_by_texts_too_short_to_search(recorded: Path) -> None:
    model = resolve("ppo-2", recorded, None)[1].sha256
    record(recorded, [exchange(950, "zed", "hi", model=model)], [{"answer": f"{950:032x}", "thumb": "up"}])
    made = collected(recorded)
    plan = plan_user(open_lineage_store(recorded, None), "zed")
    assert [node.sha256 for node in plan.holders] == [made.sha256]
    assert made.path / "feedback.jsonl" in plan.files
    (made.path / "people.json").write_text("{")
    assert made.sha256 in [node.sha256 for node in plan_user(open_lineage_store(recorded, None), "zed").holders]


def test_unusable_records_are_counted(recorded: Path) -> None:
    model = resolve("ppo-2", recorded, None)[1].sha256
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    odd = [
        exchange(900, model=model, complete=False),
        exchange(901, model=model, route="/v1/completions"),
        exchange(902, model=model, request=json.dumps({"messages": image}).encode()),
        exchange(903, "gone", model=model),
    ]
    record(recorded, odd, [{"answer": f"{900:032x}", "thumb": "up"}, {"answer": f"{903:032x}", "thumb": "up"}])
    keys = {path.name for path in (recorded / RECORDED / "keys").iterdir()}
    record(recorded, [exchange(904, "last", model=model)], [])
    before = json.loads((collected(recorded).path / "people.json").read_text())
    [last] = {path.name for path in (recorded / RECORDED / "keys").iterdir()} - keys
    assert before[last] == 1
    (recorded / RECORDED / "keys" / last).unlink()
    stats = json.loads((collected(recorded).path / "stats.json").read_text())
    assert stats == {
        "answers": 91,
        "feedback": 91,
        "unused_answer_broken_off": 1,
        "unused_answer_not_one_text": 2,
        "unused_answer_withdrawn": 1,
        "unused_feedback_on_an_unused_answer": 1,
    }


@pytest.mark.parametrize("forged", [1, 7])
def test_nothing_is_collected_from_what_was_tampered_with(forged: int, recorded: Path) -> None:
    """A segment in the place of another, and one that nobody's line names: `test_recorder` has every tampering."""
    last = sorted((recorded / RECORDED).glob("*.parquet"))[-1]
    shutil.copy(last, last.with_name(f"{forged:08d}.parquet"))
    with pytest.raises(ConfigError, match=r"^--output: recorded/\d+\.parquet: .*; see `xray recorded`$"):
        collected(recorded)
    assert not list((recorded / "checkpoints").glob("feedback-*"))


def test_feedback_that_is_sent_again_counts_once(recorded: Path) -> None:
    record(recorded, [], [{"answer": f"{0:032x}", "thumb": "up"}] * 3)
    assert len(rows(collected(recorded).path / "feedback.jsonl")) == 91


def test_feedback_becomes_pairs_labels_and_demonstrations(recorded: Path, tmp_path: Path) -> None:
    feedback = Feedback(collected(recorded).path)
    rules = CurateConfig(heldout_fraction=0.25)
    notes = ran(curate.run, rules, CurateInputs([feedback]), tmp_path / "curated")
    again = ran(curate.run, rules, CurateInputs([feedback]), tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "curated").iterdir())
    for name in files:
        assert (tmp_path / "curated" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert notes.tables == again.tables
    stats = json.loads((tmp_path / "curated" / "stats.json").read_text())
    assert dict(map(tuple, notes.tables["curate_dropped"])) == {  # type: ignore[arg-type]
        name.removeprefix("dropped_"): count for name, count in stats.items() if name.startswith("dropped_")
    }
    assert stats["labels_train"] == len(rows(tmp_path / "curated" / "judgements.jsonl")) > 20
    assert (stats["largest_share_labels"], stats["held"]) == (pytest.approx(2 / 45, abs=0.03), [])

    curated = Curated(tmp_path / "curated")
    labelled, _ = from_verdicts(rows(curated.path / "judgements.jsonl"), TextSet())
    assert len(labelled) == stats["labels_train"]
    assert {one.desirable for one in labelled} == {True, False}
    fixed = tmp_path / "fixed"
    fixed.mkdir()
    (fixed / "heldout.arrow").write_bytes(examples(range(3)))
    inputs = PreferencesInputs(judgements=curated, data=Dataset(fixed))
    ran(preferences.run, CuratedPreferences(), inputs, tmp_path / "pairs")
    sides = {
        side: list(Pairs(tmp_path / "pairs" / f"{side}.arrow", PreferenceExample)) for side in ("train", "heldout")
    }
    assert {side: len(found) for side, found in sides.items()} == {
        side: stats[f"pairs_{side}"] for side in ("train", "heldout")
    }
    texts = {side: {prompt_text(pair.prompt) for pair in found} for side, found in sides.items()}
    assert not texts["train"] & texts["heldout"]


def test_a_held_cycle_trains_nothing_until_a_person_releases_it(recorded: Path, tmp_path: Path) -> None:
    feedback = [Feedback(collected(recorded).path)]
    held = {"min_alpha": 0.99, "heldout_fraction": 0.25, "min_judge_agreement": None}
    # All judge the same reply, so that they can disagree.
    one = tmp_path / "feedback"
    one.mkdir()
    lines = rows(feedback[0].path / "feedback.jsonl")
    lines = [row | ({"reply": "fine"} if "same" in row["prompt"][0]["content"] else {}) for row in lines]
    (one / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    ran(curate.run, CurateConfig(**held), CurateInputs([Feedback(one)]), tmp_path / "held")
    reason = "held is held for a person: its judges' agreement on ratings is α = 0.000; at least 0.99"
    with pytest.raises(ValueError, match=reason):
        ran(
            preferences.run,
            CuratedPreferences(),
            PreferencesInputs(judgements=Curated(tmp_path / "held")),
            tmp_path / "pairs",
        )
    with pytest.raises(ValueError, match="release it with the field `released`"):
        ran(
            recorded_data.demonstrations,
            Section(),
            DemonstrationsInputs(Curated(tmp_path / "held")),
            tmp_path / "demonstrations",
        )
    released = CurateConfig(**held, released="ann: I looked at it")
    ran(curate.run, released, CurateInputs([Feedback(one)]), tmp_path / "released")
    stats = json.loads((tmp_path / "released" / "stats.json").read_text())
    assert (stats["held"], stats["released"]) == ([], "ann: I looked at it")


def test_recorded_prompts_are_those_that_nothing_is_trained_on(recorded: Path, tmp_path: Path) -> None:
    feedback = Feedback(collected(recorded).path)
    ran(curate.run, CurateConfig(heldout_fraction=0.25), CurateInputs([feedback]), tmp_path / "curated")
    trained = {prompt_text(row["prompt"]) for row in rows(tmp_path / "curated" / "judgements.jsonl")}
    seen = tmp_path / "seen"
    seen.mkdir()
    config = RecordedPromptsConfig(heldout_fraction=0.25, max_share=None)
    write_pairs(seen / "train.arrow", Example, [])
    ran(recorded_data.prompts, config, RecordedPromptsInputs([feedback], [Dataset(seen)]), tmp_path / "prompts")
    found = list(Pairs(tmp_path / "prompts" / "heldout.arrow", Example))
    asked = {prompt_text(one.prompt) for one in found}
    assert 5 < len(found) == len(asked) < 40
    assert not asked & trained
    write_pairs(seen / "train.arrow", Example, found[:1])
    ran(recorded_data.prompts, config, RecordedPromptsInputs([feedback], [Dataset(seen)]), tmp_path / "fewer")
    assert list(Pairs(tmp_path / "fewer" / "heldout.arrow", Example)) == found[1:]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "gold: FILE line 1: Invalid JSON"),
        ('{"prompt": "q", "good": true}', "gold: FILE line 1: must have reply and good, or chosen and rejected"),
        ('{"prompt": "q", "reply": "r", "good": 1}', "gold: FILE line 1: Input should be a valid boolean"),
    ],
)
def test_a_bad_gold_file_is_one_line(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "gold.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"^gold: ") as caught:
        curate.read_gold(str(path))
    assert str(caught.value).startswith(reason.replace("FILE", str(path)))
    assert "\n" not in str(caught.value)
