"""The studio in a browser: the real command, its keys, its layout, and what a screen reader is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.e2e.conftest import ROOT, XRAY, environment
from tests.e2e.pages import CHROMIUM, PICTURES, find_chromium, open_browser
from tests.unit.lineage.synthetic import NAME, Lifecycle
from tests.unit.studio.world import compared, recorded, with_rollouts
from xray.deployments.service import free_port
from xray_runtime.feedback.session import read_sessions
from xray_runtime.lineage.log import view
from xray_runtime.lineage.reference import find, open_lineage_store

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason=f"no browser: none of {', '.join(CHROMIUM)}"),
]

AXE = "axe-core@4.14.1"
ITERATIONS, ROWS = 100, 500
LONGEST_TASK_MS = 100
WIDTHS = (390, 1400)
LONG_TASKS = """() => { window.longest = 0; new PerformanceObserver(list => { for (const entry of list.getEntries())
    window.longest = Math.max(window.longest, entry.duration); }).observe({ type: "longtask" }); }"""
RULES = "async () => (await axe.run()).violations.filter(v => ['serious', 'critical'].includes(v.impact))"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("studio") / "run"
    Lifecycle(output).whole()
    with_rollouts(output, tmp_path_factory.mktemp("tokenizer"), ITERATIONS, ROWS)
    compared(output)
    recorded(output)
    return output


def started(output: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The command and its address, once it answers."""
    port = free_port()
    command = [str(XRAY), "studio", "--output", str(output), "--port", str(port), "--by", "ada", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{address}/static/icon.svg")
            return process, address
        except httpx.TransportError:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
    raise AssertionError("the studio did not start")


@pytest.fixture(scope="module")
def address(output: Path) -> Iterator[str]:
    process, address = started(output)
    yield address
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright, open_browser(playwright) as browser:
        yield browser


@pytest.fixture
def window(browser: Browser) -> Iterator[Page]:
    """A page that must neither raise errors, nor run a model's script, nor ask another machine."""
    context = browser.new_context(viewport={"width": WIDTHS[1], "height": 900}, color_scheme="light")
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on("request", lambda request: problems.append(request.url) if "127.0.0.1" not in request.url else None)
    yield page
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: it fetches axe-core")
    place = tmp_path_factory.mktemp("axe")
    done = subprocess.run(["npm", "pack", AXE], cwd=place, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot fetch {AXE}")
    shutil.unpack_archive(next(place.glob("*.tgz")), place)
    return (place / "package" / "axe.min.js").read_text(encoding="utf-8")


def paths(output: Path) -> dict[str, str]:
    """Name of a picture → path of every page."""
    store = open_lineage_store(output, None)
    policy, [session] = find("ppo-read", store).sha256, read_sessions(output)
    run = next(iter(view(output).runs))
    return {
        "runs": "/",
        "run": f"/runs/{run}",
        "ledgers": "/rollouts",
        "rollouts": f"/rollouts/{policy[:12]}",
        "diff": f"/rollouts/{policy[:12]}/diff?first=0&second=1",
        "review": "/review",
        "question": f"/review/{session.name}",
        "recorded": "/review/recorded",
        "lineage": "/lineage",
        "checkpoint": f"/checkpoints/{find('evaluate', store).sha256}",
        "evaluations": "/evaluations",
        "models": "/promote",
        "promote": f"/promote/{NAME}",
        "error": "/rollouts/nothing",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone_and_passes_axe(
    address: str, output: Path, window: Page, axe: str, scheme: Any
) -> None:
    window.emulate_media(color_scheme=scheme)
    found = dict(paths(output))
    error = found.pop("error")
    for name, path in found.items():
        for width in WIDTHS:
            window.set_viewport_size({"width": width, "height": 900})
            window.goto(f"{address}{path}")
            wide = window.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
            assert wide <= 0, (path, width, wide)
            window.evaluate(axe)
            said = [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in window.evaluate(RULES)]
            assert said == [], (path, width)
            if PICTURES in os.environ and scheme == "light":
                window.screenshot(path=Path(os.environ[PICTURES]) / f"studio-{name}-{width}.png")
    assert httpx.get(f"{address}{error}").status_code == 400


def test_a_person_judges_with_keys_alone(address: str, output: Path, window: Page) -> None:
    [session] = read_sessions(output)
    window.goto(f"{address}/review/{session.name}")
    window.get_by_text("3 to judge").wait_for()
    assert "<script>alert('x')</script>" in window.locator(".sides").inner_text()
    window.keyboard.press("1")
    window.get_by_text("2 to judge").wait_for()
    assert window.evaluate("document.activeElement.textContent") == "Prompt"
    window.keyboard.press("c")
    window.keyboard.type("better than 1 and 2")
    window.keyboard.press("Escape")
    window.keyboard.press("b")
    window.get_by_text("1 to judge").wait_for()
    window.keyboard.press("u")
    window.get_by_text("from b 1").wait_for()
    window.keyboard.press("2")
    window.get_by_text("asked 2").wait_for()
    window.keyboard.press("t")
    window.keyboard.press("t")
    window.get_by_text("All are judged").wait_for()
    [session] = read_sessions(output)
    said = [(j.number, j.judge, j.correction) for j in session.judgements]
    assert said == [(0, "ada", None), (1, "ada", "better than 1 and 2"), (1, "ada", None), (2, "ada", None)]
    right = {"a": "b", "b": "a"}[session.judgements[2].left]
    assert [j.verdict for j in session.judgements] == [session.judgements[0].left, "bad", right, "tie"]


def test_50_000_rollouts_scroll_without_a_pause(address: str, output: Path, window: Page) -> None:
    window.goto(f"{address}{paths(output)['rollouts']}?order=highest")
    window.get_by_text("50,000 rollouts").wait_for()
    assert window.locator(".chunk").count() == ITERATIONS * ROWS / 50
    window.evaluate(LONG_TASKS)
    height = window.evaluate("document.scrollingElement.scrollHeight")
    assert height > 1000 * 5000
    for part in range(1, 60):
        window.mouse.wheel(0, 400)
        if part % 20 == 0:
            window.evaluate("y => window.scrollTo(0, y)", height * part / 60)
        window.wait_for_timeout(50)
    window.evaluate("window.scrollTo(0, document.scrollingElement.scrollHeight)")
    last = window.locator(".chunk").last
    last.locator("article").first.wait_for()
    assert "reward -250.000" in last.inner_text()
    longest = window.evaluate("window.longest")
    assert longest < LONGEST_TASK_MS, longest


def test_the_audit_answers_in_its_place(address: str, window: Page) -> None:
    window.goto(address)
    window.get_by_role("button", name="Audit").click()
    window.get_by_role("status").get_by_text("sound:").wait_for(timeout=120_000)


def test_an_open_studio_asks_for_the_token_it_printed(output: Path, browser: Browser) -> None:
    process, address = started(output, "--host", "0.0.0.0")
    try:
        assert process.stdout is not None
        token = next(found[1] for line in process.stdout if (found := re.search(r"token (\S+)", line)))
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/rollouts")
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("The token is not right").wait_for()
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Runs").wait_for()
        context.close()
    finally:
        process.kill()
        process.wait()
