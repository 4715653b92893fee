"""One interface to every library that generates: replies with the log-probabilities they were sampled at.

All engines, whichever library they use, guarantee:

- each reply is drawn with its own seed, so it does not depend on the rest of the batch;
- it ends with one of the stop tokens, with the token that completes a text of `stop` or, marked as not `ended`, after
  `max_new_tokens`;
- its log-probabilities are at the sampling temperature, over the tokens that `top_k`, `top_p` and `min_p` leave (by
  default the whole vocabulary);
- replies are of exactly the requested policy version, or an error is raised.

Engines agree in log-probabilities up to float rounding, and in replies as the temperature goes to 0; at higher
temperatures each library uses its own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from xray_runtime.data.routes import Routes
from xray_runtime.engines.sampling_config import MOST_REPORTED, SamplingConfig
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.engines.top_tokens import TopTokens


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    """Tokens that end a reply: `models.causal_lm.stop_tokens`."""
    pad_token_id: int
    stop: tuple[str, ...] = ()
    """Texts that end a reply, too; the reply includes them."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    routes: bool = False
    """Replies come with the experts that were chosen for each token; with `capabilities.routes`. No prefix is then
    taken from a cache, since the experts of its tokens are not known."""
    top_logprobs: int = 0
    """Replies come with so many of the likeliest tokens at each place; with `capabilities.top_logprobs`."""
    kept: bool = False
    """Replies come with the tokens that `top_k`, which must be set, `top_p` and `min_p` left at each place."""

    @property
    def reported(self) -> int:
        """How many of the likeliest tokens at each place engines report; 0: none."""
        of_kept = min(2 * self.top_k, MOST_REPORTED) if self.kept and self.top_k is not None else 0
        return max(self.top_logprobs, of_kept)

    def bare(self) -> Sampling:
        """The same for replies without what training needs to know of them."""
        return replace(self, routes=False, top_logprobs=0, kept=False)

    @classmethod
    def of(cls, config: SamplingConfig, stop_token_ids: tuple[int, ...], pad_token_id: int) -> Sampling:
        fields = {name: getattr(config, name) for name in SamplingConfig.model_fields}
        return cls(**fields | {"stop": tuple(config.stop)}, stop_token_ids=stop_token_ids, pad_token_id=pad_token_id)


@dataclass(frozen=True)
class Reply:
    """One sampled reply: its tokens, including the stop token, and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]
    routes: Routes | None = None
    """Those of prompt and reply."""
    top: TopTokens | None = None

    def first(self, count: int) -> Reply:
        """The reply up to its token `count`."""
        left_out = len(self.token_ids) - count
        routes = self.routes and self.routes.first(len(self.routes.ids) - left_out)
        return Reply(self.token_ids[:count], self.logprobs[:count], routes, self.top and self.top.first(count))

    def ended(self, sampling: Sampling) -> bool:
        """Whether it ended with a stop token."""
        return bool(self.token_ids) and self.token_ids[-1] in sampling.stop_token_ids


@dataclass(frozen=True)
class EngineRank:
    """Device, rank and rendezvous of an engine's process; `world_size` ranks share one copy of the model."""

    device: str
    rank: int = 0
    world_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0


class Sampler(Protocol):
    """A library with one model, or this rank's shard of it, in this process."""

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        """One reply a prompt, in order."""

    def logprobs(self, rows: list[list[int]]) -> list[float] | None:
        """The model's log-probability of each token but a row's first, one row after the other; None: it cannot say."""
        return None

    def read_pictures(self, checkpoint: Path, folders: tuple[Path, ...]) -> None:
        """Prompts may have pictures of these folders from now on. With `capabilities.pictures`."""
        raise AssertionError(f"{type(self).__name__} does not support this call")

    def write(self, tensors: Tensors, version: int) -> None:
        """Write whole tensors into the model by their Hugging Face names; see `sync.versioned.Write`."""

    def catch_up(self, held: Callable[[], Tensors], version: int) -> None:
        """Called before every `sample`, with all weights of `version`: copies of the model that `write` did not reach,
        because they joined later, take them now."""
        return

    def receive(self, step: str, info: dict[str, Any], version: int) -> None:
        """One step of a transfer from GPU to GPU, which the generator's `DirectSender` drives: `init` once, then
        `start`, any number of `update`, whose `names` are the tensors that it brings, and `finish`."""
        raise AssertionError(f"{type(self).__name__} does not support this call")

    def layers_of(self, names: set[str]) -> set[str]:
        """`names` and the tensors that must be written together with them."""
        return names

    def wake_up(self) -> None:
        """Stay awake until `sleep`, over any number of samples. Only with `runtime.generator_sleeps`."""
        return

    def sleep(self, *, drop: bool = False) -> None:
        """Free the GPU's memory until the next sample or update; with `drop`, without keeping the weights. On a CPU,
        free what the next sample can take again."""
        return
