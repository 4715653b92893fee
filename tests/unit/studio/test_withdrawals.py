"""Withdrawals in the studio are those of `xray withdraw`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.live.serving.recording import exchange, keep
from tests.unit.studio.world import HOSTILE, post, studio
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import run_lock
from xray_runtime.kernel.history.recorded import RecordedReader
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.live.withdrawal import verify


@pytest.fixture
def output(fresh: Callable[[], Path]) -> Path:
    output = fresh()
    model = find("sft", open_lineage_store(output, None)).sha256
    keep(output, exchange(1, "ann", f"a text of ann's {HOSTILE}", model=model), exchange(2, "bob", model=model))
    return output


def readable(output: Path) -> int:
    return sum(row["texts"] is not None for row in RecordedReader(output).rows(None, (), None))


def seen(text: str) -> str:
    found = re.search(r'name="seen" value="(\w+)"', text)
    assert found is not None, text
    return found[1]


def test_a_person_is_withdrawn_after_the_list_was_seen(output: Path) -> None:
    client = studio(output)
    assert "Nothing was withdrawn here" in client.get("/withdrawals").text
    assert client.get("/withdrawals/verify").status_code == 400
    listed = post(client, "/withdrawals", kind="user", name="ann", answer="list").text
    assert "Withdraw ann?" in listed
    assert (view(output).state(Withdrawals), readable(output)) == ([], 2)
    fields = {"kind": "user", "name": "ann", "by": "ada", "answer": "withdraw"}
    for wrong, text in (
        ({"seen": "0" * 64}, "has changed since the list was shown"),
        ({"seen": seen(listed), "by": " "}, "by: is required"),
        ({"seen": seen(listed), "name": "nobody"}, "&#39;nobody&#39; is not allowed"),
        ({"seen": seen(listed), "name": ""}, "name: is required"),
        ({"seen": seen(listed), "kind": "table"}, "kind: &#39;table&#39; is not allowed"),
    ):
        reply = post(client, "/withdrawals", **fields | wrong)
        assert (reply.status_code, text in reply.text) == (400, True), reply.text
    with run_lock(output, "another"):
        reply = post(client, "/withdrawals", **fields, seen=seen(listed))
    assert (reply.status_code, "another run is using" in reply.text) == (400, True)
    assert (view(output).state(Withdrawals), readable(output)) == ([], 2)
    assert post(client, "/withdrawals", **fields, seen=seen(listed)).headers["location"] == "/withdrawals"
    [entry] = view(output).state(Withdrawals)
    assert (entry.by, entry.subject.split()[0], readable(output)) == ("ada", "user", 1)
    assert entry.subject in client.get("/withdrawals").text
    assert 'class="state sound"' in client.get("/withdrawals/verify").text


def test_a_source_takes_its_descendants_along_and_live_models_are_named(output: Path) -> None:
    store = open_lineage_store(output, None)
    source = next(s for n in store.graph.nodes.values() for s in n.statement.predicate.build.internal.sources)  # type: ignore[union-attr]
    client = studio(output)
    listed = post(client, "/withdrawals", kind="source", name=source.digest).text
    for stage in ("prepare", "sft", "ppo-2"):
        assert find(stage, store).name in listed
    fields = {"kind": "source", "name": source.digest, "by": "ada", "answer": "withdraw", "seen": seen(listed)}
    assert post(client, "/withdrawals", **fields).status_code == 303
    page = client.get("/withdrawals").text
    assert f"/checkpoints/{find('ppo-2', store).sha256}" in page
    # Its candidate descends from the source: the page says what `xray withdraw --verify` says.
    found = verify(open_lineage_store(output, None))
    assert found
    said = client.get("/withdrawals/verify").text
    assert 'class="state broken"' in said
    assert said.count("<li>") == len(found)
