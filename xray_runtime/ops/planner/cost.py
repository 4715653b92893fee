"""Seconds of one iteration on GPUs, and bytes on disk: a stated model, not a measurement. It ranks plans; its seconds
are estimates.

An iteration is one rollout with its scoring and updates, or one optimizer step of a stage that only trains. Every
sequence is assumed to be as long as the config allows.

Phases follow one another; with a lag and separate GPUs the generator works beside the others (`plan.overlapped`).

    generate   decoding: a step reads the weights and the cache of all running sequences; prefill is compute
    score      one forward pass of each frozen model, and of each trained one for its old log-probabilities
    update     passes (forward 1, backward 2, recomputation 1; adapters save a third) beside ZeRO's collectives, which
               overlap with them; then tensor-parallel all-reduces, the pipeline's bubble and the optimizer's traffic
    sync       weights to the generator
    sleep      memory that moves to the host and back, for models that take turns

A pass takes its matrix products' FLOPs, and after them the memory traffic of everything else: norms, activations and
the loss. `tests/unit/ops/test_published_speed.py` compares seconds with what prime-rl and NeMo-RL published.

FLOPs of a forward pass: 2 a weight and token, and 2·S·a·d a layer for causal attention (Korthikanti et al. 2022,
appendix A). Collectives of n ranks move (n - 1)/n of their bytes, all-reduces twice that (Patarasuk & Yuan 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from xray_runtime.engines.roles import ALL_USES, Use
from xray_runtime.models.shapes import device_parameters, lora_parameters
from xray_runtime.ops.planner.memory import (
    GENERATOR_BATCH_TOKENS,
    Layout,
    Memory,
    chunk_tokens,
    kv_cache_bytes,
    layer_activation_bytes,
)
from xray_runtime.ops.planner.model_states import FLOAT32_BYTES, HALF_BYTES, gradient_bytes

if TYPE_CHECKING:
    from xray_runtime.cluster.pool.machine import Machine
    from xray_runtime.ops.planner.workload import PlannedRole, Workload

MFU = 0.4
"""Share of peak FLOP/s in large matrix products, attention's included."""
ACTIVATION_TRAFFIC = 3
"""Bytes moved in one pass for each byte of activations: written once, and read by what follows, kernel by kernel. The
only number here that was fitted to published speeds (prime-rl's SFT of 0.6B and 4B)."""
FORWARD_LOGIT_TRAFFIC, TRAINING_LOGIT_TRAFFIC = 40, 106
"""Bytes moved for each logit: the operations of `algorithms.logprobs`, each reading and writing its tensors; training
computes logits twice."""
HEAD_READS = {"forward": 1, "training": 7}
"""How often the output layer's weight is moved for each chunk of logits: read in three products, its gradient written,
and read twice and written to be summed."""
HALF_SPEED_TOKENS = 512
"""Tokens of a pass that reaches half of `MFU`."""
BANDWIDTH = 0.7
"""Share of peak memory and host rates."""
COLLECTIVE = 0.5
"""Share of peak link rates in collectives."""
EXPOSED = 0.1
"""Share of the shorter of computation and ZeRO's collectives that does not overlap with the longer."""
LAYER_S = 3e-4
"""Least time of one layer's forward pass: its kernels are started one by one."""
STEP_S, SEQUENCE_S = 4e-3, 2e-5
"""vLLM's own work for one decoding step, and for each sequence in it: scheduling, a draw with its own seed, outputs."""
SLEEP_S = 0.2
"""Least time to free one model's memory and to map it again, piece by piece: an assumption."""
REDUCE_S = 15e-6
"""Least time of one all-reduce."""
HOST_COPY_RATE = 1.3e9
"""Bytes/s of weights that are sent through host memory: copied, hashed, and verified."""
HOST_ADAM_RATE = 20e9
"""Bytes/s of AdamW in host memory, per GPU."""
ADAM_BYTES = 28
"""Traffic of an AdamW step per parameter: gradient, master and moments read, master, moments and weight written."""


MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, by its maker's data sheet. Rates are peaks."""

    name: str
    memory_bytes: int
    """Memory that the driver reports."""
    half_flops: float
    """Dense bfloat16 FLOP/s with float32 sums."""
    single_flops: float
    """float32 FLOP/s without TF32."""
    memory_rate: float
    """Bytes/s of its own memory."""
    peer_rate: float
    """Bytes/s to another GPU of the node, in each direction: NVLink, or PCIe."""
    network_rate: float
    """Bytes/s to another node, in each direction: each GPU's share of the node's network."""
    host_rate: float
    """Bytes/s to host memory, in each direction."""


GPUS = (
    # name, memory, half and single FLOP/s, rates of its memory, to a peer, to the network, to the host
    Gpu("L4", 23_034 * MIB, 121e12, 30e12, 300e9, 32e9, 3e9, 32e9),
    Gpu("L40S", 46_068 * MIB, 362e12, 92e12, 864e9, 32e9, 12.5e9, 32e9),
    Gpu("H100", 81_559 * MIB, 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),
    Gpu("H200", 143_771 * MIB, 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
)
"""24, 48, 80 and 141 GB. A card with 24 GB is assumed to be an L4, the slowest of them."""
COMPARED = ("H100", "H200")
"""GPUs whose seconds were compared with published speeds: within a factor of two."""


@cache
def gpu_of(memory_bytes: int) -> Gpu:
    """The known GPU whose memory is nearest to `memory_bytes`."""
    return min(GPUS, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


@dataclass(frozen=True)
class Links:
    """Rates of one machine's GPUs, after the assumed shares, in FLOP/s and bytes/s."""

    machine: Machine

    def flops(self, weight_bytes: int, tokens: float) -> float:
        """FLOP/s of a pass over `tokens` tokens."""
        gpu = gpu_of(self.machine.memory_bytes)
        peak = gpu.half_flops if weight_bytes < FLOAT32_BYTES else gpu.single_flops
        return MFU * peak * tokens / (tokens + HALF_SPEED_TOKENS)

    @property
    def memory(self) -> float:
        return BANDWIDTH * gpu_of(self.machine.memory_bytes).memory_rate

    @property
    def host(self) -> float:
        return BANDWIDTH * gpu_of(self.machine.memory_bytes).host_rate

    def ring(self, ranks: int, stride: int = 1) -> float:
        """Bytes/s of a collective of `ranks` GPUs, `stride` apart. Beyond one node it uses the network shares of all
        its GPUs on a node."""
        gpu, node = gpu_of(self.machine.memory_bytes), self.machine.node_size
        if ranks * stride <= node:
            return COLLECTIVE * gpu.peer_rate
        return COLLECTIVE * min(gpu.peer_rate, gpu.network_rate * max(node // stride, 1))


def forward_flops(role: PlannedRole, workload: Workload) -> float:
    """FLOPs of one forward pass of one sequence."""
    shape, length = role.shape, workload.sequence_tokens
    weights = (shape.num_layers * shape.layer_parameters() - shape.idle_parameters) * length
    logits = shape.embedding_parameters * workload.response_tokens if role.scores_tokens else 0
    attention = shape.num_layers * shape.num_heads * shape.head_size * length * length
    return 2.0 * (weights + logits + attention)


def traffic_seconds(
    role: PlannedRole, layout: Layout, workload: Workload, rows: float, links: Links, *, training: bool
) -> float:
    """Memory traffic of the fullest pipeline stage for `rows` sequences, for all but the matrix products of layers: in
    one forward pass or, if `training`, in all passes of an update. Every tensor-parallel rank computes all logits."""
    shape, width = role.shape, role.weight_bytes
    passes = 3.0 + role.options.checkpointing if training else 1.0
    share = 1.0 if role.top_layers is None or not training else role.top_layers / shape.num_layers
    kept = layer_activation_bytes(shape, workload.sequence_tokens, width, layout.tp)
    moved = passes * ACTIVATION_TRAFFIC * kept * share * shape.num_layers / (layout.pp * layout.sp)
    if role.scores_tokens:
        each = TRAINING_LOGIT_TRAFFIC if training else FORWARD_LOGIT_TRAFFIC
        reads = HEAD_READS["training" if training else "forward"]
        chunk = chunk_tokens(shape, on_gpu=workload.device == "cuda")
        head = reads * shape.embedding_parameters * width / chunk
        moved += workload.response_tokens * (each * shape.vocab_size + head)
    return rows * moved / links.memory


def score_seconds(role: PlannedRole, layout: Layout, workload: Workload, machine: Machine) -> float:
    """The forward passes over a rollout that score it."""
    links, rows = Links(machine), math.ceil(workload.rollout_size / layout.dp)
    tokens = max(workload.score_tokens, workload.sequence_tokens)
    passes = math.ceil(rows * workload.sequence_tokens / tokens)
    flops = rows * forward_flops(role, workload) / (layout.tp * layout.pp * layout.sp)
    compute = max(flops / links.flops(role.weight_bytes, tokens), passes * role.shape.num_layers * LAYER_S)
    compute += traffic_seconds(role, layout, workload, rows, links, training=False)
    gathered = passes * _gather_bytes(role, layout) / links.ring(layout.num_copies)
    apart = _split_seconds(role, layout, tokens, links) + _dispatch_seconds(role, layout, tokens, links)
    return role.scored_passes * (_overlapped(compute, gathered) + passes * apart)


def update_seconds(role: PlannedRole, layout: Layout, workload: Workload, machine: Machine) -> float:
    """The updates of one iteration, or one step of a stage without a rollout."""
    links, options, shape = Links(machine), role.options, role.shape
    steps = max(role.epochs * workload.rollout_size // workload.batch_size, 1)
    rows = math.ceil(workload.batch_size / layout.dp) * role.sequences_per_row
    pass_tokens = max(workload.micro_batch_tokens, workload.sequence_tokens * role.sequences_per_row)
    tokens = min(pass_tokens, rows * workload.sequence_tokens)
    passes = math.ceil(rows * workload.sequence_tokens / tokens)
    # A forward pass counts 1. Adapters need no gradients of the weights; a trunk is computed once per rollout.
    share = 1.0 if role.top_layers is None else role.top_layers / shape.num_layers
    weight = (2.0 if options.lora_rank is not None else 3.0) + (1.0 if options.checkpointing else 0.0)
    flops = rows * forward_flops(role, workload) * weight * share / (layout.tp * layout.pp * layout.sp)
    least = passes * math.ceil(shape.num_layers * share / layout.pp) * LAYER_S * weight
    compute = max(flops / links.flops(role.weight_bytes, tokens), least)
    compute += traffic_seconds(role, layout, workload, rows, links, training=True)
    compute *= (passes + layout.pp - 1) / passes
    copies = layout.num_copies
    trained, ring = trained_parameters(role, layout), links.ring(copies, layout.tp)
    gradients = trained * gradient_bytes(role.weight_bytes, layout.zero_stage, options.float32_sums)
    # ZeRO 2 and 3 reduce gradients after every pass, lower stages once a step.
    reductions = passes if layout.zero_stage >= 2 else 2 if layout.zero_stage == 0 else 1
    moved = reductions * gradients * (copies - 1) / copies
    moved += 2 * passes * _gather_bytes(role, layout)
    if layout.zero_stage in (1, 2):
        moved += trained * role.weight_bytes * (copies - 1) / copies
    split = (2 + options.checkpointing) * passes * _split_seconds(role, layout, tokens, links)
    split += (2 + options.checkpointing) * passes * _dispatch_seconds(role, layout, tokens, links)
    handed = tokens * shape.hidden_size * role.weight_bytes / links.ring(2, layout.tp) + REDUCE_S
    split += 2 * passes * (layout.pp - 1) * handed
    return steps * (_overlapped(compute, moved / ring) + split + _optimizer_seconds(role, layout, trained, links))


def generate_seconds(role: PlannedRole, layout: Layout, workload: Workload, machine: Machine) -> float:
    """A rollout on `layout.dp` replicas."""
    links, shape = Links(machine), role.shape
    rows = math.ceil(workload.rollout_size / layout.dp)
    running = workload.running_sequences(layout)
    weights = device_parameters(shape, layout.tp, split_vocabulary=True)
    prompt = workload.sequence_tokens - workload.response_tokens
    cached = kv_cache_bytes(shape, running * (prompt + workload.response_tokens // 2), role.weight_bytes, layout.tp)
    active = weights - shape.idle_parameters // layout.tp
    # Experts that none of the running sequences takes are not read.
    idle = 0.0 if shape.experts is None else shape.experts.parameters * (1.0 - shape.experts.taken(running)) / layout.tp
    read = ((weights - idle) * role.weight_bytes + cached) / links.memory
    compute = running * 2 * active / links.flops(role.weight_bytes, GENERATOR_BATCH_TOKENS)
    reduced = _split_seconds(role, layout, running, links)
    step = max(read, compute) + reduced + STEP_S + running * SEQUENCE_S
    prefill = rows * prompt * 2 * active / links.flops(role.weight_bytes, GENERATOR_BATCH_TOKENS)
    return math.ceil(rows / running) * workload.response_tokens * step + prefill


def sync_seconds(policy: PlannedRole, layout: Layout, workload: Workload, machine: Machine, *, shared: bool) -> float:
    """The policy's weights to the generator; `shared`: on the same GPUs."""
    size = policy.shape.num_parameters
    if workload.through_host or layout.tp * layout.pp > 1:
        return size * FLOAT32_BYTES / HOST_COPY_RATE
    links = Links(machine)
    copies = layout.num_copies
    gathered = size * HALF_BYTES / links.ring(copies) if layout.zero_stage == 3 and copies > 1 else 0.0
    return gathered + size * HALF_BYTES / (links.memory if shared else links.ring(machine.num_devices))


def iteration_seconds(
    workload: Workload, layouts: Mapping[Use, Layout], machine: Machine, *, shared: bool
) -> dict[str, float]:
    """Phase → seconds. Args: layouts: use → layout; shared: all models are on the same GPUs."""
    trained, frozen, sampled = map(workload.of_use, ALL_USES)
    phases: dict[str, float] = {}
    if sampled:
        phases["generate"] = sum(generate_seconds(r, layouts["sampled"], workload, machine) for r in sampled)
    scored = [score_seconds(role, layouts["frozen"], workload, machine) for role in frozen]
    if sampled:
        scored += [score_seconds(role, layouts["trained"], workload, machine) for role in trained]
    if scored:
        phases["score"] = sum(scored) if shared else max(scored)
    if trained:
        updates = [update_seconds(role, layouts["trained"], workload, machine) for role in trained]
        phases["update"] = sum(updates) if shared else max(updates)
    if trained and sampled:
        phases["sync"] = sync_seconds(trained[0], layouts["trained"], workload, machine, shared=shared)
    asleep = ["sampled"] * workload.generator_sleeps + ["trained"] * workload.trainer_sleeps
    if asleep:
        roles = [role for role in workload.roles if role.use in asleep]
        memory = [workload.memory(role, layouts[role.use]) for role in roles]
        phases["sleep"] = sleep_seconds(workload, roles, memory, machine)
    return phases


def sleep_seconds(
    workload: Workload, roles: Sequence[PlannedRole], memory: Sequence[Memory], machine: Machine
) -> float:
    """Bytes of models on one GPU, to host memory and back. Weights of a generator that the next sync brings are not
    kept."""
    trained = workload.of_use("trained")
    synced = bool(trained) and trained[0].options.lora_rank is None and trained[0].top_layers is None
    kept = [m for role, m in zip(roles, memory, strict=True) if role.use != "sampled" or not synced]
    return SLEEP_S * len(roles) + 2 * sum(m.weights + m.optimizer + m.kept for m in kept) / Links(machine).host


def trained_parameters(role: PlannedRole, layout: Layout) -> int:
    """Parameters that one rank trains, without ZeRO."""
    shape, tp, pp = role.shape, layout.tp, layout.pp
    if role.options.lora_rank is not None:
        return lora_parameters(shape, role.options.lora_rank, tp, pp, targets=role.options.lora_targets)
    if role.top_layers is not None:
        return role.top_layers * shape.layer_parameters(tp)
    return device_parameters(shape, tp, pp)


def _overlapped(compute: float, moved: float) -> float:
    return max(compute, moved) + EXPOSED * min(compute, moved)


def _gather_bytes(role: PlannedRole, layout: Layout) -> float:
    """Bytes that a rank receives to have all weights once under ZeRO-3, and of experts that ranks share its own."""
    if layout.zero_stage != 3:
        return 0.0
    whole, experts, copies = role.shape.num_parameters, 0, layout.num_copies
    if layout.ep > 1 and role.shape.experts is not None:
        experts = role.shape.experts.parameters
    of_rank = copies // layout.ep
    received = (whole - experts) * (copies - 1) / copies + experts / layout.ep * (of_rank - 1) / of_rank
    return received * role.weight_bytes


def _dispatch_seconds(role: PlannedRole, layout: Layout, tokens: int, links: Links) -> float:
    """Tokens to the experts that other ranks hold, and back, in a forward pass over `tokens` tokens of a rank."""
    experts = role.shape.experts
    if layout.ep == 1 or experts is None:
        return 0.0
    size = tokens * experts.chosen * role.shape.hidden_size * role.weight_bytes * (layout.ep - 1) / layout.ep
    return 2 * experts.num_layers * (size / links.ring(layout.ep) + REDUCE_S)


def _split_seconds(role: PlannedRole, layout: Layout, tokens: float, links: Links) -> float:
    """A forward pass over `tokens` tokens: two all-reduces a layer under tensor parallelism, and where ranks share rows
    four exchanges, of queries, keys, values and outputs."""
    shape, sp = role.shape, layout.sp
    if sp > 1:
        heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_size
        exchanged = tokens / sp * heads * role.weight_bytes * (sp - 1) / sp
        return shape.num_layers * (exchanged / links.ring(sp) + 4 * REDUCE_S)
    if layout.tp == 1:
        return 0.0
    size = 2 * tokens * role.shape.hidden_size * role.weight_bytes * (layout.tp - 1) / layout.tp
    return 2 * math.ceil(role.shape.num_layers / layout.pp) * (size / links.ring(layout.tp) + REDUCE_S)


def _optimizer_seconds(role: PlannedRole, layout: Layout, trained: int, links: Links) -> float:
    own = trained / (layout.num_copies if layout.zero_stage else 1)
    if role.options.offload:
        moved = own * (FLOAT32_BYTES + role.weight_bytes) / links.host
        return moved + own * ADAM_BYTES / HOST_ADAM_RATE
    return own * ADAM_BYTES / links.memory
