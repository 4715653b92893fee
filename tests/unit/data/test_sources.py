"""Sources: what each column convention means, what chitchat holds, and how bad data are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from xray_runtime.data.reading.forms import usual
from xray_runtime.data.reading.record_files import Where
from xray_runtime.data.reading.records import conversation_id, preference, prompt_and_replies
from xray_runtime.data.reading.sources import (
    CHITCHAT_SIZE,
    RatedConversation,
    chat_pairs,
    chitchat_conversations,
    read_records,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Pau"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": '{"sky":\t"blue"}', "name": "weather", "tool_call_id": "c1"}
AS_WRITTEN = "  def f(x):\n\tif x:\n\n        return\u00a0'a  b'\r\n\u2028 \n"
HH = "\n\nHuman: What is it?\n\nAssistant: A cat.\n\nHuman: Sure?\n\nAssistant: "


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_chitchat_merges_messages_of_one_person_and_keeps_ratings() -> None:
    conversations = list(chitchat_conversations())
    assert len(conversations) == CHITCHAT_SIZE == 7168
    first = next(c for c in conversations if c.id == "a07edb12-6b91-4138-b11e-02421888d699")
    assert first.turns[:2] == ["Hello How are you doing today?", "whats up MD im doing good how are you doing?"]
    assert sum(bool(c.ratings) for c in conversations) == 5988
    assert {value for c in conversations for value in c.ratings.values()} <= set(range(1, 11))


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (1, [([user("a")], "b"), ([user("b")], "c"), ([user("c")], "d")]),
        # Two messages before "c" are a (assistant's) and b (user's): a prompt begins with a user's.
        (2, [([user("a")], "b"), ([user("b")], "c"), ([user("c")], "d")]),
        (3, [([user("a")], "b"), ([user("b")], "c"), ([user("a"), assistant("b"), user("c")], "d")]),
    ],
)
def test_chat_pairs(context: int, expected: list[tuple[list[dict[str, str]], str]]) -> None:
    found = list(chat_pairs(RatedConversation("x", ["a", "b", "c", "d"]), context))
    assert [(prompt, reply["content"]) for prompt, reply in found] == expected
    assert {reply["role"] for _, reply in found} == {"assistant"}


@pytest.mark.parametrize(
    ("record", "context", "expected"),
    [
        ({"prompt": " hi\n there", "completion": "yo  you"}, 1, [([user(" hi\n there")], "yo  you")]),
        ({"prompt": [SYSTEM, user("hi")], "completion": [assistant("yo")]}, 1, [([SYSTEM, user("hi")], "yo")]),
        (
            {"messages": [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")]},
            1,
            [([SYSTEM, user("a")], "b"), ([SYSTEM, user("c")], "d")],
        ),
        (
            {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
            2,
            [([user("a")], "b"), ([user("c")], "d")],
        ),
        (
            {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
            3,
            [([user("a")], "b"), ([user("a"), assistant("b"), user("c")], "d")],
        ),
        ({"prompt": "hi", "chosen": "good", "rejected": "bad"}, 1, [([user("hi")], "good")]),
        (
            {"chosen": HH + "Yes.", "rejected": HH + "No."},
            1,
            [([user("What is it?"), assistant("A cat."), user("Sure?")], "Yes.")],
        ),
        ({"chosen": "\n\nHuman: Bye", "rejected": "\n\nHuman: Bye"}, 1, []),
    ],
)
def test_prompt_and_replies(record: dict[str, Any], context: int, expected: list[Any]) -> None:
    found = list(prompt_and_replies("row 1", usual("row 1", record), context))
    assert [(prompt, reply["content"]) for prompt, reply in found] == expected


ASK, SAY = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
CALLED = {"name": "weather", "arguments": {"city": "Pau"}}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": [ASK, SAY]}, [user("a"), assistant("b")]),
        ({"conversations": [user("a"), assistant("b")], "system": "Be kind."}, [SYSTEM, user("a"), assistant("b")]),
        (
            {"conversations": [{"from": "system", "value": "Be kind."}, ASK, SAY, ASK, SAY], "system": ""},
            [SYSTEM, user("a"), assistant("b"), user("a"), assistant("b")],
        ),
        (
            {
                "conversations": [
                    ASK,
                    {"from": "function_call", "value": json.dumps(CALLED)},
                    {"from": "observation", "value": "rain"},
                    SAY,
                ]
            },
            [user("a"), CALLING, {"role": "tool", "content": "rain"}, assistant("b")],
        ),
        ({"instruction": "a", "output": "b"}, [user("a"), assistant("b")]),
        (
            {"instruction": "a", "input": "x", "output": "b", "system": "Be kind.", "history": [["q", "r"]]},
            [SYSTEM, user("q"), assistant("r"), user("a\n\nx"), assistant("b")],
        ),
        ({"instruction": "a", "input": "", "output": "b", "history": []}, [user("a"), assistant("b")]),
        (
            {"messages": [{"role": "developer", "content": "Be kind."}, user("a"), assistant("b")]},
            [SYSTEM, user("a"), assistant("b")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "x"}]},
                    {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                ]
            },
            [user("a\nx"), assistant("b")],
        ),
    ],
)
def test_forms_of_other_projects(record: dict[str, Any], expected: list[Any]) -> None:
    *_, (prompt, reply) = prompt_and_replies("row 1", usual("row 1", record), None)
    assert [*prompt, reply] == expected


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [ASK], "chosen": SAY, "rejected": {"from": "gpt", "value": "c"}},
        {"conversations": [ASK], "chosen": "b", "rejected": "c"},
        {"instruction": "a", "chosen": "b", "rejected": "c"},
    ],
)
def test_preferences_of_other_projects(record: dict[str, Any]) -> None:
    assert preference("row 1", record) == ([user("a")], assistant("b"), assistant("c"))
    assert list(prompt_and_replies("row 1", usual("row 1", record), None)) == [([user("a")], assistant("b"))]


def test_an_empty_conversation_has_no_reply() -> None:
    for record in ({"messages": []}, {"conversations": []}, {"conversations": [SAY]}):
        assert not list(prompt_and_replies("row 1", usual("row 1", record), None))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"prompt": AS_WRITTEN, "chosen": AS_WRITTEN + "1", "rejected": AS_WRITTEN + "2"},
            ([user(AS_WRITTEN)], AS_WRITTEN + "1", AS_WRITTEN + "2"),
        ),
        (
            {"prompt": [user("hi")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
            ([user("hi")], "good", "bad"),
        ),
        # UltraFeedback's form: each reply repeats the prompt.
        (
            {"prompt": "hi", "chosen": [user("hi"), assistant("good")], "rejected": [user("hi"), assistant("bad")]},
            ([user("hi")], "good", "bad"),
        ),
        (
            {"chosen": [user("hi"), assistant("good")], "rejected": [user("hi"), assistant("bad")]},
            ([user("hi")], "good", "bad"),
        ),
        (
            {"chosen": HH + "Yes.\n\nLine two.", "rejected": HH + "No."},
            ([user("What is it?"), assistant("A cat."), user("Sure?")], "Yes.\n\nLine two.", "No."),
        ),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}, None),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c", "rejected": "\n\nHuman: a\n\nAssistant: b"}, None),
    ],
)
def test_preference(record: dict[str, Any], expected: Any) -> None:
    found = preference("row 1", record)
    assert (found and (found[0], *(reply["content"] for reply in found[1:]))) == expected
    assert found is None or {reply["role"] for reply in found[1:]} == {"assistant"}


@pytest.mark.parametrize(
    "record",
    [
        {"text": "x", "id": 1},
        {},
        {"instruction": "x"},
        {"instruction": 3, "output": "x"},
        {"instruction": "x", "output": "y", "history": [["a"]]},
        {"conversations": "x"},
        {"conversations": [{"from": "human"}]},
        {"conversations": [{"from": "judge", "value": "x"}]},
        {"conversations": [{"from": "function_call", "value": "{"}]},
        {"messages": [user("x") | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [user("x") | {"content": ["x"]}]},
        {"messages": "x"},
        {"prompt": [], "completion": "x"},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "judge", "content": "x"}]},
        {"prompt": [assistant("x")], "completion": "y"},
        {"prompt": "x\ud800", "completion": "y"},
        {"messages": [user("x"), {"role": "assistant", "content": "\udfff"}]},
        {"messages": [user("x"), {"role": "assistant"}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        {"messages": [user("x"), {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        {"messages": [user("x"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
        {"messages": [user("x"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        {"prompt": "x", "completion": "y", "tools": "[{"},
        {"prompt": "x", "completion": "y", "tools": ["f"]},
        {"prompt": 5, "completion": "y"},
        {"prompt": "x", "completion": [user("y")]},
        {"prompt": "x", "completion": [user("other"), assistant("y")]},
        {"prompt": "x", "chosen": [CALLING, TOLD, assistant("y")], "rejected": "z"},
        {"messages": [user("x"), assistant("y") | {"function_call": {"name": "f", "arguments": "{}"}}]},
        {"messages": [user("x"), assistant("y") | {"weight": 2}]},
        {"chosen": "no turns", "rejected": "x"},
        {"chosen": "lost\n\nHuman: a\n\nAssistant: b", "rejected": "x"},
        {"chosen": 1, "rejected": "x"},
    ],
)
def test_bad_records_name_file_row_column_and_what_is_allowed(record: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        list(prompt_and_replies("file line 3", usual("file line 3", record), 1))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "system", "content": AS_WRITTEN}, user(AS_WRITTEN), assistant(AS_WRITTEN)]},
        {"prompt": AS_WRITTEN, "completion": AS_WRITTEN},
        {"prompt": [user(AS_WRITTEN)], "chosen": [assistant(AS_WRITTEN)], "rejected": AS_WRITTEN},
        {"chosen": "\n\nHuman: " + AS_WRITTEN + "\n\nAssistant: " + AS_WRITTEN},
    ],
)
def test_no_character_of_a_text_is_changed(record: dict[str, Any]) -> None:
    [(prompt, reply)] = prompt_and_replies("row", record, 1)
    assert {message["content"] for message in (*prompt, reply)} == {AS_WRITTEN}


def test_tools_their_calls_and_answers_are_carried() -> None:
    messages = [SYSTEM, user("a"), assistant("b"), user("c"), CALLING, TOLD, assistant("d")]
    asked_first = SYSTEM | {"tools": [TOOL]}
    # Within a tool's use a prompt begins with what led to it, however short the context.
    for context, begin in ((1, 3), (3, 3), (4, 3), (5, 1), (None, 1)):
        found = list(prompt_and_replies("row", {"messages": messages, "tools": [TOOL]}, context))
        assert [reply for _, reply in found] == [assistant("b"), CALLING, assistant("d")]
        assert found[-1][0] == [asked_first, *messages[begin:6]]
    [(prompt, _)] = prompt_and_replies("row", {"prompt": "x", "completion": "y", "tools": json.dumps([TOOL])}, 1)
    assert prompt == [{"role": "user", "content": "x", "tools": [TOOL]}]
    # OpenAI's form: arguments as JSON text; and the flat one.
    text = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Pau"}'}}
    for given in (text, {"name": "weather", "arguments": {"city": "Pau"}}):
        record = {"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": [given]}]}
        [(_, reply)] = prompt_and_replies("row", record, 1)
        assert reply["content"] == ""
        assert reply["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Pau"}}


def test_a_completion_may_use_tools_and_a_reply_may_not_be_learned() -> None:
    end = assistant("b")
    for said in ([CALLING, TOLD, end], [user("a"), CALLING, TOLD, end]):
        found = list(prompt_and_replies("row", {"prompt": "a", "completion": said, "tools": [TOOL]}, 1))
        asked_first = user("a") | {"tools": [TOOL]}
        assert found == [([asked_first], CALLING), ([asked_first, CALLING, TOLD], end)]
    # OpenAI's fine-tuning: what has weight 0 is read and not learned.
    messages = [user("a"), assistant("b") | {"weight": 0}, user("c"), assistant("d") | {"weight": 1}]
    found = list(prompt_and_replies("row", {"messages": messages, "parallel_tool_calls": False}, None))
    assert found == [([user("a"), assistant("b"), user("c")], assistant("d"))]


def test_preferred_and_rejected_replies_may_call_tools() -> None:
    found = preference("row 7", {"prompt": "x", "chosen": [CALLING], "rejected": "y", "tools": [TOOL]})
    assert found == ([{"role": "user", "content": "x", "tools": [TOOL]}], CALLING, assistant("y"))
    transcripts = [[user("a"), CALLING, TOLD, end] for end in (assistant("b"), CALLING)]
    found = preference("row 8", {"chosen": transcripts[0], "rejected": transcripts[1]})
    assert found == ([user("a"), CALLING, TOLD], assistant("b"), CALLING)


def test_structs_of_arrow_lose_what_is_not_there(tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": [user("a"), CALLING, TOLD, assistant("b")]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "m.parquet")
    _, records = read_records("data.source", str(tmp_path / "m.parquet"), "train")
    where, record = next(records)
    assert str(where) == f"{tmp_path / 'm.parquet'} row 1"
    found = list(prompt_and_replies(where, record, None))
    assert found[1][0][2] == TOLD
    assert found[0][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Pau"}}
    assert [list(message) for message in found[1][0]] == [list(user("")), list(CALLING), list(TOLD)]


def test_jsonl_reads_every_row_and_numbers_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": 1, "b": null}\r\n\n{"a": "x\u2028y"}\n'.encode())
    total, records = read_records("data.source", str(path), "train")
    assert total == 2
    assert list(records) == [
        (Where(str(path), "line", 1, 1), {"a": 1}),
        (Where(str(path), "line", 3, 2), {"a": "x\u2028y"}),
    ]
    assert str(Where(str(path), "line", 3, 2)) == f"{path} line 3"


@pytest.mark.parametrize("content", [b'{"a": 1}\n{oops\n', b"[1]\n", b"\xff\xfe\n"])
def test_damaged_jsonl(tmp_path: Path, content: bytes, message_texts: Messages) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with message_texts.raises(ValueError):
        list(read_records("data.source", str(path), "train")[1])


def test_an_array_and_lines_in_a_json_file_read_alike(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "completion": "yo"}, {"prompt": "who", "completion": "me", "note": None}]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    jsonl(tmp_path / "lines.json", *rows)
    for name, unit in (("array", "row"), ("lines", "line")):
        source = str(tmp_path / f"{name}.json")
        total, records = read_records("data.source", source, "train")
        assert total == 2
        assert list(records) == [
            (Where(source, unit, 1, 1), rows[0]),
            (Where(source, unit, 2, 2), {"prompt": "who", "completion": "me"}),
        ]
    for content, message in (("[1]", "row 1: int found, an object is expected"), ("[{", "cannot be read")):
        (tmp_path / "array.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_records("data.source", str(tmp_path / "array.json"), "train")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "missing.json", "missing"])
def test_a_missing_file_is_one_clear_line(tmp_path: Path, name: str) -> None:
    source = str(tmp_path / name)
    with pytest.raises(ValueError, match=r"^data\.source: '.*missing") as caught:
        read_records("data.source", source, "train")
    assert "\n" not in str(caught.value)


def test_parquet_and_saved_datasets_read_alike(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "hi", "completion": "yo"}, {"prompt": "who", "completion": None}]
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "many")
    for name in ("rows.parquet", "one", "many"):
        total, records = read_records("data.source", str(tmp_path / name), "train")
        assert total == 2
        assert [record for _, record in records] == [{"prompt": "hi", "completion": "yo"}, {"prompt": "who"}]
    with pytest.raises(ValueError, match="no split 'test'; there are 'train'"):
        read_records("data.source", str(tmp_path / "many"), "test")


def test_conversation_ids_follow_content_not_place() -> None:
    first = conversation_id("row", {"prompt": "x", "completion": "y"})
    assert first == conversation_id("row", {"completion": "other", "prompt": "x"})
    assert first != conversation_id("row", {"prompt": "z", "completion": "y"})
    assert conversation_id("row", {"conversation_id": 7, "messages": []}) == "7"
