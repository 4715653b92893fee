"""The audit as a scheduled flow: an artifact each time, an event and a failed run when something broke."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from tests.unit.lineage.synthetic import Lifecycle


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness():
        yield


def artifacts() -> list[str]:
    from prefect import get_client

    async def read() -> list[str]:
        async with get_client() as client:
            return [str(a.data) for a in await client.read_artifacts() if a.key == "audit"]

    return asyncio.run(read())


def test_a_sound_store_passes_and_a_broken_one_fails_with_an_event(
    server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flows.audit

    events = []
    monkeypatch.setattr(flows.audit, "emit_event", lambda name, **content: events.append((name, content["payload"])))
    lifecycle = Lifecycle(tmp_path / "run", tracking=False).whole()
    assert flows.audit.audit(str(tmp_path / "run"))["sound"]
    assert events == []
    (lifecycle.done["sft"].path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(flows.audit.NotSound, match="file-changed sft"):
        flows.audit.audit(str(tmp_path / "run"))
    assert [name for name, _ in events] == ["xray.audit.broken"]
    assert events[0][1]["findings"][0]["code"] == "file-changed"
    assert sorted(text.startswith("**NOT SOUND**") for text in artifacts()) == [False, True]
