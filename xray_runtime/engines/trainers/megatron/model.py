"""A Llama of Megatron-core's model-parallel layers with the interface of `HeadedLM`.

Parts of Megatron-core 0.16 that always allocate on CUDA are replaced, so that the model also runs on CPU: its attention
core (by torch's fused kernel), its rotary embedding (by angles from Hugging Face's frequencies) and its gathering of
logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from xray_runtime.algorithms.logprobs import chunked_logprobs_and_entropy
from xray_runtime.engines.topology import Topology
from xray_runtime.engines.trainers.megatron.weights import padded_vocabulary
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.family import Heads, HFConfig
from xray_runtime.models.packing import Prompts
from xray_runtime.models.padding import pad, unpad


class MegatronLM(GPTModel):
    """One rank's part of a Llama with an optional scalar head. Weights are uninitialized; see `weights`.

    Shapes as in `models.heads`; inside Megatron hidden states are [S, B, H].

    Args:
        config: the Hugging Face model's `LlamaConfig`.
        inv_freq: its rotary frequencies [head size / 2].
        scalar_head: add the head on the last pipeline stage.
        dtype: type of the weights and of the passes.
    """

    has_trunk = packs = False
    auxiliary = passes = None
    adapters: Adapters | None = None
    branches = ()

    def __init__(
        self, config: HFConfig, topology: Topology, inv_freq: Tensor, *, scalar_head: bool, dtype: torch.dtype
    ) -> None:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
        layers = topology.layers(stage, config.num_hidden_layers)
        super().__init__(
            _megatron_config(config, topology, dtype),
            TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=WrappedTorchNorm),
            vocab_size=padded_vocabulary(config.vocab_size, topology.tensor),
            max_sequence_length=config.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == topology.pipeline - 1,
            share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
            position_embedding_type="none",
        )
        self.num_tokens = config.vocab_size
        self.scalar = nn.Linear(config.hidden_size, 1, dtype=dtype) if scalar_head and self.post_process else None
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, task: Any, *args: Any) -> Any:
        """`task(self, *args)`, as `HeadedLM.forward`."""
        return task(self, *args)

    def noting_passes(self) -> MegatronLM:
        """This module: its models have nothing to note."""
        return self

    def states(self, input_ids: Tensor) -> Tensor:
        """Output states [S, B, H] of this pipeline stage for ids [B, S], or for the tensor of `set_input_tensor`."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq)
        out: Tensor = self.decoder(
            hidden_states=self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, None, None, :],
        )
        return out

    def hidden(self, input_ids: Tensor, lengths: Tensor, trunk: None = None, prompts: Prompts | None = None) -> Tensor:
        """Last hidden states [N, H]. `prompts` changes nothing: each sequence's prompt is computed."""
        return unpad(self.states(pad(input_ids, lengths)).transpose(0, 1), lengths)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """As `HeadedLM.logprobs`. Tensor-parallel peers have the same rows, and thus equally many chunks."""
        return chunked_logprobs_and_entropy(self._logits, hidden, targets, temperature, vocab_size=self.num_tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [N, V] of hidden states [N, H], whole on every tensor-parallel peer."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        part, _ = self.output_layer(hidden, weight=weight)
        whole: Tensor = _Gather.apply(part, parallel_state.get_tensor_model_parallel_group())  # type: ignore[no-untyped-call]
        return whole[:, : self.num_tokens]

    def scalars(self, hidden: Tensor) -> Tensor:
        """Scalar head's output [...] of hidden states [..., H]."""
        assert self.scalar is not None
        out: Tensor = self.scalar(hidden).squeeze(-1)
        return out


class CausalAttention(nn.Module):
    """Causal attention of one rank's heads by torch's fused kernel, called as Megatron calls its attention cores."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, **_: Any) -> Tensor:
        """[S, B, heads × head size] of query [S, B, heads, head size], key and value [S, B, groups, head size]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class _Gather(torch.autograd.Function):
    """Gather [N, V / peers] of each peer to [N, V] on all of them, for the same loss on each."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        if group.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


def _megatron_config(config: HFConfig, topology: Topology, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=Heads.of(config).size,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Micro-batches are ragged; their losses are shares of a global sum and are only added.
        variable_seq_lengths=True,
        # Required with ragged lengths, also for a model without experts.
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
    )
