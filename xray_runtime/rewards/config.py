"""The kinds of reward, found by the field that chooses them in a term: a module of `xray_runtime.rewards.kinds`, or an
entry point of another package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.kernel.arguments import FIELDS, Arguments
from xray_runtime.kernel.config.section import Section, UnitInterval
from xray_runtime.kernel.config.sources import BUILT_IN_GOLD, GivenGold
from xray_runtime.kernel.config.validation import hint
from xray_runtime.kernel.plugs import Registry
from xray_runtime.rewards.term import Recording, Term

REWARDS: Registry[type[Term]] = Registry("reward", "xray_runtime.rewards.kinds", "TERM", "xray.rewards")


def reward_kinds(registry: Registry[type[Term]] = REWARDS) -> dict[str, type[Term]]:
    """Field → the kind that it chooses. Raises ValueError if a plug is not a whole kind."""
    kinds = {name: registry.get(name) for name in registry}
    for name, kind in kinds.items():
        is_term = isinstance(kind, type) and issubclass(kind, Term)
        if not is_term or getattr(kind, "field", None) != name or name not in kind.model_fields:
            raise ValueError(f"reward {name!r}: {kind!r} must be a kind of reward with the field {name!r}")
        if not isinstance(getattr(kind, "recording", None), Recording):
            raise ValueError(f"reward {name!r}: must say how its answers are recorded: recording=Recording.COMPUTED, …")
    return kinds


def chosen_kinds(kinds: Mapping[str, type[Term]], fields: Mapping[str, Any]) -> list[str]:
    """The kinds that the fields of a term choose; it is one in a valid term."""
    return [name for name in kinds if fields.get(name) is not None]


def _one_kind(kinds: Mapping[str, type[Term]], value: Any) -> Any:
    if isinstance(value, Term):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not allowed: must be a mapping of fields")
    if len(chosen_kinds(kinds, value)) != 1:
        known = sorted({*kinds, *Term.model_fields})
        of_kinds = {field for kind in kinds.values() for field in kind.model_fields}
        for name in (str(name) for name in value if name not in of_kinds):
            raise ValueError(f"{name}: unknown field{hint(name, known)}; allowed here: {', '.join(known)}")
        *some, last = kinds
        raise ValueError(f"one of {', '.join(some)} and {last} must be set")
    return {name: given for name, given in value.items() if given is not None or name not in kinds}


def _any_of(kinds: Mapping[str, type[Term]]) -> Any:
    def tag(value: Any) -> str:
        kind = type(value) if isinstance(value, Term) else kinds[chosen_kinds(kinds, value)[0]]
        return kind.__name__

    members = tuple(Annotated[kind, Tag(kind.__name__)] for kind in kinds.values())
    return Annotated[Union[members], Discriminator(tag), BeforeValidator(partial(_one_kind, kinds))]  # noqa: UP007


KINDS = reward_kinds()

if TYPE_CHECKING:
    RewardTerm: TypeAlias = Term
    ExternalReward: TypeAlias = Term
else:
    RewardTerm = _any_of(KINDS)
    """One of the sources whose weighted sum is the reward."""
    ExternalReward = _any_of({name: written for name, kind in KINDS.items() if (written := kind.in_files())})
    """A source of reward in the file of a lifecycle, which names no reward models."""


def reward_term(**fields: Any) -> Term:
    """A term of the kind that its fields choose. Raises ValidationError."""
    term: Term = TypeAdapter(RewardTerm).validate_python(fields)
    return term


class GoldConfig(Section):
    """The gold score of a stage's replies."""

    gold: GivenGold | None = None
    """Gold score of replies: logged, never trained on."""

    @property
    def called_functions(self) -> Sequence[str]:
        return () if self.gold in (None, BUILT_IN_GOLD) else (str(self.gold),)

    def check_call(
        self, path: str, functions: Mapping[str, Callable[..., Any]], columns: Collection[str] | None
    ) -> None:
        if self.gold is not None and self.gold in functions:
            Arguments(functions[self.gold], f"gold {self.gold!r}", FIELDS).check(())


class JudgingConfig(GoldConfig):
    """Fields of stages that sample and score replies."""

    rewards: list[RewardTerm] = Field(default_factory=list)
    """Sources of the reward, which is their weighted sum."""
    max_failed: UnitInterval = 0.1
    """Maximum share of the replies in a batch that may have no score; beyond it the stage fails."""
    generator: GeneratorConfig = GeneratorConfig()
    frozen: FrozenConfig = FrozenConfig()
    """The layout of models that only score."""

    @property
    def replies_per_prompt(self) -> int:
        """Replies to one prompt, which sources may compare."""
        return 1

    @property
    def keeps_answers(self) -> bool:
        """Whether answers may go into the checkpoint: their reasons may quote replies."""
        return True

    @property
    def terms(self) -> dict[str, list[Term]]:
        """Field → the sources in it."""
        return {"rewards": self.rewards}
