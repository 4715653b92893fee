"""`xray lineage`: where a checkpoint came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.options import AsJson, Output, Ref, Tracking

PANEL = "Evidence"


def command(
    ref: Ref,
    output: Output = None,
    tracking_uri: Tracking = None,
    descendants: Annotated[bool, typer.Option("--descendants", help="Also show the checkpoints made from it.")] = False,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page with a clickable graph.")] = None,
) -> None:
    """Show where a checkpoint came from.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve, resolve_history
    from xray_runtime.kernel.history.render import lineage_json, lineage_text, selection

    # Descendants and a page's comparisons need every manifest; a plain history does not.
    read = resolve if descendants or html is not None else resolve_history
    store, node = read(ref, output, tracking_uri)
    if html is not None:
        from xray_runtime.trust.page import write_html

        write_html(html, store, node, selection(store.graph, node, descendants))
    if as_json:
        print(json.dumps(lineage_json(store.graph, node, descendants), indent=2))
    else:
        sys.stdout.writelines(line + "\n" for line in lineage_text(store.graph, node, descendants))
