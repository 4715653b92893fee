"""The docs: what they link to exists, their code compiles and writes graphs, and they stay short."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from xray_runtime.data.columns import GROUPS
from xray_runtime.engines.layouts import GENERATORS, TRAINERS
from xray_runtime.kernel.graph.kind import KINDS
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.graph.planning import planning

ROOT = Path(__file__).parents[3]
README, GRAPHS = ROOT / "README.md", ROOT / "docs" / "graphs.md"
MADE = {"kinds.md", "config.md", "cli.md", "columns.md", "engines.md"}
"""Pages that `docs/hooks.py` makes from the code."""
MEASURED = {
    "methods-table.md",
    "families-table.md",
    "identity-table.md",
    "layouts.md",
    "planning-table.md",
    "routes.md",
    "score-centering.md",
    "results.md",
}
"""Pages of what benchmarks measured."""
LIMITS = {"gpu.md": 1300, "planning.md": 1100, "troubleshooting.md": 450, "recording.md": 320, "gpu-matrix.md": 360}
LIMITS |= {"rows.md": 480, "reasoning.md": 350, "pictures.md": 670, "witness.md": 500, "verify-without-xray.md": 390}
LIMITS |= {"replay.md": 400, "glance.md": 960, "studio.md": 610, "studio-pictures.md": 460, "first-hour.md": 1500}
"""Pages with a limit of words of their own."""
WRITTEN = ("first", "first_rewards", "judges", "shortest", "graph")
"""Modules that README and docs/graphs.md have their reader write."""
PAGES = sorted(ROOT.glob("docs/*.md"))
AGENTS = ROOT / "AGENTS.md"
TEXTS = [README, AGENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:xray|deployments|flows|tasks|xray_runtime|examples|configs|benchmarks|docs|tests)/[\w./-]*)`")


def blocks(path: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(path.read_text(encoding="utf-8")) if kind == language]


def words(path: Path) -> int:
    """Words of the text; code blocks, rules of tables and comments are none."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_python_in_the_docs_compiles(path: Path) -> None:
    for number, block in enumerate(blocks(path, "python")):
        compile(block, f"{path.name}, block {number}", "exec")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Modules and stage kinds that a test makes are gone after it."""
    find_kind("")
    modules, kinds = set(sys.modules), set(KINDS)
    yield
    for name in {*WRITTEN} - modules:
        sys.modules.pop(name, None)
    for name in KINDS.keys() - kinds:
        del KINDS[name]


def run_module(name: str, source: str) -> types.ModuleType:
    assert name in WRITTEN
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    return module


@pytest.mark.usefixtures("forgotten")
def test_the_graphs_of_the_page_can_be_written() -> None:
    # In the order of the page; nothing runs, but every field and every type of input is checked.
    [first], (judges, shortest, graph) = blocks(README, "python"), blocks(GRAPHS, "python")
    with planning() as graphs:
        module = run_module("first", first)
        run_module("first_rewards", "from first import brevity").brevity = module.brevity
        run_module("judges", judges).judges.fn()
        run_module("shortest", shortest)
        run_module("graph", graph)
    start = ["prepare", "fresh_base", "sft"]
    judging = [f"{rating}-{stage}" for rating in ("upbeat", "interesting") for stage in ("pairs", "judge")]
    assert [list(g.calls) for _, g in graphs] == [
        [*start, "ppo", "evaluate"],
        [*start, *judging, "ppo", "evaluate"],
        ["prepare", "fresh_base", "shortest", "sft"],
    ]


def test_the_notebook_is_the_page_of_the_first_hour() -> None:
    found = importlib.util.spec_from_file_location("notebook", ROOT / ".ci" / "notebook.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    # `python .ci/notebook.py` writes it.
    text = made.NOTEBOOK.read_text(encoding="utf-8")
    assert text == made.notebook(made.PAGE.read_text(encoding="utf-8"))
    cells = json.loads(text)["cells"]
    assert ["".join(c["source"]) for c in cells if c["cell_type"] == "code"][1:] == [
        block.strip() for block in blocks(made.PAGE, "python")
    ]


@pytest.mark.usefixtures("forgotten")
def test_the_readmes_graph_can_be_written() -> None:
    with planning() as graphs:
        for block in blocks(README, "python"):
            run_module("first", block)
    assert [list(g.calls) for _, g in graphs] == [["prepare", "fresh_base", "sft", "ppo", "evaluate"]]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if target.name in MADE and target.parent.name == "docs":
            continue
        assert target.exists(), f"{path.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path.name}: {link}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_files_that_are_named_exist(path: Path) -> None:
    missing = [name for name in PATH.findall(path.read_text(encoding="utf-8")) if not (ROOT / name).exists()]
    assert not missing, f"{path.name}: {missing}"


def test_commands_in_the_readme_exist() -> None:
    from typer.main import get_command

    from xray.cli.main import app

    commands = set(getattr(get_command(app), "commands", {}))
    named = set(re.findall(r"\bxray ([a-z]+)\b", "\n".join(re.findall(r"`[^`]+`|^xray .*$", README.read_text(), re.M))))
    assert named, "the README names no command"
    assert named <= commands, named - commands


def test_the_page_for_assistants_is_short_and_its_commands_exist() -> None:
    text = AGENTS.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    commands = re.findall(r"^(?:make|\.venv/bin)\S* .*$|`((?:make|\.venv/bin/\S+) [^`]+)`", text, re.MULTILINE)
    lines = [line.partition("#")[0] for line in "\n".join(blocks(AGENTS, "")).splitlines()] + [c for c in commands if c]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {found[1] for line in lines if (found := re.match(r"make ([a-z-]+)", line))}
    assert named <= targets, named - targets
    assert {"install", "lint", "unit"} <= named
    paths = [path for line in lines for path in re.findall(r"(?:tests|configs)/[\w./-]+", line)]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
    binaries = set(re.findall(r"\.venv/bin/(\w+)", text))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert binaries <= {"pytest", *settings["project"]["scripts"]}


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("hooks")


def test_every_stage_kind_has_a_body_whose_docstring_the_site_can_show(hooks: types.ModuleType) -> None:
    page = hooks.kinds_page()
    for name, kind in KINDS.items():
        assert f"## xray.{name}\n" in page
        for section in kind.sections:
            assert all(f"| `{field}` |" in page for field in section.model_fields)


def test_the_page_of_engines_says_what_each_can_do(hooks: types.ModuleType) -> None:
    page = hooks.engines_page()
    assert "| lora | yes | yes | yes | Adapters" in page
    assert "| transports | plasma | plasma | plasma | plasma, nccl, ipc |" in page
    for registry in (TRAINERS, GENERATORS):
        assert f"| {' | '.join(f'`{name}`' for name in registry)} |" in page


IMPORTS = re.compile(r"^\s*(?:>>> )?(?:from|import) xray_runtime\b", re.MULTILINE)


def test_docs_and_examples_import_xray_alone() -> None:
    # CONTRIBUTING.md shows plugs inside X-ray.
    sources = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/*.ipynb"), *ROOT.glob("docs/*.md"), README]
    texts = {path: path.read_text(encoding="utf-8").replace('\\n"', "").replace('    "', "") for path in sources}
    assert [path.name for path, text in texts.items() if IMPORTS.search(text)] == []
    assert IMPORTS.search('    "from xray_runtime.data import pairs'.replace('    "', ""))


def test_the_site_lists_its_pages_for_programs(hooks: types.ModuleType, tmp_path: Path) -> None:
    nav = [{"Start": "index.md"}, {"How to": [{"The studio": "studio.md"}]}]
    page = "# A title\n\n```\ncode\n```\n\nWhat {name} says. And more.\n"
    text = hooks.llms_text("X-ray", "about it", nav, lambda name: page.replace("{name}", name))
    assert text == (
        "# X-ray\n\n> about it\n\n- [Start](index.html): What index.md says.\n\n## How to\n\n"
        "- [The studio](studio.html): What studio.md says.\n"
    )


def test_the_site_shows_every_column(hooks: types.ModuleType) -> None:
    page = hooks.columns_page()
    for name, group in GROUPS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert [row for row in section.splitlines() if row.startswith("| `")] == [
            f"| `{c.name}` | {c.shape} | {c.dtype} | {c.writer} | {c.readers} | {c.meaning} |" for c in group
        ]
        assert len(section.split("|")[0].split()) > 3


def test_the_docs_stay_short() -> None:
    assert words(README) <= 500
    # The third edition does more: agents in sandboxes, the nightly flow, the studio, withdrawal; the fourth trains
    # adapters, long rows and more families, by more methods, from teachers too, samples without waiting, and signs with
    # keys that it cannot read.
    assert sum(words(page) for page in PAGES if page.name not in {*MEASURED, *LIMITS}) <= 16_750
    # New, and none of it stands elsewhere.
    assert [name for name, limit in LIMITS.items() if words(ROOT / "docs" / name) > limit] == []
