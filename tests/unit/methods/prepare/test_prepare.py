"""Stage prepare: the split, what is dropped and counted, and the same bytes every time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.methods.prepare.prepared import prepare
from xray_runtime.data.heldout import held_out_prompts
from xray_runtime.data.pairs import Example, Pairs, prompt_text
from xray_runtime.data.withdrawn import WithdrawnTexts
from xray_runtime.methods.common.findings import data_findings
from xray_runtime.methods.prepare.config import DataConfig
from xray_runtime.methods.prepare.kind import PREPARE


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


@pytest.mark.parametrize("count", [800, pytest.param(7168, marks=pytest.mark.long)])
def test_chitchat(tmp_path: Path, count: int) -> None:
    limits: dict[str, Any] = {"context_messages": 1, "min_chars": 2, "max_chars": 120, "max_conversations": count}
    train, heldout, stats, recorder = prepare(tmp_path / "a", **limits)
    # The pairs of 2 to 120 characters an earlier, independent count found: 80,672, within what merging rules change.
    assert count < 7168 or 78_000 < len(train) + len(heldout) < 84_000
    assert 0.02 < len(heldout) / len(train) < 0.08
    assert not {e.conversation for e in train} & {e.conversation for e in heldout}
    assert not {prompt_text(e.prompt) for e in train} & {prompt_text(e.prompt) for e in heldout}
    for e in (*train, *heldout):
        assert [m["role"] for m in e.prompt] == ["user"]
        assert 2 <= len(e.response) <= 120
        assert 2 <= len(prompt_text(e.prompt)) <= 120
        assert e.response == " ".join(e.response.split())
    assert len({e.id for e in (*train, *heldout)}) == len(train) + len(heldout)
    dropped = sum(n for name, n in stats.items() if name.startswith("dropped_")) - stats["dropped_without_reply"]
    assert stats["read_pairs"] == stats["train_pairs"] + stats["heldout_pairs"] + dropped
    assert stats["read_conversations"] == count
    assert recorder.reports[-1] == (count, count)
    assert len(recorder.tables["data_examples"][1]) == 20
    prepare(tmp_path / "b", **limits)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_adding_conversations_moves_none(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(300)]
    few = prepare(tmp_path / "a", source=rows_file(tmp_path / "few.jsonl", rows[100:]), heldout_fraction=0.2)
    # The new rows stand before the old ones, so row numbers change.
    many = prepare(tmp_path / "b", source=rows_file(tmp_path / "many.jsonl", rows), heldout_fraction=0.2)
    assert {e.response for e in few[0]} <= {e.response for e in many[0]}
    assert {e.response for e in few[1]} <= {e.response for e in many[1]}
    assert len(many[0]) + len(many[1]) == 300
    other = prepare(tmp_path / "c", seed=1, source=str(tmp_path / "many.jsonl"), heldout_fraction=0.2)
    assert {e.response for e in other[1]} != {e.response for e in many[1]}


def test_every_reason_to_drop_is_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"question {i}", "completion": "fine"} for i in range(50)]
    rows += [
        {"prompt": "  ", "completion": "empty prompt"},
        {"prompt": "empty reply", "completion": "\n"},
        {"prompt": "short reply", "completion": "k"},
        {"prompt": "long reply", "completion": "x" * 41},
        {"prompt": "long prompt" * 4, "completion": "fine"},
        {"messages": [{"role": "assistant", "content": "no reply"}]},
    ]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    limits: dict[str, Any] = {"min_chars": 2, "max_chars": 40}
    train, heldout, stats, _ = prepare(tmp_path / "a", source=source, heldout_fraction=0.2, **limits)
    assert len(train) + len(heldout) == 50
    listed = [json.loads(line) for line in (tmp_path / "a" / "dropped.jsonl").read_text().splitlines()]
    assert listed == [
        {"reason": "empty", "row": 51, "reply": 0},
        {"reason": "empty", "row": 52, "reply": 0},
        {"reason": "too_short", "row": 53, "reply": 0},
        {"reason": "too_long", "row": 54, "reply": 0},
        {"reason": "too_long", "row": 55, "reply": 0},
        {"reason": "without_reply", "row": 56},
    ]
    said = (
        "dropped 5 of 55 replies: 2 longer than max_chars, 2 empty, 1 shorter than min_chars; 1 of 56 rows without a "
        "reply to learn; listed in dropped.jsonl of the checkpoint"
    )
    assert data_findings({f"data/{name}": [(0, float(count))] for name, count in stats.items()}) == [said]
    assert stats == {
        "dropped_empty": 2,
        "dropped_heldout_prompt_seen_in_training": 0,
        "dropped_too_long": 2,
        "dropped_too_short": 1,
        "dropped_without_reply": 1,
        "heldout_conversations": len(heldout),
        "heldout_pairs": len(heldout),
        "read_conversations": 56,
        "read_pairs": 55,
        "read_records": 56,
        "train_conversations": len(train),
        "train_pairs": len(train),
    }


def test_withdrawn_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"a question of person {n}, in full", "completion": f"an answer to person {n}"} for n in range(40)
    ]
    texts = WithdrawnTexts.read(tmp_path / "texts.json")
    texts.add([rows[3]["prompt"], rows[5]["completion"]])
    texts.write(tmp_path / "texts.json")
    source, withdrawn = rows_file(tmp_path / "rows.jsonl", rows), str(tmp_path / "texts.json")
    train, heldout, stats, _ = prepare(tmp_path / "out", source=source, withdrawn=withdrawn, heldout_fraction=0.2)
    kept = {prompt_text(pair.prompt) for pair in train + heldout}
    assert kept == {row["prompt"] for n, row in enumerate(rows) if n not in (3, 5)}
    assert stats["dropped_withdrawn"] == 2
    # Another file gives another key, so that what was made with the rows is not taken for what is made without.
    assert PREPARE.outside(DataConfig(source=source, withdrawn=withdrawn)) == {"source": source, "withdrawn": withdrawn}
    assert "dropped_withdrawn" not in prepare(tmp_path / "all", source=source, heldout_fraction=0.2)[2]


def test_texts_are_kept_to_the_byte(tmp_path: Path) -> None:
    code = "def f(x):\n    if x:\n\t\treturn  '\u00a0'\r\n\n\n{number}  \n"
    rows = [
        {"messages": [{"role": r, "content": code + f"{r} {i}"} for r in ("system", "user", "assistant")]}
        for i in range(40)
    ]
    train, heldout, _, _ = prepare(
        tmp_path / "a", source=rows_file(tmp_path / "rows.jsonl", rows), max_chars=400, heldout_fraction=0.2
    )
    found = [[m["content"] for m in e.prompt] + [e.response] for e in (*train, *heldout)]
    assert sorted(found) == sorted([m["content"] for m in row["messages"]] for row in rows)


def test_tool_calls_are_replies_and_no_text_is_dropped(tmp_path: Path) -> None:
    def conversation(i: int) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": {"i": i}}}
        said = [("user", f"question {i}"), ("assistant", ""), ("tool", ""), ("assistant", f"answer {i}")]
        return [{"role": r, "content": c} | ({"tool_calls": [call]} if r + c == "assistant" else {}) for r, c in said]

    rows = [{"messages": conversation(i), "tools": [{"function": {"name": "f"}}]} for i in range(40)]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    train, heldout, stats, _ = prepare(tmp_path / "a", source=source, context_messages=None, heldout_fraction=0.2)
    assert stats["dropped_empty"] == 0
    assert len(train) + len(heldout) == 80
    for e in (*train, *heldout):
        assert e.prompt[0]["tools"] == [{"function": {"name": "f"}}]
        assert (e.tool_calls is None) == (len(e.prompt) == 3)
        assert len(e.prompt) == 1 or e.prompt[1]["tool_calls"]


def test_a_mixture_has_its_shares_and_says_what_it_read(tmp_path: Path) -> None:
    sources = [
        {
            "source": rows_file(
                tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}", "completion": f"answer {i}"} for i in range(400)]
            ),
            "weight": weight,
        }
        for name, weight in (("code", 0.7), ("chat", 0.2), ("maths", 0.1))
    ]
    train, heldout, stats, _ = prepare(tmp_path / "a", sources=sources, max_conversations=500)
    assert [stats[f"read_conversations_source_{n}"] for n in range(3)] == [350, 100, 50]
    assert [stats[f"kept_pairs_source_{n}"] for n in range(3)] == [350, 100, 50]
    assert len(train) + len(heldout) == 500
    sources[2]["limit"] = 10
    _, _, stats, _ = prepare(tmp_path / "b", sources=sources, max_conversations=460)
    assert [stats[f"read_conversations_source_{n}"] for n in range(3)] == [350, 100, 10]
    # Where one ends and no limit said so, the mixture does.
    _, _, stats, _ = prepare(tmp_path / "c", sources=sources[:2])
    assert stats["read_conversations_source_0"] == 400
    assert abs(stats["read_conversations_source_1"] - 400 * 2 / 7) <= 1
    with pytest.raises(ValueError, match=r"data\.sources\.1\.source: .*gone\.jsonl' is not a file"):
        prepare(tmp_path / "d", sources=[sources[0], {"source": str(tmp_path / "gone.jsonl")}])
    with pytest.raises(ValueError, match=r"source = 'x\.jsonl' is not allowed together with sources"):
        DataConfig.model_validate({"source": "x.jsonl", "sources": sources})


def test_a_curriculum_orders_training_and_nothing_else(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}", "level": (7 * i) % 5} for i in range(600)]
    level = {row["completion"]: row["level"] for row in rows}
    source = rows_file(tmp_path / "rows.jsonl", rows)
    plain, held, _, _ = prepare(tmp_path / "a", source=source)
    train, heldout, _, _ = prepare(tmp_path / "b", source=source, curriculum="level")
    # Equal levels keep their order.
    assert train == sorted(plain, key=lambda e: level[e.response])
    assert heldout == held
    facts = [json.loads((tmp_path / name / "dataset.json").read_text())["in_order"] for name in "ab"]
    assert facts == [False, True]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        *("dataset.json", "dropped.jsonl", "heldout.arrow", "stats.json", "train.arrow")
    ]
    for value in (None, "hard", float("nan")):
        rows[3]["level"] = value
        with pytest.raises(ValueError, match=r"rows\.jsonl line 4: column 'level' must be a finite number"):
            prepare(tmp_path / f"c{value}", source=rows_file(tmp_path / "rows.jsonl", rows), curriculum="level")
    with pytest.raises(ValueError, match="curriculum = 'level' is not allowed: 'chitchat' has no columns"):
        DataConfig(curriculum="level")


def test_a_prompt_of_training_is_no_held_out_prompt(tmp_path: Path) -> None:
    rows = [
        {"conversation_id": f"c{i}", "prompt": "same" if i % 2 else f"own {i}", "completion": f"answer {i}"}
        for i in range(200)
    ]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    train, heldout, stats, _ = prepare(tmp_path / "a", source=source, heldout_fraction=0.3)
    assert "same" in {prompt_text(e.prompt) for e in train}
    assert "same" not in {prompt_text(e.prompt) for e in heldout}
    assert stats["dropped_heldout_prompt_seen_in_training"] == 200 - len(train) - len(heldout) > 0


def test_rows_of_one_conversation_stay_together(tmp_path: Path) -> None:
    rows = [
        {"conversation_id": f"c{i % 40}", "prompt": f"question {i}", "completion": f"answer {i}"} for i in range(160)
    ]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    train, heldout, stats, _ = prepare(tmp_path / "a", source=source, heldout_fraction=0.3)
    assert len(train) + len(heldout) == 160
    assert not {e.conversation for e in train} & {e.conversation for e in heldout}
    assert stats["read_conversations"] == 40
    assert {(e.id, e.conversation) for e in (*train, *heldout)} == {(f"{i + 1}-0", f"c{i % 40}") for i in range(160)}


def test_an_empty_side_is_refused(tmp_path: Path) -> None:
    source = rows_file(tmp_path / "rows.jsonl", [{"prompt": "only one", "completion": "x" * 500}])
    with pytest.raises(ValueError, match=r"0 training and 0 held-out pairs .* \(dropped: \{'dropped_too_long': 1\}\)"):
        prepare(tmp_path / "a", source=source, max_chars=120)


def test_long_conversations_of_any_script_are_kept_whole(tmp_path: Path) -> None:
    said = ["Почему небо синее? " * 160, "因为瑞利散射。" * 500, "לָמָּה? " * 400, "Because of scattering.\n\n" * 130]
    rows = [
        {"conversations": [{"from": ("human", "gpt")[n % 2], "value": f"{i} {text}"} for n, text in enumerate(said)]}
        for i in range(40)
    ]
    train, heldout, stats, _ = prepare(
        tmp_path / "a", source=rows_file(tmp_path / "rows.jsonl", rows), heldout_fraction=0.2
    )
    assert (len(train) + len(heldout), stats["read_pairs"]) == (80, 80)
    last = next(e for e in train if len(e.prompt) == 3)
    number = last.response.partition(" ")[0]
    assert [*(m["content"] for m in last.prompt), last.response] == [f"{number} {text}" for text in said]


def test_dropped_rows_are_listed_within_bounds(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "completion": "x" * (30 if i % 100 else 3)} for i in range(3000)]
    _, _, stats, _ = prepare(
        tmp_path / "a", source=rows_file(tmp_path / "rows.jsonl", rows), max_chars=20, heldout_fraction=0.5
    )
    listed = (tmp_path / "a" / "dropped.jsonl").read_text().splitlines()
    assert (stats["dropped_too_long"], len(listed)) == (2970, 1001)
    assert json.loads(listed[-1]) == {"reason": "too_long", "more": 1970}


def test_ground_truth_is_carried_along(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"What is {i} + {i}?", "completion": f"It is {2 * i}.", "answer": 2 * i, "note": "\ud800 é"}
        for i in range(40)
    ]
    rows[3] |= {"answer": None}
    source = rows_file(tmp_path / "a.jsonl", rows)
    train, heldout, _, _ = prepare(tmp_path / "out", source=source, columns=["answer", "note"], heldout_fraction=0.3)
    found = {example.prompt[0]["content"]: json.loads(example.columns) for example in train + heldout}
    assert found == {row["prompt"]: {"answer": row["answer"], "note": row["note"]} for row in rows}
    assert train
    assert heldout
    plain, _, _, _ = prepare(tmp_path / "plain", source=source, heldout_fraction=0.3)
    assert {example.columns for example in plain} == {"{}"}
    with pytest.raises(ValueError, match=r"^data\.columns: 'anser' has a value in no record of "):
        prepare(tmp_path / "wrong", source=source, columns=["answer", "anser"])
    with pytest.raises(
        ValueError, match="columns = \\['answer'\\] must be empty with source = 'chitchat', which has none"
    ):
        DataConfig(columns=["answer"])


def test_rows_to_choose_by_are_in_neither_other_side(tmp_path: Path) -> None:
    # Every prompt stands in two conversations.
    rows = [{"prompt": f"question {i // 2}", "completion": f"answer {i}"} for i in range(800)]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    train, heldout, _, _ = prepare(tmp_path / "a", source=source, heldout_fraction=0.2)
    assert not (tmp_path / "a" / "validation.arrow").exists()
    kept, same, stats, _ = prepare(tmp_path / "b", source=source, heldout_fraction=0.2, validation_fraction=0.25)
    validation = list(Pairs(tmp_path / "b" / "validation.arrow", Example))
    prompts = [{prompt_text(e.prompt) for e in side} for side in (kept, same, validation)]
    assert not prompts[0] & prompts[1]
    assert not prompts[0] & prompts[2]
    assert not prompts[1] & prompts[2]
    # Held-out rows whose prompt stood in training may stand in it no more; nothing else moves.
    assert {e.id for e in heldout} <= {e.id for e in same}
    assert {e.id for e in kept} <= {e.id for e in train}
    assert stats["validation_pairs"] == len(validation) > 20
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        *("train.arrow", "heldout.arrow", "validation.arrow", "stats.json", "dataset.json", "dropped.jsonl")
    }
    assert all(text in held_out_prompts(tmp_path / "b") for side in prompts[1:] for text in side)
    assert not any(text in held_out_prompts(tmp_path / "b") for text in prompts[0])


def test_prompts_alone_are_kept_and_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"question {i}", "answer": i, "url": "x"} for i in range(40)]
    rows += [{"messages": [{"role": "user", "content": f"asked {i}"}], "answer": i} for i in range(40)]
    rows += [{"prompt": f"rated {i}", "completion": f"answer {i}", "label": i % 2 == 0} for i in range(40)]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    train, heldout, stats, _ = prepare(tmp_path / "a", source=source, columns=["answer"], heldout_fraction=0.2)
    alone = [e for e in train + heldout if not e.has_reply]
    assert {json.loads(e.columns)["answer"] for e in alone} == set(range(40))
    assert {e.response for e in train + heldout if e.has_reply} == {f"answer {i}" for i in range(0, 40, 2)}
    assert (len(alone), stats["prompts_without_reply"], stats["dropped_undesirable"]) == (80, 80, 20)
    assert stats["columns_not_read"] == {"url": 40}
    listed = [json.loads(line) for line in (tmp_path / "a" / "dropped.jsonl").read_text().splitlines()]
    assert listed == [{"reason": "undesirable", "row": 82 + i} for i in range(0, 40, 2)]
    numbers = {name: count for name, count in stats.items() if isinstance(count, int)}
    series = {f"data/{name}": [(0, float(count))] for name, count in numbers.items()}
    assert data_findings(series | {"data/columns_not_read/url": [(0, 40.0)]}) == [
        "20 of 120 rows with replies labelled as bad (label); listed in dropped.jsonl of the checkpoint",
        "80 of 100 prompts have no reply: sft leaves them out",
        "columns not read: url 40",
    ]


def test_reasoning_is_kept(tmp_path: Path) -> None:
    thought = [None, "", "let me see"]
    replies = [{"role": "assistant", "content": "a", "thinking": thought[i % 3]} for i in range(60)]
    replies += [{"role": "assistant", "thinking": "t"}] * 30
    rows = [{"messages": [{"role": "user", "content": f"q {i}"}, reply]} for i, reply in enumerate(replies)]
    train, heldout, stats, _ = prepare(
        tmp_path / "a", source=rows_file(tmp_path / "rows.jsonl", rows), heldout_fraction=0.3
    )
    found = {int(e.prompt[0]["content"][2:]): (e.response, e.reasoning_content) for e in train + heldout}
    assert found == {i: ("a", thought[i % 3] or None) if i < 60 else ("", "t") for i in range(90)}
    assert stats["dropped_empty"] == 0
    assert train[0].reply.keys() <= {"role", "content", "reasoning_content"}
