"""`xray recorded`, `xray audit --all` of what was recorded, and the options of `xray serve --record`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.live.serving.recording import exchange, keep
from tests.unit.trust.commands import serve_command
from xray.cli.main import app
from xray.cli.serve_recording import FEEDBACK_KEYS, recording_lock, recording_options
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.reference import open_lineage_store, resolve


def ran(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


def test_records_are_shown_and_checked(fresh: Callable[[], Path]) -> None:
    output = fresh()
    assert ran("recorded", "--output", str(output))[0] == 2
    model = resolve("ppo-2", output, None)[1].sha256
    keep(output, exchange(1, "ann", model=model), exchange(2, "bob", model=model))
    keep(output, exchange(3, "ann", "again", model=model))
    before = ran("audit", "--all", "--output", str(output))
    assert before[0] == 0, before[1]

    code, text = ran("recorded", "--output", str(output), "--user", "ann", "--json")
    content = json.loads(text)
    assert (code, content["sound"], content["answers"], content["lost"]) == (0, True, 2, {})
    asked = [record["texts"]["request"]["messages"][0]["content"] for record in content["records"]]
    assert asked == ["again", "how are you"]
    code, text = ran("recorded", "--output", str(output), "--limit", "1")
    assert (code, text.splitlines()[-1]) == (0, "1 shown of 3 answers and 0 feedback")

    (output / RECORDED / "00000002.parquet").unlink()
    code, text = ran("recorded", "--output", str(output))
    assert code == 1
    assert "2 shown of 2 answers" in text
    assert "BROKEN recorded/00000002.parquet: it is missing, or a link" in text
    code, text = ran("audit", "--all", "--output", str(output))
    assert code == 1
    assert "recorded-broken: recorded/00000002.parquet" in text
    (output / RECORDED / "chain.jsonl").write_bytes(b"nonsense\n")
    code, text = ran("recorded", "--output", str(output))
    assert (code, "0 shown of 0 answers" in text) == (1, True)


def test_bad_options_of_a_recording_are_one_line(fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    output = fresh()
    monkeypatch.delenv(FEEDBACK_KEYS, raising=False)
    assert serve_command(output, "ppo-2", "--set", "sample=0.5") == (2, "error: --set: needs --record")
    for field, text in (
        ("sample=0", "sample: 0 is not allowed: must be greater than 0"),
        ("routes=[/v1/models]", 'routes.0: "/v1/models" is not allowed: must be one of'),
        ("days=3", "days: unknown field; allowed here: "),
        ("redact=os:system", "redact: 'os:system' is not allowed: it would import os"),
    ):
        code, found = serve_command(output, "ppo-2", "--record", "--set", field)
        assert (code, found.startswith("error: "), text.split(":")[0] in found) == (2, True, True), found
        assert text[:40] in " ".join(found.split()), found


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("shop", "'shop' is not allowed: must be NAME=KEY"),
        ("shop=short", "'shop' is not allowed: must be NAME=KEY"),
        ("shop=0123456789abcdef,desk=0123456789abcdef", "the key of 'desk' is not allowed: another one is the same"),
        ("shop=the inference key", "the key of 'shop' is not allowed: another one is the same"),
        ("shop=0123456789abcdef,shop=0123456789abcdeg", "'shop' is given twice"),
    ],
)
def test_keys_of_applications_differ_from_each_other_and_from_the_inference_key(
    keys: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FEEDBACK_KEYS, keys)
    with pytest.raises(ConfigError) as caught:
        recording_options(True, [], "the inference key")
    assert str(caught.value).startswith(f"{FEEDBACK_KEYS}: {text}")


def test_keys_leave_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FEEDBACK_KEYS, "shop=0123456789abcdef")
    found = recording_options(True, ["retention_days=7"], None)
    assert found is not None
    assert (list(found.applications.values()), found.config.retention_days) == (["shop"], 7)
    assert "0123456789abcdef" not in str(found.applications)
    assert recording_options(True, [], None).applications == {}  # type: ignore[union-attr]


def test_one_command_records_into_an_output_directory(fresh: Callable[[], Path]) -> None:
    store = open_lineage_store(fresh(), None)
    recording = recording_options(True, [], None)
    with recording_lock(recording, store):
        again = recording_lock(recording, store)
        with pytest.raises(ConfigError, match="--record: another `xray serve --record` records into"):
            again.__enter__()
        # One that does not record may serve beside it.
        with recording_lock(None, store):
            pass
    with recording_lock(recording, store):
        pass
