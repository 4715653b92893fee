"""Every lesson and every other example can be read, written down as a graph and planned; its README names it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from xray.flows.lifecycle_graph import recorded_graph
from xray.flows.subject import Subject
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.kernel.graph.graph import Graph
from xray_runtime.methods.loading import load_config
from xray_runtime.ops.planner.auto import plan

ROOT = Path(__file__).parents[3]
LESSONS = sorted((ROOT / "examples" / "lessons").glob("[0-9]*.py"))
EXAMPLES = ["guess_number", "guess_together", "online_dpo", "side_by_side", "squares_vlm", "two_judges"]
"""The others that are a flow named as their file."""
MAX_CODE_LINES = 60
"""Of a lesson, its docstring and blank lines not counted."""
ROW = re.compile(r"^\| `([\w./]+)` \|", re.MULTILINE)


def target(path: Path) -> str:
    """`module:flow` of a lesson."""
    return f"examples.lessons.{path.stem}:{path.stem.partition('_')[2]}"


def graph(name: str, output: Path) -> Graph:
    return Subject(flow=name, parameters={"output": str(output)}).recorded()


def test_lessons_are_numbered_without_a_gap() -> None:
    assert [int(path.stem[:2]) for path in LESSONS] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_short_and_says_what_comes_next(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    said = ast.get_docstring(tree) or ""
    assert said.startswith(f"Lesson {int(path.stem[:2])}: ")
    assert f"xray run {target(path)}\n" in said + "\n" or f"xray run {target(path)} " in said
    assert "Change next: " in said
    lines = text.splitlines()[tree.body[0].end_lineno :]
    assert len([line for line in lines if line.strip()]) <= MAX_CODE_LINES
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    tops = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert tops <= {"prefect", "torch", "xray"}


@pytest.mark.parametrize("name", [*map(target, LESSONS), *(f"examples.{e}:{e}" for e in EXAMPLES)])
def test_an_example_is_planned(name: str, tmp_path: Path) -> None:
    found = graph(name, tmp_path)
    assert plan(found, Machine(num_devices=8, memory_bytes=80 * GIB)).fits
    assert plan(found, Machine(num_devices=1, memory_bytes=16 * GIB, device="cpu")).fits


def test_the_last_lesson_is_the_quickstart(tmp_path: Path) -> None:
    ours = graph(target(LESSONS[-1]), tmp_path).calls
    theirs = recorded_graph(load_config(ROOT / "configs" / "quickstart.yaml")).calls
    renamed = {"base": "fresh_base", "reward": "reward_model"}
    assert list(ours) == [renamed.get(name, name) for name in theirs]
    for call, other in zip(ours.values(), theirs.values(), strict=True):
        assert call.config == other.config, call.name


def test_the_readme_has_a_row_for_every_example() -> None:
    folder = ROOT / "examples"
    rows = ROW.findall((folder / "README.md").read_text(encoding="utf-8"))
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in (".py", ".ipynb")}
    folders = {"own_project/", "agents/sdks/"}
    files = {name for name in files if not name.endswith("__init__.py") and not name.startswith(tuple(folders))}
    assert set(rows) == files | folders
    assert len(rows) == len(set(rows))
