"""Environments for multi-turn episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from xray_runtime.config.engines import Count, Positive, Section


def _importable(path: str) -> str:
    """`path`. Raises ValueError if a separate process could not import it."""
    if path.startswith("__main__:") or "<" in path:
        raise ValueError(
            f"{path!r} is not allowed: environments run in processes that import them: must be a class or a "
            "function at the top level of a module, not of a script or a notebook"
        )
    return path


class EnvironmentConfig(Section):
    """An environment that answers the policy turn by turn; `max_new_tokens` then limits one turn."""

    path: Annotated[str, Field(pattern=r"^[^:]+:[^:]+$"), AfterValidator(_importable)]
    """`module:name` of a class, or of a function without arguments, that makes the environment of one episode. Its
    module must be in XRAY_ALLOWED_IMPORTS."""
    max_turns: Count = 8
    """Maximum number of the policy's replies in an episode, which is then truncated."""
    max_tokens: Annotated[int, Field(ge=2)] = 512
    """Maximum number of tokens after the prompt, over all turns and observations. An episode is truncated when another
    full turn would not fit."""
    cohorts: Count = 2
    """Number of independent groups of episodes: while the environments of one group run, the generator samples for
    another. Within a group, a turn begins when all environments have answered."""
    num_workers: Count = 4
    """Number of processes that run environments."""
    timeout_s: Positive = 30.0
    """An episode fails if a reset or step takes longer."""
    memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Address space of each process."""

    def check_turns(self, max_new_tokens: int, stop: Sequence[str]) -> None:
        """Raises ValueError if `max_new_tokens` per turn or `stop` texts do not fit an episode."""
        if self.max_tokens < max_new_tokens:
            raise ValueError(
                f"environment.max_tokens = {self.max_tokens} must be at least max_new_tokens = {max_new_tokens}, the "
                "limit of one turn"
            )
        if stop:
            raise ValueError(
                f"stop = {stop!r} must be [] with an environment: a turn cut there would lack its end of turn"
            )
