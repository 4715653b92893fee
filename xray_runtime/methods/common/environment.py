"""Environments for multi-turn episodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from xray_runtime.kernel.config.allowed_imports import check_import
from xray_runtime.kernel.config.section import Count, Positive, Section, sections
from xray_runtime.kernel.config.sources import Source
from xray_runtime.kernel.plugs import Registry
from xray_runtime.methods.common.allowed_commands import check_command, check_path

EPISODE_SOURCES: Registry[object] = Registry(
    "environment", "xray_runtime.agents.sources", "SOURCE", "xray.episode_sources"
)
"""Kind of environment → its `sampling.episode_source.EpisodeSource`."""


def _importable(path: str) -> str:
    """`path`. Raises ValueError if a separate process could not import it."""
    if path.startswith("__main__:") or "<" in path:
        raise ValueError(
            f"{path!r} is not allowed: environments run in processes that import them: must be a class or a "
            "function at the top level of a module, not of a script or a notebook"
        )
    return path


SeatName = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]{0,31}$")]


def _seats(names: list[str]) -> list[str]:
    if len(names) == 1 or len(set(names)) < len(names):
        raise ValueError(f"{names!r} is not allowed: must be the different names of at least two seats, or empty")
    return names


class _Played(Section):
    gives_rewards = True
    source: ClassVar[str]
    """The name in `EPISODE_SOURCES` of the source that plays its episodes."""

    @property
    def rows_an_episode(self) -> int:
        return 1

    def plugs(self) -> tuple[str, ...]:
        return (EPISODE_SOURCES.module(self.source),)


class EnvironmentConfig(_Played):
    """An environment that answers the policy turn by turn; `max_new_tokens` then limits one turn."""

    source = "environment"

    path: Annotated[str, Field(pattern=r"^[^:]+:[^:]+$"), AfterValidator(_importable)]
    """`module:name` of a class, or of a function without arguments, that makes the environment of one episode. Its
    module must be in XRAY_ALLOWED_IMPORTS."""
    max_turns: Count = 8
    """Maximum number of replies in an episode, of all seats together; it is then truncated."""
    max_tokens: Annotated[int, Field(ge=2)] = 512
    """Maximum number of tokens after the prompt of a row, over all turns and observations. An episode is truncated when
    another full turn would not fit."""
    seats: Annotated[list[SeatName], AfterValidator(_seats)] = Field(default_factory=list)
    """Names of the seats of a game, played by the policy (`ppo` alone); replies are compared seat by seat. Empty: the
    policy plays alone."""
    champion_seats: list[SeatName] = Field(default_factory=list)
    """Those of `seats` that the stage's `champion` plays, a model that learns nothing and whose turns make no rows."""
    cohorts: Count = 2
    """Number of independent groups of episodes: while the environments of one group run, the generator samples for
    another. Within a group, a turn begins when all environments have answered."""
    num_workers: Count = 4
    """Number of processes that run environments."""
    timeout_s: Positive = 30.0
    """An episode fails if a reset or step takes longer."""
    memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Address space of each process."""

    @property
    def rows_an_episode(self) -> int:
        return max(len(self.policy_seats), 1)

    @property
    def policy_seats(self) -> list[str]:
        """The seats that make rows."""
        return [seat for seat in self.seats if seat not in self.champion_seats]

    @model_validator(mode="after")
    def _champion_has_company(self) -> Self:
        unknown = [seat for seat in self.champion_seats if seat not in self.seats]
        if unknown or (self.champion_seats and not self.policy_seats):
            raise ValueError(
                f"champion_seats = {self.champion_seats} is not allowed: must be some of seats = {self.seats}, not all"
            )
        return self

    @property
    def called_functions(self) -> Sequence[str]:
        return (self.path,)


class AgentConfig(_Played):
    """An agent that calls the policy at an address, as it would call OpenAI or Anthropic (`docs/agents.md`);
    `max_new_tokens` limits one reply. Exactly one of `agent`, `command` and `url` is set."""

    source = "agent"

    agent: Annotated[str, Field(pattern=r"^[^:]+:[^:]+$"), AfterValidator(_importable)] | None = None
    """`module:function`, called with a task in a process of its own; it returns the reward. Its module must be in
    XRAY_ALLOWED_IMPORTS. With `directory`, `venv` or `sandbox` it runs as a command does, and is imported there
    alone."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A program with its arguments, which XRAY_ALLOWED_COMMANDS must allow. The task is JSON on its standard input; it
    posts its reward, or prints it last."""
    directory: Source | None = None
    """Files of the command or the function, which runs in a copy of this directory for each episode; None: in an empty
    one. XRAY_ALLOWED_PATHS must allow it."""
    sandbox: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")] | None = None
    """A service that runs the command or the function (`docs/agents.md`); None: a sandbox of this machine."""
    accept_weak_sandbox: bool = False
    """Let programs run on machines where neither bubblewrap nor user namespaces keep them in (`docs/security.md`)."""
    venv: Source | None = None
    """A Python virtual environment for the command or the function, which XRAY_ALLOWED_PATHS must allow."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")] | None = None
    """A service that receives each task with an address, and answers with the reward."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on."""
    concurrency: Count = 64
    """Maximum number of agents that run at the same time."""
    max_calls: Count = 64
    """Maximum number of replies in an episode."""
    max_sampled_tokens: Count = 16384
    """Maximum number of tokens of all replies of an episode."""
    max_tokens: Annotated[int, Field(ge=2)] = 512
    """Maximum number of tokens after the prompt that fit the context: prompt, replies and observations of one
    history."""
    timeout_s: Positive = 300.0
    """An agent that takes longer is ended."""
    memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Address space of each of its processes."""
    output_mb: Positive = 16.0
    """Maximum size of its output."""
    max_processes: Count = 32
    """Maximum number of its processes."""
    disk_mb: Count = 256
    """Maximum size of the files in a sandbox, in memory."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often an agent runs again when there is no result without a fault of its own."""
    untrainable: Literal["refuse", "leave_out"] = "refuse"
    """Calls with another temperature than the stage's, or another distribution: refuse them, or answer them and leave
    them out of the loss."""
    changed: Literal["anew", "fail"] = "anew"
    """When an agent that runs again after a kill makes other calls than before: begin its episode anew, or fail the
    stage."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("agent", "command", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of agent, command and url must be set, not {' and '.join(given) or 'none'}")
        for name in ("directory", "venv", "sandbox"):
            if getattr(self, name) is not None and self.url is not None:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be left out with url: X-ray does not start it")
        if self.sandbox is not None and self.venv is not None:
            raise ValueError(f"venv = {self.venv!r} must be left out with sandbox: the service has its own programs")
        return self

    @property
    def called_functions(self) -> Sequence[str]:
        # A sandbox imports its function, and X-ray does not.
        return () if self.agent is None or self.is_sandboxed else (self.agent,)

    @property
    def outside_fields(self) -> Mapping[str, str]:
        return {} if self.directory is None else {"directory": self.directory}

    def check_call(
        self, path: str, functions: Mapping[str, Callable[..., Any]], columns: Collection[str] | None
    ) -> None:
        self.check_allowed(path)
        if self.agent is not None and self.is_sandboxed and self.agent not in functions:
            check_import(self.agent)

    def check_allowed(self, path: str = "environment") -> None:
        """Raises ValueError if the environment does not allow `command`, `directory` or `venv`."""
        if self.command is not None:
            check_command(self.command, f"{path}.command")
        if self.directory is not None:
            check_path(self.directory, f"{path}.directory")
        if self.venv is not None:
            check_path(self.venv, f"{path}.venv")

    @property
    def is_sandboxed(self) -> bool:
        """Whether it runs in a sandbox, apart from our packages."""
        return self.command is not None or any((self.directory, self.venv, self.sandbox))


def _section_name(value: Any) -> str:
    given = value if isinstance(value, Mapping) else vars(value) if isinstance(value, Section) else {}
    is_agent = any(given.get(name) is not None for name in ("agent", "command", "url"))
    return AgentConfig.__name__ if is_agent else EnvironmentConfig.__name__


AnyEnvironment = Annotated[
    Annotated[EnvironmentConfig, Tag(EnvironmentConfig.__name__)] | Annotated[AgentConfig, Tag(AgentConfig.__name__)],
    Discriminator(_section_name),
]
"""The environment of a policy, or the agent that calls it."""


def environment_of(config: Section) -> EnvironmentConfig | AgentConfig | None:
    """The config of the source that plays the episodes of a stage; None: its replies are single ones."""
    return next((part for _, part in sections(config) if isinstance(part, EnvironmentConfig | AgentConfig)), None)


def check_turns(
    environment: EnvironmentConfig | AgentConfig, max_new_tokens: int, stop: Sequence[str], *, seats: bool = False
) -> None:
    """Raises ValueError if `max_new_tokens` per turn or `stop` texts do not fit an episode, or its several `seats`
    this kind of stage."""
    if isinstance(environment, EnvironmentConfig) and environment.seats and not seats:
        raise ValueError(f"environment.seats = {environment.seats} must be [] here: only `ppo` plays games of several")
    if environment.max_tokens < max_new_tokens:
        raise ValueError(
            f"environment.max_tokens = {environment.max_tokens} must be at least max_new_tokens = {max_new_tokens}, "
            "the limit of one turn"
        )
    if stop:
        raise ValueError(f"stop = {stop!r} must be [] with an environment: a turn cut there would lack its end of turn")
