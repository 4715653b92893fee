"""The ranks of one model as plain processes, without Ray: forked from one that has imported everything."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import reserve_port
from xray_runtime.data.batch import TextBatch
from xray_runtime.engines.topology import Topology
from xray_runtime.kernel.config.section import RuntimeConfig

PRELOAD = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which ZeRO imports, and with it torch's compiler: seconds
    *("deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops"),
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "transformers.models.llama.modeling_llama",
    *(f"xray_runtime.engines.trainers.{name}" for name in ("deepspeed.pipeline", "fsdp2.engine", "megatron.engine")),
    "benchmarks.layouts",
]
TIMEOUT_S = 900.0

Script = Callable[..., Any]
"""`script(learner, deal, *args)`, run on every rank; `deal(rows)` are the rows this rank gets of a global batch."""


def run_ranks(
    spec: ModelSpec, logs: Path, script: Script, *args: Any, kind: type[Learner] = Learner, device: str = "cpu"
) -> list[Any]:
    """What `script` returned on each rank of the layout in `spec.training.engine`, by rank.

    Args:
        device: "cuda": each rank sees the GPU of its number.

    Raises:
        RuntimeError: a rank failed; the message is its traceback. The other ranks are ended.
    """
    assert spec.training is not None
    topology = Topology.of(spec.training.engine)
    os.environ |= {"DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # CUDA does not survive a fork of a process that has looked for it.
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(PRELOAD)
    reserved = reserve_port()
    port = int(reserved.getsockname()[1])
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(topology.size)))).split(",")
    ours, processes = [], []
    for rank in range(topology.size):
        mine, theirs = context.Pipe()
        if device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
        rank_info = RankInfo("policy", rank, rank, topology.size, "127.0.0.1", port, logs)
        process = context.Process(
            target=_work, args=(theirs, kind, spec, topology, rank_info, device, script, args), daemon=True
        )
        process.start()
        theirs.close()
        ours.append(mine)
        processes.append(process)
    try:
        answers: dict[int, Any] = {}
        while len(answers) < topology.size:
            waiting = {ours[rank]: rank for rank in range(topology.size) if rank not in answers}
            ready = wait(list(waiting), TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"no rank answered in {TIMEOUT_S:.0f} s")
            for connection, rank in waiting.items():
                if connection in ready:
                    failure, answers[rank] = connection.recv()
                    if failure is not None:
                        raise RuntimeError(failure)
        return [answers[rank] for rank in range(topology.size)]
    finally:
        for process in processes:
            process.join(5.0 if len(answers) == topology.size else 0.0)
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
        reserved.close()


def _work(
    connection: Any,
    kind: type[Learner],
    spec: ModelSpec,
    topology: Topology,
    rank_info: RankInfo,
    device: str,
    script: Script,
    args: Any,
) -> None:
    # Collections, of which DeepSpeed asks for some, need not look through all that was imported before the fork.
    gc.freeze()
    try:
        learner = kind(RuntimeConfig(threads=1, device=device))  # type: ignore[arg-type]
        learner.build(spec, rank_info)

        def deal(rows: TextBatch) -> TextBatch:
            return rows.take(rows.shard_places(topology.data)[topology.data_rank(rank_info.rank)])

        connection.send((None, script(learner, deal, *args)))
    except Exception:
        connection.send((traceback.format_exc(), None))
    # Not through interpreter exit: gloo's threads may still hold a peer that is already gone.
    os._exit(0)
