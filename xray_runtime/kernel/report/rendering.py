"""Pages and cards from the templates beside this module, HTML (values are escaped) and Markdown, and texts on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.report.names import title

if TYPE_CHECKING:
    from jinja2 import Environment, Template


TEMPLATES = Path(__file__).with_name("templates")


def template(name: str, folders: tuple[Path, ...] = (TEMPLATES,)) -> Template:
    """The template with this file name in the first folder that has one.

    In Markdown, the filters `code` and `plain` quote untrusted text.
    """
    return _environment(folders).get_template(name)


@cache
def _environment(folders: tuple[Path, ...]) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"code": _code, "number": _number, "plain": _plain, "named": title}
    environment.filters |= {"amount": _amount, "duration": duration, "groups": _groups}
    environment.filters |= {"counted": counted, "moment": _moment}
    return environment


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    texts = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *texts)]


def _number(value: float | str | None) -> str:
    return "–" if value is None or value != value else value if isinstance(value, str) else f"{value:+.3f}"


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rollouts that follow each other, in groups of one prompt."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row["prompt_row"])]


def _amount(value: float) -> str:
    """A number without a sign: counts whole, others to four digits."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time as people say it: `48 s`, `12 min`, `3 h 5 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, name: str) -> str:
    """A number of things as people say it: `1 rollout`, `1,024 rollouts`."""
    return f"{number:,} {name}" + ("s" if number != 1 else "")


def _moment(at: str) -> str:
    """A time of the log (ISO 8601, UTC), to the minute."""
    return f"{at[:16].replace('T', ' ')} UTC" if at else "at an unknown time"


def _code(text: str) -> str:
    """`text` as code, also inside a table."""
    return "`" + re.sub(r"\s+", " ", text.replace("`", "'").replace("|", "\\|")) + "`"


def _plain(text: str) -> str:
    """`text` without Markdown or HTML in it."""
    return re.sub(r"([\\`*_\[\]<>|#!])", r"\\\1", re.sub(r"\s+", " ", text))


def computed_text(stage: Mapping[str, Any]) -> str:
    """The seconds of an entry of lifecycle.json, and the day if another run computed it."""
    seconds = f"{stage['computed_seconds']:.1f} s"
    if not stage["cached"]:
        return seconds
    day = f" on {stage['computed_at'][:10]}" if stage["computed_at"] else ""
    return f"cached; computed in {seconds}{day}"


def run_text(run: Mapping[str, Any]) -> str:
    """How a run ended and its seconds, with those of the cached stages when they were computed."""
    cached = [stage for stage in run["stages"] if stage["cached"]]
    text = f"{run['status']} in {run['seconds']:.0f} s"
    if cached:
        before = sum(stage["computed_seconds"] for stage in cached)
        text += f", {len(cached)} of {len(run['stages'])} stages cached, which took {before:.0f} s to compute"
    return text
