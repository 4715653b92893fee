"""Tables for terminals of any width and for pipes."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP = 2
MIN_TEXT = 24
"""Smallest readable width of the last cell of a row."""


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print `rows` in columns; the last cell of a row wraps between words.

    A terminal too narrow for that gets a line for each cell. A pipe gets a line for each row, whatever its length.

    Args:
        right: columns of numbers, aligned to the right.
    """
    listed = [list(columns), *map(list, rows)]
    widths = [max(cell_len(row[i]) for row in listed) for i in range(len(columns) - 1)]
    indent = sum(widths) + GAP * len(widths)
    room = console.width - indent if console.is_terminal else None
    if room is not None and room < min(MIN_TEXT, max(cell_len(row[-1]) for row in listed)):
        _print_cells(console, columns, rows)
        return
    for number, row in enumerate(listed):
        head = "".join(
            _padded(cell, width, column in right) + " " * GAP
            for column, cell, width in zip(columns, row, widths, strict=False)
        )
        lines = wrapped(row[-1], room)
        for line, text in enumerate(lines):
            before = head if line == 0 else " " * indent
            show(console, (before + text).rstrip(), "bold" if number == 0 else "")


def _print_cells(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if cell:
                name = f"{column}: " if column and number else ""
                for text in wrapped(cell, console.width - GAP - len(name)):
                    show(console, f"{' ' * GAP if number else ''}{name}{text}", "" if number else "bold")
                    name = " " * len(name)


def print_indented(console: Console, head: str, text: str, style: str = "") -> None:
    """Print `text` after `head`, with continuation lines aligned; in a pipe, lines are not wrapped."""
    room = console.width - cell_len(head) if console.is_terminal else None
    for paragraph in text.split("\n"):
        for line in wrapped(paragraph, room):
            show(console, (head + line).rstrip(), style)
            head = " " * cell_len(head)


def wrapped(text: str, width: int | None) -> list[str]:
    """`text` in lines of at most `width`, broken only between words; one line if `width` is None."""
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def show(console: Console, line: str, style: str = "") -> None:
    """Print a line without markup and wrapping."""
    console.print(Text(line, style=style), soft_wrap=True, highlight=False)


def say(text: str) -> None:
    """`show` on stdout."""
    show(Console(), text)


def _padded(cell: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if right else cell + space
