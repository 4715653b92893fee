"""Input of the planner: the models of one stage, the size of their batches, and the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.roles import Use
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.shapes import ModelShape, ceil_div, from_parameter_count
from xray_runtime.ops.planner.memory import (
    PLAIN,
    Layout,
    Memory,
    Options,
    generation_memory,
    scoring_memory,
    training_memory,
)
from xray_runtime.ops.planner.model_states import FLOAT32_BYTES, HALF_BYTES, sharding_of
from xray_runtime.ops.planner.sync_memory import receiving_bytes, sending_bytes

CACHED_SEQUENCES, CACHED_TOKENS = 8, 16_384
"""Unit of a generator's planned KV cache: this many full sequences, but at most this many tokens and at least one
sequence. In vLLM, further sequences wait."""


OpenChoice = Literal["micro_batch_tokens", "generator_replicas", "sleep", "offload"]
OPEN_CHOICES: frozenset[OpenChoice] = frozenset(get_args(OpenChoice))


@dataclass(frozen=True, kw_only=True)
class PlannedRole:
    """One model of a stage with its shape; `ModelRole` says what the fields without a text are."""

    name: str
    shape: ModelShape
    use: Use
    weight_bytes: int
    """2 for a trained role means mixed precision: the optimizer works in float32."""
    scores_tokens: bool = True
    top_layers: int | None = None
    """Its trainable layers; None: all."""
    branches: int = 0
    scored_passes: int = 1
    """Passes over a rollout to score it; 2 if it is its own reference."""
    options: Options = PLAIN
    """Only for a trained role."""
    in_one_piece: bool = False
    """Its engine cannot split it."""
    library: str = EngineConfig.default
    """The trainer that splits it."""
    model: str | None = None
    """Its pretrained base model, which may not support splitting; None: a Llama."""
    epochs: int = 1
    sequences_per_row: int = 1
    kept_rollouts: int = 0
    keeps_routes: bool = False
    kept_top_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The models of one stage, all open at the same time, and the size of their batches."""

    roles: tuple[PlannedRole, ...]
    sequence_tokens: int
    """Longest prompt plus longest reply."""
    response_tokens: int
    """Longest reply."""
    batch_size: int
    """Sequences of one optimizer step: the most data-parallel ranks."""
    rollout_size: int
    """Sequences of one rollout."""
    micro_batch_tokens: int
    score_tokens: int = 8192
    """Tokens of one scoring pass."""
    reserved_kv_bytes: int = 0
    """Memory that vLLM always reserves for its KV cache."""
    generator_replicas: int = 1
    generator_sleeps: bool = False
    """The generator releases its memory while the other models work."""
    trainer_sleeps: bool = False
    """Trained models release theirs while the generator works."""
    samples_ahead: bool = False
    """The generator samples the next rollout while the other models score one and learn from it."""
    cache_scale: int = 4
    """Size of the KV cache, in units of `CACHED_SEQUENCES` and `CACHED_TOKENS`."""
    device: Literal["cpu", "cuda"] = "cuda"
    through_host: bool = False
    """Weights go to the generator through host memory."""
    sequence_parallel: int = 1
    """Ranks of trained models that share the tokens of each row; for rows that are too long for one."""
    open_choices: frozenset[OpenChoice] = frozenset()
    """Choices that the planner may make on GPUs, besides layouts and recomputation."""

    def of_use(self, use: Use) -> list[PlannedRole]:
        return [role for role in self.roles if role.use == use]

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row of a trained model; a pair's are those of both sides."""
        return self.sequence_tokens * max((role.sequences_per_row for role in self.of_use("trained")), default=1)

    @property
    def is_long(self) -> bool:
        """Whether that row is longer than a pass of the default size: then it decides what fits."""
        return self.row_tokens > EngineConfig.model_fields["micro_batch_tokens"].default

    @property
    def num_models(self) -> int:
        """Number of models, with each replica of a generator."""
        return len(self.roles) + len(self.of_use("sampled")) * (self.generator_replicas - 1)

    def with_options(self, **changes: Any) -> Workload:
        """The workload with these fields of `Options` for its trained models."""

        def changed(role: PlannedRole) -> PlannedRole:
            options = replace(role.options, **changes)
            options = replace(options, checkpointing=options.checkpointing and options.may_recompute)
            if options.offload:
                options = replace(options, least_zero_stage=max(options.least_zero_stage, 1))
            return replace(role, options=options) if role.use == "trained" else role

        return replace(self, roles=tuple(changed(role) for role in self.roles))

    def memory(self, role: PlannedRole, layout: Layout, *, shared: bool = True) -> Memory:
        """Memory of `role` on one of its devices; `shared`: the other models are on the same devices."""
        memory = self._working(role, layout)
        return memory if self.device == "cpu" else replace(memory, syncing=self._syncing(role, layout, shared))

    def _syncing(self, role: PlannedRole, layout: Layout, shared: bool) -> int:
        """`Memory.syncing`: the first trained model is the policy, and sends its weights to the generators."""
        trained, through_host = self.of_use("trained"), self.through_host
        if not trained or not self.of_use("sampled"):
            return 0
        if role.use == "sampled":
            return receiving_bytes(role.shape, role.weight_bytes, layout.tp, through_host=through_host, shared=shared)
        if role.name != trained[0].name:
            return 0
        return sending_bytes(
            *(role.shape, role.weight_bytes, layout, role.options), through_host=through_host, shared=shared
        )

    def _working(self, role: PlannedRole, layout: Layout) -> Memory:
        """Memory that its own work needs."""
        shape, width, on_gpu = role.shape, role.weight_bytes, self.device == "cuda"
        # On CUDA, torch has no fused attention for float32 with grouped heads.
        keeps_scores = on_gpu and width == FLOAT32_BYTES and shape.num_kv_heads < shape.num_heads
        scored_length = self.sequence_tokens if keeps_scores or shape.eager else 0
        if role.use == "sampled":
            sequences = min(CACHED_SEQUENCES * self.cache_scale, ceil_div(self.rollout_size, layout.dp))
            most = CACHED_TOKENS * self.cache_scale
            cached = max(min(sequences * self.sequence_tokens, most), self.sequence_tokens)
            return generation_memory(
                shape,
                width,
                layout,
                sequences=self.running_sequences(layout) if on_gpu else sequences,
                cached_tokens=cached,
                reserved_kv_bytes=self.reserved_kv_bytes,
                on_gpu=on_gpu,
            )
        tokens, positions = self._pass(role, self.score_tokens)
        scoring = scoring_memory(
            *(shape, width, layout),
            tokens=tokens,
            positions=positions,
            sharding=sharding_of(role.library),
            scored_length=scored_length,
            on_gpu=on_gpu,
        )
        if role.use == "frozen":
            return scoring
        tokens, positions = self._pass(role, self.micro_batch_tokens)
        training = training_memory(
            shape,
            width,
            layout,
            tokens=tokens,
            positions=positions,
            top_layers=role.top_layers,
            branches=role.branches,
            options=role.options,
            scored_length=scored_length,
            on_gpu=on_gpu,
        )
        # A trained model scores as well, at another time.
        passes = (training.activations, training.logits), (scoring.activations, scoring.logits)
        activations, logits = max(passes, key=sum)
        if role.top_layers is not None:
            # A frozen trunk's output, w·h a token, is kept from a rollout to its updates.
            tokens = self.sequence_tokens * ceil_div(self.rollout_size, layout.dp)
            activations += width * tokens * shape.hidden_size
        return replace(training, activations=activations, logits=logits)

    def running_sequences(self, layout: Layout) -> int:
        """Sequences that one replica of the generator samples at a time: vLLM's `max_num_seqs`."""
        cached = max(CACHED_TOKENS * self.cache_scale // self.sequence_tokens, 1)
        return min(CACHED_SEQUENCES * self.cache_scale, ceil_div(self.rollout_size, layout.dp), cached)

    def _pass(self, role: PlannedRole, max_tokens: int) -> tuple[int, int]:
        """(tokens, positions that get logits) of one pass; a sequence longer than `max_tokens` is a pass of its own."""
        tokens = max(max_tokens, self.sequence_tokens * role.sequences_per_row)
        return tokens, ceil_div(tokens * self.response_tokens, self.sequence_tokens) if role.scores_tokens else 0


def training_options(lora: LoRAConfig | None, engine: EngineConfig, device: str) -> tuple[int, Options]:
    """(bytes per weight, options) of a trained model.

    On CPU, device memory is host memory, so offloading to it saves nothing.
    """
    engine = engine.resolved(device)
    mixed, sharding = engine.precision == "bfloat16", sharding_of(engine.library)
    options = Options(
        lora_rank=lora.rank if lora is not None else None,
        lora_targets=tuple(sorted(lora.target_modules)) if lora is not None and lora.target_modules else None,
        offload=engine.offloads(device),
        checkpointing=engine.activation_checkpointing,
        may_recompute=engine.capabilities.activation_checkpointing,
        float32_sums=mixed,
        least_zero_stage=engine.least_sharding_level,
        sharding=sharding,
    )
    return HALF_BYTES if mixed else FLOAT32_BYTES, options


def from_parameters(count: float, sequence_tokens: int, options: Options = PLAIN) -> Workload:
    """PPO with five models of `count` parameters each in mixed precision, half of each sequence a reply, batches of 512
    (as Ouyang et al. 2022).
    """
    shape = from_parameter_count(count)
    uses: tuple[tuple[str, Use, bool], ...] = (
        ("policy", "trained", True),
        ("reference", "frozen", True),
        ("critic", "trained", False),
        ("reward", "frozen", False),
        ("generator", "sampled", True),
    )
    return Workload(
        roles=tuple(
            PlannedRole(
                name=name,
                shape=shape,
                use=use,
                weight_bytes=HALF_BYTES,
                scores_tokens=tokens,
                options=options if use == "trained" else PLAIN,
            )
            for name, use, tokens in uses
        ),
        sequence_tokens=sequence_tokens,
        response_tokens=sequence_tokens // 2,
        batch_size=512,
        rollout_size=512,
        micro_batch_tokens=4096,
        open_choices=OPEN_CHOICES,
    )
