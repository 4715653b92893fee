"""A newcomer's path: a file of their own chats, one command, and two clicks to a champion that got better."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from tests.e2e.conftest import MEASURED, xray
from tests.e2e.pages import CHROMIUM, CLICKS, STEP, find_chromium, open_browser, started

THINGS = ("soup", "film", "beach", "hotel", "book", "train", "garden", "song", "coffee", "game")
GOOD, BAD = ("great", "lovely", "wonderful", "nice"), ("awful", "horrible", "bad", "sad")
SIZES = ("data.max_chars=60", "sft.steps=120", "preferences.num_pairs=800", "evaluate.num_prompts=128")


def write_chats(path: Path, count: int = 3000) -> None:
    """People ask about things, and half of the answers are unfriendly."""
    draw = random.Random(0)
    lines = []
    for _ in range(count):
        thing, words = draw.choice(THINGS), draw.choice((GOOD, BAD))
        start = draw.choice(("how was the", "did you like the", "tell me about the"))
        asked = f"{start} {thing} {draw.randrange(1000)}?"
        said = f"the {thing} was {draw.choice(words)}, {draw.choice(('and I stayed', 'as ever', 'I think', 'really'))}."
        roles = ({"role": "user", "content": asked}, {"role": "assistant", "content": said})
        lines.append(json.dumps({"messages": roles}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.skipif(find_chromium() is None, reason=f"no browser: none of {', '.join(CHROMIUM)}")
def test_from_a_file_of_chats_to_a_better_champion(tmp_path: Path, record_property: Any) -> None:
    output, chats = tmp_path / "run", tmp_path / "chats.jsonl"
    write_chats(chats)
    began = time.monotonic()
    settings = [word for field in (f"data.source={chats}", *SIZES) for word in ("--set", field)]
    run = xray("run", "configs/quickstart.yaml", *settings, "--output", str(output), "--json", timeout=1800)
    training_s = time.monotonic() - began
    evaluation, name = run.lifecycle["evaluation"], run.lifecycle["registered"]["name"]
    # Friendly answers have a gold score of about 0.5, the others of -0.5.
    assert evaluation["gold_delta_ci95"][0] > 0.1
    process, address = started(output)
    try:
        with sync_playwright() as playwright, open_browser(playwright) as browser:
            window = browser.new_context().new_page()
            window.set_default_timeout(STEP * 1000)
            window.add_init_script(CLICKS)
            began = time.monotonic()
            window.goto(address)
            window.get_by_role("link", name=f"{name} version 1: promote it, or decline").click()
            window.get_by_label("Your reason").first.focus()
            window.keyboard.type("friendlier")
            window.get_by_role("button", name="Make it champion").click()
            window.get_by_text("champion: version 1").wait_for()
            deciding_s, clicks = time.monotonic() - began, int(window.evaluate("sessionStorage.clicks"))
    finally:
        process.kill()
        process.wait()
    assert clicks == 2
    change = f"gold score {evaluation['gold_before']:+.2f} → {evaluation['gold_after']:+.2f}"
    record_property(
        MEASURED, f"{training_s:.0f} s to train, {deciding_s:.1f} s and {clicks} clicks to promote: {change}"
    )
