"""One interface to every library that generates: sampled replies, with the log-probabilities they were sampled at.

What all engines have in common, whichever library is under them:

- each reply is drawn with a seed of its own, so it depends neither on its neighbours nor on the batch;
- it ends with one of the stop tokens, with the token that completes a text of `stop` or, marked as not `ended`, after
  `max_new_tokens`;
- its log-probabilities are at the sampling temperature, over what `top_k`, `top_p` and `min_p` leave: by default the
  whole vocabulary;
- replies are of exactly the policy version asked for, or an error.

Engines agree in log-probabilities (float rounding apart), and in replies as the temperature goes to 0; at higher
temperatures each library draws from its own random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xray_runtime.config.sampling import SamplingConfig
from xray_runtime.weights.versioned import Tensors

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    """Tokens that end a reply, whichever comes first: `models.causal_lm.stop_tokens`."""
    pad_token_id: int
    stop: tuple[str, ...] = ()
    """Texts that end a reply too; they stay in it."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: SamplingConfig, stop_token_ids: tuple[int, ...], pad_token_id: int) -> Sampling:
        """As `config` says."""
        fields = {name: getattr(config, name) for name in SamplingConfig.model_fields}
        return cls(**fields | {"stop": tuple(config.stop)}, stop_token_ids=stop_token_ids, pad_token_id=pad_token_id)


@dataclass(frozen=True)
class Reply:
    """One sampled reply: its tokens, the one that stopped it included, and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]

    def ended(self, sampling: Sampling) -> bool:
        """Whether it came to an end by itself."""
        return bool(self.token_ids) and self.token_ids[-1] in sampling.stop_token_ids


@dataclass(frozen=True)
class Place:
    """Where an engine's process is: its rank among the `world_size` that share one copy of the model."""

    device: str
    rank: int = 0
    world_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0


class Sampler(Protocol):
    """One library, holding one model (or this rank's shard of it) in this process."""

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        """One reply a prompt, in order."""

    def write(self, tensors: Tensors, version: int) -> None:
        """Put whole tensors into the model, by their Hugging Face names; see `weights.versioned.Write`."""

    def layers_of(self, names: set[str]) -> set[str]:
        """`names`, and the tensors that must be written together with any of them."""
