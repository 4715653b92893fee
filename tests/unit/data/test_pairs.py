"""Records on disk: what is written is read back, byte for byte the same each time."""

from __future__ import annotations

from pathlib import Path

from xray_runtime.data.pairs import (
    Example,
    PreferenceExample,
    prompt_text,
    read_examples,
    read_preferences,
    write_jsonl,
)

PROMPT = [{"role": "user", "content": "h\u00e9 \u2028 \U0001f642"}, {"role": "assistant", "content": "b"}]


def test_examples_round_trip(tmp_path: Path) -> None:
    examples = [Example("c-0", "c", PROMPT, 'say "x"'), Example("c-1", "c", PROMPT, "")]
    assert write_jsonl(tmp_path / "a.jsonl", examples) == 2
    assert read_examples(tmp_path / "a.jsonl") == examples


def test_preferences_round_trip(tmp_path: Path) -> None:
    pairs = [PreferenceExample("p", PROMPT, "good", "bad")]
    write_jsonl(tmp_path / "p.jsonl", pairs)
    assert read_preferences(tmp_path / "p.jsonl") == pairs


def test_the_line_is_the_contract(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [Example("c-0", "c", [{"role": "user", "content": "\u00e9"}], "r")])
    expected = (
        '{"id": "c-0", "conversation": "c", "prompt": [{"role": "user", "content": "\u00e9"}], "response": "r"}\n'
    )
    assert (tmp_path / "a.jsonl").read_bytes() == expected.encode()


def test_prompt_text_leaves_roles_out() -> None:
    assert prompt_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "a\nb"
