"""transformers is imported without scikit-learn, which others may still import."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
