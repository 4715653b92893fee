"""Independence of judges: a judge must not be a source that the policy was trained against, nor learn from its pairs.

A graph refuses a dependent judge when it is built. Promotion checks again from the store (`lineage.leaky_judges`),
which also knows imported checkpoints."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.config.rewards import RewardTerm, source_names
from xray_runtime.graph.artifacts import Artifact, Judgements, Model, Preferences, RewardModel, is_a

if TYPE_CHECKING:
    from xray_runtime.graph.handles import Handle

JUDGES = "judges"
"""Role of reward models that are only logged; no policy is trained against them."""
LIMITS = {"limit_s", "memory_mb"}
"""Fields of a verifier that do not distinguish sources."""


@dataclass(frozen=True, eq=False)
class TrainedItem:
    """An existing or planned checkpoint, with its parents."""

    id: str
    name: str
    """Name for messages."""
    type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """Config as JSON."""
    parents: Mapping[str, TrainedItem] = field(default_factory=dict)
    """Role → parent."""

    def is_a(self, *types: builtins.type[Artifact]) -> bool:
        return is_a(self.type, *types)

    def lineage(self) -> dict[str, TrainedItem]:
        """Itself and its ancestors by id, without those that were only logged."""
        found: dict[str, TrainedItem] = {}
        waiting = [self]
        while waiting:
            made = waiting.pop()
            if made.id not in found:
                found[made.id] = made
                waiting += [parent for role, parent in made.parents.items() if role.partition(".")[0] != JUDGES]
        return found


def dependent_judges(
    policy: TrainedItem, config: EvaluationConfig, models: Mapping[str, TrainedItem]
) -> dict[str, str]:
    """Judge that is not independent of `policy` → why. `gold` may be one of them. `models`: role → reward model in
    `config.judges`."""
    opposed = list(_trained_against(policy))
    found = {}
    if config.gold is not None and (why := _same(RewardTerm.model_construct(function=config.gold), opposed)):
        found["gold"] = why
    for name, term in zip(source_names(config.judges), config.judges, strict=True):
        reasons = [_same(term, opposed), *(_of_model(models[role], policy, opposed) for role in term.roles)]
        why = next((reason for reason in reasons if reason), None)
        if why:
            found[name] = why
    return found


@dataclass(frozen=True)
class Opposed:
    """A source that a stage was trained against."""

    stage: TrainedItem
    term: RewardTerm | None
    """Its source, if it is not a model."""
    model: TrainedItem | None


def _trained_against(policy: TrainedItem) -> Iterator[Opposed]:
    for stage in policy.lineage().values():
        written = stage.config.get("rewards")
        # A user's kind may use this field name for something else.
        written = [term for term in written if isinstance(term, dict)] if isinstance(written, list) else []
        terms = [RewardTerm.model_construct(**term) for term in written]
        shown = {role for term in terms if not term.weight for role in term.roles}
        counted = {role for term in terms if term.weight for role in term.roles}
        for term in terms:
            if term.weight and not term.roles:
                yield Opposed(stage, term, None)
        for role, parent in stage.parents.items():
            logged = role in shown and role not in counted
            if parent.is_a(RewardModel) and role.partition(".")[0] != JUDGES and not logged:
                yield Opposed(stage, None, parent)


def trained_against(policy: TrainedItem) -> dict[str, TrainedItem]:
    """The reward models that a policy was trained against, by id."""
    return {one.model.id: one.model for one in _trained_against(policy) if one.model is not None}


def learnt_from(made: TrainedItem, *types: type[Artifact]) -> list[tuple[TrainedItem, TrainedItem]]:
    """(model, preference pairs or verdicts that it was trained on) of the models of `types` in a lineage."""
    return [
        (model, parent)
        for model in made.lineage().values()
        if model.is_a(*types)
        for parent in model.parents.values()
        if parent.is_a(Preferences, Judgements)
    ]


def _same(term: RewardTerm, opposed: list[Opposed]) -> str | None:
    for other in opposed:
        if other.term is not None and not term.roles and _source(term) == _source(other.term):
            return f"{other.stage.name} was trained against it"
    return None


def _source(term: RewardTerm) -> Any:
    """A key by which equal sources compare equal, as JSON."""
    verifier, service, judge = (_json(getattr(term, name, None)) for name in ("verifier", "service", "judge"))
    if verifier is not None:
        return {name: value for name, value in verifier.items() if name not in LIMITS and value is not None}
    if service is not None:
        return service["url"]
    # The same model with another rubric is the same judge.
    return (judge["url"], judge["model"]) if judge is not None else term.function


def _json(section: Any) -> dict[str, Any] | None:
    return section if section is None or isinstance(section, dict) else section.model_dump(mode="json")


def _of_model(model: TrainedItem, policy: TrainedItem, opposed: list[Opposed]) -> str | None:
    own = model.lineage()
    for other in opposed:
        if other.model is not None and other.model.id in own:
            source = "it" if other.model.id == model.id else f"{other.model.name}, which it comes from"
            return f"{other.stage.name} was trained against {source}"
    # Two parts of one split share no rows.
    for _, mine in learnt_from(model, RewardModel):
        for stage, pairs in learnt_from(policy, Model, RewardModel):
            if pairs.id in mine.lineage() or mine.id in pairs.lineage():
                return f"{stage.name} was trained on the same pairs, {pairs.name}"
    return None


def item_of(handle: Handle) -> TrainedItem:
    """The item of a graph's handle; only the name of an existing checkpoint is known."""
    known: dict[int, TrainedItem] = {}

    def made(one: Handle) -> TrainedItem:
        if id(one) not in known:
            call = one.call
            config = call.config_json() if call is not None else {}
            parents = {role: made(parent) for role, parent in call.parents.items()} if call is not None else {}
            known[id(one)] = TrainedItem(one.name, one.name, one.output.__name__, config, parents)
        return known[id(one)]

    return made(handle)


def check_judges(config: EvaluationConfig, inputs: Mapping[str, Handle]) -> None:
    """Raises ValueError if the graph shows that a judge is not independent of the policy."""
    models = {role: item_of(handle) for role, handle in inputs.items() if role.startswith(f"{JUDGES}.")}
    dependent = dependent_judges(item_of(inputs["policy"]), config, models)
    for number, name in enumerate(source_names(config.judges)):
        if name in dependent and config.judges[number].weight:
            raise ValueError(
                f"judges.{number}: {name!r} is not allowed: {dependent[name]}; list it under rewards, which are "
                "reported but decide no wins"
            )
    if "gold" in dependent:
        raise ValueError(f"gold: {config.gold!r} is not allowed: {dependent['gold']}; use another judge")
