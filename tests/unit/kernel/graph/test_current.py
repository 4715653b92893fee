"""The graph that a call is added to, and workspaces that are only planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import xray
from tests.unit.kernel.graph.calls import parts, refused
from xray_runtime.kernel.graph.current import current_graph
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.graph.planning import is_planning, planning


def test_a_stage_needs_a_graph() -> None:
    said = refused(lambda: xray.base(model="x"))
    assert said == 'a stage can be called only inside `with xray.workspace("DIRECTORY"):`'


def test_the_innermost_graph_counts() -> None:
    with recording() as outer:
        with recording() as inner:
            assert current_graph() is inner
            xray.base(model="x")
        assert current_graph() is outer
    assert (list(outer.calls), list(inner.calls)) == ([], ["base"])


def test_planning_records_every_workspace(tmp_path: Path) -> None:
    """Servers, `until` and what goes into records are left out; nothing is written."""
    out = tmp_path / "a"
    assert is_planning() is None
    with planning() as graphs:
        options: dict[str, Any] = {"runtime": {"device": "cpu"}, "until": "base", "project": "p", "gates": {}}
        with xray.workspace(out, seed=5, generator={"engine": "transformers"}, **options) as opened:
            data, base, _ = parts()
            xray.sft(base, data)
            xray.register(base)
        with xray.workspace(str(tmp_path / "b")):
            xray.base(model="x")
    assert is_planning() is None
    assert [(directory, list(graph.calls)) for directory, graph in graphs] == [
        (out, ["prepare", "base", "preferences", "reward_model", "sft"]),
        (tmp_path / "b", ["base"]),
    ]
    first = graphs[0][1]
    assert opened is first
    assert (first.seed, first.runtime.device) == (5, "cpu")
    assert first.defaults == {"generator": {"engine": "transformers"}}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sed": 3}, "sed: unknown field: no stage kind has a field of this name"),
        ({"runtime": {"devise": "cpu"}}, "runtime.devise: unknown field (did you mean device?); allowed here: "),
        ({"seed": "3"}, "seed: '3' is not allowed: must be a whole number from 0 to 2147483647"),
    ],
)
def test_options_of_a_workspace_are_checked(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    def opened() -> None:
        with planning(), xray.workspace(tmp_path, **options):
            pass

    assert refused(opened).startswith(message)
