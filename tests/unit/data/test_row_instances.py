"""Rows of public files: each key that means something is read, or refused by row and key."""

from __future__ import annotations

from typing import Any

import pytest

from xray_runtime.data.reading.forms import usual
from xray_runtime.data.reading.keys import Unread
from xray_runtime.data.reading.records import left_out, preference, prompt_and_replies

U, A, S = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))
SYSTEM_2 = {"role": "system", "content": "now in French"}
SAYS = {"from": "gpt", "value": "a"}
ASKS = {"from": "human", "value": "u"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
THOUGHT = A | {"reasoning_content": "hm"}
PICTURE = {"bytes": b"x", "path": None}
WHERE = "rows.jsonl line 3"


def pairs(record: dict[str, Any], context: int | None = None) -> list[Any]:
    found = usual(WHERE, record)
    read = list(prompt_and_replies(WHERE, found, context))
    return [] if any(reply for _, reply in read) and left_out(WHERE, found) else read


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # Reasoning, by each name, in each form.
        ({"messages": [U, A | {"reasoning_content": "hm"}]}, [([U], THOUGHT)]),
        ({"messages": [U, A | {"reasoning": "hm"}]}, [([U], THOUGHT)]),
        ({"messages": [U, A | {"thinking": "hm", "reasoning": "hm"}]}, [([U], THOUGHT)]),
        ({"messages": [U, A | {"reasoning_content": ""}]}, [([U], A)]),
        ({"conversations": [ASKS, SAYS | {"reasoning_content": "hm"}]}, [([U], THOUGHT)]),
        ({"prompt": "u", "completion": [A | {"thinking": "hm"}]}, [([U], THOUGHT)]),
        ({"prompt": "u", "completion": "a", "reasoning_content": "hm"}, [([U], THOUGHT)]),
        ({"instruction": "u", "output": "a", "reasoning_content": "hm"}, [([U], THOUGHT)]),
        ({"prompt": "u", "chosen": [THOUGHT], "rejected": [A]}, [([U], THOUGHT)]),
        (
            {"messages": [U, {"role": "assistant", "content": None, "reasoning_content": "hm"}]},
            [([U], THOUGHT | {"content": ""})],
        ),
        (
            {
                "messages": [
                    U,
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
                    },
                ]
            },
            [([U], THOUGHT)],
        ),
        ({"messages": [U, THOUGHT, U, A]}, [([U], THOUGHT), ([U, THOUGHT, U], A)]),
        # Messages that are not learned, in each form.
        *(
            ({"messages": [U, A | {key: value}, U, A]}, [([U, A, U], A)])
            for key in ("weight", "train", "trainable", "loss", "loss_mask")
            for value in (0, False)
        ),
        ({"messages": [U, A | {"weight": 1, "train": True}]}, [([U], A)]),
        ({"messages": [U | {"weight": 0}, A]}, [([U], A)]),
        ({"conversations": [ASKS, SAYS | {"weight": 0}, ASKS, SAYS | {"loss": True}]}, [([U, A, U], A)]),
        ({"prompt": "u", "completion": [A | {"weight": 0}]}, []),
        ({"prompt": "u", "completion": [A | {"weight": 0}, U, A | {"weight": 1}]}, [([U, A, U], A)]),
        ({"prompt": [U, A | {"weight": 0}, U], "completion": "a"}, [([U, A, U], A)]),
        ({"chosen": [U, A | {"weight": 0}, U, A], "rejected": [U, A, U, S | {"role": "assistant"}]}, [([U, A, U], A)]),
        # Records that are not learned.
        ({"prompt": "u", "completion": "a", "label": False}, []),
        ({"prompt": "u", "completion": "a", "label": 0}, []),
        ({"prompt": "u", "completion": "a", "label": True}, [([U], A)]),
        ({"messages": [U, A], "label": False}, []),
        ({"messages": [U, A], "weight": 0}, []),
        ({"instruction": "u", "output": "a", "train": False}, []),
        # Everything before a reply.
        ({"messages": [A, U, A]}, [([A, U], A)]),
        ({"messages": [S, A, U, A]}, [([S, A, U], A)]),
        ({"messages": [S, U, A, SYSTEM_2, U, A]}, [([S, U], A), ([S, U, A, SYSTEM_2, U], A)]),
        ({"messages": [U, SYSTEM_2, A]}, [([U, SYSTEM_2], A)]),
        ({"conversations": [ASKS, SAYS, {"from": "system", "value": "now in French"}, ASKS, SAYS]}, 2),
        # `system`.
        ({"messages": [{"role": "system", "content": ""}, U, A]}, [([U], A)]),
        ({"messages": [{"role": "system", "content": " \n"}, U, A]}, [([U], A)]),
        ({"conversations": [ASKS, SAYS], "system": ""}, [([U], A)]),
        ({"messages": [U, A], "system": "s"}, [([S, U], A)]),
        ({"messages": [S, U, A], "system": "s"}, [([S, U], A)]),
        ({"prompt": "u", "completion": "a", "system": "s"}, [([S, U], A)]),
        ({"prompt": "u", "chosen": [U, A], "rejected": "b", "system": "s"}, [([S, U], A)]),
        # HH-RLHF's transcripts in `prompt`.
        ({"prompt": "\n\nHuman: u\n\nAssistant: a\n\nHuman: u\n\nAssistant:", "completion": "a"}, [([U, A, U], A)]),
        ({"prompt": "Human: u\n\nAssistant:", "completion": "a"}, [([U], A)]),
        (
            {"prompt": "\n\nHuman: u\n\nAssistant:", "chosen": "\n\nHuman: u\n\nAssistant: a", "rejected": "b"},
            [([U], A)],
        ),
        # Prompts without a reply.
        ({"prompt": "u"}, [([U], None)]),
        ({"prompt": [S, U], "answer": 42}, [([S, U], None)]),
        ({"prompt": "u", "label": "positive"}, [([U], None)]),
        ({"messages": [U]}, [([U], None)]),
        ({"messages": [U, A, U]}, [([U], A), ([U, A, U], None)]),
        ({"conversations": [ASKS]}, [([U], None)]),
        ({"prompt": [U, A, U]}, [([U, A, U], None)]),
        # Empty values mean nothing; a text may mention a picture.
        ({"messages": [U, A], "images": [], "tools": "", "functions": None, "history": []}, [([U], A)]),
        ({"messages": [U, A | {"refusal": "", "audio": None, "tool_calls": []}]}, [([U], A)]),
        ({"prompt": "Is <image> a tag?", "completion": "a"}, 1),
        ({"prompt": "<image>\n<url>x</url>\n</image>", "completion": "a"}, 1),
        ({"messages": [U, A | {"channel": "final"}]}, [([U], A)]),
        ({"messages": [U, A], "file": {"path": "src/a.py"}}, [([U], A)]),
        ({"messages": [{"role": "user", "from": "human", "content": "u", "value": "u"}, A]}, [([U], A)]),
        (
            {"messages": [U, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": None}}]}]},
            [([U], {"role": "assistant", "content": "", "tool_calls": [CALL]})],
        ),
    ],
)
def test_rows_that_are_read(record: dict[str, Any], expected: Any) -> None:
    found = pairs(record)
    assert (len(found) if isinstance(expected, int) else found) == expected


def test_a_short_context_keeps_system_messages() -> None:
    messages = [S, A, U, A, SYSTEM_2, U, A]
    assert pairs({"messages": messages}, 1) == [([S, U], A), ([S, SYSTEM_2, U], A)]
    # Two messages reach back to the greeting, four to the first reply.
    assert pairs({"messages": messages}, 2)[0] == ([S, A, U], A)
    assert pairs({"messages": messages}, 4)[1] == ([S, U, A, SYSTEM_2, U], A)
    assert pairs({"messages": messages}, 5)[1] == (messages[:-1], A)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": [U, A | {"thinking": "x", "reasoning": "y"}]},
            "message 2 of messages has 2 different reasonings",
        ),
        (
            {"messages": [U, A | {"reasoning": {"effort": "low"}}]},
            "message 2 of messages: reasoning is an object; allow",
        ),
        (
            {"messages": [U | {"thinking": "x"}, A]},
            "message 1 of messages has reasoning and role 'user'; allowed: assi",
        ),
        ({"messages": [U, A], "reasoning_content": "x"}, "reasoning_content is a column beside messages"),
        (
            {"prompt": "u", "completion": "a", "reasoning": "on"},
            r"reasoning \(text\) is not supported: name the reply's",
        ),
        ({"messages": [U, A | {"weight": 0.5}]}, r"message 2 of messages: weight is 0.5 \(a number\); allowed: 0, 1"),
        ({"messages": [U, A | {"loss": "false"}]}, r"message 2 of messages: loss is 'false' \(text\); allowed: 0, 1"),
        ({"messages": [U, A | {"loss_mask": [0, 1]}]}, r"loss_mask is \[0, 1\] \(a list\); allowed: 0, 1, false, true"),
        ({"messages": [U, A | {"weight": 1, "train": False}]}, "message 2 of messages: weight and train disagree"),
        ({"messages": [U | {"train": True}, A]}, "message 1 of messages is to be learned and of role 'user'"),
        ({"messages": [A | {"weight": 1}, U, A]}, "messages: the message 'a' is to be learned, but answers neither"),
        (
            {"prompt": [U, A | {"weight": 1}, U], "completion": "a"},
            "message 2 of prompt is to be learned; only the rep",
        ),
        (
            {"prompt": "u", "chosen": [A | {"weight": 0}], "rejected": "b"},
            "chosen is not to be learned; remove such row",
        ),
        ({"messages": [U, A], "weight": 0.3}, r"line 3: weight is 0.3 \(a number\); allowed: 0, 1, false, true"),
        ({"prompt": "u", "completion": "a", "label": "false"}, r"label is 'false' \(text\); allowed: true and false"),
        ({"messages": [U, A], "label": 7}, r"label is 7 \(a whole number\); .* rename the column \(rename_columns\)"),
        *(
            ({"messages": [U, A], name: ["x.png"]}, rf"line 3: {name} \(a list\) is not supported: pictures, sounds")
            for name in ("images", "image", "videos", "audio")
        ),
        ({"messages": [U, A], "shot": PICTURE}, r"line 3: shot \(an object\) is not supported: pictures"),
        (
            {"prompt": "u", "completion": "a", "shots": [PICTURE]},
            r"line 3: shots \(a list\) is not supported: pictures",
        ),
        ({"messages": [U, A], "shot": {"path": "a.PNG"}}, r"line 3: shot \(an object\) is not supported: pictures"),
        ({"messages": [U | {"images": ["x"]}, A]}, r"message 1 of messages: images \(a list\) is not supported"),
        (
            {"messages": [U | {"content": [{"type": "image"}]}, A]},
            "message 1 of messages has a content part of type 'im",
        ),
        ({"prompt": "<image>\nWhat is it?", "completion": "a"}, "message 1 of prompt has the placeholder '<image>'"),
        ({"conversations": [{"from": "human", "value": "What?\n<video>"}, SAYS]}, "has the placeholder '<video>' of a"),
        ({"messages": [U, A], "functions": [{"name": "f"}]}, r"functions \(a list\) is not supported: OpenAI's old"),
        ({"messages": [U, A], "history": [["a", "b"]]}, r"history \(a list\) is not supported: it is read with instr"),
        ({"messages": [U, A], "system_prompt": "x"}, r"system_prompt \(text\) is not supported: rename it to system"),
        ({"messages": [S, U, A], "system": "other"}, "system differs from the system message of messages"),
        ({"messages": [U, A], "system": ["x"]}, "line 3: system is a list; allowed: text"),
        ({"messages": [U, A | {"refusal": "No."}]}, r"message 2 of messages: refusal \(text\) is not supported: give"),
        ({"messages": [U, A | {"audio": {"id": "x"}}]}, r"message 2 of messages: audio \(an object\) is not supported"),
        ({"messages": [U, A | {"prefix": True}]}, r"message 2 of messages: prefix \(true or false\) is not supported"),
        (
            {"messages": [U, A | {"channel": "analysis"}]},
            "message 2 of messages: channel is 'analysis'; allowed: 'final'",
        ),
        (
            {"messages": [U, A | {"from": "human"}]},
            "message 2 of messages: role is 'assistant', and ShareGPT's key says",
        ),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}, A]},
            "1 of messages: tool_call_id is a whole",
        ),
        (
            {"messages": [{"role": "tool", "content": {"a": 1}}, A]},
            "message 1 of messages: content is an object; allowed",
        ),
        ({"messages": [{"role": "User", "content": "x"}, A]}, "message 1 of messages: role is 'User'; allowed: system"),
        ({"instruction": "u", "output": "a", "history": [["a", None]]}, "history: pair 1 has null; allowed: two texts"),
        ({"prompt": [U, A]}, "prompt must end with a user message"),
        ({"prompt": "\n\nHuman: a\n\nAssistant: It", "completion": "is"}, "prompt must end with a user message"),
        ({"prompt": "Be kind.\n\nHuman: a\n\nAssistant:", "completion": "a"}, "prompt must be turns that begin with"),
        ({"prompt": "u", "response": "a"}, r"rename_columns: \{response: completion\} where response is the reply"),
        ({"prompt": "u", "chosen": "a"}, "the columns 'chosen', 'prompt' match no supported form"),
        ({"text": "Once upon a time"}, "text alone, as for pretraining, is not read: give prompts and replies"),
        ({"Prompt": "u", "Completion": "a"}, r"can be mapped with rename_columns: \{Prompt: prompt\}"),
        ({"prompt": "u", "completion": "a", "chat_template_kwargs": {"x": 1}}, r"chat_template_kwargs \(an object\)"),
        ({"messages": [U, A], "labels": [1, 2]}, r"labels \(a list\) is not supported: masks and labels of tokens"),
        ({"messages": [U, A], "tools": [{"x": float("nan")}]}, "tools.0.x is nan; allowed: finite numbers"),
        ({"messages": [U, A], "tools": '[{"a": 1, "a": 2}]'}, "tools is a text .* has the key 'a' twice"),
        ({"messages": [U, A], "tools": "[{"}, "tools is a text that cannot be read: not JSON"),
    ],
)
def test_rows_that_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        pairs(record)
    assert str(caught.value).startswith(WHERE)
    assert "\n" not in str(caught.value)


def test_replies_that_differ_in_their_reasoning_are_different() -> None:
    other = A | {"reasoning_content": "well"}
    assert preference(WHERE, {"prompt": "u", "chosen": [THOUGHT], "rejected": [other]}) == ([U], THOUGHT, other)
    assert preference(WHERE, {"chosen": [U, THOUGHT, U, A], "rejected": [U, other, U, A]}) is None


@pytest.mark.parametrize(("key", "value"), [("label", False), ("weight", 0), ("margin", 0.5)])
def test_pairs_that_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"line 3: {key}"):
        preference(WHERE, {"prompt": "u", "chosen": "a", "rejected": "b", key: value})


def test_every_other_key_is_counted() -> None:
    unread = Unread()
    record = {
        "messages": [U | {"id": 1, "name": "Ann"}, A | {"score": 0.5}],
        "prompt": "x",
        "source": "web",
        "tools": [],
    }
    parts = [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]
    for given in (record, {"messages": [U | {"content": parts}, A], "source": "web", "answer": 4}):
        list(prompt_and_replies(WHERE, usual(WHERE, given, carried=["answer"], unread=unread), None, unread))
    assert unread.counts() == {
        "columns_not_read": {"prompt": 1, "source": 2},
        "message_keys_not_read": {"content.cache_control": 1, "id": 1, "name": 1, "score": 1},
    }
    assert str(unread).startswith("columns not read: source 2, prompt 1; message keys not read: ")
    assert unread.metrics("data")["data/columns_not_read/source"] == 2.0
    # However many names there are, a bounded number is kept.
    unread.add_columns(f"c{n}" for n in range(1000))
    assert len(unread.columns) == 101
    assert unread.columns.total() == 1003
