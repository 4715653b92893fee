"""Which packages are installed. The folders at the top of the repository are mapped: `flows/` is `xray.flows`, …

A project that depends on X-ray may have folders of its own under such names. All else stands in pyproject.toml.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

SETTINGS = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]

setup(packages=[*find_packages(include=["xray", "xray.*", "xray_runtime", "xray_runtime.*"]), *SETTINGS["package-dir"]])
