"""A causal LM seen as policy, critic, reference or reward model.

Shapes: B sequences of `lengths` [B], N tokens in all of them together, H hidden, V vocabulary. Ids [N] and states
[N, H] of all sequences stand one after the other, and so they go through the layers (`packing`). A model whose
attention cannot be ours gets rows padded on the right; with causal attention padding there needs no mask, since no real
token ever looks to its right.

A model whose lower layers are frozen is run in two parts, `trunk` and `branch`: the trunk's output is the same for the
policy at every update, for the reference and for reward models trained above the same trunk, so it is computed once a
rollout and kept (trlX's "hydra" model).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xray_runtime.algorithms.logprobs import chunked_logprobs_and_entropy
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.family import Logits, family_of
from xray_runtime.models.head_layers import BorrowedHead, ScalarHead
from xray_runtime.models.noted_passes import NotedPasses
from xray_runtime.models.packing import Prompts, can_pack, packed_states, use_packed_attention
from xray_runtime.models.padding import pad, unpad
from xray_runtime.models.parts import backbone_of, check_parts
from xray_runtime.models.pictures import PictureReader
from xray_runtime.models.routing import ARGUMENT, take_routes
from xray_runtime.models.sequence_parallel import SequenceRanks, States, each_where_it_is

T = TypeVar("T")


class HeadedLM(nn.Module):
    """A Hugging Face causal LM with an optional scalar head on its last hidden state.

    Args:
        scalar_head: add a linear head to one number a position (value or reward).
        trainable_layers: train only this many top layers, the final norm and the head; None: everything.
        branches: frozen models on the same trunk.
        adapters: LoRA adapters in `lm`, which are trained instead of its weights.

    Attributes:
        routed_layers: number of layers with experts that take routes.

    Raises:
        ValueError: `trainable_layers` exceeds the model's layers, or a branch does not share the trunk.
    """

    def __init__(
        self,
        lm: Any,
        *,
        scalar_head: bool = False,
        trainable_layers: int | None = None,
        branches: Iterable[Branch] = (),
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        assert adapters is None or trainable_layers is None
        self.lm = lm
        self.adapters = adapters
        text = lm.config.get_text_config()
        text.use_cache = False
        self.scalar = ScalarHead(text.hidden_size, 1) if scalar_head else None
        if self.scalar is not None:
            # A zero head: the first values are 0 for every state, rather than noise the policy would learn from.
            nn.init.zeros_(self.scalar.weight)
            nn.init.zeros_(self.scalar.bias)
        family = family_of(lm.config.model_type)
        self.parts, self._logits = family.parts, family.logits(lm.config)
        self.pictures: PictureReader | None = None
        """Set where rows have pictures."""
        for tower in family.pictures.towers if family.pictures is not None else ():
            lm.get_submodule(tower).requires_grad_(False)
        known = family.auxiliary
        self.noted = known if known and hasattr(lm.config, known.option) else None
        """The output of its own that training notes."""
        self.auxiliary = self.noted if self.noted and self.noted.coefficient(lm.config) else None
        """The model's own loss, if its config asks for one."""
        self.passes: NotedPasses | None = None
        self.sequence_ranks: SequenceRanks | None = None
        """Those that share the tokens of each micro-batch; set by `engines.trainer`."""
        self.packs = can_pack(lm)
        """Whether sequences go through in one row, rather than padded."""
        if self.packs:
            use_packed_attention(lm)
        self.routed_layers = take_routes(lm, family)
        self.has_trunk = trainable_layers is not None
        self.frozen_layers = 0 if trainable_layers is None else self._train_top(trainable_layers)
        for branch in (held := list(branches)):
            if not self.has_trunk or not self._same_trunk(branch.whole):
                raise ValueError(f"{branch.role} does not share the policy's frozen trunk")
            branch.keep_top(self.frozen_layers)
            if self.packs:
                use_packed_attention(branch)
        self.branches: Any = nn.ModuleList(held)

    def _train_top(self, trainable_layers: int) -> int:
        """Freeze all but the top layers and the final norm; returns the number of frozen layers."""
        lm = self.lm
        if not self.parts.fit(lm) or family_of(lm.config.model_type).pictures is not None:
            raise ValueError(
                f"base.trainable_layers: {trainable_layers} is not allowed: only models built like Llama can be "
                f"taken apart, not a {type(lm).__name__}"
            )
        check_parts(lm, f"base.trainable_layers: {trainable_layers}")
        layers = self.layers
        if trainable_layers > len(layers):
            raise ValueError(f"base.trainable_layers: {trainable_layers} is more than the model's {len(layers)} layers")
        frozen = len(layers) - trainable_layers
        lm.requires_grad_(False)
        for module in (*layers[frozen:], lm.get_submodule(self.parts.norm)):
            module.requires_grad_(True)
        return frozen

    @property
    def layers(self) -> Any:
        """The causal LM's layers, a `ModuleList`."""
        return self.lm.get_submodule(self.parts.layers)

    def _same_trunk(self, other: Any) -> bool:
        frozen = (f"{self.parts.layers}.{number}" for number in range(self.frozen_layers))
        names = (self.parts.embeddings, self.parts.head, *frozen)
        pairs = [(self.lm.get_submodule(name), other.get_submodule(name)) for name in names]
        parameters = (pq for a, b in pairs for pq in zip(a.parameters(), b.parameters(), strict=True))
        # Those of skeletons are compared in their files, by `weight_files.same_trunk`.
        return all(p.shape == q.shape if p.is_meta and q.is_meta else torch.equal(p, q) for p, q in parameters)

    def checkpoint_activations(self) -> None:
        """Keep, from now on, only what enters each layer for the backward pass, which computes the rest again.

        Raises:
            ValueError: the model has no layers that can be told from one another.
        """
        # Stages import this module too, and do without these three seconds.
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in self.lm.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"engine.activation_checkpointing: true is not allowed: a {type(self.lm).__name__} has no layers that "
                "transformers can compute again"
            )
        for layer in layers:
            # transformers' own switch works in training mode alone, which would turn dropout on as well.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """`task(self, *args)`: every use of the module is one forward, so that engines' hooks see it."""
        return task(self, *args)

    def trunk(self, input_ids: Tensor, lengths: Tensor, prompts: Prompts | None = None) -> Tensor:
        """Hidden states [N, H] entering the first trainable layer, without gradient."""
        with torch.no_grad():
            trunk = self._part(0, self.layers[: self.frozen_layers], nn.Identity())
            return self._run_whole(trunk, lengths, prompts, input_ids=input_ids)

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        trunk: Tensor | None = None,
        prompts: Prompts | None = None,
        routes: Tensor | None = None,
    ) -> States:
        """Last hidden states [N, H]; from `trunk` states where they are given.

        A prompt that `prompts` says several sequences share is computed once, where the model packs sequences.
        `routes`: experts of each token in each layer that has some [N, L, K]; −1: those that the model chooses.
        """
        if routes is not None and (self.has_trunk or routes.shape[1] != self.routed_layers):
            raise ValueError(f"routes of {routes.shape[1]} layers cannot be replayed by a {type(self.lm).__name__}")
        if trunk is None and not self.has_trunk:
            given = {} if routes is None else {ARGUMENT: routes}
            return self._run(backbone_of(self.lm), lengths, prompts, input_ids=input_ids, **given)
        states = self.trunk(input_ids, lengths, prompts) if trunk is None else trunk
        top = self._part(self.frozen_layers, self.layers[self.frozen_layers :], self.lm.get_submodule(self.parts.norm))
        return self._run(top, lengths, prompts, inputs_embeds=states)

    def _run_whole(self, backbone: Any, lengths: Tensor, prompts: Prompts | None, **entering: Tensor) -> Tensor:
        """`_run` of a model taken apart, whose ranks share no sequences."""
        states = self._run(backbone, lengths, prompts, **entering)
        assert isinstance(states, Tensor)
        return states

    def _run(self, backbone: Any, lengths: Tensor, prompts: Prompts | None, **entering: Tensor) -> States:
        """Last hidden states [N, H] of a backbone, of `input_ids` [N] or `inputs_embeds` [N, H]."""
        if self.passes is not None and torch.is_grad_enabled():
            backbone = functools.partial(self._noted, backbone, lengths)
        if self.packs:
            return packed_states(backbone, lengths, prompts, self.sequence_ranks, **entering)
        padded = {name: pad(flat, lengths) for name, flat in entering.items()}
        if self.pictures is not None:
            padded = self.pictures.entering(padded["input_ids"])
        return unpad(backbone(**padded).last_hidden_state, lengths)

    def noting_passes(self) -> HeadedLM:
        """A module with the same weights, whose passes with gradients are noted, where it has something to note."""
        if self.noted is None:
            return self
        # A shallow copy, since several threads may be in a pass of this module; by hand, since FSDP's class of it makes
        # whole new ones.
        module = HeadedLM.__new__(HeadedLM)
        module.__dict__ = self.__dict__ | {"passes": NotedPasses(self.noted, self.lm.config)}
        return module

    def _noted(self, backbone: Any, lengths: Tensor, **inputs: Any) -> Any:
        """The output of `backbone`, after it was noted; tokens that pad do not count."""
        assert self.passes is not None
        out = backbone(**inputs, **{self.passes.option: True})
        parts: tuple[Tensor, ...] = getattr(out, self.passes.output)
        if (ranks := self.sequence_ranks) is not None:
            parts = tuple(ranks.whole(part, len(inputs["trees"].computed)) for part in parts)
        if self.packs:
            # A shared prompt, computed once, counts in each of its sequences.
            parts = tuple(part[inputs["trees"].given] for part in parts)
        else:
            parts = tuple(unpad(part.view(len(lengths), -1, part.shape[-1]), lengths) for part in parts)
        self.passes.add(parts)
        return out

    def keep_stage(self, layers: range) -> None:
        """Keep one pipeline stage: these layers, and the parts below the first or above the last. Names do not change.

        The last stage's `hidden` wants the states of the stage before as its `trunk`.
        """
        lm, parts, num_layers = self.lm, self.parts, len(self.layers)
        for i in set(range(num_layers)) - set(layers):
            self.layers[i] = nn.Identity()
        if layers.stop < num_layers:
            lm.set_submodule(parts.norm, nn.Identity())
            lm.set_submodule(parts.head, nn.Identity())
            self.scalar = None
        elif lm.config.tie_word_embeddings:
            lm.set_submodule(parts.head, BorrowedHead(lm.get_submodule(parts.head).weight))
        if layers.start > 0:
            lm.set_submodule(parts.embeddings, nn.Identity())
        self.stage, self.frozen_layers, self.noted = layers, layers.start, None
        if self.adapters is not None:
            self.adapters.keep(lm)

    def stage_states(self, lengths: Tensor, prompts: Prompts | None = None, **entering: Tensor) -> Tensor:
        """Hidden states [N, H] that leave this pipeline stage, of `input_ids` or `inputs_embeds` that enter it."""
        layers = self.layers[self.stage.start : self.stage.stop]
        return self._run_whole(self._part(self.stage.start, layers, nn.Identity()), lengths, prompts, **entering)

    def branch_hidden(self, branch: Branch, trunk: Tensor, lengths: Tensor, prompts: Prompts | None = None) -> Tensor:
        """Last hidden states [N, H] of a branch."""
        with torch.no_grad():
            part = self._part(self.frozen_layers, branch.layers, branch.norm)
            return self._run_whole(part, lengths, prompts, inputs_embeds=trunk)

    def _part(self, first: int, layers: nn.ModuleList, norm: nn.Module) -> Any:
        # A shallow copy of the backbone that shares every module but runs only `layers` (the model's from `first` on)
        # and then `norm`: masks and rotary embeddings stay the library's own code, whatever the family.
        backbone = self.lm.get_submodule(self.parts.backbone)
        part = copy.copy(backbone)
        part.__dict__ = backbone.__dict__ | {"_modules": dict(backbone._modules)}
        for name, module in ((self.parts.layers, layers), (self.parts.norm, norm)):
            part._modules[name.rpartition(".")[2]] = module
        part.config = copy.copy(self.lm.config)
        part.config.num_hidden_layers = len(layers)
        if getattr(self.lm.config, "layer_types", None):
            # Families with sliding windows look up a layer's mask here, by its place.
            part.config.layer_types = self.lm.config.layer_types[first : first + len(layers)]
        return part

    def logprobs(self, hidden: States, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities of targets [N] or [N, k], entropy [N]) after hidden states [N, H]; logits are not kept."""
        chunked, vocab_size = chunked_logprobs_and_entropy, self.lm.config.get_text_config().vocab_size

        def compute(own: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.in_chunks(
                lambda logits, states: chunked(logits, states, ids, temperature, vocab_size=vocab_size), own
            )

        return each_where_it_is(compute, hidden, targets)

    def in_chunks(self, compute: Callable[[Callable[[Tensor], Tensor], Tensor], T], hidden: Tensor) -> T:
        """`compute(logits of states, hidden)`, which calls the output layer on parts of `hidden` [N, H]; its logits are
        the model's, scaled and capped as its family says.

        It is one call of the layer, whatever the number of parts: ZeRO-3 gathers its weight once for all of them, and
        ranks whose rows need other numbers of parts still meet in the same collectives.
        """
        layer = self.lm.get_output_embeddings()
        if not isinstance(layer.forward, _ForwardInChunks):
            layer.forward = _ForwardInChunks(layer.forward, self._logits)
        found: T = layer(hidden, compute)
        return found

    def scalars(self, hidden: States) -> Tensor:
        """Scalar head's output [N] of hidden states [N, H]."""
        head = self.scalar
        assert head is not None
        found: Tensor = each_where_it_is(lambda own: head(own).squeeze(-1), hidden)
        return found


class Branch(nn.Module):
    """A frozen Hugging Face causal LM; a `HeadedLM` with the same trunk keeps its layers above that.

    Args:
        scalar: a reward model's head.
        checkpoint: directory of a skeleton's weights.
    """

    layers: nn.ModuleList
    norm: nn.Module
    first: int
    """Number of its first layer in the whole model."""

    def __init__(self, role: str, lm: Any, scalar: ScalarHead | None = None, checkpoint: Path | None = None) -> None:
        super().__init__()
        self.role, self.scalar, self.checkpoint = role, scalar, checkpoint
        self.whole: Any = lm
        self.requires_grad_(False)

    def keep_top(self, first: int) -> None:
        """Keep the layers from `first` on, and let go of the others."""
        parts = family_of(self.whole.config.model_type).parts
        self.first, self.norm = first, self.whole.get_submodule(parts.norm)
        self.layers = self.whole.get_submodule(parts.layers)[first:]
        del self.whole


@dataclass(frozen=True)
class _ForwardInChunks:
    """An output layer's forward; with `compute` see `HeadedLM.in_chunks`."""

    layer: Callable[[Tensor], Tensor]
    logits: Logits

    def __call__(self, hidden: Tensor, compute: Callable[..., Any] | None = None) -> Any:
        # transformers calls the layer too, and does the rest by itself.
        return (
            self.layer(hidden) if compute is None else compute(lambda states: self.logits(self.layer(states)), hidden)
        )
