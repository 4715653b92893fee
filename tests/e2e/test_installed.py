"""The wheel in an environment of its own, far from the repository: the command and type checkers work there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, environment

BIN = Path(sys.executable).parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("xray", "xray_runtime", *SETTINGS["tool"]["setuptools"]["package-dir"].values())
FILES = (".ci/stubs.py", "pyproject.toml", "setup.py", "README.md", "LICENSE")
OWN = (ROOT / "tests" / "user_script" / "own.py").read_text(encoding="utf-8")
MISTAKES = {
    "steps=30": "stepz=30",
    '{"coef": 0.01}': '{"coeff": 0.01}',
    'method="grpo"': 'method="grpoo"',
    "seed=seed": "sead=seed",
    "prompts=sums,\n            rewards": "promts=sums,\n            rewards",
    '"kind": "math"': '"kind": "maths"',
}
"""What a user may write by mistake."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of an environment with the wheel, and with the libraries that are installed here."""
    folder = tmp_path_factory.mktemp("installed")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "sources" / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    (folder / "sources" / ".ci").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder / "sources" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "wheel", *options, "--wheel-dir", str(folder), str(folder / "sources")], folder)
    shutil.rmtree(folder / "sources")
    venv.create(folder / "env")
    python = folder / "env" / "bin" / "python"
    run([*pip, "--python", str(python), "install", *options, *map(str, folder.glob("*.whl"))], folder)
    [site] = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python.parent


def run(command: list[str], folder: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_has_the_stub_that_the_code_gives(installed: Path) -> None:
    [packed] = (installed.parent / "lib").glob("python*/site-packages/xray/__init__.pyi")
    run([sys.executable, str(ROOT / ".ci" / "stubs.py")], installed)
    assert packed.read_text(encoding="utf-8") == (ROOT / "xray" / "__init__.pyi").read_text(encoding="utf-8")


def shipped(installed: Path, name: str) -> str:
    code = f"import xray.configs; print(xray.configs.__path__[0] + '/{name}')"
    return run([str(installed / "python"), "-c", code], installed).stdout.strip()


def test_the_command_helps_and_plans(installed: Path, tmp_path: Path) -> None:
    assert "the whole life of an RLHF model" in run([str(installed / "xray"), "--help"], tmp_path).stdout
    config = shipped(installed, "tiny.yaml")
    assert Path(config).is_relative_to(installed.parent)
    assert "policy" in run([str(installed / "xray"), "plan", config], tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


def test_a_project_with_folders_of_these_names_gets_its_own(installed: Path, tmp_path: Path) -> None:
    for name in ("configs", "deployments", "flows", "tasks"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    code = "import configs, deployments, flows, tasks, xray.flows, xray.tasks; print(flows.MINE, xray.flows.__file__)"
    mine, place = run([str(installed / "python"), "-c", code], tmp_path).stdout.split()
    assert mine == "True"
    assert Path(place).is_relative_to(installed.parent)


@pytest.mark.long
def test_a_lifecycle_runs(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "xray"), "run", shipped(installed, "tiny.yaml"), "--output", "run", "--json"]
    lifecycle = json.loads(run(command, tmp_path, timeout=900).stdout)
    assert lifecycle["status"] == "completed"
    assert lifecycle["registered"]


def readme() -> str:
    return next(block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


SKIPPED = re.findall(
    r"\w+",
    """
alembic apprise beartype chardet cryptography cv2 dns docket fastapi google griffe huggingface_hub IPython
markdown_it matplotlib mcp mistral_common mlflow opentelemetry peft pendulum PIL pyarrow ray redis rich
ruamel sqlalchemy starlette torch transformers uvicorn vllm websockets werkzeug
""",
)
"""Libraries that no annotation of a script needs: mypy reads them for minutes."""
Errors = Iterator[tuple[str, str]]
"""(name of a file, error in it)"""


def mypy(installed: Path, folder: Path) -> Errors:
    names = ",".join(f"{name}.*" for name in SKIPPED)
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{names}]\nfollow_imports = skip\n")
    command = [str(BIN / "mypy"), "--strict", f"--python-executable={installed / 'python'}", "."]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        if ": error: " in line:
            yield line.partition(":")[0], line


def pyright(installed: Path, folder: Path) -> Errors:
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    command = [str(BIN / "pyright"), "--pythonpath", str(installed / "python"), "--outputjson"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        yield Path(found["file"]).name, found["message"]


@pytest.mark.long
@pytest.mark.parametrize("check", [mypy, pyright])
@pytest.mark.timeout(1200)
def test_a_users_script_is_typed(check: Callable[[Path, Path], Errors], installed: Path, tmp_path: Path) -> None:
    """It passes in strict mode; each mistake in a copy of it is found."""
    (tmp_path / "readme.py").write_text(readme())
    (tmp_path / "own.py").write_text(OWN)
    for number, (right, wrong) in enumerate(MISTAKES.items()):
        assert OWN.count(right) == 1, right
        (tmp_path / f"mistake_{number}.py").write_text(OWN.replace(right, wrong))
    errors = list(check(installed, tmp_path))
    assert [error for name, error in errors if not name.startswith("mistake")] == []
    assert {name for name, _ in errors} == {f"mistake_{number}.py" for number in range(len(MISTAKES))}
