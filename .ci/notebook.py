"""Write `examples/notebook.ipynb` from `docs/first-hour.md`: Python blocks are its cells of code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "first-hour.md", ROOT / "examples" / "notebook.ipynb"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)")


def notebook(page: str) -> str:
    """The notebook of a page, without outputs; its links are relative to `examples/`."""
    cells = [_cell(0, "code", "%matplotlib inline")]
    for part, text in enumerate(CODE.split(page)):
        if text.strip():
            kind = "code" if part % 2 else "markdown"
            cells.append(_cell(len(cells), kind, text.strip() if part % 2 else LINK.sub("](../docs/", text.strip())))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    content = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
