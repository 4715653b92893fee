"""One local Ray and one tiny model for all component tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from xray_runtime.config.base import FreshBase
from xray_runtime.processes import kill_tagged, start_reaper
from xray_runtime.workers.workhorse import REPRODUCIBLE

# As Workhorses do: on some processors MKL's small products else depend on where in a batch a row stands.
os.environ["MKL_CBWR"] = REPRODUCIBLE
# By default Ray's workers give way to everything else on the machine: a busy neighbour starves them.
os.environ.setdefault("RAY_worker_niceness", "0")

TINY = FreshBase(
    vocab_size=320, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=128, max_positions=64
)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    mark = start_reaper()
    import ray

    from tests.component.models import RUN_ID
    from xray_runtime.workers.pool import open_worker_pool

    # `local`: without it a Ray that somebody left running here would be taken.
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="xray",
    )
    pool = open_worker_pool(RUN_ID)
    yield
    del pool  # it lives as long as its handle
    ray.shutdown()
    kill_tagged(mark)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from xray_runtime.data.tokenizing import train_tokenizer
    from xray_runtime.models.causal_lm import fresh_llama, save_model

    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(["hello there", "how are you today", "fine thanks"] * 20, TINY.vocab_size)
    save_model(fresh_llama(TINY, tokenizer, seed=1), tokenizer, directory)
    return directory
