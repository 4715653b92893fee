"""Pages of the studio, Prefect and MLflow in a real browser, worked by what a person reads on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, Locator, Page, Playwright

from tests.e2e.conftest import ROOT, XRAY, environment
from tests.e2e.operator import LONG
from xray.deployments.service import free_port

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
STEP = 150.0
"""Seconds for what a page does by itself, on a busy machine."""
PICTURES = "XRAY_SCREENSHOTS"
"""Where pictures of the pages go, such as docs/images; without it none are made."""
# MLflow's assistant opens itself over the first page somebody sees.
SEEN = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"

CLICKS = """addEventListener("click", event => {
    if (event.isTrusted && event.detail) sessionStorage.clicks = Number(sessionStorage.clicks ?? 0) + 1; }, true)"""
"""Counts a person's clicks, over all pages of a visit."""


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def open_browser(playwright: Playwright) -> Browser:
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=find_chromium(), args=[*FLAGS, *root], timeout=LONG * 1000)


class Pages:
    """A window with Prefect's pages, and those their links lead to."""

    def __init__(self, browser: Browser, prefect: str) -> None:
        self._prefect = prefect
        self._context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
        self._context.set_default_timeout(STEP * 1000)
        self._context.add_init_script(SEEN)
        self.asked: set[str | None] = set()
        """Machines that a page asked for anything."""
        self._context.on("request", lambda request: self.asked.add(urlsplit(request.url).hostname))
        self.window = self._context.new_page()

    def deployment(self, name: str) -> None:
        self.window.goto(f"{self._prefect}/deployments")
        self.window.locator("a[href*='/deployments/deployment/']").get_by_text(name, exact=True).click()
        self.window.get_by_text("Schedules", exact=True).wait_for()

    def form(self, name: str) -> None:
        """The form of a run of deployment `name`."""
        self.deployment(name)
        self.window.get_by_role("button", name="Run", exact=True).click()
        self.window.get_by_text("Custom run").click()
        self.window.get_by_role("button", name="Submit").wait_for()

    def copy(self, run: str) -> None:
        """The form of a run, filled in as `run` was."""
        self.run(run)
        self.window.get_by_role("banner").get_by_role("button").last.click()
        self.window.get_by_text("Copy to new run").click()
        self.window.get_by_role("button", name="Submit").wait_for()

    def field(self, label: str, nth: int = 0) -> Locator:
        """What stands under `label` in a form: the `nth` of several."""
        title = f"> .p-label__header .schema-form-property__label:text-is('{label}')"
        return self.window.locator(f".schema-form-property:has({title})").nth(nth)

    def fill(self, label: str, value: str, nth: int = 0) -> None:
        self.field(label, nth).locator("input, textarea").first.fill(value)

    def submit(self) -> str:
        """Start the run of the form; returns its id."""
        return str(self.press(self.window.get_by_role("button", name="Submit"), "/create_flow_run")["id"])

    def press(self, button: Locator, path: str) -> Any:
        """Press what asks Prefect's server for `path`, again while its database is busy; returns the answer."""

        def taken_or_refused(answer: Any) -> bool:
            return bool(answer.url.endswith(path) or (answer.url.endswith("/schemas/validate") and not answer.ok))

        while True:
            with self.window.expect_response(taken_or_refused) as answer:
                button.click()
            if answer.value.status != 503:
                assert answer.value.ok, answer.value.text()
                return answer.value.json()

    def run(self, run: str) -> None:
        """The page of a flow run."""
        self.window.goto(f"{self._prefect}/runs/flow-run/{run}")

    def shows(self, state: str) -> None:
        """Wait until the page of the run says so by itself."""
        self.window.get_by_role("banner").get_by_text(state, exact=True).wait_for(timeout=LONG * 1000)

    def retry(self) -> None:
        self.window.get_by_role("button", name="Retry").click()
        self.press(self.window.get_by_role("dialog").get_by_role("button", name="Retry"), "/set_state")

    def approve(self, question: str) -> None:
        """Answer what the run on the page waits for."""
        self.shows("Suspended")
        self.window.get_by_role("button", name="Resume").click()
        dialog = self.window.get_by_role("dialog")
        dialog.get_by_text(question).wait_for()
        dialog.get_by_role("switch").click()
        self.fill("Name", "Ada")
        self.fill("Note", "Its replies read well.")
        self.picture("approval")
        self.press(dialog.get_by_role("button", name="Submit"), "/resume")

    def artifact(self, key: str) -> Locator:
        """Open an artifact of the run on the page; returns what it shows."""
        self.window.get_by_role("tablist").get_by_text("Artifacts", exact=True).click()
        self.window.get_by_role("tabpanel").get_by_role("link").filter(has_text=key).first.click()
        return self._shown()

    def summary(self, artifact_id: str) -> Locator:
        """Open an artifact of a stage: the run's page has it in its graph, drawn on a canvas."""
        self.window.goto(f"{self._prefect}/artifacts/artifact/{artifact_id}")
        return self._shown()

    def _shown(self) -> Locator:
        self.window.get_by_role("button", name="Show raw data").wait_for()
        return self.window.get_by_role("article").last

    def follow(self, link: Locator) -> Page:
        """The page that opens beside this one."""
        with self._context.expect_page() as opened:
            link.click()
        return opened.value

    def picture(self, name: str, page: Page | None = None) -> None:
        if PICTURES in os.environ:
            (page or self.window).screenshot(path=Path(os.environ[PICTURES]) / f"{name}.png")


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
