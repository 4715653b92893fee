"""vLLM keeps a kernel for each number of tokens in a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

SCRIPT = """
import ctypes, sys
from pathlib import Path
from xray_runtime.cluster.pool.libraries import prepare_imports
prepare_imports(threads=1)
from xray_runtime.engines.generators.vllm.sampler import VLLMSampler
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.kernel.config.section import RuntimeConfig

class Memory(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

c = ctypes.CDLL(None)
c.mallinfo2.restype = Memory
sampler = VLLMSampler(Path(sys.argv[1]), 64, RuntimeConfig(device="cpu", threads=1), EngineRank("cpu"))
sampling = Sampling(max_new_tokens=1, temperature=1.0, stop_token_ids=(), pad_token_id=0)
for count in range(1, 161):
    sampler.sample([[5, 6, 7]] * count, list(range(count)), sampling)
    if count in (40, 160):
        print(c.mallinfo2().uordblks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc counts what is in use")
def test_memory_does_not_grow_with_new_batch_sizes(tiny_model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    command = [sys.executable, "-c", SCRIPT, str(tiny_model)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    early, late = map(int, result.stdout.splitlines()[-2:])
    assert late - early < 4 * 2**20
