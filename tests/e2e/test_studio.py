"""The studio in a browser: the real command, its keys, its layout, and what a screen reader is told."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.e2e.chat_server import Answers
from tests.e2e.conftest import MEASURED, ROOT
from tests.e2e.pages import CHROMIUM, CLICKS, PICTURES, STEP, find_chromium, open_browser, started
from tests.unit.studio.world import compared, recorded, run_at_work, with_rollouts
from tests.unit.trust.promoting import aliases
from tests.unit.trust.synthetic import NAME, Lifecycle
from xray.studio.pages.chat import EXAMPLE
from xray.studio.studio import Studio
from xray.tasks.output_directory import saved_config
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import run_lock
from xray_runtime.kernel.graph.artifacts import FEEDBACK
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.live.feedback.collection import collect, sound_chain
from xray_runtime.live.feedback.session import read_sessions

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=f"no browser: none of {', '.join(CHROMIUM)}")

AXE = "axe-core@4.14.1"
ITERATIONS, ROWS = 100, 500
FIRST_PAGE_FILES, FIRST_PAGE_KB = 8, 80
MAX_LOADED_CHUNKS = 20
"""Of 1,000: what a person has scrolled past, and not what is between."""
LOCAL = re.compile(r"http://127\.0\.0\.1:|file:///")
"""Addresses on this machine."""
SCREENS = (("light", 1400), ("dark", 390))
"""A wide screen, and a phone at night."""
PICTURED = {"prompts", "review", "question", "diff", "withdrawals", "chat"}
"""Pages of which docs/images has pictures from a synthetic lifecycle; of all others it has the quickstart's."""
COLORS = 96
MAX_CLICKS = 7
LONG_TASKS = """() => { window.longest = 0; new PerformanceObserver(list => { for (const entry of list.getEntries())
    window.longest = Math.max(window.longest, entry.duration); }).observe({ type: "longtask" }); }"""
PARTS = {
    "/runs",
    "/waiting",
    "/runs/{run_id}/live",
    "/runs/{run_id}/curves",
    "/pictures/{digest}",
    "/rollouts/{ref}/rows",
    "/withdrawals/verify",
    "/metrics",
}
"""Parts that pages request, and addresses that programs read."""
RULES = "async () => (await axe.run()).violations"
LOADED_MS = "() => performance.getEntriesByType('navigation')[0].loadEventEnd"
FILES_KB = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .map(file => [new URL(file.name).pathname, file.decodedBodySize / 1000])"""
ANSWERED_MS = "() => { const [p] = performance.getEntriesByType('navigation'); return p.responseEnd - p.requestStart; }"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("studio") / "run"
    Lifecycle(output).whole()
    with_rollouts(output, tmp_path_factory.mktemp("tokenizer"), 2, 100)
    compared(output)
    recorded(output)
    return output


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def address(output: Path, served: str) -> Iterator[str]:
    process, address = started(output, "--serve", served)
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
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    context.set_default_timeout(STEP * 1000)
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on("request", lambda request: problems.append(request.url) if not LOCAL.match(request.url) else None)
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


def require_readable(window: Page, axe: str) -> None:
    """Nothing scrolls sideways, and axe finds nothing."""
    wide = window.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    assert wide <= 0, (window.url, wide)
    window.evaluate(axe)
    found = [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in window.evaluate(RULES)]
    assert found == [], window.url


def loaded_ms(window: Page, address: str) -> float:
    """Time from asking for the first page until it has loaded with all its files."""
    window.goto(address)
    window.wait_for_function("performance.getEntriesByType('navigation')[0].loadEventEnd > 0")
    return float(window.evaluate(LOADED_MS))


def picture(window: Page, name: str) -> None:
    """Keep a picture of what the window shows, in few colours, which makes a small file."""
    if PICTURES in os.environ:
        phone = "-phone" if window.evaluate("window.innerWidth") < 1000 else ""
        shown = Image.open(io.BytesIO(window.screenshot())).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        shown.save(Path(os.environ[PICTURES]) / f"studio-{name}{phone}.png", optimize=True)


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
        "tokens": f"/rollouts/{policy[:12]}/tokens?iteration=1&row=7&by=kl",
        "extremes": f"/rollouts/{policy[:12]}/extremes?iteration=1&by=kl",
        "prompts": f"/rollouts/{policy[:12]}?order=prompt&text=reply",
        "diff": f"/rollouts/{policy[:12]}/diff?first=0&second=1",
        "review": "/review",
        "question": f"/review/{session.name}?number=1",
        "recorded": "/review/recorded",
        "lineage": "/lineage",
        "checkpoint": f"/checkpoints/{find('evaluate', store).sha256}",
        "evaluations": "/evaluations",
        "models": "/promote",
        "promote": f"/promote/{NAME}",
        "withdrawals": "/withdrawals",
        "chat": "/chat",
        "error": "/rollouts/nothing",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_every_page_fits_its_screen_and_passes_axe(
    address: str, output: Path, window: Page, axe: str, scheme: Any, width: int, record_property: Any
) -> None:
    window.emulate_media(color_scheme=scheme)
    window.set_viewport_size({"width": width, "height": 900})
    found = dict(paths(output))
    error, times = found.pop("error"), []
    for name, path in found.items():
        window.goto(f"{address}{path}")
        require_readable(window, axe)
        times.append(f"{name} {window.evaluate(ANSWERED_MS):.0f}")
        if name in PICTURED:
            picture(window, name)
    answered = f"{', '.join(times)}; the first page loads in {loaded_ms(window, address):.0f}"
    record_property(MEASURED, f"axe found nothing on {len(times)} pages, {width} pixels; answered in ms: {answered}")
    assert httpx.get(f"{address}{error}").status_code == 400


def test_the_first_page_is_few_small_files(address: str, window: Page) -> None:
    loaded_ms(window, address)
    window.wait_for_load_state("networkidle")
    files = window.evaluate(FILES_KB)
    assert {name for name, _ in files} > {"/", "/static/htmx.min.js"}
    assert len(files) <= FIRST_PAGE_FILES, files
    assert sum(size for _, size in files) <= FIRST_PAGE_KB, files


def test_every_registered_page_is_among_them(output: Path) -> None:
    shown = [path.partition("?")[0] for path in paths(output).values()]
    routes = [route for pages in Studio(output, "ada").pages for route in pages.router.routes]
    registered = {r.path: r.path_regex for r in routes if isinstance(r, APIRoute) and "GET" in r.methods}
    assert registered.keys() >= PARTS
    missing = {path for path, regex in registered.items() if not any(map(regex.match, shown))}
    assert missing <= PARTS


def test_a_dark_screen_prints_black_on_white(address: str, window: Page) -> None:
    window.emulate_media(color_scheme="dark", media="print")
    window.goto(f"{address}/evaluations")
    assert window.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert window.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    # Colors of the light page: what is grey on dark would hardly be seen on paper.
    assert window.evaluate("getComputedStyle(document.querySelector('.small')).color") == "rgb(76, 85, 99)"
    assert not window.locator("header").is_visible()


def test_a_cell_leads_to_its_replies_and_tokens_are_read_with_keys(address: str, output: Path, window: Page) -> None:
    policy = find("ppo-read", open_lineage_store(output, None)).sha256[:12]
    window.goto(f"{address}/rollouts/{policy}")
    window.get_by_text("200 rollouts").wait_for()
    window.locator(".spread a").first.click()
    window.wait_for_url("**iteration=0&min=*")
    count = int(window.get_by_role("status").inner_text().split()[0])
    assert 0 < count < 200
    assert window.locator("article").count() == min(count, 50)
    window.get_by_label("Search").fill("reply 0")
    window.keyboard.press("Enter")
    window.wait_for_url("**text=reply+0*")
    window.get_by_role("link", name="Tokens of iteration 0").first.click()
    # Its keys are heard once the page's script has run.
    window.wait_for_url("**/tokens?*", wait_until="load")
    tokens = window.locator("#tokens")
    tokens.focus()
    window.keyboard.press("ArrowRight")
    assert "token 1: log-probability -1.000, KL to the reference" in window.locator("#token").inner_text()
    window.get_by_role("link", name="advantage").click()
    window.wait_for_url("**by=advantage")
    assert "p4" in str(window.locator("#t0").get_attribute("class"))


def test_curves_have_axes_values_and_choices_in_the_address(output: Path, window: Page, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(output, tmp_path / "run", symlinks=True))
    points = [{"sft/loss": 4.0 - n / 10, "sft/heldout_loss": 4.2 - n / 10} for n in range(30)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_at_work, whole, "sft", points).result()
    with run_lock(whole, "live-1"):
        process, address = started(whole)
        try:
            window.goto(f"{address}/runs/live-1?smooth=0.5")
            curve = window.get_by_role("figure", name="loss (nats a token), sft: 4 to 1.1 at step 29")
            curve.locator("canvas").wait_for()
            # Smoothed curves stand beside the values.
            legend = curve.locator(".u-series")
            assert legend.count() == 5
            curve.locator(".u-over").hover()
            assert re.search(r"\d\.\d", legend.nth(2).inner_text())
            window.get_by_label("logarithmic").check()
            window.wait_for_url("**log=1")
            window.get_by_label("Beside").select_option(index=1)
            window.wait_for_url("**with=*")
            window.wait_for_load_state("networkidle")
        finally:
            window.close()
            process.kill()
            process.wait()


REAL = Path(os.environ.get("XRAY_PICTURED_RUN", ROOT / "runs" / "quickstart")).resolve()
"""A finished quickstart, of which the pictures in docs/images are made."""


@pytest.mark.skipif(not (REAL / "report.html").is_file(), reason=f"no run in {REAL}: make demo makes it")
def test_a_real_run_and_its_report_fit_a_phone(window: Page) -> None:
    store = open_lineage_store(REAL, None)
    policy, log = find("ppo-2", store).sha256[:12], view(REAL)
    run, model = next(iter(reversed(log.runs))), next(name for name, _ in log.decided if name)
    process, address = started(REAL)
    rollouts = f"{address}/rollouts/{policy}"
    pages = {
        "front": f"{address}/",
        "run": f"{address}/runs/{run}",
        "rollouts": rollouts,
        "tokens": f"{rollouts}/tokens?iteration=13&row=3&by=kl",
        "extremes": f"{rollouts}/extremes?iteration=13&by=advantage",
        "lineage": f"{address}/lineage",
        "checkpoint": f"{address}/checkpoints/{policy}",
        "evaluations": f"{address}/evaluations",
        "models": f"{address}/promote",
        "promote": f"{address}/promote/{model}",
        "report": (REAL / "report.html").as_uri(),
    }
    try:
        for scheme, width in SCREENS:
            window.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            window.set_viewport_size({"width": width, "height": 900})
            for name, page in pages.items():
                window.goto(page)
                window.wait_for_load_state("networkidle")
                wide = window.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
                assert wide <= 0, (name, width, wide)
                picture(window, name)
        window.close()
    finally:
        process.kill()
        process.wait()


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
    window.wait_for_load_state()  # "u" opens another page, whose script reads keys
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


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_pages_behind_forms_fit_and_pass_axe(address: str, window: Page, axe: str, scheme: Any, width: int) -> None:
    """With the verdicts of the test before."""
    window.emulate_media(color_scheme=scheme)
    window.set_viewport_size({"width": width, "height": 900})
    window.goto(f"{address}/review")
    window.get_by_role("button", name="Publish the verdicts").click()
    window.get_by_text("pairs from").wait_for()
    require_readable(window, axe)
    window.goto(f"{address}/withdrawals")
    window.get_by_label("Name of the person").fill("ann")
    window.get_by_role("button", name="List what was made").click()
    window.get_by_role("heading", name="Withdraw ann?").wait_for()
    require_readable(window, axe)


@pytest.mark.timeout(600)
def test_from_a_bad_answer_to_a_better_model_in_seven_clicks(
    tmp_path: Path, window: Page, record_property: Any
) -> None:
    output, life = tmp_path / "run", Lifecycle(tmp_path / "run")
    life.whole()
    # Playwright's event loop has this thread.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(recorded, output).result()
    process, address = started(output)
    try:
        window.add_init_script(CLICKS)
        began = time.monotonic()
        window.goto(address)
        window.get_by_role("link", name="Review").click()
        window.get_by_role("link", name="Recorded answers").click()
        window.get_by_text("2 to judge").wait_for()
        # A key that is typed before the field has the focus is a verdict.
        window.wait_for_load_state("networkidle")
        window.keyboard.press("c")
        window.wait_for_function("document.activeElement.tagName === 'TEXTAREA'")
        window.keyboard.type("what it should have said")
        window.get_by_role("button", name="bad").click()
        window.get_by_text("1 to judge").wait_for()
        judging_s = time.monotonic() - began
        # The cycle: it collects the correction; its candidate is evaluated beside the champion.
        store = open_lineage_store(output, None)
        collected = collect(store, saved_config(output).project, "flywheel", 1, sound_chain(store).last).path
        [judged] = map(json.loads, (collected / FEEDBACK).read_text(encoding="utf-8").splitlines())
        assert judged["signals"] == {"thumb": "down", "correction": "what it should have said"}
        asked = [f"question {n}" for n in range(50, 56)]
        life.evaluate(asked, stage="evaluate-cycle", win_rate=0.9, gates={"min_win_rate": 0.5})
        began = time.monotonic()
        window.get_by_role("link", name="Promote").click()
        window.get_by_role("link", name=NAME).first.click()
        window.get_by_label("Your reason").first.focus()
        window.keyboard.type("its answers are better")
        window.get_by_role("button", name="Make it champion").click()
        window.get_by_text("champion: version").wait_for()
        clicks = int(window.evaluate("sessionStorage.clicks"))
        promoting_s = time.monotonic() - began
        record_property(MEASURED, f"{clicks} clicks, {judging_s:.1f} s to judge, {promoting_s:.1f} s to promote")
        assert clicks <= MAX_CLICKS
        assert aliases(output)["champion"] == aliases(output)["candidate"]
        # A page that still loads when its server dies reports an error of the test, not of the product.
        window.wait_for_load_state("networkidle")
        window.close()
    finally:
        process.kill()
        process.wait()


def test_a_chat_calls_tools_and_a_reply_is_made_again(address: str, window: Page) -> None:
    Answers.asked.clear()
    window.goto(f"{address}/chat")
    window.get_by_label("System prompt").fill("be brief")
    message = window.locator("textarea[name=text]")
    message.fill("hello")
    message.press("Enter")
    window.get_by_text("reply 1 to <b>hello</b>").wait_for()
    window.get_by_role("button", name="Regenerate").click()
    window.get_by_text("reply 2 to <b>hello</b>").wait_for()
    assert window.get_by_text("reply 1").count() == 0
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert [each["messages"] for each in Answers.asked] == [said, said]
    window.get_by_label("Tools").fill(json.dumps(EXAMPLE))
    message.fill("is it warm?")
    message.press("Enter")
    window.get_by_text('Result of weather({"city": "Ghent"}); Enter sends it').wait_for()
    message.fill("31 degrees")
    message.press("Enter")
    window.get_by_text("reply 4 to <b>31 degrees</b>").wait_for()
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    assert Answers.asked[-1]["tools"] == EXAMPLE
    assert Answers.asked[-1]["messages"][-2:] == [
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "31 degrees"},
    ]
    window.get_by_text("Message; Enter sends it").wait_for()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A studio over 50,000 rollouts, and its directory."""
    output = tmp_path / "run"
    Lifecycle(output).whole()
    with_rollouts(output, tmp_path / "tokenizer", ITERATIONS, ROWS)
    process, address = started(output)
    yield address, output
    process.kill()
    process.wait()


@pytest.mark.long
def test_50_000_rollouts_load_where_one_scrolls(large: tuple[str, Path], window: Page, record_property: Any) -> None:
    address, output = large
    policy = find("ppo-read", open_lineage_store(output, None)).sha256
    window.goto(f"{address}/rollouts/{policy[:12]}?order=highest")
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
    loaded = window.locator(".chunk:has(article)").count()
    assert 2 <= loaded <= MAX_LOADED_CHUNKS
    longest = window.evaluate("window.longest")
    record_property(MEASURED, f"{loaded} chunks of 50,000 rollouts are loaded; the longest task took {longest:.0f} ms")


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
