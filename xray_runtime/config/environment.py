"""Episodes of many turns: where the policy's replies go, and what answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from xray_runtime.config.engines import Count, Positive, Section


def _importable(path: str) -> str:
    """`path`. Raises ValueError where a process of its own could not import it."""
    if path.startswith("__main__:") or "<" in path:
        raise ValueError(
            f"{path!r} is not allowed: environments run in processes that import them: must be a class or a "
            "function at the top level of a module, not of a script or a notebook"
        )
    return path


class EnvironmentConfig(Section):
    """An environment that answers the policy turn by turn; `max_new_tokens` is then the limit of one turn."""

    path: Annotated[str, Field(pattern=r"^[^:]+:[^:]+$"), AfterValidator(_importable)]
    """`module:name` of a class, or a function without arguments, that makes one environment an episode; in a module
    that XRAY_ALLOWED_IMPORTS names."""
    max_turns: Count = 8
    """Replies of the policy in one episode; it is cut after them."""
    max_tokens: Annotated[int, Field(ge=2)] = 512
    """Tokens after the prompt, of all turns and of what was observed between them. An episode that has no room left
    for another whole turn is cut."""
    cohorts: Count = 2
    """Groups of episodes that take their turns independently: while the environments of one are at work, the generator
    samples for another. Within one, a turn begins when the environments of all have answered."""
    num_workers: Count = 4
    """Processes in which environments work."""
    timeout_s: Positive = 30.0
    """A reset or step that takes longer costs its episode."""
    memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Address space of each process."""

    def check_turns(self, max_new_tokens: int, stop: Sequence[str]) -> None:
        """Raises ValueError where turns of `max_new_tokens` that `stop` texts may end are not allowed in an episode."""
        if self.max_tokens < max_new_tokens:
            raise ValueError(
                f"environment.max_tokens = {self.max_tokens} must be at least max_new_tokens = {max_new_tokens}, the "
                "limit of one turn"
            )
        if stop:
            raise ValueError(
                f"stop = {stop!r} must be [] with an environment: a turn cut there would lack its end of turn"
            )
