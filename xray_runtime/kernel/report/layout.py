"""The picture of a lineage: every stage below its parents, in layers (Sugiyama, Tagawa & Toda 1981).

Deviations: all arrows of one parent share a line past the layers between, and positions are relaxed, not optimal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MIN_NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y = 128, 46, 26, 34
LINE_WIDTH = 2
"""Room for a line that passes a layer."""
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


def lineage_graph(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Positions of boxes and arrows: each stage is below its parents.

    Returns {"width", "height", "nodes": [{"x", "y", "name", "title", "sha", "cached"}], "edges": [SVG path],
    "node_width", "node_height"}.
    """
    by_sha = {stage["checkpoint"]["sha256"]: i for i, stage in enumerate(stages)}
    parents = [sorted({by_sha[p] for p in stage["parents"] if by_sha.get(p, i) < i}) for i, stage in enumerate(stages)]
    names = [_shortened(stage["name"]) for stage in stages]
    node_width = max([MIN_NODE_WIDTH, *(24 + CHAR_WIDTH * len(name) for name in names)])
    boxes = [_Item(layer, node_width) for layer in _layers(parents)]
    items, routes = list(boxes), list[list[_Item]]()
    lines: dict[tuple[int, int], _Item] = {}
    for child, of in enumerate(parents):
        for parent in of:
            route = [boxes[parent]]
            for layer in range(boxes[parent].layer + 1, boxes[child].layer):
                if (parent, layer) not in lines:
                    lines[parent, layer] = _Item(layer, LINE_WIDTH)
                    items.append(lines[parent, layer])
                route.append(lines[parent, layer])
            route.append(boxes[child])
            routes.append(route)
            for above, below in pairwise(route):
                if below not in above.near:
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
        "edges": [_path(route) for route in routes],
        "node_width": node_width,
        "node_height": NODE_HEIGHT,
    }


def _layers(parents: Sequence[Sequence[int]]) -> list[int]:
    """The layer of each stage: below all its parents; without any, just above its first child."""
    layers: list[int] = []
    for of in parents:
        layers.append(1 + max((layers[p] for p in of), default=-1))
    for i, of in enumerate(parents):
        if not of:
            layers[i] = max(0, min((layers[c] for c, found in enumerate(parents) if i in found), default=0) - 1)
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


def _path(route: Sequence[_Item]) -> str:
    """From the lower edge of a box to the upper edge of another, past the layers between."""
    x, y = route[0].x, _top(route[0]) + NODE_HEIGHT
    parts = [f"M{x:g},{y}"]
    for item in route[1:]:
        top = _top(item)
        parts.append(f"C{x:g},{(y + top) / 2:g} {item.x:g},{(y + top) / 2:g} {item.x:g},{top}")
        x, y = item.x, top + NODE_HEIGHT
        if item is not route[-1]:
            parts.append(f"L{x:g},{y}")
    return " ".join(parts)


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 13]}…{name[-12:]}"
