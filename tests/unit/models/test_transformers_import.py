"""transformers is imported without scikit-learn, which others may still import; what it looks for is not imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from xray_runtime.models.transformers_import import without

CODE = """
import sys
from xray_runtime.models.transformers_import import import_transformers
import_transformers()
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "sklearn" not in sys.modules, "imported"
import sklearn
import_transformers()
assert sys.modules["sklearn"] is sklearn
"""


@pytest.mark.long
def test_scikit_learn_is_left_out() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_what_is_left_out_is_there_again_afterwards() -> None:
    name = "turtledemo"  # of Python, and nobody imports it
    with without(name):
        assert importlib.util.find_spec(name) is None
    assert importlib.util.find_spec(name) is not None
    assert name not in sys.modules
    with without("json"):
        assert importlib.util.find_spec("json") is not None
    assert "json" in sys.modules
