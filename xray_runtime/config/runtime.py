"""Where and how the work runs."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from xray_runtime.config.engines import Count, Fraction, NonNegative, Positive, Section


class RuntimeConfig(Section):
    """Where and how the work runs. `device` and `threads` are in every stage key; nothing else changes a result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it is present."""
    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """CPU threads of a Workhorse whose model works alone. Models that work at the same time (all that score a rollout;
    policy and separate critic) share them: each gets the whole part of `threads` over their number, at least one. With
    a PPO stage's `lag: 1` the generator counts as one of them, and keeps all `threads` itself. The number of threads
    changes float rounding."""
    niceness: Annotated[int, Field(ge=0, le=19)] = 0
    """How much the run's processes give way to other programs on a busy machine: at 0 they get as much of a core as
    those, at 10 a tenth as much. A cluster of your own may ask for more (`RAY_worker_niceness` where its Ray was
    started; Ray's default is 15)."""
    cpus_per_workhorse: NonNegative = 0.2
    """Ray CPUs one Workhorse reserves. Below 1 several share a core: right on a laptop, wrong on a cluster."""
    gpus_per_workhorse: NonNegative = 1.0
    """Ray GPUs one Workhorse reserves on CUDA."""
    generator_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Whole copies of the generator, prompts dealt out to the least loaded. On CPU the replies do not depend on it."""
    generator_sleeps: bool = False
    """CUDA and vLLM only: between rollouts the generator keeps its weights in host memory and gives its GPU memory to
    the models it shares the GPU with."""
    trainer_sleeps: bool = False
    """CUDA only: while replies are sampled, what is trained keeps its weights and optimizer states in host memory and
    gives its GPU memory to the generator."""
    weight_transfer: Literal["auto", "plasma", "nccl", "ipc"] = "plasma"
    """How weights go from the trainer to the generator. `plasma`: shared memory on one machine, else Ray's object
    store; `ipc`: the same GPUs, shared; `nccl`: between GPUs (both vLLM only). `auto`: ipc, nccl or plasma, by where
    both are."""
    parallel: Literal["as_written", "auto"] = "as_written"
    """`auto`: every layout, and on CUDA the shares of a GPU, are chosen for the cluster by the planner's memory model
    when a stage is called; its record has what was chosen."""
    storage: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s?#]+$")] | None = None
    """URL of a store that several machines share (`s3://BUCKET/PREFIX`, `file:///PATH`, whatever fsspec knows):
    checkpoints, snapshots, records and results lie there too, and what is there is fetched, never computed again."""
    wait_timeout_s: Positive = 600.0
    """How long a stage waits for devices that others than its own run hold; stages of one run wait for each other as
    long as it takes. More than the cluster has is refused at once."""
    hang_timeout_s: Annotated[float, Field(ge=5.0)] = 120.0
    """A Workhorse that gives no sign of life for so long is given up, and its stage goes on from its snapshot. This
    limit, and those below, grow with the load where more programs want to run than there are cores."""
    collective_timeout_s: Annotated[float, Field(ge=5.0)] = 600.0
    """A rank that waits for its peers in one collective for longer is given up, and its stage goes on from a snapshot.
    At least as long as one rank may be at work alone; NCCL has a limit of its own, ten minutes."""
    generator_memory_gib: Annotated[float, Field(ge=0.25)] = 1.0
    """Memory for vLLM's KV cache on CPU."""
    gpu_memory_fraction: Fraction = 0.4
    """Share of a GPU vLLM may take on CUDA."""
    snapshot_every: Count = 10
    """Steps (SFT, reward model) or iterations (PPO) between snapshots, from which an interrupted stage goes on. Fewer
    are made where they would take more than 4% of a stage's time."""
    on_out_of_memory: Literal["halve", "fail"] = "halve"
    """`halve`: a stage that ran out of memory goes on with micro-batches half as large, the same global batch, and
    results that differ in float rounding alone; `fail`: it fails."""
    micro_batch_divisor: Annotated[int, Field(ge=1, le=64)] = 1
    """Divides every engine's micro_batch_tokens; `halve` doubles it."""
    retries: Annotated[int, Field(ge=0, le=20)] = 1
    """New attempts after a stage fails with an ordinary error."""
    retry_delay_s: NonNegative = 2.0
    restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """New attempts at the whole run after its driver or Ray was lost, each going on from what is there."""
    stall_timeout_s: Annotated[float, Field(ge=10.0)] = 1800.0
    """A run that shows no progress for so long hangs: it is ended and started again."""

    @model_validator(mode="after")
    def _chosen_once(self) -> Self:
        for field in ("gpus_per_workhorse", "gpu_memory_fraction"):
            if self.parallel == "auto" and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field} = {getattr(self, field)} must be left out with parallel = 'auto', which chooses it"
                )
        return self

    @field_validator("storage")
    @classmethod
    def _others_can_open_it(cls, url: str | None) -> str | None:
        if url is not None and re.search(r"://[^/]*:[^/]*@", url):
            raise ValueError("a password is not allowed in the URL: credentials come from the environment")
        if url is not None and re.match(r"memory:|file://[^/]", url):
            raise ValueError(f"{url!r} is not allowed: must be reachable from other processes (file:///ABSOLUTE/PATH)")
        return url
