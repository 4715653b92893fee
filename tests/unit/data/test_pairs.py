"""Pairs on disk: what is written is read back, byte for byte the same each time; what is damaged is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from xray_runtime.data.pairs import BATCH_ROWS, Example, Pairs, PreferenceExample, pairs_of, prompt_text, write_pairs

PROMPT = [{"role": "user", "content": "h\u00e9 \u2028 \U0001f642"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("count", [0, 1, BATCH_ROWS - 1, BATCH_ROWS, BATCH_ROWS + 1, 2 * BATCH_ROWS + 7])
def test_rows_are_found_in_any_order(count: int, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    examples = [Example(f"{i}-0", f"c{i}", PROMPT[: 1 + i % 2], "x" * (i % 5)) for i in range(count)]
    assert write_pairs(path, Example, iter(examples)) == count
    pairs = Pairs(path, Example)
    assert len(pairs) == count
    assert list(pairs) == examples
    assert [pairs[i] for i in reversed(range(count))] == examples[::-1]
    assert pairs[-3:] == examples[-3:]
    assert list(pairs.prompt_texts()) == [prompt_text(e.prompt) for e in examples]
    with pytest.raises(IndexError):
        pairs[count]
    content = path.read_bytes()
    write_pairs(path, Example, examples)
    assert path.read_bytes() == content


def test_anyone_can_read_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write_pairs(tmp_path / "p.arrow", PreferenceExample, [PreferenceExample("p", PROMPT, "good", "bad")])
    [row] = pandas.read_feather(tmp_path / "p.arrow").to_dict("records")
    said = [{part: message[part] for part in ("role", "content")} for message in row["prompt"]]
    assert (row["id"], said, row["chosen"], row["rejected"]) == ("p", PROMPT, "good", "bad")
    assert list(pairs_of(tmp_path / "p.arrow")) == [PreferenceExample("p", PROMPT, "good", "bad")]


def test_tools_are_kept_as_they_are(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"b": 1, "a": [None, "\n \u00a0"]}}}
    prompt = [
        {"role": "user", "content": "x\t\n", "tools": [{"function": {"name": "f", "parameters": {}}}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "name": "f", "tool_call_id": "1"},
    ]
    examples = [Example("0", "c", prompt, "", [call]), Example("1", "c", prompt[:1], "said")]
    write_pairs(tmp_path / "a.arrow", Example, examples)
    assert list(Pairs(tmp_path / "a.arrow", Example)) == examples
    pairs = [
        PreferenceExample("0", prompt, "", "no", [call]),
        PreferenceExample("1", prompt, "a", "b", [call, call], [call]),
        PreferenceExample("2", prompt, "a", "b"),
    ]
    write_pairs(tmp_path / "p.arrow", PreferenceExample, pairs)
    assert list(Pairs(tmp_path / "p.arrow", PreferenceExample)) == pairs
    said = '[{"id":"1","function":{"name":"f","arguments":{"b":1,"a":[null,"\\n \u00a0"]}}}]'
    assert prompt_text(prompt) == f"x\t\n\n{said}\n"
    assert pairs[0].texts == (said, "no")
    assert pairs[1].texts[1] == f"b\n{said}"


def test_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    pairs = [Example(str(i), "c", PROMPT, "reply") for i in range(600)]
    write_pairs(path, Example, pairs)
    with pytest.raises(
        ValueError, match=r"a\.arrow: not a file of PreferenceExamples, or damaged \(its columns are id, "
    ):
        Pairs(path, PreferenceExample)
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], b"", b"{}\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.arrow: not a file of Examples, or damaged"):
            Pairs(path, Example)
    # Batches of another size: rows would be looked for in the wrong ones.
    write_pairs(path, Example, pairs)
    table = pa.ipc.open_file(str(path)).read_all()
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=100)
    with pytest.raises(ValueError, match="batch 0 has 100 rows"):
        list(Pairs(path, Example))


def test_any_damaged_byte_raises_a_value_error(tmp_path: Path) -> None:
    """A dataset may come from anybody: one that lies about its lengths must not make us read beyond its end."""
    path, rng = tmp_path / "a.arrow", random.Random(0)
    write_pairs(path, Example, [Example(str(i), "c", PROMPT, "reply" * i) for i in range(20)])
    content, refused = path.read_bytes(), 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] = rng.choice([0, 127, 128, 255])
        path.write_bytes(damaged)
        try:
            list(Pairs(path, Example))
        except ValueError:
            refused += 1
    assert refused > 20
