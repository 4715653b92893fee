"""Pages and cards from the templates beside this module: HTML, where values are escaped, and Markdown."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def template(name: str) -> Template:
    """A template by its file name. In Markdown, the filters `code` and `plain` quote untrusted text."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("xray_runtime.report", "templates")
    environment = Environment(loader=loader, autoescape=select_autoescape(["html"]), trim_blocks=True)
    environment.filters |= {"code": _code, "plain": _plain}
    return environment


def _code(text: str) -> str:
    """`text` as code, also inside a table."""
    return "`" + re.sub(r"\s+", " ", text.replace("`", "'").replace("|", "\\|")) + "`"


def _plain(text: str) -> str:
    """`text` without Markdown or HTML in it."""
    return re.sub(r"([\\`*_\[\]<>|#!])", r"\\\1", re.sub(r"\s+", " ", text))
