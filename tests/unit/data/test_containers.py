"""One record through every container: the same rows, ids, split and digest."""

from __future__ import annotations

import datetime
import decimal
import gzip
import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from tests.message_texts import Messages
from tests.unit.methods.prepare.prepared import prepare
from xray_runtime.data.messages import read_tools
from xray_runtime.data.reading.json_values import (
    ROUNDED,
    UNTOLD,
    arrow_records,
    canonical_record,
    check_json,
    parse_json,
)
from xray_runtime.data.reading.keys import Unread
from xray_runtime.data.reading.pictures import PictureFolder
from xray_runtime.data.reading.sources import read_records
from xray_runtime.methods.prepare.body import _read
from xray_runtime.methods.prepare.config import DataConfig

NO_PICTURES = PictureFolder(Path("pictures"), None)

Row = dict[str, Any]


def written(folder: Path, rows: list[Row]) -> list[str]:
    """The rows in every container, as sources."""
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    spaced = b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\r\n")
    array = json.dumps(rows, indent=1).encode()
    (folder / "lines").mkdir()
    contents = {"a.jsonl": lines, "b.json": lines, "c.json": array, "d.jsonl": spaced, "lines/train.jsonl": lines}
    contents |= {"e.jsonl.gz": gzip.compress(lines), "f.json.gz": gzip.compress(array)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for name, content in (("g.jsonl.zst", lines), ("h.json.zst", array)):
        with pa.output_stream(str(folder / name), compression="zstd") as file:
            file.write(content)
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(folder / "i.parquet")
    (folder / "tables").mkdir()
    data.to_parquet(folder / "tables" / "train-00000-of-00001.parquet")
    data.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": data}).save_to_disk(folder / "dict")
    named = ("i.parquet", "g.jsonl.zst", "h.json.zst", "lines", "tables", "saved", "dict")
    return [str(folder / name) for name in (*contents, *named) if "/" not in name]


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


HALF = gzip.compress(b'{"a": 1}\n' * 9999, mtime=0)[:60]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBER = st.integers(-5, 5) | st.floats(-1e9, 1e9) | st.integers(-(2**53), 2**53)
CALLS = st.lists(
    st.fixed_dictionaries({"name": TEXT, "arguments": st.fixed_dictionaries({"x": maybe(NUMBER), "y": maybe(TEXT)})}),
    min_size=1,
    max_size=2,
)
ANSWER = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": TEXT,
        "reasoning_content": maybe(TEXT),
        "weight": maybe(st.sampled_from([0, 1])),
        "tool_calls": maybe(CALLS),
        "note": maybe(st.fixed_dictionaries({"a": maybe(NUMBER), "b": maybe(TEXT)})),
    }
)
ASKED = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXT, "name": maybe(TEXT)})
ROW = st.fixed_dictionaries(
    {
        "messages": st.lists(st.tuples(ASKED, ANSWER), min_size=1, max_size=3).map(lambda turns: sum(turns, ())),
        "conversation_id": maybe(st.integers(0, 99)),
        "system": maybe(TEXT),
        "tools": maybe(st.just('[{"const": null}]')),
        "answer": maybe(NUMBER),
        "meta": maybe(st.fixed_dictionaries({"p": maybe(NUMBER), "q": maybe(st.lists(maybe(st.integers(0, 9))))})),
        "flags": maybe(st.lists(maybe(st.booleans()), max_size=2)),
        "unused": maybe(TEXT),
    }
)


def read(source: str) -> Any:
    unread = Unread()
    try:
        config = DataConfig(source=source, columns=["answer", "meta", "flags"], context_messages=3)
        total, rows = _read(config, set(), unread, NO_PICTURES)
        return total, list(rows), unread.counts()
    except ValueError as error:
        return str(error).replace(source, "").partition(": message")[2]


@settings(max_examples=8, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=4))
def test_a_record_is_the_same_from_every_container(rows: list[Row]) -> None:
    with TemporaryDirectory() as folder:
        # A list of tuples is no list of Arrow's.
        plain = json.loads(json.dumps(rows))
        sources = written(Path(folder) / "all", plain)
        first, *others = [read(source) for source in sources]
        assert [other == first for other in others] == [True] * len(sources[1:])
        records = [[record for _, record in read_records("data.source", source, "train")[1]] for source in sources]
        assert all(found == records[0] for found in records)
        # Equal values of other types, 1 and 1.0 or True, are not the same.
        assert len({json.dumps(found, sort_keys=True) for found in records}) == 1


def test_prepare_writes_the_same_from_every_container(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {n}", "at": None},
                {"role": "assistant", "content": f"answer {n}", "reasoning_content": "hm" if n % 3 else None},
            ],
            "tools": '[{"name": "f", "parameters": {"const": null}}]' if n % 2 else None,
            "answer": n / 2,
            "about": {"level": n if n % 4 else None, "from": "web"},
            "url": "x" if n % 5 else None,
        }
        for n in range(60)
    ]
    found = set()
    for number, source in enumerate(written(tmp_path / "all", rows)):
        out = tmp_path / str(number)
        prepare(out, source=source, columns=["answer", "about"], curriculum="answer", heldout_fraction=0.3)
        found.add(tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())))
    assert len(found) == 1
    stats = json.loads((tmp_path / "0" / "stats.json").read_text())
    assert stats["columns_not_read"] == {"url": 48}
    assert "message_keys_not_read" not in stats


SCHEMA = {"name": "f", "parameters": {"properties": {"x": {"const": None}, "y": {"enum": [None, 1], "title": None}}}}


def test_a_schema_keeps_its_null_or_is_refused(tmp_path: Path) -> None:
    kept = [{"name": "f", "parameters": {"properties": {"x": {"const": None}, "y": {"enum": [None, 1]}}}}]
    rows = [{"prompt": "u", "tools": [SCHEMA], "schema": {"default": None}}]
    *others, parquet, _, _, lines, tables, saved, _ = written(tmp_path / "all", rows)
    for source in (*others, lines):
        [(where, record)] = read_records("data.source", source, "train")[1]
        assert read_tools(where, record) == kept
        assert check_json(where, "schema", record["schema"]) == {"default": None}
    for source in (parquet, tables, saved):
        [(where, record)] = read_records("data.source", source, "train")[1]
        place = (
            r"row 1: tools\.0\.parameters\.properties\.x\.const is null or absent, which its container does not tell"
        )
        with pytest.raises(ValueError, match=place):
            read_tools(where, record)
        with pytest.raises(ValueError, match=r"row 1: schema\.default is null or absent"):
            check_json(where, "schema", record["schema"])


def test_numbers_are_exact() -> None:
    text = f'{{"a": {2**70}, "b": 1.0, "c": 1.5, "d": 1e3, "e": {2**53 + 1}, "f": 1e300, "g": -0.0, "h": true}}'
    found = canonical_record(parse_json(text))
    assert found == {"a": 2**70, "b": 1, "c": 1.5, "d": 1000, "e": 2**53 + 1, "f": 1e300, "g": 0, "h": True}
    assert [type(value) for value in found.values()] == [int, int, float, int, int, float, int, bool]
    table = pa.table({"a": [float(2**64), 2.0, 0.5]})
    assert [row["a"] for row in arrow_records(table)] == [float(2**64), 2, 0.5]
    # Arrow's reader of JSON makes floats of large integers.
    assert [row["a"] for row in arrow_records(table, is_from_json=True)] == [ROUNDED, 2, 0.5]


def test_types_that_json_has_not_are_refused_where_they_are_used(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    values = {"day": day, "time": datetime.datetime(2026, 1, 2), "cost": decimal.Decimal("1.5"), "bytes": b"x"}
    pq.write_table(pa.Table.from_pylist([{"prompt": "u", **values, "nan": float("nan")}] * 2), tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    assert len(list(_read(DataConfig(source=source), set(), Unread(), NO_PICTURES)[1])) == 2
    kinds = {
        "day": "date",
        "time": "datetime",
        "cost": "Decimal",
        "bytes": "bytes",
        "nan": "nan; allowed: finite numbers",
    }
    for name, kind in kinds.items():
        with pytest.raises(ValueError, match=rf"a\.parquet row 1: {name} is {kind}"):
            list(_read(DataConfig(source=source, columns=[name]), set(), Unread(), NO_PICTURES)[1])
    pq.write_table(pa.Table.from_pylist([{"prompt": "u", "conversation_id": day}]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"row 1: conversation_id is date; allowed: text, a whole number"):
        list(_read(DataConfig(source=str(tmp_path / "b.parquet")), set(), Unread(), NO_PICTURES)[1])


def test_arrow_has_json_maps_and_names_that_occur_twice(tmp_path: Path) -> None:
    kind = pa.struct([("j", pa.json_())])
    storage = pa.array([{"j": '{"const": null, "x": null, "n": 2.0}'}], pa.struct([("j", pa.string())]))
    maps = pa.array([[("a", 1.0)]], pa.map_(pa.string(), pa.float64()))
    table = pa.table({"s": storage.cast(kind), "m": maps})
    assert list(arrow_records(table)) == [{"s": {"j": {"const": None, "n": 2}}, "m": {"a": 1}}]
    with pytest.raises(ValueError, match="two columns have the name 'a'"):
        list(arrow_records(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])))
    pq.write_table(pa.table({"x": pa.array([{"default": None, "b": 1}])}), tmp_path / "a.parquet")
    [(_, record)] = read_records("data.source", str(tmp_path / "a.parquet"), "train")[1]
    assert record == {"x": {"default": UNTOLD, "b": 1}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}\n'),
        ("a.json", b'[{"a": 1}, {"a": 1, "a": 2}]'),
        ("a.json", b'[{"a": 1} {"a": 2}]'),
        ("a.json", b'[{"a": 1}] x'),
        ("a.json", b'{\n "data": [{"prompt": "x"}]\n}'),
        ("a.jsonl.gz", HALF),
        ("a.jsonl.gz", b'{"a": 1}\n'),
        ("a.json.zst", b'{"a": 1}\n'),
        ("a.parquet", b"PAR1"),
        ("a.csv", b"a,b\n"),
        ("a.csv.gz", b"a,b\n"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, name: str, content: bytes, message_texts: Messages) -> None:
    (tmp_path / name).write_bytes(content)
    with message_texts.raises(ValueError):
        list(read_records("data.source", str(tmp_path / name), "train")[1])


def test_columns_are_renamed(tmp_path: Path) -> None:
    rows = [{"question": f"q {n}", "solution": n, "response": f"a {n}"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, names = str(tmp_path / "a.jsonl"), {"question": "prompt", "response": "completion", "solution": "answer"}
    given: dict[str, Any] = {"source": source, "heldout_fraction": 0.3}
    train, heldout, stats, _ = prepare(tmp_path / "out", rename_columns=names, columns=["answer"], **given)
    assert {(e.prompt[0]["content"], e.response, e.columns) for e in train + heldout} == {
        (f"q {n}", f"a {n}", f'{{"answer": {n}}}') for n in range(40)
    }
    assert "columns_not_read" not in stats
    for wrong, message in (
        ({"question": "prompt", "reply": "completion"}, r"data.rename_columns: no record had 'reply' so far"),
        ({**names, "note": "x"}, "data.rename_columns: 'note' has a value in no record of"),
        ({"question": "solution"}, r"line 1 has a column 'solution' already: rename that one, too"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path / f"wrong{len(message)}", rename_columns=wrong, **given)
    with pytest.raises(ValueError, match="two columns would have the name 'prompt'"):
        DataConfig(source=source, rename_columns={"a": "prompt", "b": "prompt"})
    with pytest.raises(ValueError, match="rename_columns is not allowed with source = 'chitchat'"):
        DataConfig(rename_columns={"a": "prompt"})
