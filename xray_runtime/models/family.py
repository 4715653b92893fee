"""Model families: each file in `families/` is one, and its `FAMILY` says what X-ray knows of it.

A model of a type that none lists is trained as `UNLISTED`: padded, planned from the modules that transformers builds,
and tried by each generator. Whatever a family says is checked on a few tokens as a model enters (`trial`), or by tests
on small random models. Neither this module nor a family imports torch as it is imported: planners ask them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xray_runtime.kernel.plugs import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn


class HFConfig(Protocol):
    """A Hugging Face config object: each family has a class and further fields of its own."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    tie_word_embeddings: bool

    def get_text_config(self, decoder: bool | None = None) -> HFConfig: ...

    def to_dict(self) -> dict[str, Any]: ...

    def __getattr__(self, name: str) -> Any: ...


class Heads(NamedTuple):
    """The heads of attention in a layer."""

    queries: int
    keys: int
    """Key-value heads."""
    size: int
    """Features of a head."""

    @classmethod
    def of(cls, config: HFConfig) -> Heads:
        """From a config with the field names of a Llama, where those that equal a default may be left out."""
        queries = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // queries
        return cls(queries, getattr(config, "num_key_value_heads", None) or queries, size)


@dataclass(frozen=True)
class Logits:
    """Changes of the logits z of an output layer: z · scale, then z / divisor, then cap · tanh(z / cap)."""

    scale: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [..., V], in the operations of the models themselves and so with their bits."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


@dataclass(frozen=True)
class Parts:
    """Where a causal LM has the parts by which it is cut; `layers` and `norm` are children of `backbone`."""

    backbone: str = "model"
    embeddings: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"

    def fit(self, lm: nn.Module) -> bool:
        """Whether `lm` has all of them."""
        names = {name for name, _ in lm.named_modules()}
        return names.issuperset((self.backbone, self.embeddings, self.layers, self.norm, self.head))

    def above(self, num_layers: int, top_layers: int) -> tuple[str, ...]:
        """Prefixes of the names of weights in the `top_layers` upper layers and the final norm."""
        return (*(f"{self.layers}.{n}." for n in range(num_layers - top_layers, num_layers)), f"{self.norm}.")


class LayerSizes(NamedTuple):
    """Widths in one layer of a config."""

    hidden: int
    queries: int
    """All heads together."""
    keys: int
    """All key-value heads together."""
    head: int
    intermediate: int


class Beyond(NamedTuple):
    """Sizes by which one layer exceeds that of a Llama without biases."""

    parameters: int = 0
    normalized: int = 0
    """Features that further norms normalize."""


@dataclass(frozen=True)
class Auxiliary:
    """A loss of the model's own, which training adds to the method's (`objectives.training_loss`)."""

    option: str
    """The argument, True, with which the backbone gives that output."""
    output: str
    """The field of its output."""
    loss: Callable[[tuple[Tensor, ...], HFConfig], Tensor]
    """(output, config) → the loss of these tokens, of any number of sequences."""
    coefficient: Callable[[HFConfig], float]
    """Its weight in the whole loss, by the config; 0: it is off."""
    statistics: Callable[[tuple[Tensor, ...], HFConfig], dict[str, Tensor]]
    """(output, config) → sums over these tokens for the log, whether the loss is on or off."""


@dataclass(frozen=True)
class Pictures:
    """How a family reads pictures, where transformers gives their features as `get_image_features`."""

    towers: tuple[str, ...]
    """The parts that read them; they are never trained."""
    written: tuple[str, ...]
    """Fields of the config: the ids with which a prompt writes a picture. `image_token_id` is one of them."""
    layout: Callable[[Any, Any, Mapping[str, Any], int, int], list[int]]
    """(transformers' image processor, tokenizer, `config.json`, width, height) → the ids in place of
    `image_token_id`, without `around`; the tower's features stand where that is one of them."""
    encoded: Callable[[Tensor], dict[str, Any]]
    """Features [1 + D, N, H] of all pictures of a batch → the output of transformers' `get_image_features`."""
    has_grid: bool
    """Positions follow each picture's grid of patches (`get_rope_index`)."""
    around: str | None = None
    """A token on both sides of `layout`."""


def token_id(tokenizer: Any, token: str) -> int:
    """The id of an added token. Raises ValueError: there is none."""
    number: int | None = tokenizer.get_added_vocab().get(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token}, with which pictures are written")
    return number


@dataclass(frozen=True)
class Routing:
    """How a layer's router is read, and told what to choose."""

    read: Callable[[Any], tuple[Tensor, Tensor]]
    """Its output → (ids of a token's experts [S, K], in the order in which their outputs are summed, their weights)."""
    force: Callable[[Any, Any, Tensor], Any]
    """(router, its output, ids [S, K]; −1: as it chose) → the output with these experts, weighted by its own logits."""


@dataclass(frozen=True, kw_only=True)
class Family:
    model_types: tuple[str, ...]
    """transformers' names, in `config.json`."""
    packs: bool = False
    """Tokens meet in attention alone, and there by causality alone, unless the config asks for windows."""
    parts: Parts = Parts()
    """Checked before use: a model that lacks them, or changes states in between, is not cut (`models.parts`)."""
    beyond: Callable[[Mapping[str, Any], LayerSizes], Beyond] | None = None
    """(`config.json`, sizes) → what a layer has beyond a Llama's, so that a plan needs no torch. It also promises that
    layers can be split, by tensor and in stages. None: the model is built to be planned."""
    config_fields: tuple[str, ...] = ()
    """Fields that `beyond` needs to be written out, besides a Llama's."""
    logits: Callable[[HFConfig], Logits] = lambda config: Logits()
    """Changes of its output layer's logits."""
    attention: Callable[[HFConfig], str] = lambda config: "sdpa"
    """transformers' attention that computes all of a config's; "eager" where it caps scores. Where transformers has no
    "sdpa" for a class, "eager" is taken anyway."""
    pictures: Pictures | None = None
    """None: it reads text alone."""
    auxiliary: Auxiliary | None = None
    chosen: str = "num_experts_per_tok"
    """The config's field with the number of experts that a token takes."""
    routers: tuple[str, ...] = ()
    """Last parts of the names of modules in a layer that choose experts."""
    routing: Routing | None = None
    """None: the routes of its models can be neither recorded nor replayed."""
    megatron: Callable[[HFConfig], bool] = lambda config: False
    """Whether Megatron-core's GPT of Llama's parts computes a model of this config (`megatron.weights`)."""
    plain_tokenizer: bool = False
    """transformers takes a tokenizer of its plain class for what it says, so none is chosen by the model's type."""
    tried: tuple[str, ...] = ()
    """Generators that were seen to compute small random models of it as transformers does (4e-7 nats)."""

    def is_hidden_matrix(self, name: str, num_dims: int) -> bool:
        """Whether a causal LM's parameter is a matrix between hidden states (what Muon steps): no embedding, output
        layer, router, bias or norm."""
        module = name.rpartition(".")[0]
        inside = module.startswith(f"{self.parts.layers}.")
        return inside and num_dims == 2 and module.rpartition(".")[2] not in self.routers


FAMILIES: Registry[Family] = Registry("model family", "xray_runtime.models.families", "FAMILY", "xray.families")
UNLISTED = Family(model_types=())


@cache
def family_name(model_type: str | None) -> str | None:
    """The registered name of the family of a `model_type`; None where no family lists it."""
    names = [model_type] if model_type in [*FAMILIES] else []
    # A file that is called as its model_type is asked first, so that the others need not be imported.
    return next((n for n in (*names, *FAMILIES) if n and model_type in FAMILIES.get(n).model_types), None)


def family_of(model_type: str | None) -> Family:
    """The family of transformers' `model_type`."""
    name = family_name(model_type)
    return UNLISTED if name is None else FAMILIES.get(name)
