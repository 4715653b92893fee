"""Answers of others (external rewards, environments, agents, teachers), which a replay reads instead of asking."""

from __future__ import annotations

from pathlib import Path

from xray_runtime.data.ledger import iterations
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.environment import environment_of
from xray_runtime.methods.common.sampling.episode_source import source_of
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.in_flight import restore_groups
from xray_runtime.rewards.external_rewards import recorded_sources
from xray_runtime.rewards.journal import ANSWERS, Journal, restore_answers
from xray_runtime.rewards.reward_sources import ENVIRONMENT


def require_answers(node: Node, config: Section, kept: list[int], last: int) -> None:
    """Raises ConfigError where the checkpoint does not hold what others answered until the iteration `last`.

    Args:
        kept: iterations in its ledger.
    """
    if (
        isinstance(config, PPOConfig)
        and config.in_flight_updates
        and (kept[: last + 1] != list(range(last + 1)) or config.ledger.tokens == "hashed")
    ):
        raise ConfigError(
            f"REF: {node.name} is not allowed: time decided its schedule (in_flight_updates), and no ledger holds the "
            f"replies of all iterations to {last}"
        )
    names = [term.name for term in recorded_sources(config)]
    if isinstance(config, PPOConfig) and config.distillation is not None and config.distillation.server is not None:
        names.append("the teacher's server")
    if names and not (node.directory / ANSWERS).is_file():
        raise ConfigError(
            f"REF: {node.name} is not allowed: {names[0]} might answer differently, and the checkpoint does not "
            "hold its answers (ledger.keep = 'none', or ledger.tokens = 'hashed')"
        )


def restore_recorded(checkpoint: Path, config: Section, iteration: int | None, journal: Journal) -> list[str]:
    """Write what external rewards, environments and agents answered up to `iteration` (None: to the end) to `journal`,
    as an earlier attempt would: asked again, they might answer differently. Also that of the next one, which is
    compared where no digest tells the weights after `iteration`. Returns their sources.

    Raises:
        ConfigError: a file of the checkpoint is damaged.
    """
    last = iteration + 1 if iteration is not None else max(iterations(checkpoint / LEDGER), default=0)
    environment = environment_of(config)
    try:
        found = restore_answers(checkpoint, journal)
        if environment is not None and source_of(environment).restore(checkpoint, config, last, journal):
            found.add(ENVIRONMENT)
        restore_groups(checkpoint, config, last, journal)
    except ValueError as error:
        raise ConfigError(f"REF: {error}") from None
    return sorted(found)
