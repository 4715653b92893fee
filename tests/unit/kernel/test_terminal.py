"""Tables in terminals of any width, and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from xray_runtime.kernel.terminal import print_indented, print_table

COLUMNS = ("stage", "seconds", "why")
ROWS = [
    ("prepare", "1.5", "cached; computed in 48.0 s on 2026-11-23"),
    ("a-policy-with-a-long-name", "120.0", "sft.lr 0.001 → 0.002; code xray_runtime.algorithms.losses"),
    ("評価", "3.0", ""),
]


def printed(width: int, terminal: bool, color: bool = False) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, no_color=not color)
    print_table(console, COLUMNS, ROWS, right=("seconds",))
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(width: int) -> None:
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in printed(width, terminal=True)]
    assert all(cell_len(line) <= width for line in lines if " " in line.strip())
    words = {word for row in (COLUMNS[1:], *ROWS) for cell in row for word in cell.split()}
    shown = " ".join(lines).split()
    assert words <= {word.removesuffix(":") for word in shown} | set(shown)


def test_a_pipe_gets_whole_lines_without_colour() -> None:
    lines = printed(40, terminal=False)
    assert len(lines) == 1 + len(ROWS)
    assert lines[2] == "a-policy-with-a-long-name    120.0  sft.lr 0.001 → 0.002; code xray_runtime.algorithms.losses"
    assert lines[0] == "stage                      seconds  why"
    assert not any("\x1b" in line for line in lines)


def test_a_narrow_terminal_gets_a_line_for_each_cell() -> None:
    lines = printed(30, terminal=True)
    assert "  seconds: 1.5" in lines
    assert "  why: cached; computed in" in lines


def test_text_is_indented_below_its_head() -> None:
    text = io.StringIO()
    print_indented(
        Console(file=text, width=30, force_terminal=True), "  reply   ", "one two three four\nfive [bold]six"
    )
    assert text.getvalue().splitlines() == ["  reply   one two three four", "          five [bold]six"]
