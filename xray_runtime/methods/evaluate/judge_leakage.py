"""Independence of judges: a judge must not be a source that the policy was trained against, nor learn from its pairs.

A graph refuses a dependent judge when it is built. Promotion checks again from the store (`trust.leaky_judges`),
which also knows imported checkpoints."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.graph.artifacts import Artifact, Judgements, Model, Preferences, RewardModel, is_a
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.rewards.config import KINDS, chosen_kinds
from xray_runtime.rewards.term import Term, source_names

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.handles import Handle

JUDGES = "judges"
"""Role of reward models that are only logged; no policy is trained against them."""


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
        items: dict[str, TrainedItem] = {}
        waiting = [self]
        while waiting:
            made = waiting.pop()
            if made.id not in items:
                items[made.id] = made
                waiting += [parent for role, parent in made.parents.items() if role.partition(".")[0] != JUDGES]
        return items


def dependent_judges(
    policy: TrainedItem, config: EvaluationConfig, models: Mapping[str, TrainedItem]
) -> dict[str, str]:
    """Judge that is not independent of `policy` → why. `gold` may be one of them. `models`: role → reward model in
    `config.judges`."""
    opposed = list(_trained_against(policy))
    leaks = {}
    # The identity of a function is its name.
    if config.gold is not None and (why := _same(config.gold, opposed)):
        leaks["gold"] = why
    for name, term in zip(source_names(config.judges), config.judges, strict=True):
        if term.roles:
            reasons = [_of_model(models[role], policy, opposed) for role in term.roles]
        else:
            reasons = [_same(_identity(type(term), term.model_dump(mode="json")), opposed)]
        why = next((reason for reason in reasons if reason), None)
        if why:
            leaks[name] = why
    return leaks


@dataclass(frozen=True)
class Opposed:
    """A source that a stage was trained against."""

    stage: TrainedItem
    identity: Any
    """Identity of the source (`Term.identity`), if it is not a model."""
    model: TrainedItem | None


def _trained_against(policy: TrainedItem) -> Iterator[Opposed]:
    for stage in policy.lineage().values():
        written = stage.config.get("rewards")
        # A user's kind may use this field name for something else.
        written = [term for term in written if isinstance(term, dict)] if isinstance(written, list) else []
        shown, counted = set[str](), set[str]()
        for term in written:
            kind = KINDS.get(next(iter(chosen_kinds(KINDS, term)), ""))
            if kind is None:
                continue
            roles = kind.model_construct(**term).roles
            if not term.get("weight", 1.0):
                shown.update(roles)
                continue
            counted.update(roles)
            if not roles:
                yield Opposed(stage, _identity(kind, term), None)
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


def _same(identity: Any, opposed: list[Opposed]) -> str | None:
    for other in opposed:
        if other.model is None and identity == other.identity:
            return f"{other.stage.name} was trained against it"
    return None


def _identity(kind: type[Term], fields: Mapping[str, Any]) -> Any:
    # As JSON, in which a tuple equals a list.
    return json.loads(json.dumps(kind.identity(fields)))


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
