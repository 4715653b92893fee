"""One local Ray and one tiny model for all component tests."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.grouping import GroupScheduling
from tests.unit.kernel.store.published import IDENTITY
from xray_runtime.cluster.pool.libraries import REPRODUCIBLE
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.processes import QUIET, kill_tagged, start_reaper
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.template_database import copy_template
from xray_runtime.models.config import FreshBase

if TYPE_CHECKING:
    from xray_runtime.live.serving.replica import ServedModel

# As Workhorses do: on some processors MKL's small products else depend on where in a batch a row stands.
os.environ["MKL_CBWR"] = REPRODUCIBLE
# As in a run: by default Ray's workers give way to everything else, and an agent measures each of them for a page that
# nobody opens.
for name in (name for name in QUIET if name.startswith("RAY_")):
    os.environ.setdefault(name, QUIET[name])

TINY = FreshBase(
    vocab_size=320, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=128, max_positions=64
)


GROUPS = {
    "models": "conversations families handles harness_task lag learner memory_model offline published_shards",
    "processes": "failures pool reservations signs staging",
    "vllm": "adapter_sync shared_base direct_sync fork_server generator generator_servers ipc_engine ipc_sizes serving "
    "sleeping_generator vllm_routes",
    "ranks": "adapters fsdp2 layouts megatron non_finite options sequence_parallel",
    "prefect": "audit_and_promotion review suspension template_databases",
}
"""Files that share what takes seconds to start, the longest first: a Ray whose Workhorses are used again, vLLM's
imports, the process that ranks are forked from, a Prefect server."""


GROUP_OF = {f"test_{name}.py": group for group, names in GROUPS.items() for name in names.split()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of `GROUPS` first."""
    order = [*GROUPS, None]
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    places = [number for number, item in enumerate(items) if item in here]
    in_order = sorted(here, key=lambda item: order.index(GROUP_OF.get(item.path.name)))
    for number, item in zip(places, in_order, strict=True):
        items[number] = item


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Those of a group in one worker, and else those of each file."""
    return GroupScheduling(config, log, lambda file, _: GROUP_OF.get(file, file))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    mark = start_reaper()
    from tests.component.processes import RUN_ID
    from xray.deployments.local_ray import running_ray
    from xray_runtime.cluster.pool.pool import open_worker_pool

    # Without RAY_ADDRESS: a Ray that somebody left running here must not be taken.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with running_ray(num_cpus=2):
            pool = open_worker_pool(RUN_ID)
            yield
            del pool  # it lives as long as its handle
    kill_tagged(mark)


@pytest.fixture(scope="session")
def prefect_database() -> Path:
    """The database of `prefect`: a copy of the template."""
    from xray.deployments.local_services import make_prefect_database

    path = Path(tempfile.mkdtemp()) / "prefect-test.db"  # Prefect removes the directory
    copy_template(path, "prefect", partial(make_prefect_database, os.environ))
    return path


@pytest.fixture(scope="session")
def prefect(prefect_database: Path) -> Iterator[str]:
    """Address of a Prefect server for all tests, which is this process's too."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing import utilities

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", lambda: str(prefect_database.parent))
        with utilities.prefect_test_harness(server_startup_timeout=240):
            yield str(PREFECT_API_URL.value())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from xray_runtime.data.tokenizing import train_tokenizer
    from xray_runtime.models.causal_lm import fresh_llama, save_model

    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(["hello there", "how are you today", "fine thanks"] * 20, TINY.vocab_size)
    save_model(fresh_llama(TINY, tokenizer, seed=1), tokenizer, directory)
    return directory


@pytest.fixture(scope="session")
def nan_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint with one weight that is NaN."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(tiny_model, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    from xray_runtime.live.serving.replica import ServedModel
    from xray_runtime.models.causal_lm import fresh_llama, load_tokenizer, save_model

    folder = tmp_path_factory.mktemp("served")
    store = Store(folder / "checkpoints")
    tokenizer = load_tokenizer(tiny_model)
    with store.building(IDENTITY.stage, IDENTITY.key) as built:
        # The schema of a tool takes a few hundred tokens of so small a vocabulary.
        save_model(fresh_llama(TINY.model_copy(update={"max_positions": 1024}), tokenizer, seed=1), tokenizer, built)
        ref = store.publish(built, IDENTITY, type="Model", step=0, dataset=None)
    return ServedModel(
        directory=ref.path,
        sha256=ref.sha256,
        names=("tiny",),
        tensor_parallel=2,
        runtime=RuntimeConfig(threads=1, generator_memory_gib=0.25),
        device="cpu",
        key=None,
        logs=folder / "logs",
    )
