"""Withdrawal: the text is gone from every file, what was made from it is refused, and a kill is repaired."""

from __future__ import annotations

import html
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.live.serving.recording import KEYS, exchange, keep, with_recorder
from tests.unit.trust.commands import xray
from tests.unit.trust.promoting import aliases, broken, promoted
from tests.unit.trust.synthetic import NAME, Lifecycle, comparison, copied, pair_file, prompt, weights
from xray_runtime.data.pairs import Example, PreferenceExample
from xray_runtime.data.withdrawn import WithdrawnTexts
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.recorded import RecordedReader
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.reference import find, open_lineage_store, resolve
from xray_runtime.live.feedback import session as sessions
from xray_runtime.live.feedback.judgements import Judgement, Question
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.choice import Follower, champion, fixed, require_sound
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.gates import NotPromoted
from xray_runtime.trust.promotion import review, roll_back

SECRET = 'my "secret" is <b>Zürich & co</b>, keep it'
OTHER = "a text of somebody else, which must stay"
FORMS = {
    SECRET, html.escape(SECRET), html.escape(SECRET).replace("&quot;", "&#34;"), json.dumps(SECRET)[1:-1],
    json.dumps(SECRET, ensure_ascii=False)[1:-1],
}  # fmt: skip


def holding(output: Path) -> list[str]:
    """Every file below the directory that has the text in any form."""
    found = []
    for path in sorted(output.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        if any(form.encode() in content for form in FORMS):
            found.append(path.relative_to(output).as_posix())
    return found


def node(output: Path, stage: str) -> Node:
    return find(stage, open_lineage_store(output, None))


def learned(output: Path) -> None:
    """Ann's recorded chat became pairs, which `dpo-ann` learned from; its copies are in six kinds of files."""
    ppo = node(output, "ppo-2")
    keep(output, exchange(1, "ann", SECRET, model=ppo.sha256), exchange(2, "bob", OTHER, model=ppo.sha256))
    said = json.dumps({"answer": f"{1:032x}", "user": "judge", "correction": f"{SECRET} better"}).encode()
    assert with_recorder(output, lambda recorder: recorder.feedback(said, key_digest(KEYS["shop"])))[0] == 200
    life = Lifecycle.resumed(output)
    asked = [{"role": "user", "content": SECRET}]
    rows = [PreferenceExample("0", asked, "good", "bad"), PreferenceExample("1", prompt(3), "good", "bad")]
    files = {"train.arrow": pair_file(PreferenceExample, rows), "heldout.arrow": pair_file(PreferenceExample)}
    life.add("pairs-ann", "preferences", files | {"stats.json": b'{"pairs": 2}'}, {"data": "prepare"})
    policy = {"config.json": b"{}", "model.safetensors": weights("ann")}
    life.add("dpo-ann", "dpo", policy, {"policy": "sft", "preferences": "pairs-ann"})
    life.evaluate([f"question {i}" for i in range(50, 56)], "dpo-ann", "evaluate-ann", win_rate=0.9)
    life.register("dpo-ann")
    # A table of the stage, a log, a page, a comparison, MLflow's database.
    records = next(iter(output.glob("records/pairs-ann-*")))
    (records / "preferences.json").write_text(json.dumps({"columns": ["prompt"], "rows": [[SECRET]]}))
    (output / "logs").mkdir(exist_ok=True)
    (output / "logs" / "run.log").write_text(f"prompt: {SECRET}\n")
    (output / "report.html").write_text(f"<p>{html.escape(SECRET)}</p>")
    made = sessions.Session.read(sessions.session_directory(output, _setup(output)))
    made.add_questions([Question(number=n, prompt=prompt(n), a=t, b="b") for n, t in enumerate((SECRET, OTHER))])
    for number in (0, 1):
        made.add_judgement(Judgement(number=number, left="a", verdict="a", judge="ada", at="2026-01-01T00:00:00+00:00"))
    with sqlite3.connect(output / "mlflow.db") as connection:
        run = connection.execute("select run_uuid from runs limit 1").fetchone()[0]
        connection.execute("insert into tags (key, value, run_uuid) values ('note', ?, ?)", (SECRET, run))


def _setup(output: Path) -> sessions.Setup:
    return comparison(node(output, "sft").sha256, node(output, "ppo-2").sha256)


@pytest.fixture(scope="module")
def made(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = copied(untouched, tmp_path_factory.mktemp("withdrawal") / "run")
    learned(output)
    return output


@pytest.fixture
def output(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path / "run")


def withdrawn(output: Path, *arguments: str) -> tuple[int, str]:
    done = xray("withdraw", "--output", output, *arguments)
    return done.exit_code, done.output


def test_a_persons_text_is_gone_and_what_was_made_from_it_is_refused(output: Path) -> None:
    pairs, model, mine = node(output, "pairs-ann"), node(output, "dpo-ann"), len(holding(output))
    assert mine == 6
    code, text = withdrawn(output, "--user", "ann")
    assert (code, f"holds it      {pairs.name}" in text, f"made from it  {model.name} (model)" in text) == (
        0,
        True,
        True,
    )
    assert "nothing was changed" in text
    assert len(holding(output)) == mine
    before = (output / RECORDED / "00000001.parquet").read_bytes()

    code, text = withdrawn(output, "--user", "ann", "--yes")
    assert code == 0, text
    assert "--set data.withdrawn=" in text
    assert holding(output) == []
    # Its segment is as it was; nobody can read it, nor what the judge said of it. Bob's rows stay.
    assert (output / RECORDED / "00000001.parquet").read_bytes() == before
    rows = {
        row["id"][-1:] if row["kind"] == "answer" else "said": row["texts"]
        for row in RecordedReader(output).rows(None, (), None)
    }
    assert (rows["1"], rows["said"]) == (None, None)
    assert rows["2"]["request"]["messages"][0]["content"] == OTHER
    [made] = sessions.read_sessions(output)
    assert ([q.a for q in made.questions], [j.number for j in made.judgements]) == ([OTHER], [1])
    # Records still verify: what is missing is named by a signed entry.
    assert broken(output) == []
    assert xray("recorded", "--output", output).exit_code == 0
    assert not (pairs.directory / "train.arrow").exists()
    assert (model.directory / "model.safetensors").exists()
    [entry] = view(output).state(Withdrawals)
    assert "ann" not in entry.subject

    # Again, it has nothing left to do.
    assert withdrawn(output, "--user", "ann", "--yes")[0] == 0
    assert len(view(output).state(Withdrawals)) == 1
    gates = PromotionConfig(min_win_rate=None)
    with pytest.raises(NotPromoted) as refused:
        review(open_lineage_store(output, None), node(output, "dpo-ann"), name=NAME, gates=gates)
    assert any("descends from withdrawn data" in reason for reason in refused.value.reasons)
    # Neither a model from before it, nor its siblings are.
    assert review(open_lineage_store(output, None), node(output, "ppo-2"), name=NAME, gates=gates)
    # The candidate descends from it until somebody trains again.
    code, text = withdrawn(output, "--verify")
    assert (code, f"{NAME}@candidate is {model.sha256[:12]}" in text) == (1, True)
    Lifecycle.resumed(output).register("ppo-2")
    code, text = withdrawn(output, "--verify")
    assert (code, text) == (0, "no live model descends from what was withdrawn, and what was erased is gone\n")


def test_a_champion_that_descends_is_named_and_is_neither_served_nor_rolled_back_to(output: Path) -> None:
    promoted(output, "dpo-ann", min_win_rate=None, max_kl=None)
    served = champion(NAME, output, None)
    require_sound(served, None)
    follower = Follower(NAME, output, None, None, served.node.sha256)
    assert follower.next_champion() is None
    assert withdrawn(output, "--user", "ann", "--yes")[0] == 0
    with pytest.raises(NotServedError, match=r"dpo-ann .* descends from withdrawn data: "):
        follower.next_champion()
    assert follower.next_champion() is None  # said once
    for choice in (champion(NAME, output, None), fixed("dpo-ann", output, None)):
        with pytest.raises(NotServedError, match="descends from withdrawn data: "):
            require_sound(choice, None)
    require_sound(fixed("sft", output, None), None)
    code, text = withdrawn(output, "--verify")
    assert (code, f"{NAME}@champion" in text) == (1, True)
    Lifecycle.resumed(output).register("ppo-2")
    promoted(output, "ppo-2", min_win_rate=None, max_regression=None)
    assert withdrawn(output, "--verify")[0] == 0
    with pytest.raises(NotPromoted, match="descends from withdrawn data: pairs-ann"):
        roll_back(open_lineage_store(output, None), name=NAME, by="a", note="b")
    assert aliases(output)["champion"] == "1"


def test_the_same_text_from_another_file_is_refused_too(output: Path) -> None:
    """Somebody trains on a copy that the withdrawal did not reach: it is in the data, whatever it is called."""
    assert withdrawn(output, "--user", "ann", "--yes")[0] == 0
    life = Lifecycle.resumed(output)
    rows = [Example("0", "c", [{"role": "user", "content": SECRET}], "reply")]
    files = {"train.arrow": pair_file(Example, rows), "heldout.arrow": pair_file(Example), "stats.json": b"{}"}
    life.add("prepare-again", "prepare", files, {})
    life.add("sft-again", "sft", {"config.json": b"{}", "model.safetensors": weights("x")}, {"data": "prepare-again"})
    with pytest.raises(NotPromoted, match="it contains withdrawn texts"):
        review(open_lineage_store(output, None), node(output, "sft-again"), name=NAME)


def test_a_source_is_withdrawn_with_all_that_came_from_it(output: Path) -> None:
    code, text = withdrawn(output, "--source", "own.jsonl", "--yes")
    assert code == 0, text
    for stage in ("sft", "ppo-1", "ppo-2", "dpo-ann"):
        assert f"made from it  {node(output, stage).name} (model)" in text
    assert "made from it  base" in text  # its tokenizer was trained on it
    left = [p.name for p in output.rglob("*") if p.suffix in (".arrow", ".parquet") and RECORDED not in p.parts]
    assert left == []
    assert broken(output) == []
    with pytest.raises(NotPromoted, match="descends from withdrawn data"):
        review(open_lineage_store(output, None), node(output, "ppo-2"), name=NAME)
    assert withdrawn(output, "--verify")[0] == 1


CRASH = """
import os, signal, sys
from pathlib import Path
from typer.testing import CliRunner
from xray.cli.main import app
from xray_runtime.live import {module}
real, calls = {module}.{function}, []
def killed(*arguments, **named):
    calls.append(1)
    if len(calls) > {after}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)
setattr({module}, "{function}", killed)
CliRunner().invoke(app, ["withdraw", "--output", sys.argv[1], "--user", "ann", "--yes"], catch_exceptions=False)
"""


@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("evidence", 0),
        pytest.param("rewrite", 0, marks=pytest.mark.long),
        ("erase_file", 2),
        pytest.param("files_with", 1, marks=pytest.mark.long),
    ],
)
def test_killed_in_the_middle_it_is_ended_by_the_same_command(output: Path, function: str, after: int) -> None:
    code = CRASH.format(module="withdrawal", function=function, after=after)
    done = subprocess.run([sys.executable, "-c", code, str(output)], env=os.environ, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    # Once it is signed, nothing is promoted, whatever is erased; before, nothing is.
    if function != "evidence":
        with pytest.raises(NotPromoted, match="descends from withdrawn data"):
            review(open_lineage_store(output, None), node(output, "dpo-ann"), name=NAME)
    else:
        assert len(holding(output)) == 6
    code_of, text = withdrawn(output, "--user", "ann", "--yes")
    assert code_of == 0, text
    assert holding(output) == []
    assert broken(output) == []


LONG = " ".join(f"word{number}" for number in range(3000))
"""More than a page of a database."""


def test_a_long_text_and_one_in_nested_json_are_found_in_a_database(output: Path) -> None:
    keep(output, exchange(3, "ann", LONG, model=node(output, "ppo-2").sha256))
    nested = json.dumps({"request": json.dumps({"content": SECRET})})
    with sqlite3.connect(output / "mlflow.db") as connection:
        run = connection.execute("select run_uuid from runs limit 1").fetchone()[0]
        for name, text in (("long", LONG), ("nested", nested)):
            connection.execute("insert into tags (key, value, run_uuid) values (?, ?, ?)", (name, text, run))
    assert LONG.encode() not in (output / "mlflow.db").read_bytes()
    assert withdrawn(output, "--user", "ann", "--yes")[0] == 0
    with sqlite3.connect(output / "mlflow.db") as connection:
        values = dict(connection.execute("select key, value from tags where key in ('long', 'nested')"))
    assert values == {"long": "(withdrawn)", "nested": json.dumps({"request": json.dumps({"content": "(withdrawn)"})})}


def test_a_model_that_descends_is_refused_under_any_name(output: Path) -> None:
    model = node(output, "dpo-ann")
    assert withdrawn(output, "--user", "ann", "--yes")[0] == 0
    gates = PromotionConfig(min_win_rate=None)
    for reference in ("dpo-ann", model.sha256, model.sha256[:12], str(model.directory), f"{NAME}@candidate"):
        store, found = resolve(reference, output, None)
        with pytest.raises(NotPromoted, match="descends from withdrawn data"):
            review(store, found, name=NAME, gates=gates)
    # Its weights under another name, with a manifest that names no parents: nothing says where they come from.
    copy = model.directory.with_name("sft-000000000000")
    shutil.copytree(model.directory, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"stage": "fine", "parents": {}}))
    store, found = resolve("fine", output, None)
    with pytest.raises(ConfigError, match="has no version with checkpoint"):
        review(store, found, name=NAME, gates=gates)


def test_an_erased_file_that_is_put_back_is_found(output: Path) -> None:
    path = node(output, "pairs-ann").directory / "train.arrow"
    content = path.read_bytes()
    withdrawn(output, "--user", "ann", "--yes")
    path.write_bytes(content)
    code, text = withdrawn(output, "--verify")
    assert (code, "it was erased, but is present" in text) == (1, True)


def test_withdrawn_rows_are_known_by_salted_hashes(tmp_path: Path) -> None:
    texts = WithdrawnTexts.read(tmp_path / "w" / "texts.json")
    texts.add([SECRET, "short"])
    texts.write(tmp_path / "w" / "texts.json")
    assert (tmp_path / "w" / "texts.json").stat().st_mode & 0o077 == 0
    again = WithdrawnTexts.read(tmp_path / "w" / "texts.json")
    assert again.touches([{"role": "user", "content": f" {SECRET}\n"}])
    assert again.touches([{"role": "user", "content": "x"}], "y", SECRET)
    assert not again.touches([{"role": "user", "content": OTHER}], "short")
    assert holding(tmp_path) == []
    (tmp_path / "w" / "texts.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged, or not a file of withdrawn texts"):
        WithdrawnTexts.read(tmp_path / "w" / "texts.json")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--user, --source, --verify: exactly one is required"),
        (["--user", "ann", "--verify"], "--user, --source, --verify: exactly one is required"),
        (["--user", "nobody-here"], "--user: nothing that was recorded can be read"),
        (["--source", "other.jsonl"], "--source: 'other.jsonl' is not allowed: must be one that a checkpoint read"),
        (["--verify"], "--verify: nothing was withdrawn in"),
    ],
)
def test_bad_input_is_one_line(untouched: Path, arguments: list[str], text: str) -> None:
    done = xray("withdraw", "--output", untouched, *arguments)
    assert (done.exit_code, text in " ".join(done.output.split())) == (2, True), done.output
