"""The picture of a lineage: every stage below its parents, in layers (Sugiyama, Tagawa & Toda 1981).

Deviations: all arrows of one parent share a line past the layers between, and positions are relaxed, not optimal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MIN_NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y = 128, 46, 26, 34
LINE_WIDTH = 2
"""Room for a line that passes a layer."""
MAX_LAYERS = 12
"""An arrow that is longer crosses what is in its way: lines past all layers would be as many as stages squared."""
MARGIN = 4
SWEEPS = 8
MAX_NAME_CHARS, CHAR_WIDTH = 32, 8
"""Longest name in a box; the pointer shows the whole name."""


@dataclass(eq=False)
class _Item:
    """A stage, or the line of a stage past a layer."""

    layer: int
    width: float
    x: float = 0.0
    """Its middle."""
    near: list[_Item] = field(default_factory=list)
    """The items that it is joined with, in the layers beside it."""

    def wanted(self) -> float:
        return sum(item.x for item in self.near) / len(self.near) if self.near else self.x


_Pair = tuple[_Item, _Item]


def lineage_graph(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Positions of boxes and arrows: each stage is below its parents.

    Returns {"width", "height", "nodes": [{"x", "y", "name", "title", "sha", "cached"}], "edges": [SVG path],
    "lines": [SVG path], "node_width", "node_height"}; `edges` end at boxes, `lines` are their common parts.
    """
    by_sha = {stage["checkpoint"]["sha256"]: i for i, stage in enumerate(stages)}
    parents = [sorted({by_sha[p] for p in stage["parents"] if by_sha.get(p, i) < i}) for i, stage in enumerate(stages)]
    names = [_shortened(stage["name"]) for stage in stages]
    node_width = max([MIN_NODE_WIDTH, *(24 + CHAR_WIDTH * len(name) for name in names)])
    boxes = [_Item(layer, node_width) for layer in _layers(parents)]
    items, lines, arrows, distant = list(boxes), list[_Pair](), list[_Pair](), list[_Pair]()
    # The boxes and lines below each stage that its arrows start from, one a layer.
    starts = [[box] for box in boxes]
    for child, of in enumerate(parents):
        for parent in of:
            passed = starts[parent]
            distance = boxes[child].layer - boxes[parent].layer
            if distance > MAX_LAYERS:
                distant.append((boxes[parent], boxes[child]))
                continue
            while len(passed) < distance:
                lines.append((passed[-1], _Item(passed[-1].layer + 1, LINE_WIDTH)))
                passed.append(lines[-1][1])
                items.append(passed[-1])
            arrows.append((passed[distance - 1], boxes[child]))
    for above, below in (*lines, *arrows):
        above.near.append(below)
        below.near.append(above)
    _place(items)
    return {
        "width": max((item.x + item.width / 2 for item in items), default=0) + MARGIN,
        "height": max((_top(box) + NODE_HEIGHT for box in boxes), default=0) + MARGIN,
        "nodes": [
            {
                "x": box.x - node_width / 2,
                "y": _top(box),
                "name": name,
                "title": stage["name"],
                "sha": stage["checkpoint"]["sha256"][:12],
                "cached": stage["cached"],
            }
            for box, name, stage in zip(boxes, names, stages, strict=True)
        ],
        "edges": [_path(above, below) for above, below in (*arrows, *distant)],
        "lines": [f"{_path(above, below)} v{NODE_HEIGHT}" for above, below in lines],
        "node_width": node_width,
        "node_height": NODE_HEIGHT,
    }


def _layers(parents: Sequence[Sequence[int]]) -> list[int]:
    """The layer of each stage: below all its parents; without any, just above its first child."""
    layers: list[int] = []
    for of in parents:
        layers.append(1 + max((layers[p] for p in of), default=-1))
    children = [sys.maxsize] * len(parents)
    for of, layer in zip(parents, layers, strict=True):
        for parent in of:
            children[parent] = min(children[parent], layer)
    for i, of in enumerate(parents):
        if not of:
            layers[i] = children[i] - 1 if children[i] < sys.maxsize else 0
    return layers


def _place(items: Iterable[_Item]) -> None:
    """Order each layer by the middle of what its items are joined with, and move them there as far as room allows."""
    layers: dict[int, list[_Item]] = {}
    for item in items:
        layers.setdefault(item.layer, []).append(item)
    ordered = [layers[number] for number in sorted(layers)]
    for layer in ordered:
        _spread(layer)
    for sweep in range(SWEEPS):
        for layer in ordered if sweep % 2 == 0 else ordered[::-1]:
            layer.sort(key=_Item.wanted)
            for item in layer:
                item.x = item.wanted()
            _spread(layer)
    left = min((item.x - item.width / 2 for layer in ordered for item in layer), default=0.0)
    for layer in ordered:
        for item in layer:
            item.x = round(item.x - left + MARGIN, 1)


def _spread(layer: Sequence[_Item]) -> None:
    """Move the items of a layer apart, about the middle of where they are."""
    middle = sum(item.x for item in layer) / len(layer)
    for before, item in pairwise(layer):
        item.x = max(item.x, before.x + (before.width + item.width) / 2 + GAP_X)
    shift = sum(item.x for item in layer) / len(layer) - middle
    for item in layer:
        item.x -= shift


def _top(item: _Item) -> int:
    return MARGIN + item.layer * (NODE_HEIGHT + GAP_Y)


def _path(above: _Item, below: _Item) -> str:
    """From the lower edge of an item to the upper edge of one in the next layer."""
    start, end = _top(above) + NODE_HEIGHT, _top(below)
    middle = (start + end) / 2
    return f"M{above.x:g},{start} C{above.x:g},{middle:g} {below.x:g},{middle:g} {below.x:g},{end}"


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 13]}…{name[-12:]}"
