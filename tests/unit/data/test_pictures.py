"""Pictures in rows: their ids, the rows that have them, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from tests.message_texts import Messages
from tests.unit.methods.prepare.prepared import prepare
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import PreferenceExample, write_pairs
from xray_runtime.data.picture_reader import read_picture
from xray_runtime.data.pictures import (
    PLACEHOLDER,
    PictureFiles,
    PictureTokens,
    digest_of,
    picture_ids,
    pictures_in,
    runs,
    shown_picture,
)
from xray_runtime.data.published_pictures import as_html
from xray_runtime.data.reading.forms import usual
from xray_runtime.data.reading.pictures import PictureFolder, keep_pictures_of
from xray_runtime.data.reading.records import preference, prompt_and_replies
from xray_runtime.data.tokenizing import decode_prompts, train_tokenizer

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
MARKS = ("<|begin|>", "<|picture|>", "<|end_of_picture|>")


def picture(number: int, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (number, 0, 0)).save(content, form)
    return content.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@given(DIGESTS, st.integers(4, 40))
def test_ids_hold_the_digest(digest: str, count: int) -> None:
    ids = picture_ids(digest, count)
    assert len(ids) == count
    assert all(-(2**31) <= number < 0 for number in ids)
    assert digest_of(ids) == digest[:31]
    assert np.array(ids, np.int32).tolist() == ids


def test_ids_of_a_known_digest() -> None:
    # 124 bits, 31 each: the first part is the first 31 bits of ff…, all ones; the last bit of the 124 is 0.
    digest = "f" * 30 + "e" + "0" * 33
    assert picture_ids(digest, 5) == [-(2**31), -(2**31), -(2**31), -(2**31) + 1, -(2**31)]


def test_few_tokens_are_refused(message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        picture_ids("0" * 64, 3)


def test_pictures_of_a_row_also_side_by_side() -> None:
    one, other = sha256(b"1"), sha256(b"2")
    counts = {one[:31]: 6, other[:31]: 5}
    row = [7, *picture_ids(one, 6), *picture_ids(other, 5), 8, *picture_ids(one, 6)]
    assert list(pictures_in(row, counts.__getitem__)) == [one[:31], other[:31], one[:31]]
    with pytest.raises(ValueError, match="is cut"):
        list(pictures_in(row[:-1], counts.__getitem__))


def tokenizer() -> Any:
    found = train_tokenizer(["what is this", "and this"] * 3, 300)
    found.add_tokens(list(MARKS), special_tokens=True)
    before, token, after = found.convert_tokens_to_ids(list(MARKS))
    found.pictures = PictureTokens((before, token, after), token, lambda w, h: [token] * (w * h // 16), (), "16 pixels")
    return found


def test_prompts_and_conversations_have_the_same_ids() -> None:
    written = tokenizer()
    pictures = [{"sha256": sha256(bytes([n])), "width": 8, "height": 8 + 4 * n} for n in range(2)]
    prompt = [{"role": "user", "content": f"{PLACEHOLDER} what? {PLACEHOLDER}", "pictures": pictures}]
    [ids] = chat_format(written).prompts([prompt])
    before, _, after = written.convert_tokens_to_ids(list(MARKS))
    assert [
        list(pictures_in(ids, {p["sha256"][:31]: n for p, n in zip(pictures, (4, 6), strict=True)}.__getitem__))
    ] == [[p["sha256"][:31] for p in pictures]]
    assert [ids[ids.index(before) + 5], ids.count(before), ids.count(after)] == [after, 2, 2]
    conversation = [*prompt, {"role": "assistant", "content": "this"}, {"role": "user", "content": "and?"}]
    [row] = chat_format(written).turns([([*conversation, {"role": "assistant", "content": "that"}], [1, 3])])
    (start, end), (last, close) = row.spans
    assert row.ids[:start] == ids
    assert written.decode(row.ids[start:end]) == "this<|end|>"
    assert row.ids[:last] == chat_format(written).prompts([conversation])[0]
    assert written.decode(row.ids[last:close]) == "that<|end|>"
    assert decode_prompts(written, [ids]) == [
        f"{shown_picture(pictures[0]['sha256'])} what? {shown_picture(pictures[1]['sha256'])}"
    ]


OF_SMOLVLM = (
    "<|begin|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<|picture|>' }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Reads lists of parts alone, and begins a turn otherwise where a picture comes first."""


@pytest.mark.parametrize(
    ("content", "count", "expected"),
    [
        (f"{PLACEHOLDER}what?", 1, "<|begin|>User:[0]what?<|end|>\nAssistant:"),
        (f"{PLACEHOLDER}{PLACEHOLDER}", 2, "<|begin|>User:[0][1]<|end|>\nAssistant:"),
        (f"is {PLACEHOLDER} {PLACEHOLDER}?", 2, "<|begin|>User: is [0] [1]?<|end|>\nAssistant:"),
        (f"{PLACEHOLDER} or {PLACEHOLDER}?", 2, "<|begin|>User:[0] or [1]?<|end|>\nAssistant:"),
        (f"{PLACEHOLDER}what?", 0, f"<|begin|>User: {PLACEHOLDER}what?<|end|>\nAssistant:"),
    ],
)
def test_a_template_of_parts(content: str, count: int, expected: str) -> None:
    written = tokenizer()
    written.chat_template, (before, token, _) = OF_SMOLVLM, written.convert_tokens_to_ids(list(MARKS))
    written.pictures = PictureTokens((token,), token, lambda w, h: [token] * 5, (before,), "five")
    pictures = [{"sha256": sha256(bytes([n])), "width": 8, "height": 8} for n in range(count)]
    message: dict[str, Any] = {"role": "user", "content": content} | ({"pictures": pictures} if count else {})
    [ids] = chat_format(written).prompts([[message]])
    shown = "".join(
        written.decode(run) if one is None else f"[{digests(pictures).index(one)}]" for one, run in runs(ids)
    )
    for number in range(count):
        shown = shown.replace(f"{MARKS[0]}[{number}]{MARKS[0]}", f"[{number}]")
    assert shown == expected
    reply = {"role": "assistant", "content": "red"}
    [row] = chat_format(written).turns([([message, reply], [1])])
    assert row.ids[: len(ids)] == ids
    assert written.decode(row.ids[slice(*row.spans[0])]) == " red<|end|>"


def test_a_template_that_leaves_pictures_out_is_refused(message_texts: Messages) -> None:
    written = tokenizer()
    _, token, _ = written.convert_tokens_to_ids(list(MARKS))
    written.chat_template = OF_SMOLVLM.replace("{{ '<|picture|>' }}", "")
    written.pictures = PictureTokens((token,), token, lambda w, h: [token] * 5, (), "five")
    pictures = [{"sha256": sha256(b""), "width": 8, "height": 8}]
    with message_texts.raises(ValueError):
        chat_format(written).prompts([[{"role": "user", "content": f"{PLACEHOLDER}what?", "pictures": pictures}]])


def digests(pictures: list[dict[str, Any]]) -> list[str]:
    return [one["sha256"][:31] for one in pictures]


def test_a_text_forges_no_picture() -> None:
    written = tokenizer()
    _, token, _ = written.convert_tokens_to_ids(list(MARKS))
    [ids] = chat_format(written).prompts([[{"role": "user", "content": f"{PLACEHOLDER}{MARKS[1]}"}]])
    assert min(ids) >= 0
    assert token not in ids
    assert decode_prompts(written, [ids]) == [f"{PLACEHOLDER}{MARKS[1]}"]


def test_a_model_of_text_refuses_pictures(message_texts: Messages) -> None:
    written = tokenizer()
    written.pictures = None
    prompt = [{"role": "user", "content": PLACEHOLDER, "pictures": [{"sha256": sha256(b""), "width": 1, "height": 1}]}]
    with message_texts.raises(ValueError):
        chat_format(written).prompts([prompt])


def rows(folder: Path, count: int = 24) -> tuple[list[bytes], list[dict[str, Any]]]:
    folder.mkdir(parents=True)
    contents = [picture(number) for number in range(count)]
    for number, content in enumerate(contents):
        (folder / f"{number}.png").write_bytes(content)
    return contents, [{"prompt": f"{PLACEHOLDER}what?", "completion": "red"} for _ in range(count)]


def test_paths_bytes_urls_and_parts_are_the_same_rows(tmp_path: Path) -> None:
    contents, plain = rows(tmp_path / "pictures")
    forms: dict[str, list[dict[str, Any]]] = {
        "paths": [row | {"image": f"{n}.png"} for n, row in enumerate(plain)],
        "urls": [
            row | {"images": [f"data:image/png;base64,{base64.b64encode(content).decode()}"]}
            for row, content in zip(plain, contents, strict=True)
        ],
    }
    for name, records in forms.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = [
        row | {"images": [{"bytes": content, "path": f"{n}.png"}]}
        for n, (row, content) in enumerate(zip(plain, contents, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "bytes.parquet")
    found = []
    for number, source in enumerate(("paths.jsonl", "urls.jsonl", "bytes.parquet")):
        out = tmp_path / f"out{number}"
        train, heldout, stats, _ = prepare(
            out, source=str(tmp_path / source), pictures=str(tmp_path / "pictures"), heldout_fraction=0.3
        )
        kept = {picture["sha256"] for pair in (*train, *heldout) for picture in pair.prompt[0]["pictures"]}
        assert kept == set(map(sha256, contents))
        assert stats["pictures"] == len(contents)
        assert stats["dropped_heldout_prompt_seen_in_training"] == 0  # prompts differ by their pictures alone
        assert {file.stem for file in (out / "pictures").iterdir()} == kept
        found.append(
            ([pair._replace(id="") for pair in train], sorted(f.read_bytes() for f in (out / "pictures").iterdir()))
        )
    assert found[0] == found[1] == found[2]


def test_content_parts(tmp_path: Path) -> None:
    rows(tmp_path / "pictures")
    lines = []
    for number in range(24):
        parts = [{"type": "text", "text": "Is"}, {"type": "image_url", "image_url": {"url": f"{number}.png"}}]
        parts += [{"type": "text", "text": "like"}, {"type": "image", "image": "0.png"}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    train, _, _, _ = prepare(
        tmp_path / "out", source=str(tmp_path / "rows.jsonl"), pictures=str(tmp_path / "pictures"), heldout_fraction=0.3
    )
    assert {pair.prompt[0]["content"] for pair in train} == {f"Is{PLACEHOLDER}like{PLACEHOLDER}?"}
    assert {len(pair.prompt[0]["pictures"]) for pair in train} == {2}


@pytest.mark.parametrize("more", [{}, {"image": None, "text": None}], ids=["as written", "as in a table"])
def test_parts_whose_picture_is_in_the_column(tmp_path: Path, more: dict[str, None]) -> None:
    parts = [{"type": "image", **more}, {"type": "text", "text": "what?"}]
    record = {"images": [picture(1)], "messages": [{"role": "user", "content": parts}, ANSWER]}
    found = usual("", PictureFolder(tmp_path / "pictures", None).store("", record))
    [(prompt, _)] = prompt_and_replies("", found, None)
    assert [one["sha256"] for one in prompt[0]["pictures"]] == [sha256(picture(1))]
    # The id decides on which side a conversation is, so every process must find the same.
    assert " at 0x" not in repr(found)


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("column", ["image", "images"])
def test_a_row_of_text_among_rows_with_pictures(tmp_path: Path, column: str, value: object) -> None:
    record = {"prompt": "why?", "completion": "so"}
    assert PictureFolder(tmp_path, None).store("", record | {column: value}) == record


def test_pictures_of_dropped_rows_are_not_kept(tmp_path: Path) -> None:
    contents, plain = rows(tmp_path / "pictures")
    records = [row | {"image": f"{n}.png"} for n, row in enumerate(plain)]
    records[3]["completion"] = " "
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare(
        tmp_path / "out", source=str(tmp_path / "rows.jsonl"), pictures=str(tmp_path / "pictures"), heldout_fraction=0.3
    )
    kept = {file.stem for file in (tmp_path / "out" / "pictures").iterdir()}
    assert kept == {sha256(content) for number, content in enumerate(contents) if number != 3}


USER, ANSWER = {"role": "user", "content": f"{PLACEHOLDER}what?"}, {"role": "assistant", "content": "red"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": "none.png"}, "line 2: image 1: the picture 'none.png' does not exist in data.pictures"),
    ({"image": "../rows.jsonl"}, "line 2: image 1: the picture '../rows.jsonl' is not in data.pictures"),
    ({"image": "http://a/b.png"}, "line 2: image 1: the picture is an address"),
    ({"image": {"size": 3}}, "line 2: image 1: the picture is missing; its keys are size"),
    ({"image": 7}, "line 2: image 1: the picture is a whole number; allowed: a path, bytes, a data URL"),
    ({"image": "data:image/png;base64,%%"}, "line 2: image 1: the picture's data URL cannot be read"),
    ({"image": "data:image/png;base64,AAAA"}, "line 2: image 1: the picture cannot be read"),
    ({"image": "cut.png"}, "line 2: image 1: the picture cannot be read"),
    (
        {"image": "a.tiff"},
        "image 1: the picture cannot be read (cannot identify image file); allowed: PNG, JPEG, WEBP, GIF, BMP",
    ),
    ({"images": ["0.png", "1.png"]}, "line 2: prompt has 1 placeholders <image>, and images has 2 pictures"),
    ({"images": []}, "line 2: prompt has 1 placeholders <image>, and images has 0 pictures"),
    ({"image": "0.png", "images": ["1.png"]}, "line 2: it has the columns image and images"),
    ({}, "line 2: message 1 of prompt has the placeholder '<image>' of a picture, sound or video, which the row"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": []},
        "line 2: prompt has 1 placeholders <image>, and images has 0 pictures",
    ),
    (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Is"}, {"type": "image"}]}]},
        "line 2: message 1 of prompt: the picture is missing; its keys are type",
    ),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image", "path": "0.png"}, USER["content"]]}]},
        "line 2: message 1 of prompt",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "image", "path": "0.png"}]}]},
        "line 2: message 2 of messages has a picture and role 'assistant'; allowed: user",
    ),
    ({"image": "iVBORw0K" * 1000}, "line 2: image 1: the picture 'iVBORw0KiVBORw0K"),
    ({"image": "a\0b"}, "line 2: image 1: the picture 'a\\x00b' does not exist in data.pictures"),
]


@pytest.mark.parametrize(("record", "expected"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_refused(record: dict[str, Any], expected: str, tmp_path: Path, message_texts: Messages) -> None:
    _, plain = rows(tmp_path / "pictures", 2)
    (tmp_path / "pictures" / "cut.png").write_bytes(picture(1)[:40])
    (tmp_path / "pictures" / "a.tiff").write_bytes(picture(1, "TIFF"))
    given = record if "messages" in record else plain[1] | record
    lines = [json.dumps(plain[0] | {"image": "0.png"}), json.dumps(given)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with message_texts.raises(ValueError) as caught:
        prepare(tmp_path / "out", source=str(tmp_path / "rows.jsonl"), pictures=str(tmp_path / "pictures"))
    assert expected in str(caught.value)


def test_a_path_needs_its_folder(tmp_path: Path, message_texts: Messages) -> None:
    _, plain = rows(tmp_path / "pictures", 2)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"image": "0.png"}) for row in plain))
    with message_texts.raises(ValueError):
        prepare(tmp_path / "out", source=str(tmp_path / "rows.jsonl"))


def test_changed_files_are_found(tmp_path: Path) -> None:
    content = picture(1)
    file = tmp_path / f"{sha256(content)}.png"
    file.write_bytes(content)
    assert PictureFiles([tmp_path]).path(sha256(content)[:31]) == file
    with pytest.raises(ValueError, match="is in no dataset of this stage"):
        PictureFiles([tmp_path]).path(sha256(b"other"))
    file.write_bytes(content + b" ")
    with pytest.raises(ValueError, match="damaged"):
        PictureFiles([tmp_path]).path(sha256(content))


def test_pages_escape_what_stands_around_a_picture() -> None:
    digest = sha256(b"1")[:31]
    text = f"<b>{shown_picture(digest)}</b>"
    assert f'src="/p/{digest}"' in as_html(text, "/p/{}".format)
    assert "<b>" not in as_html(text, "/p/{}".format)
    assert as_html(text, lambda _: None) == f"&lt;b&gt;&lt;image {digest}&gt;&lt;/b&gt;"


def test_pairs_keep_the_pictures_of_their_prompts(tmp_path: Path) -> None:
    content, source, out = picture(1), tmp_path / "source", tmp_path / "out"
    out.mkdir()
    record = {"prompt": USER["content"], "chosen": "red", "rejected": "blue", "image": content}
    pair = preference("row 1", PictureFolder(source, None).store("row 1", record))
    assert pair is not None
    prompt, chosen, rejected = pair
    PictureFolder(source, None).store("row 2", {"image": picture(2)})
    write_pairs(out / "train.arrow", PreferenceExample, [PreferenceExample("1", prompt, *texts_of(chosen, rejected))])
    for _ in range(2):
        assert keep_pictures_of(out / "pictures", [out / "train.arrow", out / "none"], [source]) == 1
        assert [file.read_bytes() for file in (out / "pictures").iterdir()] == [content]
    write_pairs(out / "train.arrow", PreferenceExample, [])
    assert keep_pictures_of(out / "pictures", [out / "train.arrow"], [source]) == 0
    assert not (out / "pictures").exists()


def texts_of(*messages: dict[str, Any]) -> list[str]:
    return [message["content"] for message in messages]


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_pictures_in_replies_are_refused(side: str, tmp_path: Path, message_texts: Messages) -> None:
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "red"}]
    record = {"prompt": "what?", "chosen": "red", "rejected": "blue"} | {
        side: [{"role": "assistant", "content": parts}]
    }
    with message_texts.raises(ValueError):
        preference("row 1", PictureFolder(tmp_path / "pictures", None).store("row 1", record))


def stored(tmp_path: Path, image: Any, form: str, **options: Any) -> tuple[int, int]:
    content = io.BytesIO()
    image.save(content, form, **options)
    one = PictureFolder(tmp_path / "pictures", None).store("row 1", {"image": content.getvalue()})["images"][0]
    return one.width, one.height


def test_treatment_of_unusual_pictures(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert stored(tmp_path, Image.new("RGB", (20, 10)), "JPEG", exif=exif) == (10, 20)
    assert stored(tmp_path, Image.new("CMYK", (20, 10)), "JPEG") == (20, 10)
    assert stored(tmp_path, Image.new("RGBA", (20, 10), (9, 8, 7, 0)), "PNG") == (20, 10)
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "blue")]
    assert stored(tmp_path, frames[0], "GIF", save_all=True, append_images=frames[1:]) == (20, 10)
    read = {file.suffix: read_picture(file)[0] for file in (tmp_path / "pictures").iterdir()}
    assert read[".png"].getpixel((0, 0)) == (9, 8, 7)  # without its transparency
    assert read[".gif"].getpixel((0, 0)) == pytest.approx((255, 0, 0), abs=8)  # its first frame
    assert {image.mode for image in read.values()} == {"RGB"}


def bomb() -> bytes:
    """A PNG of 100 bytes that says it has 40,000 × 40,000 pixels."""
    content = io.BytesIO()
    Image.new("1", (8, 8)).save(content, "PNG")
    head = b"IHDR" + struct.pack(">II", 40_000, 40_000) + content.getvalue()[24:29]
    return content.getvalue()[:12] + head + struct.pack(">I", zlib.crc32(head)) + content.getvalue()[33:]


def deep() -> bytes:
    content = io.BytesIO()
    Image.new("I;16", (8, 8)).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("content", [b"", bomb(), deep()], ids=["empty", "bomb", "16 bits"])
def test_unreadable_pictures_are_refused(content: bytes, tmp_path: Path, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        PictureFolder(tmp_path / "pictures", None).store("row 1", {"image": content})
    assert not (tmp_path / "pictures").exists()
