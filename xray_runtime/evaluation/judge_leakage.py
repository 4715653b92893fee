"""Who may judge a policy: nobody that it was trained against, or that learnt from the same preference pairs.

Asked as a graph is written, where a dependent judge is refused, and again of the store before a promotion
(`lineage.leaky_judges`), which knows of checkpoints that came from elsewhere.
"""

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
"""Role of reward models that only look on: nothing is trained against them."""
LIMITS = {"limit_s", "memory_mb"}
"""Of a verifier: they do not make another one of it."""


@dataclass(frozen=True, eq=False)
class Made:
    """A checkpoint, there already or planned, and what it is made from."""

    id: str
    name: str
    """For people."""
    type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """As JSON."""
    parents: Mapping[str, Made] = field(default_factory=dict)
    """By role."""

    def is_a(self, *types: builtins.type[Artifact]) -> bool:
        return is_a(self.type, *types)

    def lineage(self) -> dict[str, Made]:
        """Itself and all that its weights or rows came from, by id; what only looked on is not among them."""
        found: dict[str, Made] = {}
        waiting = [self]
        while waiting:
            made = waiting.pop()
            if made.id not in found:
                found[made.id] = made
                waiting += [parent for role, parent in made.parents.items() if role.partition(".")[0] != JUDGES]
        return found


def dependent_judges(policy: Made, config: EvaluationConfig, models: Mapping[str, Made]) -> dict[str, str]:
    """Judge that is not independent of `policy` → why. `gold` may be one of them.

    Args:
        models: role → reward model, of those in `config.judges`.
    """
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
    """Something that a stage was trained against."""

    stage: Made
    term: RewardTerm | None
    """Its source, where it is no model."""
    model: Made | None


def _trained_against(policy: Made) -> Iterator[Opposed]:
    for stage in policy.lineage().values():
        written = stage.config.get("rewards")
        # A kind of somebody else's may have something else of this name.
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


def trained_against(policy: Made) -> dict[str, Made]:
    """The reward models that a policy was trained against, by id."""
    return {one.model.id: one.model for one in _trained_against(policy) if one.model is not None}


def learnt_from(made: Made, *types: type[Artifact]) -> list[tuple[Made, Made]]:
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
    """What makes two sources one, as JSON has them."""
    verifier, service, judge = (_json(getattr(term, name, None)) for name in ("verifier", "service", "judge"))
    if verifier is not None:
        return {name: value for name, value in verifier.items() if name not in LIMITS and value is not None}
    if service is not None:
        return service["url"]
    # Another rubric makes no other judge of the same model.
    return (judge["url"], judge["model"]) if judge is not None else term.function


def _json(section: Any) -> dict[str, Any] | None:
    return section if section is None or isinstance(section, dict) else section.model_dump(mode="json")


def _of_model(model: Made, policy: Made, opposed: list[Opposed]) -> str | None:
    own = model.lineage()
    for other in opposed:
        if other.model is not None and other.model.id in own:
            source = "it" if other.model.id == model.id else f"{other.model.name}, which it comes from"
            return f"{other.stage.name} was trained against {source}"
    # A part of what another part was taken from too has nothing of that part.
    for _, mine in learnt_from(model, RewardModel):
        for stage, pairs in learnt_from(policy, Model, RewardModel):
            if pairs.id in mine.lineage() or mine.id in pairs.lineage():
                return f"{stage.name} was trained on the same pairs, {pairs.name}"
    return None


def made_by(handle: Handle) -> Made:
    """A stage of a graph; of a checkpoint that existed before nothing is known but its name."""
    known: dict[int, Made] = {}

    def made(one: Handle) -> Made:
        if id(one) not in known:
            call = one.call
            config = call.config_json() if call is not None else {}
            parents = {role: made(parent) for role, parent in call.parents.items()} if call is not None else {}
            known[id(one)] = Made(one.name, one.name, one.output.__name__, config, parents)
        return known[id(one)]

    return made(handle)


def check_judges(config: EvaluationConfig, inputs: Mapping[str, Handle]) -> None:
    """Raises ValueError where a judge is not independent of the policy, as far as the graph shows it."""
    models = {role: made_by(handle) for role, handle in inputs.items() if role.startswith(f"{JUDGES}.")}
    dependent = dependent_judges(made_by(inputs["policy"]), config, models)
    for number, name in enumerate(source_names(config.judges)):
        if name in dependent and config.judges[number].weight:
            raise ValueError(
                f"judges.{number}: {name!r} is not allowed: {dependent[name]}; list it under rewards, which are shown "
                "but do not judge"
            )
    if "gold" in dependent:
        raise ValueError(f"gold: {config.gold!r} is not allowed: {dependent['gold']}; use another judge")
