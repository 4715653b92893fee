"""A model's memory on one device, in bytes: closed forms over shape, weight width and layout, nothing measured.

`tests/component/test_memory_model.py` compares model states with DeepSpeed's, `tests/unit/ops/test_planning_memory.py`
activations with what autograd saves, and a training pass with its peak.

Symbols: N parameters, L layers, h hidden, a heads, d head size, k key-value heads, i intermediate, V vocabulary,
w bytes of a weight; ZeRO stage × tensor parallel `tp` × pipeline parallel `pp` × data parallel `dp` × sequence parallel
`sp`, whose ranks share a pass's activations and are data parallel to its states.

Sources: model states after ZeRO (Rajbhandari et al. 2020, §3 and §5); activations counted in the manner of
Korthikanti et al. 2022 (§4), for a Llama without dropout; fused attention keeps no scores (Dao et al. 2022), other
attention a·s² of them; LoRA after Hu et al. 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from xray_runtime.engines.capabilities import Sharding
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.models.shapes import ModelShape, ceil_div, device_parameters, lora_parameters
from xray_runtime.ops.planner.layout import Layout as Layout
from xray_runtime.ops.planner.model_states import (
    FLOAT32_BYTES,
    gathered_bytes,
    kept_bytes,
    model_states,
    sharding_of,
    summed_experts_bytes,
)

MAX_LOGITS, MAX_LOGITS_ON_GPU = 2**24, 2**28
"""Logits computed at a time (as in `algorithms.logprobs`, which needs torch)."""
LOGIT_BYTES = 3 * FLOAT32_BYTES
"""Bytes of one computed logit: itself, its log-softmax and a temporary, in float32."""
SCORE_BYTES = 8
"""Bytes that transformers' eager attention keeps of one score: its softmax in float32, and that in the weights' width
and a cap's tanh, which in float32 is 4 for the cap alone."""
PROCESS_BYTES = 500_000_000
"""A Workhorse's process without a model: private memory after imports on CPU (measured: 0.43 GB with DeepSpeed, 0.58 GB
with vLLM), about a CUDA context on a GPU."""
GENERATOR_BATCH_TOKENS = 16_384
"""Tokens of vLLM's prefill pass (default of `max_num_batched_tokens` on large GPUs)."""
GRAPH_BYTES = 20 * 2**20
"""CUDA graphs of one layer for all captured batch sizes: an assumption, after the 0.5 to 1.5 GiB that vLLM logs for
models of 30 to 80 layers."""
WORKSPACE_BYTES = 512 * 2**20
"""Workspace of the attention and sampling kernels: an assumption, FlashInfer's 394 MiB and more."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is trained, apart from its layout."""

    lora_rank: int | None = None
    """Train only LoRA adapters of this rank."""
    lora_targets: tuple[str, ...] | None = None
    """Names of the layers that get adapters (None: every projection)."""
    offload: bool = False
    """Optimizer states, and under ZeRO-3 weights, live in host memory or on disk (Ren et al. 2021, ZeRO-Offload;
    Rajbhandari et al. 2021, ZeRO-Infinity)."""
    checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass."""
    may_recompute: bool = True
    """Its trainer supports `checkpointing`."""
    float32_sums: bool = False
    """Gradients of half-precision passes are summed in float32, as X-ray's engine has DeepSpeed do."""
    least_zero_stage: int = 0
    """The lowest ZeRO stage that supports these options."""
    sharding: Sharding = field(default_factory=lambda: sharding_of(EngineConfig.default))
    """The cost of its trainer's sharding."""


PLAIN = Options()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a model's fullest device, by purpose."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    graphs: int = 0
    """vLLM's CUDA graphs and workspaces, which stay while it sleeps."""
    process: int = PROCESS_BYTES
    loading: int = 0
    """Peak while the model is loaded, without weights and process."""
    syncing: int = 0
    """Peak while weights are sent or received, beside what is resident."""
    kept: int = 0
    """The part that DeepSpeed keeps of `gradients` and `buffers` between turns."""

    @property
    def total(self) -> int:
        """The peak: in a pass, while the model is loaded, or while weights are sent."""
        return max(
            self.working, self.weights + self.loading + self.process, self.resident + self.kv_cache + self.syncing
        )

    @property
    def working(self) -> int:
        """The peak in a pass."""
        return sum(getattr(self, name) for name in HELD_IN_A_PASS)

    @property
    def resident(self) -> int:
        """Memory between an awake model's turns, without a KV cache: weights, optimizer states, what DeepSpeed keeps,
        CUDA graphs and the process."""
        return self.weights + self.optimizer + self.kept + self.asleep

    @property
    def asleep(self) -> int:
        """Memory of a model that sleeps."""
        return self.graphs + self.process


HELD_IN_A_PASS = (
    *("weights", "gradients", "optimizer", "buffers", "activations", "logits", "kv_cache", "graphs", "process"),
)
"""Fields of `Memory` that add up."""


def layer_activation_bytes(
    shape: ModelShape, tokens: int, weight_bytes: int, tp: int = 1, scored_length: int = 0
) -> int:
    """Bytes that one layer keeps for its backward pass over `tokens` tokens.

    Per token: two RMSNorms, each with its float32 input, the normalized and the scaled input, and one float32 root,
    2·((4 + 2w)·h + 4), and 4 + 2w for each feature of further norms; attention's q, k, v, its output with a float32
    log-sum, and the concatenated outputs of packed sequences, w·(3a + 2k)·d + 4·a; the MLP's gate, its SiLU, up and
    their product, 4w·i, and for each expert that a token takes, its input and its output, plain and weighted, 3w·h.
    Tensor parallelism splits attention and MLP, not the norms (Korthikanti et al. 2022, eq. 2; their GPT layer keeps
    34·h + 5·a·s bytes per token, of which 24·h and the second term are split).

    Args:
        scored_length: tokens s of a sequence whose attention scores are kept: the softmax's output, w·a·s² for each,
            and `SCORE_BYTES` instead of w in transformers' eager attention; 0: fused attention keeps none.
    """
    w, d = weight_bytes, shape.head_size
    norms = (FLOAT32_BYTES + 2 * w) * (2 * shape.hidden_size + shape.extra_norm_width) + 2 * FLOAT32_BYTES
    heads, kv_heads = ceil_div(shape.num_heads, tp), ceil_div(shape.num_kv_heads, tp)
    attention = w * (3 * heads + 2 * kv_heads) * d + FLOAT32_BYTES * heads
    attention += (SCORE_BYTES if shape.eager else w) * heads * scored_length
    routed = 0 if shape.experts is None else 3 * w * shape.experts.chosen * shape.hidden_size
    return tokens * (norms + attention + 4 * w * ceil_div(shape.intermediate_size, tp) + routed)


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    weight_bytes: int,
    layout: Layout,
    num_layers: int | None = None,
    scored_length: int = 0,
    *,
    checkpointing: bool = False,
) -> int:
    """Bytes that a rank of the first pipeline stage keeps for the backward pass over `tokens` tokens.

    Without checkpointing, every layer's activations; with it, w·h per token and layer (Korthikanti et al. 2022, §5) and
    one layer's activations at a time. A pipeline's first stage has pp micro-batches in flight (1F1B), so `pp` saves
    nothing here. The final norm is added.

    Args:
        num_layers: number of trained layers (None: all).
        scored_length: as in `layer_activation_bytes`.
    """
    layers, tokens = ceil_div(num_layers or shape.num_layers, layout.pp) * layout.pp, ceil_div(tokens, layout.sp)
    layer = layer_activation_bytes(shape, tokens, weight_bytes, layout.tp, scored_length)
    final_norm = tokens * ((FLOAT32_BYTES + 2 * weight_bytes) * shape.hidden_size + FLOAT32_BYTES)
    if checkpointing:
        return layers * tokens * weight_bytes * shape.hidden_size + layer + final_norm
    return layers * layer + final_norm


def logit_bytes(shape: ModelShape, positions: int, *, on_gpu: bool = False) -> int:
    """Logits of `positions` tokens with log-softmax and entropy: three float32 [positions, V].

    At most `MAX_LOGITS`, on GPUs `MAX_LOGITS_ON_GPU`, exist at a time.
    """
    return LOGIT_BYTES * min(positions, chunk_tokens(shape, on_gpu=on_gpu)) * shape.vocab_size


def chunk_tokens(shape: ModelShape, *, on_gpu: bool) -> int:
    """Tokens whose logits are computed at a time."""
    return max((MAX_LOGITS_ON_GPU if on_gpu else MAX_LOGITS) // shape.vocab_size, 1)


def training_memory(
    shape: ModelShape,
    weight_bytes: int,
    layout: Layout,
    *,
    tokens: int,
    positions: int,
    top_layers: int | None = None,
    branches: int = 0,
    options: Options = PLAIN,
    scored_length: int = 0,
    on_gpu: bool = False,
) -> Memory:
    """A model under training.

    Args:
        tokens: tokens of one micro-batch.
        positions: number of these that get logits.
        top_layers: number of trained layers above a frozen trunk (None: all).
        branches: number of frozen models that share the trunk and add their own top layers.
        scored_length: as in `layer_activation_bytes`.
    """
    held = device_parameters(shape, layout.tp, layout.pp)
    trained = held
    if top_layers is not None:
        trained = ceil_div(top_layers, layout.pp) * shape.layer_parameters(layout.tp) + shape.hidden_size
        held += trained * branches
    if options.lora_rank is not None:
        trained = lora_parameters(shape, options.lora_rank, layout.tp, layout.pp, targets=options.lora_targets)
        held += trained
    sharding, sums, copies = options.sharding, options.float32_sums, layout.num_copies
    weights, gradients, optimizer = model_states(
        held, trained, weight_bytes, layout.zero_stage, copies, sharding, float32_sums=sums
    )
    bucket_width = FLOAT32_BYTES if sums else weight_bytes
    bucket = min(sharding.bucket_elements, trained) * bucket_width if layout.zero_stage else 0
    memory = Memory(
        weights=0 if options.offload and layout.zero_stage >= 3 else round(weights),
        gradients=round(gradients),
        optimizer=0 if options.offload else round(optimizer),
        buffers=bucket,
        activations=activation_bytes(
            shape, tokens, weight_bytes, layout, top_layers, scored_length, checkpointing=options.checkpointing
        )
        + summed_experts_bytes(
            shape, weight_bytes, layout.ep, options.lora_targets, checkpointing=options.checkpointing
        ),
        logits=logit_bytes(shape, positions, on_gpu=on_gpu),
    )
    return replace(
        memory,
        kept=kept_bytes(memory.gradients, bucket, trained, layout.zero_stage, sharding, float32_sums=sums),
        loading=_loading_bytes(shape, weight_bytes, layout, memory, trained, sharding, float32_sums=sums),
        buffers=memory.buffers
        + gathered_bytes(
            *(shape, held, weight_bytes, layout.zero_stage, copies, sharding),
            offload=options.offload,
            ep=layout.ep,
        ),
    )


def scoring_memory(
    shape: ModelShape,
    weight_bytes: int,
    layout: Layout,
    *,
    tokens: int,
    positions: int,
    sharding: Sharding,
    scored_length: int = 0,
    on_gpu: bool = False,
) -> Memory:
    """A frozen model that scores `tokens` tokens in one pass: one layer's activations at a time."""
    held = device_parameters(shape, layout.tp, layout.pp)
    return Memory(
        weights=round(held * weight_bytes / (layout.num_copies if layout.zero_stage >= 3 else 1)),
        buffers=gathered_bytes(shape, held, weight_bytes, layout.zero_stage, layout.num_copies, sharding),
        activations=layer_activation_bytes(shape, ceil_div(tokens, layout.sp), weight_bytes, layout.tp, scored_length),
        logits=logit_bytes(shape, positions, on_gpu=on_gpu),
        loading=reading_bytes(shape, weight_bytes, layout),
    )


def kv_cache_bytes(shape: ModelShape, tokens: int, weight_bytes: int, tp: int = 1, pp: int = 1) -> int:
    """Keys and values of `tokens` cached tokens: 2·L·k·d·w each, split by tp (whole heads) and pp (whole layers). What
    is latent is not split by tp."""
    layers, kv_heads = ceil_div(shape.num_layers, pp), ceil_div(shape.num_kv_heads, tp)
    return layers * (shape.cached_features or 2 * kv_heads * shape.head_size) * weight_bytes * tokens


def generation_memory(
    shape: ModelShape,
    weight_bytes: int,
    layout: Layout,
    *,
    sequences: int,
    cached_tokens: int,
    reserved_kv_bytes: int = 0,
    on_gpu: bool = False,
) -> Memory:
    """vLLM with a KV cache of `cached_tokens`, at least `reserved_kv_bytes`.

    It samples `sequences` at a time, and computes their logits at once.
    """
    kv_cache = kv_cache_bytes(shape, cached_tokens, weight_bytes, layout.tp, layout.pp)
    return Memory(
        weights=device_parameters(shape, layout.tp, layout.pp, split_vocabulary=True) * weight_bytes,
        activations=layer_activation_bytes(shape, GENERATOR_BATCH_TOKENS, weight_bytes, layout.tp),
        logits=LOGIT_BYTES * sequences * shape.vocab_size,
        kv_cache=max(kv_cache, reserved_kv_bytes),
        graphs=WORKSPACE_BYTES + shape.num_layers * GRAPH_BYTES if on_gpu else 0,
        loading=reading_bytes(shape, weight_bytes, layout),
    )


def reading_bytes(shape: ModelShape, weight_bytes: int, layout: Layout) -> int:
    """Extra memory while a model is read one float32 tensor at a time: the largest tensor, before it is rounded or,
    under ZeRO-3, sharded.
    """
    largest = largest_tensor(shape, layout.tp)
    rounded = FLOAT32_BYTES if weight_bytes < FLOAT32_BYTES else 0
    return largest * (rounded + (weight_bytes if layout.zero_stage >= 3 else 0))


def largest_tensor(shape: ModelShape, tp: int = 1) -> int:
    """Elements of the largest tensor of one of `tp` ranks, which all hold the embeddings whole."""
    wide = max(shape.intermediate_size, shape.num_heads * shape.head_size)
    experts = 0 if shape.experts is None else ceil_div(shape.experts.largest_tensor(shape.hidden_size), tp)
    return max(shape.embedding_parameters, shape.hidden_size * ceil_div(wide, tp), experts)


def _loading_bytes(
    shape: ModelShape,
    weight_bytes: int,
    layout: Layout,
    memory: Memory,
    trained: int,
    sharding: Sharding,
    *,
    float32_sums: bool,
) -> int:
    """Extra memory while a model to train is loaded: the largest tensor as it is read, DeepSpeed's flat copy of the
    trained parameters, or the states that are then created. Master weights are read after that. DeepSpeed's ZeRO-3 also
    creates gradients and bucket at this point, and its ZeRO-1 the float32 sums of half-precision gradients.
    """
    reading, flat, states = reading_bytes(shape, weight_bytes, layout), 0, memory.optimizer
    if sharding.copies_float32 and layout.zero_stage:
        flat = weight_bytes * trained // (layout.num_copies if layout.zero_stage >= 3 else 1)
    if sharding.keeps_gradients and layout.zero_stage >= 3:
        states += memory.gradients + memory.buffers
    elif sharding.keeps_gradients and layout.zero_stage == 1 and float32_sums:
        states += FLOAT32_BYTES * trained
    return max(reading, flat, states + reading)
