"""The studio over HTTP: what each page shows, what it writes, and whom it refuses."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute
from PIL import Image
from typer.testing import CliRunner

from tests.unit.studio.world import HOSTILE, post, run_at_work, studio, with_rollouts
from tests.unit.trust.promoting import aliases, promoted
from tests.unit.trust.synthetic import NAME, Lifecycle
from xray.cli.main import app as command
from xray.studio import studio as shared
from xray_runtime.data.pairs import Pairs, PreferenceExample
from xray_runtime.kernel.evidence.view import run_lock
from xray_runtime.kernel.history.recorded import RecordedReader, recorded_lock
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.kernel.plugs import Registry
from xray_runtime.kernel.report.rendering import TEMPLATES, template
from xray_runtime.live.feedback.session import read_sessions
from xray_runtime.trust.audit.checkpoints import audit


@pytest.fixture
def output(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


PAGES = (
    *("/", "/rollouts", "/review", "/review/recorded", "/lineage", "/evaluations", "/promote", f"/promote/{NAME}"),
    "/withdrawals",
)
SCRIPTS = [f'<script src="/static/{name}.js" defer>' for name in ("htmx.min", "studio")]
MORE_SCRIPTS = {f'<script src="/static/{name}.js" defer>' for name in ("uplot.min", "curves", "tokens")}


def test_every_page_answers_with_a_strict_policy_and_no_text_becomes_markup(output: Path) -> None:
    client = studio(output)
    store = open_lineage_store(output, None)
    [session] = read_sessions(output)
    policy = find("ppo-read", store).sha256[:12]
    pages = [*PAGES, f"/rollouts/{policy}", f"/rollouts/{policy}/diff?first=0&second=2", f"/review/{session.name}"]
    pages += [f"/rollouts/{policy}/{name}" for name in ("tokens?iteration=1&row=0", "extremes?iteration=1")]
    pages += [f"/checkpoints/{sha}" for sha in store.graph.nodes]
    pages += re.findall(r'href="(/runs/[^"]+)"', client.get("/").text)
    for path in pages:
        reply = client.get(path)
        assert reply.status_code == 200, (path, reply.text)
        rules = reply.headers["content-security-policy"]
        assert "default-src 'none'" in rules
        assert "unsafe" not in rules
        # Scripts are our files; styles and handlers are in no attribute.
        scripts = re.findall(r"<script[^>]*>", reply.text)
        assert scripts[:2] == SCRIPTS, path
        assert set(scripts[2:]) <= MORE_SCRIPTS, path
        assert not re.search(r"<[^>]*\s(style|onclick|onerror|onload)=|<img src=x", reply.text), path
    assert "&lt;script&gt;" in client.get(f"/review/{session.name}").text
    assert "&lt;script&gt;" in client.get(f"/rollouts/{policy}").text


def test_pages_of_another_package(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weather" / "templates").mkdir(parents=True)
    (tmp_path / "weather" / "templates" / "weather.html").write_text(
        '{% extends "base.html" %}{% block main %}<p>{{ sky }}</p>{% endblock %}'
    )
    (tmp_path / "weather" / "__init__.py").write_text(
        "from fastapi import APIRouter, Request\nfrom xray.studio.studio import Link, Pages, page\n\n"
        "router = APIRouter()\n"
        "PAGES = Pages(router, (Link('/weather', 'Weather', 15),), 'weather')\n"
        "@router.get('/weather')\ndef weather(request: Request):\n    return page(request, 'weather.html', sky='<b>')\n"
    )
    information = tmp_path / "weather-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: weather\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[xray.pages]\nweather = weather\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(shared, "PAGES", Registry("page", "xray.studio.pages", "PAGES", "xray.pages"))
    found = studio(output).get("/weather").text
    assert "<p>&lt;b&gt;</p>" in found
    titles = ["Runs", "Weather", "Rollouts", "Review", "Lineage", "Evaluations", "Promote", "Withdrawals"]
    assert re.findall(r">(\w+)</a>", found.partition("<nav")[2].partition("</nav>")[0]) == titles


def test_without_its_token_no_form_is_taken(output: Path) -> None:
    client = studio(output)
    client.get("/")
    routes = [r for name in shared.PAGES for r in shared.PAGES.get(name).router.routes if isinstance(r, APIRoute)]
    paths = {route.path.format(name="x") for route in routes if "POST" in route.methods}
    assert len(paths) > 6
    for path in paths:
        for data in ({}, {"csrf": "0" * 64}):
            assert client.post(path, data=data).status_code == 403, path
    # A page elsewhere whose name leads to this machine.
    assert client.get("/", headers={"host": "evil.example:8100"}).status_code == 421
    assert client.get("/", headers={"host": "localhost:8100"}).status_code == 200


def test_an_open_studio_demands_its_token(output: Path) -> None:
    client = studio(output, token="a long token")
    reply = client.get("/")
    assert (reply.status_code, reply.headers["location"]) == (303, "/login")
    assert {client.get(f"/static/{name}.css").status_code for name in ("common", "studio")} == {200}
    assert client.get("/rollouts", headers={"hx-request": "true"}).headers["hx-redirect"] == "/login"
    assert client.post("/audit").status_code == 401
    assert client.post("/login", data={"token": "a long tokem"}).status_code == 401
    assert client.get("/").status_code == 303
    client.cookies.set("xray_studio", "made-up.99999999999.0000")
    assert client.get("/").status_code == 303
    client.cookies.clear()
    entered = client.post("/login", data={"token": "a long token"})
    assert entered.status_code == 303
    assert "HttpOnly" in entered.headers["set-cookie"]
    assert "SameSite=strict" in entered.headers["set-cookie"]
    assert client.get("/").status_code == 200
    assert post(client, "/audit").status_code == 303


def test_the_audit_is_shown_where_it_found_something(output: Path) -> None:
    client = studio(output)
    assert "not audited since" in client.get("/").text
    post(client, "/audit", hashing="yes")
    assert 'class="state sound">sound: ' in client.get("/").text
    node = find("sft", open_lineage_store(output, None))
    (node.directory / "model.safetensors").write_bytes(b"other bytes")
    post(client, "/audit", hashing="yes")
    assert "NOT SOUND" in client.get("/").text
    assert "model.safetensors" in client.get(f"/checkpoints/{node.sha256}").text
    assert f"{node.sha256[:8]} broken" in client.get("/lineage").text


def test_a_run_that_is_at_work_is_shown_as_it_goes_on(output: Path) -> None:
    records = run_at_work(output, "sft", [{"sft/loss": 2.0 - n / 10} for n in range(5)])
    (records / "samples.json").write_text(json.dumps({"columns": ["prompt"], "rows": [[HOSTILE]]}))
    now = int(time.time() * 1000)
    shown = {"done": 10, "total": 40, "unit": "steps", "began_ms": now - 5000, "at_ms": now}
    (records / "progress.json").write_text(json.dumps(shown))
    client = studio(output)
    with run_lock(output, "live-1"):
        page = client.get("/runs/live-1").text
        assert 'hx-trigger="every 2s"' in page
        curves = client.get("/runs/live-1/curves").json()
        assert curves["live"]
        assert curves["stages"][0]["stage"] == "sft"
        assert curves["stages"][0]["series"]["sft/loss"] == [[0, 1, 2, 3, 4], [2.0, 1.9, 1.8, 1.7, 1.6]]
        assert re.search(r"10 of 40 steps, 1[0-5] s left", page)
        assert "&lt;script&gt;" in page
        assert "<script>alert" not in page
        with (records / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "time_ms": 5, "metrics": {"sft/loss": 0.5}}) + "\n")
        assert client.get("/runs/live-1/curves").json()["stages"][0]["series"]["sft/loss"][1][-1] == 0.5
        front = client.get("/runs").text
        assert 'hx-trigger="every 4s"' in front
        assert "loss, nats a token, sft: +2.000 → +0.500" in front
    (output / "lifecycle.json").write_text(json.dumps({"run_id": "live-1", "status": "failed", "stages": []}))
    assert "every 2s" not in client.get("/runs/live-1").text
    assert client.get("/runs/other").status_code == 400


def rows(text: str) -> list[tuple[int, int, float]]:
    found = re.findall(r"Iteration (\d+), row (\d+) <small>reward <b>([-+.\d]+)", text)
    return [(int(i), int(r), float(reward)) for i, r, reward in found]


def test_pictures_of_prompts_are_shown_and_checked(output: Path) -> None:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(content, "PNG")
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    files = {"train.arrow": b"", "heldout.arrow": b"", f"pictures/{digest}.png": content.getvalue()}
    data = Lifecycle.resumed(output).add("drawn", "prepare", files, {})
    client, path = studio(output), f"/pictures/{digest[:31]}"
    reply = client.get(path)
    assert (reply.content, reply.headers["content-type"]) == (content.getvalue(), "image/png")
    assert client.get("/pictures/" + "0" * 31).status_code == 404
    assert client.get("/pictures/" + "%2e%2e%2fmanifest.json").status_code == 404
    (data.path / "pictures" / f"{digest}.png").write_bytes(content.getvalue()[::-1])
    assert client.get(path).status_code == 422


def test_rollouts_are_paged_filtered_and_sorted(output: Path) -> None:
    client = studio(output)
    path = f"/rollouts/{find('ppo-read', open_lineage_store(output, None)).sha256[:12]}"
    first = client.get(path).text
    in_order = [(i, n, float((n * 7 + i) % 40 - 20)) for i in range(3) for n in range(40)]
    assert rows(first) == in_order[:50]
    assert re.findall(r"start=(\d+)", first) == ["50", "100"]
    assert rows(client.get(f"{path}/rows?start=100").text) == in_order[100:]
    best = rows(client.get(f"{path}?order=highest").text)
    assert best == sorted(in_order, key=lambda row: -row[2])[:50]
    some = rows(client.get(f"{path}?iteration=1&min=18&source=rewards.0&unused=1&order=lowest").text)
    assert some == [(1, 34, 19.0)]
    # Replies to one prompt stand in one group; prompt n is row n of every iteration.
    by_prompt = client.get(f"{path}?order=prompt").text
    assert rows(by_prompt)[:4] == [in_order[0], in_order[40], in_order[80], in_order[1]]
    assert by_prompt.count('aria-label="3 replies to prompt ') == 16
    assert rows(client.get(f"{path}?text=REPLY+2+39").text) == [in_order[-1]]
    assert len(rows(client.get(f"{path}?iteration=1-2&min=19").text)) == 2
    for query, text in (
        ("iteration=2-1", "iteration: &#39;2-1&#39; is not allowed: must be a range"),
        ("iteration=9", "--iteration: 9 is not allowed: must be one of 0 to 2"),
        ("min=much", "lowest reward: &#39;much&#39; is not allowed: must be a number"),
        ("order=up", "--order: &#39;up&#39; is not allowed"),
        ("source=none", "--source: &#39;none&#39; is not allowed"),
    ):
        reply = client.get(f"{path}?{query}")
        assert (reply.status_code, text in reply.text) == (400, True), reply.text
    assert client.get(f"{path}/rows?start=-1").status_code == 400
    changed = client.get(f"{path}/diff?first=0&second=2").text
    assert "40 prompts are in both" in changed
    # 39 + 2 is 1 modulo 40, and 20 is taken off both.
    assert re.findall(r"reward ([-+.\d]+) → ([-+.\d]+)", changed)[0] == ("+19.000", "-19.000")


def test_the_picture_of_rewards_leads_to_its_replies(output: Path) -> None:
    client = studio(output)
    path = f"/rollouts/{find('ppo-read', open_lineage_store(output, None)).sha256[:12]}"
    page = client.get(path).text
    cells = re.findall(r'href="\?(iteration=[^"]+)"[^>]* aria-label="iteration \d: (\d+) from', page)
    # Each of the 120 rewards is in one bin.
    assert sum(int(count) for _, count in cells) == 120
    search, count = cells[0]
    assert len(rows(client.get(f"{path}?{search.replace('&amp;', '&')}").text)) == int(count) > 0


def test_each_token_has_its_numbers(output: Path) -> None:
    client = studio(output)
    path = f"/rollouts/{find('ppo-read', open_lineage_store(output, None)).sha256[:12]}"
    for by in ("logprob", "kl", "entropy", "advantage", "weight", "mismatch"):
        page = client.get(f"{path}/tokens?iteration=1&row=20&by={by}").text
        facts = re.findall(r'<span id="t(\d+)" class="(\w\d)" title="token \d+: ([^"]+)"', page)
        assert len(facts) > 3
        for n, shade, title in facts:
            assert title == (
                f"log-probability {-(int(n) + 1) / 2:+.3f}, KL to the reference +0.200, entropy 0.750, "
                "advantage +0.500, importance weight 1.000, trainer minus generator +0.250"
            )
            # A shade is 1.5 nats; advantages and differences are all at the scale, weights at 1; the KL of row 20 is
            # half of the largest, 0.39, which few rows have.
            surprise = min(4, int((int(n) + 1) / 2 / 1.5))
            expected = {"logprob": f"n{surprise}" if surprise else "p0", "weight": "p0", "kl": "p2"}
            assert shade == expected.get(by, "p4")
    found = client.get(f"{path}/extremes?iteration=1&by=kl").text
    # The largest differences are those of the last rows.
    assert {int(row) for row in re.findall(r"row=(\d+)&amp;round", found)} >= {39, 38}
    assert 'row=39&amp;round=0&amp;by=kl#t0"' in found
    likely = client.get(f"{path}/extremes?iteration=1&by=logprob").text
    longest = max(int(n) for n in re.findall(r"#t(\d+)", likely))
    assert re.findall(r"#t(\d+)", likely)[0] == str(longest)
    for query, text in (
        ("tokens?iteration=1&row=40", "row: 40 is not allowed"),
        ("tokens?iteration=9&row=0", "--iteration: 9 is not allowed"),
        ("tokens?iteration=1&row=0&by=surprise", "by: &#39;surprise&#39; is not allowed"),
        ("extremes?iteration=1&by=x", "by: &#39;x&#39; is not allowed"),
    ):
        reply = client.get(f"{path}/{query}")
        assert (reply.status_code, text in reply.text) == (400, True), reply.text


def test_two_runs_are_compared_on_the_prompts_of_both(output: Path, tmp_path: Path) -> None:
    other = with_rollouts(output, tmp_path / "tokenizer", 2, 30, "ppo-again")
    client, store = studio(output), open_lineage_store(output, None)
    path = f"/rollouts/{find('ppo-read', store).sha256[:12]}"
    assert f'<option value="{other[:12]}">ppo-again {other[:8]}</option>' in client.get(path).text
    page = client.get(f"{path}/diff?first=0&second=1&with={other[:12]}").text
    assert "30 prompts are in both" in page
    assert "<h3>ppo-read, iteration 0</h3>" in page
    assert "<h3>ppo-again, iteration 1</h3>" in page
    # Row 17: 119 is 39 modulo 40, less 20; 120 is 0 modulo 30, less 15.
    assert re.findall(r"reward ([-+.\d]+) → ([-+.\d]+)", page)[0] == ("+19.000", "-15.000")
    refused = client.get(f"{path}/diff?first=0&second=0&with=ppo-2")
    assert (refused.status_code, "its prompts are of another dataset than ppo-read" in refused.text) == (400, True)


def test_an_agents_episode_is_a_conversation_with_branches() -> None:
    call = {"call": 1, "after": None, "branch": False, "seed": 1, "version": 0, "ended": True, "in_loss": True}
    first = call | {"messages": [{"prompt": "why <b>?"}], "reply": "let me look"}
    tool = {"role": "tool", "content": "rain"}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "<b>"}}]}
    second = call | {"call": 2, "after": 1, "branch": True, "in_loss": False, "reply": "it rains"}
    second["messages"] = [asked, tool]
    row: dict[str, Any] = {
        "iteration": 3,
        "row": 1,
        "round": 0,
        "prompt": "",
        "prompt_row": 7,
        "reply": "",
        "reward": 1.0,
    }
    row |= {"advantage": 0.5, "used": "yes", "scores": {}, "failures": {}, "gold": None, "calls": [first, second]}
    folders = (Path(shared.__file__).parent / "templates", TEMPLATES)
    page = template("rows_part.html", folders).render(part=[row], node=SimpleNamespace(sha256="a" * 64), pictured=str)
    assert '<b>prompt</b> why &lt;b&gt;?</p><p class="text"><b>policy</b> let me look</p>' in page
    assert '<li class="branch"><small>call 2, after call 1, a branch, not in the loss</small>' in page
    assert r'<b>assistant</b> [{"function": {"name": "\u003cb\u003e"}}]</p>' in page
    assert '<b>tool</b> rain</p><p class="text"><b>policy</b> it rains</p>' in page


def test_what_candidates_lost_stands_beside_what_they_lost_to(output: Path) -> None:
    text = studio(output).get("/evaluations").text
    lost = text.partition("Where a candidate lost")[2]
    assert "score by gold: +0.500 → -0.250" in lost
    assert re.search(
        r"<h4>Before</h4><p class=\"text\">a</p></div><div><h4>Candidate</h4><p class=\"text\">b</p>", lost
    )


def test_the_command_sorts_and_compares_as_the_page_does(output: Path) -> None:
    where = ["rollouts", "ppo-read", "--output", str(output), "--json"]
    found = json.loads(CliRunner().invoke(command, [*where, "--order", "highest", "--limit", "3"]).output)
    assert [(r["iteration"], r["row"], r["reward"]) for r in found["rows"]] == [(0, 17, 19), (1, 34, 19), (2, 11, 19)]
    diff = json.loads(CliRunner().invoke(command, [*where, "--iteration", "0", "--against", "2"]).output)
    assert [one["rows"] for one in diff["summary"]] == [40, 40]
    bad = CliRunner().invoke(command, [*where, "--against", "2"])
    assert (bad.exit_code, "--against: needs exactly one --iteration" in bad.output) == (2, True)


def test_verdicts_are_those_of_the_terminal(output: Path) -> None:
    client = studio(output)
    [session] = read_sessions(output)
    path = f"/review/{session.name}"
    post(client, "/review", judge="Zoë")
    for number, (key, text) in enumerate((("1", ""), ("b", "a better reply"), ("t", ""))):
        page = client.get(path).text
        assert f'name="question" value="{number}"' in page
        assert session.setup.a[:12] not in page
        assert session.setup.b[:12] not in page
        post(client, path, question=str(number), key=key, correction=text)
    assert "All are judged" in client.get(path).text
    assert 'name="question" value="1"' in client.get(f"{path}?number=1").text
    [session] = read_sessions(output)
    said = [(j.number, j.judge, j.correction) for j in session.judgements]
    assert said == [(0, "Zoë", None), (1, "Zoë", "a better reply"), (2, "Zoë", None)]
    assert [j.verdict for j in session.judgements] == [session.judgements[0].left, "bad", "tie"]
    for fields, text in (
        ({"question": "0", "key": "x"}, "key: &#39;x&#39; is not allowed"),
        ({"question": "7", "key": "1"}, "question: &#39;7&#39; is not allowed"),
    ):
        reply = post(client, path, **fields)
        assert (reply.status_code, text in reply.text) == (400, True)
    assert post(client, "/review/..%2fkeys", question="0", key="1").status_code in (400, 404)
    # They are published as `xray preferences` publishes them: signed, and in the audit.
    published = post(client, "/review/publish").text
    sha256 = re.search(r"/checkpoints/(\w{64})", published)
    assert sha256 is not None, published
    node = open_lineage_store(output, None).graph.nodes[sha256[1]]
    pairs = [(p.chosen[:8], p.rejected[:8]) for p in Pairs(node.directory / "pairs.arrow", PreferenceExample)]
    assert {("a better", "from a 1"), ("a better", "from b 1")} <= set(pairs)
    assert len(pairs) == 3
    assert audit(open_lineage_store(output, None)).is_sound


def feedback(output: Path) -> list[tuple[str, dict[str, Any]]]:
    found = RecordedReader(output).rows(None, (), None)
    return [(row["answer"][-1:], row["texts"]["feedback"]) for row in found if row["kind"] == "feedback"]


def test_recorded_answers_are_judged_into_the_signed_store(output: Path) -> None:
    client = studio(output)
    alone = client.get("/review/recorded").text
    question = re.search(r'name="question" value="([\w-]+)"', alone)
    assert question is not None
    assert question[1] == f"{3:032x}"
    assert "&lt;script&gt;" in alone
    assert "<script>alert" not in alone
    pair = post(client, "/review/recorded", question=question[1], key="b", correction="corrected").text
    assert feedback(output) == [("3", {"thumb": "down", "correction": "corrected"})]
    question = re.search(r'name="question" value="([\w-]+)"', pair)
    assert question is not None
    left, right = (part[-1] for part in question[1].split("-"))
    assert {left, right} == {"1", "2"}
    assert "All are judged" in post(client, "/review/recorded", question=question[1], key="1").text
    assert (right, {"better": f"fine {left}"}) in feedback(output)
    assert audit(open_lineage_store(output, None)).is_sound
    again = post(client, "/review/recorded", question=question[1], key="1")
    assert (again.status_code, "judged already" in again.text) == (400, True)
    # Another judge sees all of them; and who records now is not disturbed.
    post(client, "/review", judge="bea")
    assert "2 to judge" in client.get("/review/recorded").text
    with recorded_lock(output):
        reply = post(client, "/review/recorded", question=f"{3:032x}", key="1")
    assert (reply.status_code, "another `xray serve --record`" in reply.text) == (400, True)


def test_a_person_promotes_what_they_saw(output: Path) -> None:
    client, path = studio(output), f"/promote/{NAME}"
    page = client.get(path).text
    assert "cannot be promoted yet" in page
    assert "win rate by gold" in page
    # There is no champion before the present one.
    assert "Roll back" not in page
    life = Lifecycle.resumed(output)
    asked = [f"question {i}" for i in range(50, 56)]
    life.evaluate(asked, stage="evaluate-more", win_rate=0.9, gates={"min_win_rate": 0.5})
    page = client.get(path).text
    seen = re.search(r'name="seen" value="(\w+)"', page)
    assert seen is not None, page
    # One screen: gates, intervals, the canary, who may decide, and what comes next.
    for text in ("win rate by gold", "Canary: none", "may decide", f"{NAME}@champion", "Where it lost"):
        assert text in page
    assert "What changed since the champion" not in page
    stale = post(client, path, seen="0" * 64, by="ada", note="good", answer="promote")
    assert (stale.status_code, "has changed since" in stale.text) == (409, True)
    nameless = post(client, path, seen=seen[1], by="", note="good", answer="promote")
    assert (nameless.status_code, "are required" in nameless.text) == (400, True)
    assert aliases(output) == {"candidate": "1"}
    assert post(client, path, seen=seen[1], by="ada", note="good", answer="promote").status_code == 303
    assert aliases(output) == {"candidate": "1", "champion": "1"}
    assert "by ada: good" in client.get("/promote").text
    assert "No stage differs between the two" in client.get(path).text
    refused = post(client, path, by="ada", note="worse", answer="rollback")
    assert (refused.status_code, "has no previous champion" in refused.text) == (400, True)


def test_a_decision_sees_what_changed_since_the_champion(output: Path) -> None:
    promoted(output, "ppo-2", min_win_rate=None)
    life = Lifecycle.resumed(output)
    roles = {"policy": "ppo-2", "prompts": "prepare", "reference": "sft", "rewards.0": "reward"}
    life.add("ppo-3", "ppo", {"config.json": b"{}", "model.safetensors": b"third"}, roles, {"lr": 0.5})
    asked, gates = [f"question {i}" for i in range(50, 56)], {"max_regression": None}
    life.evaluate(asked, policy="ppo-3", stage="evaluate-3", win_rate=0.9, gates=gates)
    life.register("ppo-3")
    page = studio(output).get(f"/promote/{NAME}").text
    changed = page.partition("What changed since the champion")[2].partition("</table>")[0]
    # It was trained from the champion, with another learning rate.
    assert re.search(r'<th scope="row">ppo-2</th><td>parents <code>policy</code></td>.*>ppo-1<.*>ppo-2<', changed), (
        changed
    )
    assert re.search(r'<th scope="row">ppo-2</th><td>config <code>lr</code></td>.*>0\.5<', changed), changed


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": "hello"}, "messages: &#39;hello&#39; is not allowed: must be a JSON list"),
        ({"messages": json.dumps([{}] * 201)}, "messages: 201 are not allowed: must be at most 200"),
        ({"messages": "[]", "tools": "{}"}, "tools: &#39;{}&#39; is not allowed: must be a JSON list"),
        ({"messages": "[]", "temperature": "3"}, "temperature: &#39;3&#39; is not allowed: must be a number from 0"),
    ],
)
def test_a_chat_names_bad_fields(made: Path, fields: dict[str, str], text: str) -> None:
    reply = post(studio(made, serve="http://127.0.0.1:9"), "/chat", **fields)
    assert (reply.status_code, text in reply.text) == (400, True), reply.text


def test_a_chat_without_a_server_says_so(made: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{taken.getsockname()[1]}"
        reply = post(studio(made, serve=away), "/chat", messages="[]")
    assert [json.loads(line) for line in reply.text.splitlines()] == [
        {"error": f"{away} does not answer: ConnectError"}
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--output", "nowhere"], "--output: 'nowhere' is not allowed"),
        (["--serve", "127.0.0.1:8000"], "--serve: '127.0.0.1:8000' is not allowed"),
        (["--public-key", "none.pub"], "--public-key: 'none.pub' is not a file"),
    ],
)
def test_bad_options_are_one_line(made: Path, arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(command, ["studio", "--output", str(made), *arguments])
    assert (done.exit_code, text in " ".join(done.output.split())) == (2, True), done.output


def test_the_front_page_says_whether_it_got_better_and_who_is_waited_for(output: Path) -> None:
    path = output / "lifecycle.json"
    content = json.loads(path.read_text())
    content["evaluation"] |= {"gold_before": 0.1, "gold_after": 0.3, "gold_delta_ci95": [0.15, 0.25]}
    content["evaluation"] |= {"distinct_2_before": 0.9, "distinct_2_after": 0.8}
    path.write_text(json.dumps(content))
    client = studio(output)
    front, waiting = client.get("/").text, client.get("/waiting").text
    for text in ("+0.100 → +0.300", "difference +0.200, 95% +0.150 to +0.250", "60.0%", "95% 40.0 to 80.0%"):
        assert text in front
    assert f'<a href="/promote/{NAME}">{NAME} version 1: promote it, or decline</a>' in waiting
    assert "3 comparisons to judge" in waiting
    assert "2 recorded answers to judge" in waiting
