"""`xray run` before anything runs: what is refused comes before anything is moved or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from xray.cli.commands import run as module
from xray.cli.commands.run import verify_determinism
from xray.cli.main import app
from xray.flows.subject import Subject, read_subject


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("seed: 3\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A directory that an earlier run has left."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.yaml").write_text("seed: 1\n")
    return output


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object, **kwargs: object) -> int:
        raise AssertionError("it was about to run")

    monkeypatch.setattr(module, "supervise", start)
    monkeypatch.setattr(module, "verify_determinism", start)


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def unharmed(output: Path) -> bool:
    return (output / "config.yaml").read_text() == "seed: 1\n" and not list(output.parent.glob("out.before-*"))


def test_explaining_changes_nothing(config: Path, output: Path) -> None:
    result = called(config, "--output", output, "--explain")
    assert result.exit_code == 0
    assert "never computed in this directory" in result.output
    assert unharmed(output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fresh", "--until", "stf"), "--until: 'stf' is not allowed: must be one of prepare, base, sft,"),
        (("--fresh", "--explain"), "--explain: cannot be combined with --fresh, which computes every stage"),
        (("--fresh", "--set", "seed=x"), 'seed: "x" is not allowed: must be a whole number'),
        (("--verify-determinism", "--until", "stf"), "--until: 'stf' is not allowed"),
    ],
)
def test_bad_input_changes_nothing(options: tuple[str, ...], message: str, config: Path, output: Path) -> None:
    result = called(config, "--output", output, *options)
    assert result.exit_code == 2
    assert message in result.output
    assert unharmed(output)


def test_the_config_of_a_run_is_saved(config: Path, output: Path) -> None:
    assert "it was about to run" in called(config, "--output", output, "--fresh").output
    assert yaml.safe_load((output / "config.yaml").read_text())["seed"] == 3
    assert (output.with_name("out.before-1") / "config.yaml").read_text() == "seed: 1\n"


SCRIPT = """
import xray
from prefect import flow

@flow(task_runner=xray.task_runner())
def two_judges(seed: int = 0):
    pass
"""


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "graphs/mine.py",
            "must be a YAML file or MODULE:FLOW, such as graphs.mine:two_judges; run a script that opens",
        ),
        (
            "graphs/mine.py:other",
            "must be a YAML file or MODULE:FLOW, such as graphs.mine:other; run a script that opens",
        ),
        (
            "graphs/broken.py",
            "such as graphs.broken:FLOW; run a script that opens its own workspace with `python graphs/",
        ),
        ("graphs/absent.py", "error: graphs/absent.py: no such file"),
        ("graphs.mine", "error: graphs.mine: no such file; name your own flow as MODULE:FLOW"),
    ],
)
def test_a_script_run_the_wrong_way_gets_a_hint(
    target: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "mine.py").write_text(SCRIPT)
    (tmp_path / "graphs" / "broken.py").write_text("def (")
    result = called(target)
    assert result.exit_code == 2
    assert says in result.output


SHARED = """
import xray
from prefect import flow

@flow(task_runner=xray.task_runner())
def shared():
    with xray.workspace("run", project="p", runtime={"storage": "STORE"}):
        xray.prepare(source="chitchat")
"""


def test_determinism_is_not_verified_against_a_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """…which would supply the second result: a flow's own store is left out, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shared_graph.py").write_text(SHARED.replace("STORE", f"file://{tmp_path}/store"))
    subject = read_subject("shared_graph:shared")
    assert subject.recorded().runtime.storage == f"file://{tmp_path}/store"
    ran = []

    def supervised(output: Path, subject: Subject, *rest: object, **options: object) -> int:
        ran.append(subject.recorded().runtime.storage)
        content = {"stages": [{"name": "prepare", "checkpoint": {"sha256": str(len(ran))}}]}
        (output / "lifecycle.json").write_text(json.dumps(content))
        return 0

    monkeypatch.setattr(module, "supervise", supervised)
    assert verify_determinism(subject, subject.recorded().runtime, tmp_path, Console()) == 1
    assert ran == [None, None]
