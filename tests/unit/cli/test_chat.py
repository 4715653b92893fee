"""`xray chat` with a model that learned to call a tool, which is really called."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.unit.agents.environments import samples
from tests.unit.agents.environments.caller import save_caller
from tests.unit.kernel.store.published import IDENTITY
from xray.cli.main import app
from xray_runtime.kernel.config.allowed_imports import VARIABLE
from xray_runtime.kernel.store.checkpoints import Store

ENVIRONMENT = f"{samples.__name__}:calculator"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with a model that knows one conversation by heart."""
    output = tmp_path_factory.mktemp("chat")
    store = Store(output / "checkpoints")
    data = IDENTITY.model_copy(update={"stage": "prepare", "kind": "prepare", "config": {"columns": ["answer"]}})
    with store.building(data.stage, data.key) as built:
        (built / "train.arrow").touch()
        dataset = store.publish(built, data, type="Dataset", step=0, dataset=None)
    with store.building(IDENTITY.stage, IDENTITY.key) as built:
        save_caller(built)
        store.publish(built, IDENTITY, type="Model", step=0, dataset=dataset.sha256)
    return output


def chat(place: Path, said: str, *options: str) -> Result:
    arguments = ["chat", "sft", "--output", str(place), "--temperature", "0.01", "--max-new-tokens", "60", *options]
    return CliRunner().invoke(app, arguments, input=said)


def test_the_tools_of_an_environment_are_called(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, samples.__name__)
    done = chat(place, "1 and 2\n1 and 2\n", "--environment", ENVIRONMENT)
    assert done.exit_code == 0, done.output
    call = '<tool_call> {"name": "add", "arguments": {"a": 1, "b": 2}} </tool_call>'
    # The second message has the first and its answer before it, which this model has never seen.
    assert done.stdout.splitlines()[:2] == [call, "1 and 2 is 3"]
    assert "[3]\n[reward 1]\n" in done.stderr
    plain = chat(place, "1 and 2\n")
    assert plain.exit_code == 0, plain.output
    assert "[" not in plain.stderr.split("temperature")[1]
    assert "columns" not in plain.stderr


def test_missing_columns_are_named_before_the_chat(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, samples.__name__)
    done = chat(place, "1 and 2\n1 and 2\n", "--environment", f"{samples.__name__}:examined")
    assert done.exit_code == 0, done.output
    before, after = done.stderr.split("reads one\n")
    assert before.endswith(
        "\nanswer: columns of its training data that chat messages lack; an episode fails if its environment "
    )
    # The first episode comes to its end, where the judge reads one; the chat goes on.
    assert after.startswith("[3]\nthe environment failed: episode 0: KeyError: 'answer'\n")
    assert done.stdout.splitlines()[1] == "1 and 2 is 3"


@pytest.mark.parametrize(
    ("path", "allowed", "line"),
    [
        ("calculator", "", '--environment.path: "calculator" is not allowed: must match'),
        (ENVIRONMENT, "", f"--environment: '{ENVIRONMENT}' is not allowed: it would import {samples.__name__}"),
        (f"{samples.__name__}:none", samples.__name__, "--environment: "),
    ],
)
def test_an_invalid_environment_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, path: str, allowed: str, line: str
) -> None:
    monkeypatch.setenv(VARIABLE, allowed)
    done = chat(place, "1 and 2\n", "--environment", path)
    assert done.exit_code == 2
    assert f"error: {line}" in done.stderr
