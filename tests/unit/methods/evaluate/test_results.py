"""Files of an evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from xray_runtime.methods.common.results import write_results
recorder = SimpleNamespace(table=lambda *_: None)
write_results(Path(sys.argv[1]), recorder, "evaluation.json", {}, ["caf\\u00e9"], [{"reply": "\\u2713"}])
"""


def test_texts_are_written_alike_in_every_locale(tmp_path: Path) -> None:
    variables = os.environ | {
        "LC_ALL": "POSIX",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "utf8",
    }
    subprocess.run([sys.executable, "-c", CODE, tmp_path], env=variables, check=True)
    assert json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8")) == ["café"]
    assert json.loads((tmp_path / "samples.json").read_text(encoding="utf-8")) == [{"reply": "✓"}]
