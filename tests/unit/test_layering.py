"""Who may import whom: xray → deployments → flows → tasks → xray_runtime, never back."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import pytest

from tests.source_trees import nodes, parsed
from xray_runtime.engines.layouts import GENERATORS, TRAINERS

ROOT = Path(__file__).parents[2]


@functools.cache
def imported(path: Path) -> set[str]:
    """Full names of every absolute import in a file, also those inside functions."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


FORBIDDEN = {
    "xray_runtime": {"prefect", "prefect_ray"},
    "xray": {"flows", "tasks", "deployments"},
    "deployments": {"flows", "tasks", "deployments"},
    "flows": {"flows", "tasks", "deployments"},
    "tasks": {"flows", "tasks", "deployments"},
    "xray_runtime/algorithms": {
        *("ray", "deepspeed", "megatron", "vllm", "transformers", "mlflow", "numpy", "pathlib", "os"),
    },
    "xray_runtime/rewards": {"ray", "deepspeed", "megatron", "vllm", "transformers", "mlflow"},
    "xray_runtime/ops/planner": {"ray", "deepspeed", "megatron", "vllm", "mlflow"},
    "xray_runtime/kernel/store": {"torch", "ray", "mlflow", "vllm", "deepspeed", "megatron", "transformers"},
}
"""Folder → libraries that none of its files imports, and the names that packages of ours only have in the checkout."""

OWNERS = {
    "mlflow": {"xray_runtime/kernel/tracking", "xray_runtime/live", "xray_runtime/trust"},
    "vllm": {"xray_runtime/engines/generators/vllm/"},
    "deepspeed": {"xray_runtime/engines/trainers/deepspeed/", "xray_runtime/engines/generators/deepspeed/"},
    "megatron": {"xray_runtime/engines/trainers/megatron/"},
    "fsspec": {"xray_runtime/kernel/store/shared.py"},
    "peft": {"xray_runtime/models/adapter_files.py"},
    "lm_eval": {"xray_runtime/methods/lm_eval/body.py"},
    "reasoning_gym": {"xray_runtime/agents/environments/reasoning_gym.py"},
}
"""Heavy library → the only places that import it."""


SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
MAPPED = SETTINGS["setuptools"]["package-dir"]
PACKAGES = {"xray": "xray", "xray_runtime": "xray_runtime"} | {folder: package for package, folder in MAPPED.items()}
"""Folder → the name its files are imported under."""


def modules() -> dict[str, Path]:
    """Every module of ours by its name."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def imported_modules(node: ast.AST, known: Container[str], typing: bool = False) -> Iterator[str]:
    """Modules of ours that code imports when it is imported or run; with `typing` also those for type checkers."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if alias.name in known)
        case ast.ImportFrom(module=str(module), names=names):
            submodules = [f"{module}.{alias.name}" for alias in names]
            yield from (name for name in submodules if name in known)
            if module in known and not all(name in known for name in submodules):
                yield module
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=orelse) if (
            not typing
        ):
            for statement in orelse:
                yield from imported_modules(statement, known)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from imported_modules(child, known, typing)


def rings(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules of which each reaches every other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        waiting, seen = list(graph[start]), set[str]()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        reached[start] = seen
    return {
        frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items() if name in seen
    }


def test_no_link_is_in_the_repository() -> None:
    """A checkout without symlinks works, and a tool that follows none sees every file."""
    folders = [*PACKAGES, "benchmarks", "docs", "examples", "tests"]
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    assert len(paths) > 500
    assert [path for path in paths if path.is_symlink()] == []


def test_packages_are_found_under_their_own_names_from_anywhere(tmp_path: Path) -> None:
    code = f"import {', '.join(PACKAGES.values())}, flows; print(xray.flows is not flows, xray.flows.__path__[0])"
    (tmp_path / "flows.py").write_text("")
    for folder in (ROOT, tmp_path):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
        assert done.stdout.split() == ["True", str(ROOT / "flows")], done.stderr


def test_rings_are_found() -> None:
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == {
        frozenset("bc"),
        frozenset("e"),
    }
    code = """
import a
if TYPE_CHECKING:
    import b
else:
    import c
try:
    from d import e
except ImportError:
    from d import name
class C:
    import f
def function():
    import g
"""
    assert list(imported_modules(ast.parse(code), {*"abcdfg", "d.e"})) == ["a", "c", "d.e", "d", "f", "g"]


def imports_of(files: dict[str, Path], typing: bool = False) -> dict[str, set[str]]:
    return {name: set(imported_modules(parsed(path), files, typing)) for name, path in files.items()}


def test_no_file_imports_itself_in_a_ring() -> None:
    files = modules()
    assert {"xray.cli.commands.up", "xray.flows.audit", "xray.deployments.servers", "xray_runtime.kernel.files"} <= set(
        files
    )
    assert rings(imports_of(files)) == set()
    below = {name: path for name, path in files.items() if name.startswith("xray_runtime.")}
    assert {"kernel", "methods", "agents", "live", "ops", "trust"} <= {name.split(".")[1] for name in below}
    assert rings(imports_of(below, typing=True)) == set()


def test_a_ring_inside_functions_is_found(tmp_path: Path) -> None:
    files = modules()
    changed = tmp_path / "files.py"
    text = files["xray_runtime.kernel.files"].read_text(encoding="utf-8")
    changed.write_text(f"{text}\n\ndef later():\n    from xray_runtime.kernel.store.checkpoints import Store\n")
    found = rings(imports_of(files | {"xray_runtime.kernel.files": changed}))
    assert len(found) == 1
    assert {"xray_runtime.kernel.files", "xray_runtime.kernel.store.checkpoints"} <= next(iter(found))


def shared_names(files: Iterable[Path]) -> list[str]:
    """Names that classes of several files have."""
    counts = Counter(node.name for path in files for node in parsed(path).body if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def test_each_class_has_a_name_of_its_own(tmp_path: Path) -> None:
    files = [*modules().values(), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    assert shared_names(files) == []
    other = tmp_path / "other.py"
    other.write_text("class Handle: ...\n")
    assert shared_names([*files, other]) == ["Handle"]


def test_folders_keep_their_order() -> None:
    """The contracts in pyproject.toml hold, also for what only type checkers import."""
    command = [sys.executable, ROOT / ".ci" / "tree.py", "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert SETTINGS["importlinter"]["exclude_type_checking_imports"] is False
    floors = SETTINGS["importlinter"]["contracts"][1]["layers"]
    assert len(floors) <= 8
    folders = {name for floor in floors for name in re.split(r" [|:] ", floor)}
    assert folders == {path.parent.name for path in (ROOT / "xray_runtime").glob("*/__init__.py")}


AGAINST = {
    "a floor above": ("kernel/errors.py", "from xray_runtime.methods.sft import config"),
    "a floor above, for types alone": (
        "algorithms/kl.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from xray_runtime.methods.ppo.config import KLConfig",
    ),
    "another extension, in a function": (
        "agents/gateway.py",
        "def later() -> None:\n    from xray_runtime.ops.planner import search",
    ),
    "an extension, from below": ("methods/sft/body.py", "from xray_runtime.live import canary"),
}
"""A violation → the file, and what it would import."""


def test_imports_against_the_order_break_a_contract(tmp_path: Path) -> None:
    """All are put into one copy of the package, and each is found."""
    shutil.copytree(ROOT / "xray_runtime", tmp_path / "xray_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    for file, code in AGAINST.values():
        changed = tmp_path / "xray_runtime" / file
        changed.write_text(f"{changed.read_text(encoding='utf-8')}\n{code}\n", encoding="utf-8")
    contract = SETTINGS["importlinter"]["contracts"][1]
    lines = ["[importlinter]", "root_package = xray_runtime", "exclude_type_checking_imports = False"]
    lines += ["[importlinter:contract:1]", "name = floors", "type = layers", "containers = xray_runtime"]
    lines += ["layers =", *(f"    {floor}" for floor in contract["layers"])]
    (tmp_path / "floors.ini").write_text("\n".join(lines), encoding="utf-8")
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache", "--config=floors.ini"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    names = {name: file.removesuffix(".py").replace("/", ".") for name, (file, _) in AGAINST.items()}
    assert [name for name, module in names.items() if f"xray_runtime.{module} -> " not in done.stdout] == []


@pytest.mark.parametrize(("folder", "names"), FORBIDDEN.items())
def test_nothing_is_imported_against_the_layers(folder: str, names: set[str]) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        (f.name, name) for f in files for name in imported(f) if any(f"{name}.".startswith(f"{top}.") for top in names)
    ]
    assert found == []


PLUGS = ("xray_runtime.engines.trainers.", "xray_runtime.engines.generators.")
NAMED = {
    # Serving is by vLLM, and a chat in this process by transformers.
    ("xray_runtime.live.serving.replica", "xray_runtime.engines.generators.vllm.server"),
    ("xray_runtime.live.feedback.chat_model", "xray_runtime.engines.generators.transformers.sampler"),
    # One library, which trains and samples.
    ("xray_runtime.engines.generators.deepspeed.sampler", "xray_runtime.engines.trainers.deepspeed.setup"),
    ("xray_runtime.engines.generators.deepspeed.sampler", "xray_runtime.engines.generators.transformers.sampler"),
    # A vLLM elsewhere, and the command that starts it.
    ("xray_runtime.engines.generators.server.launch", "xray_runtime.engines.generators.vllm.loading"),
    ("xray_runtime.engines.generators.server.launch", "xray_runtime.engines.generators.vllm.sampler"),
    ("xray_runtime.engines.generators.server.worker", "xray_runtime.engines.generators.vllm.transfer"),
    ("xray.cli.commands.generator", "xray_runtime.engines.generators.server.launch"),
}
"""(module, module of a plug that it imports by name)."""


def test_an_engine_is_chosen_by_its_name_in_a_config_alone() -> None:
    """Nobody imports a plug, or compares its name, beside the plug itself."""
    imports, files = imports_of(modules()), modules()
    plug_of = {name: ".".join(name.split(".")[:4]) for name in files if name.startswith(PLUGS)}
    found = {
        (name, other)
        for name, others in imports.items()
        for other in others
        if other in plug_of and plug_of[other] != plug_of.get(name)
    }
    assert found == NAMED
    assert {*TRAINERS, *GENERATORS} == {name.split(".")[3] for name in plug_of}
    assert [
        name for name, path in files.items() if re.search(r"\b(library|engine) [!=]= [\"']", path.read_text())
    ] == []


@pytest.mark.parametrize(("library", "owners"), OWNERS.items())
def test_heavy_libraries_have_one_owner(library: str, owners: set[str]) -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("xray/cli", "deployments", "flows", "tasks", "xray_runtime")
        for path in (ROOT / folder).rglob("*.py")
        if any(name.split(".")[0] == library for name in imported(path))
    }
    assert importers
    assert all(any(place.startswith(owner) for owner in owners) for place in importers), importers


def test_a_hidden_argument_belongs_to_a_with_block() -> None:
    """A context variable is set by a context manager beside it, and nowhere else; all others are arguments."""
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in modules().values()}
    assert {name for name, text in files.items() if "ContextVar" in text} == {
        "tasks/command.py",
        "xray_runtime/kernel/graph/current.py",
        "xray_runtime/kernel/graph/planning.py",
    }


def test_commands_import_heavy_libraries_when_they_run() -> None:
    """Bad input is named at once; and what Ray is told in the environment is read when Ray is imported."""
    code = "import sys\nfrom xray.cli.group import COMMANDS\nlist(map(COMMANDS.get, COMMANDS))\n"
    code += "print(*({'mlflow', 'prefect', 'ray', 'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
