"""What vLLM itself makes of our options on CUDA, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long  # a process that imports vLLM; the options themselves are in unit tests
def test_vllm_takes_our_options_on_cuda(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "tests.component.cuda_vllm_config", str(tiny_model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    planned, default = json.loads(done.stdout.splitlines()[-1])
    shared = {"device": "cuda", "dtype": "torch.bfloat16", "chunked_prefill": True, "prefix_caching": True}
    shared |= {"gpu_memory": 0.4, "graphs": True}
    assert planned == shared | {"sleeps": True, "max_num_seqs": 48}
    # Its own default, whatever is planned.
    assert default.pop("max_num_seqs") > 48
    assert default == shared | {"sleeps": False}
