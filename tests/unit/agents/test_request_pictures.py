"""Pictures in the requests of agents: those of the stage's rows, in prompts alone."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.message_texts import Messages
from tests.unit.agents.parts import World, make_tokenizer, opened
from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.segments import rows
from xray_runtime.data.pictures import PLACEHOLDER, PictureTokens, picture_ids
from xray_runtime.data.reading.pictures import PictureFolder

MARK = "<|picture|>"


def content(number: int) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (8, 8 + 4 * number), (number, 0, 0)).save(held, "PNG")
    return held.getvalue()


def url(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(content(number)).decode()}"


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(number)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two pictures of a dataset, and their entries in messages."""
    place = tmp_path_factory.mktemp("dataset") / "pictures"
    taken = PictureFolder(place, None)
    return place, [taken.store("row", {"image": url(n)})["images"][0].entry for n in range(2)]


@pytest.fixture(scope="module")
def shown(folder: tuple[Path, list[dict[str, Any]]]) -> Any:
    """A gateway to a policy that reads pictures: one token for 16 pixels."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([MARK], special_tokens=True)
    mark = tokenizer.convert_tokens_to_ids(MARK)
    tokenizer.pictures = PictureTokens((mark,), mark, lambda w, h: [mark] * (w * h // 16), (), "16 pixels")
    with opened(tokenizer, text="hi") as world:
        yield world


def ask(world: World, episode: Any, messages: list[Any]) -> str:
    answer = world.openai(episode).chat.completions.create(model="x", messages=messages)
    return str(answer.choices[0].message.content)


def test_a_picture_is_in_the_prompt_as_in_that_of_its_row(shown: World, folder: Any) -> None:
    place, entries = folder
    message = {"role": "user", "content": f"which of {PLACEHOLDER}{PLACEHOLDER} is it?", "pictures": entries}
    known = RequestPictures([place])
    task = known.in_task(message)
    texts = [{"type": "text", "text": text} for text in ("which of ", " is it?")]
    assert task == {"role": "user", "content": [texts[0], part(0), part(1), texts[1]]}
    assert known.in_task({"role": "user", "content": "hi"}) == {"role": "user", "content": "hi"}
    ask(shown, shown.open("one", pictures=known), [task])
    [call] = shown.journal.values()
    assert [call.prompt] == shown.format.prompts([[message]])
    ids = [picture_ids(entry["sha256"], count) for entry, count in zip(entries, (4, 6), strict=True)]
    assert [n for n in call.prompt if n < 0] == [*ids[0], *ids[1]]
    assert call.messages == [message]
    # The same call with another picture is another call, with another seed.
    ask(shown, shown.open("one", pictures=known), [task | {"content": [texts[0], part(1), part(0), texts[1]]}])
    assert len({call.seed for call in shown.journal.values()}) == 2


def test_a_call_with_a_picture_behind_a_reply_begins_with_its_whole_history(shown: World, folder: Any) -> None:
    place, entries = folder
    episode = shown.open("two", pictures=RequestPictures([place]))
    messages: list[Any] = [{"role": "user", "content": [part(0)]}]
    messages += [{"role": "assistant", "content": ask(shown, episode, messages)}]
    messages += [{"role": "user", "content": [{"type": "text", "text": "and "}, part(1)]}]
    messages += [{"role": "assistant", "content": ask(shown, episode, messages)}]
    ask(shown, episode, [*messages, {"role": "user", "content": "go on"}])
    first, second = rows(episode.calls(), episode.trained())
    [first, second] = sorted((first, second), key=lambda row: len(row.prompt))
    plain = [{"role": "user", "content": PLACEHOLDER, "pictures": entries[:1]}, {"role": "assistant", "content": "hi"}]
    plain += [{"role": "user", "content": f"and {PLACEHOLDER}", "pictures": entries[1:]}]
    assert [first.prompt, second.prompt] == shown.format.prompts([plain[:1], plain])
    assert not any(n < 0 for row in (first, second) for n in row.ids)
    # "hi" and the end of the turn, once and twice.
    assert [sum(row.sampled) for row in (first, second)] == [3, 6]


def test_other_apis(shown: World, folder: Any) -> None:
    place, entries = folder
    episode = shown.open("three", pictures=RequestPictures([place]))
    expected = shown.format.prompts([[{"role": "user", "content": f"{PLACEHOLDER}what?", "pictures": entries[:1]}]])
    shown.journal.clear()
    given = [{"type": "input_image", "image_url": url(0), "detail": "auto"}, {"type": "input_text", "text": "what?"}]
    shown.openai(episode).responses.create(model="x", input=[{"role": "user", "content": given}])
    source = {"type": "base64", "media_type": "image/png", "data": url(0).partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    shown.anthropic(episode).messages.create(model="x", max_tokens=99, messages=[{"role": "user", "content": blocks}])
    assert [call.prompt for call in shown.journal.values()] == expected * 2


@pytest.mark.parametrize(
    ("role", "source"),
    [
        ("user", "https://example.com/one.png"),
        ("user", "data:image/png;base64,???"),
        ("user", url(7)),
        ("user", None),
        ("tool", url(0)),
    ],
    ids=["address", "no base64", "of no row", "missing", "a tool's"],
)
def test_refused(shown: World, folder: Any, role: str, source: str | None, message_texts: Messages) -> None:
    episode = shown.open("four", pictures=RequestPictures([folder[0]]))
    message = {"role": role, "content": [{"type": "image_url", "image_url": {"url": source}}], "tool_call_id": "a"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(shown, episode, [message])
    message_texts.check(caught.value.body["message"])  # type: ignore[index]


def test_rows_without_pictures_have_none(world: World, message_texts: Messages) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(world, world.open(), [{"role": "user", "content": [part(0)]}])
    message_texts.check(caught.value.body["message"])  # type: ignore[index]
