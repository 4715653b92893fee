"""Which packages are installed, and the stub that is made for them.

The folders at the top of the repository are mapped: `flows/` is `xray.flows`, … A project that depends on X-ray may
have folders of its own under such names. All else stands in pyproject.toml.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


class WithStub(build_py):
    """Writes xray/__init__.pyi first, which is then packed like every file; an editable installation reads it there."""

    def run(self):
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run([sys.executable, str(ROOT / ".ci" / "stubs.py")], env=environment, check=True)
        super().run()


setup(
    packages=[*find_packages(include=["xray", "xray.*", "xray_runtime", "xray_runtime.*"]), *SETTINGS["package-dir"]],
    cmdclass={"build_py": WithStub},
)
