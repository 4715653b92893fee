"""The lineage of a checkpoint as an artifact in Prefect and as an HTML page."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.log import log_files
from xray_runtime.lineage.page import write_html
from xray_runtime.lineage.reference import LineageStore, resolve
from xray_runtime.lineage.render import lineage_mermaid, lineage_text, selection
from xray_runtime.lineage.signing import signing_key

FOLDER = "lineage"


@flow(name="lineage", flow_run_name="lineage {reference}", persist_result=False)
def lineage(output: str, reference: str, descendants: bool = False, tracking_uri: str | None = None) -> str:
    """Publish the lineage of `reference` (as in `xray lineage`) as an artifact; returns the path of its HTML page."""
    place, node = resolve(reference, Path(output).absolute(), tracking_uri)
    return str(publish_lineage(place, node, descendants))


def publish_lineage(place: LineageStore, node: Node, descendants: bool = False) -> Path:
    """Write `output/lineage/CHECKPOINT.html`, and an artifact `lineage` of the current flow run that links to it."""
    page = place.output.absolute() / FOLDER / f"{node.directory.name}.html"
    page.parent.mkdir(exist_ok=True)
    write_html(page, place, node, selection(place.graph, node, descendants))
    output = place.output.absolute()
    log_files(output, signing_key(output), [page], "lineage")
    fence = "```"
    lines = [
        f"Lineage of `{node.sha256[:12]}`, with config, results and files: [{page}]({page.as_uri()})",
        "",
        *(f"{fence}mermaid", *lineage_mermaid(place.graph, node, descendants), fence),
        "",
        *(f"{fence}text", *(line.replace("`", "'") for line in lineage_text(place.graph, node, descendants)), fence),
    ]
    create_markdown_artifact("\n".join(lines), key="lineage", description=f"lineage of {node.name}")
    return page
