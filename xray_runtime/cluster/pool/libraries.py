"""The libraries that Workhorses import, the settings under which they compute, and the processes that have them.

On a machine without a GPU a private Ray forks its workers from processes that have imported them
(`xray.deployments.fork_server`). A Workhorse, or the task of a stage, says with its runtime environment which it wants.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.hidden_libraries import hidden, hide
from xray_runtime.kernel.store.libraries import top_of

if TYPE_CHECKING:
    from xray_runtime.kernel.config.section import RuntimeConfig

VARIABLE = "XRAY_WORKER_LIBRARIES"
"""Environment variable of a worker: what was imported before the fork: `trainer:NAME`, `generator:NAME` or `STAGE`."""
STAGE = "stage"
"""The libraries of a stage's task."""
FORK_SERVER = "XRAY_FORK_SERVER"
"""Environment variable of a Ray that has a fork server: its address."""
SPIN_COUNT = 500
"""How often a waiting OpenMP thread looks for work before it sleeps (measured: 22 ns a look, 11 μs in all). Sleeping at
once costs a wake-up for every operation of a small model; looking longer takes cores from other processes (10,000 made
a step three times slower beside a busy one). See `docs/results.md`."""

REPRODUCIBLE = "AUTO"
"""MKL's mode with reductions in a fixed order, without which MKL does not promise the same bits in every run. It is as
fast (`docs/results.md`)."""

KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""glibc's settings for a process that trains on a CPU: the gradients of a step take the memory of the last step's. New
pages from the system took a quarter of PPO's time at 135M parameters. `processes.return_freed_memory` returns what is
kept. glibc reads them when a process starts."""

NEEDLESS = ("chardet", "pandas", "redis", "scipy")
"""Libraries that others import where they are installed, for what nothing of ours uses: encodings (`requests` has
`charset_normalizer` too), data frames in MLflow and Prefect, a cache of torch's compiler, object detection in
transformers and audio in vLLM. `benchmarks.memory` shows what they take."""

UNUSED = ("mlflow", "sklearn")
"""Libraries that DeepSpeed and transformers import but no Workhorse uses: 3 CPU seconds a start."""

REPRODUCIBLE_CUDA = {
    # Without a fixed workspace cuBLAS may sum in another order.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # One algorithm without reductions inside a switch, so that sums over ranks have one order.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


def prepare_imports(threads: int) -> None:
    """Set variables that torch reads when it is imported. Waiting threads must sleep, since several models
    share cores."""
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "MKL_CBWR": REPRODUCIBLE,
    }
    hide(*UNUSED)


def worker_options(name: str) -> dict[str, Any]:
    """Ray's options for a worker that wants these libraries: none where it would import them itself."""
    return {"runtime_env": {"env_vars": {VARIABLE: name}}} if os.environ.get(FORK_SERVER) else {}


def import_models() -> None:
    """Import torch, transformers, and what every model needs."""
    with hidden(*NEEDLESS):
        from xray_runtime.models import causal_lm, first_model, heads  # noqa: F401


def import_libraries(name: str, runtime: RuntimeConfig, device: str) -> None:
    """Import what the trainer or generator of this name needs (see `VARIABLE`)."""
    from xray_runtime.engines.generator import generator
    from xray_runtime.engines.trainer import trainer

    sort, _, name = name.partition(":")
    plug = trainer(name) if sort == "trainer" else generator(name)
    # Somebody else's may use any of them.
    own = top_of(type(plug).__module__) == top_of(__name__)
    with hidden(*(NEEDLESS if own else ())):
        plug.load_libraries(runtime, device)


def cuda_environment(runtime: RuntimeConfig) -> dict[str, str]:
    """Variables that must be set before CUDA starts. A CPU ignores them."""
    return REPRODUCIBLE_CUDA if runtime.reproducible else {}


def configure_torch(runtime: RuntimeConfig, device: str, *, samples: bool) -> None:
    """Set torch's switches for `runtime.reproducible` and `runtime.tf32` in this process.

    A CPU always computes the same bits twice. On CUDA that costs speed, so it is off by default. Where the model
    `samples`, nothing is refused: vLLM has a mode of its own (`generators.vllm.loading.environment`), and sampling
    needs operators without a deterministic form on CUDA.
    """
    import torch

    on_cpu = device == "cpu"
    # Attention's backward pass is deterministic on CUDA only where torch would refuse operators that are not.
    torch.use_deterministic_algorithms(on_cpu or runtime.reproducible, warn_only=on_cpu or samples)
    # Filling uninitialized memory would cost 1,000 fills a step; nothing reads it.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    if not on_cpu:
        torch.backends.cudnn.deterministic = runtime.reproducible
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = runtime.tf32
