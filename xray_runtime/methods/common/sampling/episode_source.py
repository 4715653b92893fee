"""How methods play episodes: `EPISODE_SOURCES` has a source for each kind of `environment` in a config. The extension
`agents` has those that are shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from xray_runtime.data.batch import Rollout
from xray_runtime.methods.common.environment import (
    EPISODE_SOURCES,
    AgentConfig,
    EnvironmentConfig,
    environment_of,
)
from xray_runtime.methods.common.sampling.episode import EpisodeBatch

if TYPE_CHECKING:
    from xray_runtime.cluster.protocols import ModelHandle
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.pairs import Example
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.engines.sampling import Sampling
    from xray_runtime.kernel.config.section import Section
    from xray_runtime.rewards.journal import Journal


@dataclass(frozen=True)
class SamplerSetup:
    """The objects that a sampler works with."""

    stage: Stage[Any, Any]
    generator: ModelHandle
    sampling: Sampling
    tokenizer: Tokenizer
    max_prompt: int
    """The most tokens that an episode may begin with."""
    log_dir: Path
    """For the output of environments and agents."""
    out: Path
    """The checkpoint, which keeps agents' records that no ledger has."""
    champion: ModelHandle | None = None
    """Plays `environment.champion_seats`."""


class RolloutSampler(Protocol):
    """Samples a reply, or plays an episode, for each prompt of a batch."""

    def sample(self, batch: EpisodeBatch) -> Rollout: ...


class EpisodeSampler(RolloutSampler, Protocol):
    """Plays the episodes of one stage."""

    def begin(self, batch: EpisodeBatch) -> Future[Rollout]:
        """Call `sample` in another thread, after earlier calls of `begin`."""

    def metrics(self, episodes: Rollout) -> dict[str, float]:
        """Metrics of an iteration with these episodes, beside those of every rollout (`episode_means`)."""


class EpisodeSource(Protocol):
    """How the episodes of one kind of environment are played and replayed."""

    def open(self, setup: SamplerSetup) -> AbstractContextManager[EpisodeSampler]:
        """As `open_episodes`, for a stage with an environment of this kind."""

    def restore(self, checkpoint: Path, config: Section, last: int, journal: Journal) -> bool:
        """Write what the environments or agents answered to `journal`, as an earlier attempt would, so that a replay
        asks none of them again; returns whether there was anything.

        Args:
            config: of the stage.
            last: the last iteration to take from the ledger.

        Raises:
            ValueError: a file of the checkpoint is damaged.
        """

    def examples(self, record: str, decode: Callable[[list[int]], str], name: str) -> Iterator[Example]:
        """Rows for SFT of the conversation `name`, from an episode's `Rollout.answers`; only agents' episodes are
        made into data."""
        raise AssertionError(f"{type(self).__name__} does not support this call")


def source_of(environment: EnvironmentConfig | AgentConfig) -> EpisodeSource:
    """The source of an environment's episodes."""
    return cast("EpisodeSource", EPISODE_SOURCES.get(environment.source))


@contextmanager
def open_episodes(setup: SamplerSetup) -> Iterator[EpisodeSampler | None]:
    """The episodes of a stage, with processes for its environments or agents; None if the stage has neither."""
    environment = environment_of(setup.stage.config)
    if environment is None:
        yield None
        return
    with source_of(environment).open(setup) as episodes:
        yield episodes
