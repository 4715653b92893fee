"""A digest of code changes with what computes, and with nothing else."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xray_runtime.engines.layouts import GENERATORS, TRAINERS
from xray_runtime.kernel.store.code_digest import CodeDigestError, code_digest, code_reached
from xray_runtime.models.family import FAMILIES
from xray_runtime.rewards.config import REWARDS

ROOT = Path(__file__).parents[4]

FILES = {
    "__init__.py": "from .early import ready\n",
    "early.py": "ready = True\n",
    "alone.py": "def alone(): return 1\n",
    "kinds/__init__.py": "",
    "kinds/train.py": """
        '''Trains.'''
        from __future__ import annotations
        import json
        from typing import TYPE_CHECKING
        import yaml
        from ..losses import nll
        from .. import names
        if TYPE_CHECKING:
            from {p}.hints import Hint
        else:
            from {p} import run_time
        RATE = 0.1
        '''How fast.'''
        def run(x: Hint) -> int:
            '''Runs.'''
            from {p}.deep.inner import step  # late
            return step(nll(x))
    """,
    "hints.py": "class Hint: ...\n",
    "run_time.py": "",
    "names.py": "A = 1\n",
    "losses.py": "def nll(x): return -x\n",
    "deep/__init__.py": "import {p}.deep.other\n",
    "deep/other.py": "",
    "deep/inner.py": "from importlib import import_module\ndef step(x): return import_module('{p}.named').f(x)\n",
    "named.py": "def f(x): return x\n",
}
REACHED = ["early", "kinds", "kinds.train", "losses", "names", "run_time", "deep", "deep.other", "deep.inner", "named"]


def write(folder: Path, files: dict[str, str], package: str) -> None:
    for name, text in files.items():
        lines = text.replace("{p}", package).splitlines()
        margin = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(x[margin:] for x in lines) + "\n", encoding="utf-8")
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def package(folder: Path) -> Path:
    write(folder, FILES, "kit")
    return folder / "kit"


def train() -> dict[str, str]:
    return code_reached(["kit.kinds.train"], ["kit"]).modules


def test_modules_reached_by_imports(package: Path) -> None:
    assert set(train()) == {"kit"} | {f"kit.{name}" for name in REACHED}
    assert set(code_reached(["kit.alone"], ["kit"]).modules) == {"kit", "kit.early", "kit.alone"}
    assert not any(name.split(".")[0] == "kit" for name in sys.modules)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 0.1", "RATE = 0.1  # a comment"),
        ("RATE = 0.1", "\n\n# a comment\nRATE   =   0.1"),
        ("Trains.", "Trains a model."),
        ("Runs.", "Runs a step."),
        ("How fast.", "How fast it learns."),
        ("'''How fast.'''\n", ""),
        ("'''Runs.'''", ""),
    ],
)
def test_words_change_nothing(package: Path, old: str, new: str) -> None:
    before, path = train(), package / "kinds/train.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert train() == before


@pytest.mark.parametrize(("old", "new"), [("0.1", "0.2"), ("step(nll(x))", "nll(step(x))"), ("-> int", "-> float")])
def test_code_changes_its_module_alone(package: Path, old: str, new: str) -> None:
    before, path = train(), package / "kinds/train.py"
    path.write_text(path.read_text().replace(old, new))
    after = train()
    assert {name for name in after if after[name] != before[name]} == {"kit.kinds.train"}
    assert code_digest(after) != code_digest(before)


def test_words_count_where_they_are_read(folder: Path) -> None:
    write(folder, {"__init__.py": "'''One.'''\nprint(__doc__)\n"}, "spoken")
    before = code_reached(["spoken"], ["spoken"]).modules
    write(folder, {"__init__.py": "'''Two words.'''\nprint(__doc__)\n"}, "spoken")
    assert code_reached(["spoken"], ["spoken"]).modules != before


def test_a_module_that_appears_is_seen(package: Path) -> None:
    write(package.parent, {"losses.py": "def nll(x): return -x\nfrom . import extra\n"}, "kit")
    before = train()
    write(package.parent, {"extra.py": "X = 1\n"}, "kit")
    assert set(train()) - set(before) == {"kit.extra"}


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\ndef f(name):\n    return importlib.import_module(name)\n",
        "from importlib import import_module as load\nx = lambda name: load(name)\n",
        "\nx = [__import__(name) for name in ()]\n",
        "import importlib as i\nfound = map(i.import_module, ())\n",
        "\n__import__('kit.losses', fromlist=('x',))\n",
    ],
)
def test_an_import_by_a_name_of_run_time_is_refused(package: Path, text: str) -> None:
    path = package / "losses.py"
    path.write_text(text)
    line = 3 if "def f" in text else 2
    with pytest.raises(CodeDigestError, match=rf"^kit\.losses, line {line}: [^\n]*USES = [^\n]*$"):
        train()
    path.write_text(text + "USES: tuple[str, ...] = ()\n")
    assert "kit.alone" not in train()
    path.write_text(text + "USES = ('kit.alone', 'json', 'numpy')\n")
    assert "kit.alone" in train()
    assert "numpy" in code_reached(["kit.kinds.train"], ["kit"]).libraries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("USES = ['kit.alone']\n", "line 1: USES must be a tuple of module names"),
        ("USES = (name,)\n", "line 1: USES must be a tuple of module names"),
        ("USES = ('kit.absent',)\n", "kit.losses: USES names 'kit.absent', which does not exist"),
        ("def f(:\n", "losses.py: cannot be read as Python"),
        ("from ... import x\n", "kit.losses: a relative import leaves the package"),
    ],
)
def test_unreadable_modules_are_named(package: Path, text: str, message: str) -> None:
    (package / "losses.py").write_text(text)
    with pytest.raises(CodeDigestError, match=re.escape(message)) as caught:
        train()
    assert "\n" not in str(caught.value)


def test_other_ways_to_import(folder: Path) -> None:
    write(
        folder,
        {
            "__init__.py": "",
            "root.py": """
                import importlib
                from {p}.stars import *
                importlib.import_module('.near', __package__)
                importlib.import_module('.far', '{p}.bare')
                __import__('{p}.plain')
            """,
            "stars/__init__.py": "__all__ = ['one', *['two']]\n",
            "stars/one.py": "",
            "stars/two.py": "",
            "stars/three.py": "",
            "near.py": "",
            "bare/far.py": "",
            "plain.py": "",
        },
        "ways",
    )
    reached = ["root", "stars", "stars.one", "stars.two", "near", "bare.far", "plain"]
    assert set(code_reached(["ways.root"], ["ways"]).modules) == {"ways"} | {f"ways.{name}" for name in reached}


def test_a_compiled_module_is_known_by_its_version_or_bytes(folder: Path) -> None:
    write(folder, {"__init__.py": "from . import fast\n"}, "compiled")
    library = folder / "compiled" / f"fast{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"one")
    before = code_reached(["compiled"], ["compiled"]).modules
    library.write_bytes(b"two")
    after = code_reached(["compiled"], ["compiled"]).modules
    assert {name for name in after if after[name] != before[name]} == {"compiled.fast"}
    version = f"xxhash {importlib.metadata.version('xxhash')}"
    digests = code_reached(["xxhash"], ["xxhash"]).modules
    assert digests["xxhash._xxhash"] == hashlib.sha256(version.encode()).hexdigest()


def test_nothing_python_itself_imports_is_missed() -> None:
    """Python's own import is the independent witness."""
    roots = [
        "xray_runtime.methods.prepare.body",
        "xray_runtime.ops.planner.auto",
        "xray_runtime.kernel.store.checkpoints",
    ]
    code = f"import sys, {', '.join(roots)}; print(*(m for m in sys.modules if m.startswith('xray_runtime')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert len(imported) > 20
    # A config declares the fields of every plug; the keys of stages digest those that it chooses.
    plugs = [registry.module(name) for registry in (TRAINERS, GENERATORS, REWARDS, FAMILIES) for name in registry]
    assert imported <= set(code_reached([*roots, *plugs], ["xray_runtime"]).modules)


def test_the_digest_imports_nothing_heavy() -> None:
    code = (
        "import sys; from xray_runtime.kernel.store import code_digest as c, content_digest;"
        "c.code_reached(['xray_runtime.methods.ppo.body'], ['xray_runtime']).modules;"
        "print(*({'mlflow', 'prefect', 'ray', 'torch', 'vllm', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "text",
    [
        "from xray.data import write_pairs\n",
        "import xray.data\n",
        "import xray\ndef f(path): return xray.data.Pairs(path)\n",
        "import xray as x\ndef f(path): return x.data.Pairs(path)\n",
    ],
)
def test_exports_of_xray_are_followed_to_their_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "other.py").write_text("import xray\ndef f(): return xray.Step\n")
    monkeypatch.syspath_prepend(tmp_path)
    reached = code_reached(["mine"], ["mine", "xray_runtime"]).modules
    assert "xray_runtime.data.pairs" in reached
    assert not {"xray", "xray.data", "xray_runtime.agents.environments.http"} & set(reached)
    assert set(code_reached(["other"], ["other", "xray_runtime"]).modules) == {"other"}
    (tmp_path / "method.py").write_text("from xray.algorithms import group_advantages\n")
    reached = code_reached(["method"], ["method", "xray_runtime"]).modules
    assert "xray_runtime.algorithms.groups" in reached
    assert "xray_runtime.data.pairs" not in reached
