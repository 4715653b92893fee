"""The form of a kind of reward: a term of the config that says how it scores, and how its answers are recorded.

    class Brevity(ExternalTerm, field="brevity", recording=Recording.COMPUTED):
        brevity: BrevityConfig

        def open(self, where, functions):
            return BrevitySource(self.brevity)

    TERM = Brevity

That is a module of `rewards.kinds`, or an entry point `brevity` of the group `xray.rewards`. It is imported with the
config, so it imports heavy libraries where it uses them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xray_runtime.rewards.term import Recording, Term

if TYPE_CHECKING:
    from xray_runtime.algorithms.rewards import ModelScores
    from xray_runtime.rewards.source import Source


class ExternalTerm(Term):
    """A term whose source scores texts, outside of the stage's models."""

    def __init_subclass__(cls, *, field: str, recording: Recording) -> None:
        super().__init_subclass__()
        cls.field, cls.recording = field, recording

    @abstractmethod
    def open(self, where: str, functions: Mapping[str, Callable[..., Any]]) -> Source:
        """The source. `where`: the term in errors. `functions`: those that a graph passed directly, by name. Raises
        ValueError if a function cannot be imported or called."""


class ModelTerm(Term):
    """A term that scores by reward models among the stage's inputs, its `roles`; a replay runs them again."""

    recording = Recording.COMPUTED

    def __init_subclass__(cls, *, field: str) -> None:
        super().__init_subclass__()
        cls.field = field

    @classmethod
    def in_files(cls) -> None:
        """None: a file names no inputs."""

    @property
    @abstractmethod
    def roles(self) -> Sequence[str]: ...

    @property
    def scaled_by(self) -> str | None:
        """The role by whose held-out moments the score is scaled; None: it counts as it is."""
        return None

    @abstractmethod
    def combined(self, members: Sequence[ModelScores]) -> ModelScores:
        """Its score of each reply from those of its `roles`, in their order."""
