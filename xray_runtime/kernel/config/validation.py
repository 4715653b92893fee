"""Config errors: one line that names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from xray_runtime.kernel.config.plug_section import PlugSection

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A config is not allowed; the message is one line."""


class CombinationError(ConfigError):
    """Each value is allowed by itself, but their combination is not."""


def validate_as(model: type[Model], data: Any, where: str = "") -> Model:
    """`data` as a `model`; errors name fields below `where`. Raises ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        together = all(problem["type"] == "value_error" for problem in problems)
        kind = CombinationError if together else ConfigError
        raise kind(_describe(problems[0], model, where) + more) from None
    except RecursionError:
        raise ConfigError(f"{where or 'the config'} is nested too deeply") from None


def hint(name: str, known: Sequence[str]) -> str:
    """The known name that an unknown one resembles, for the end of a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _describe(error: ErrorDetails, model: type[BaseModel], where: str) -> str:
    loc, owner = _user_path(error["loc"], model)
    names = [str(part) if str(part).isprintable() else repr(part) for part in loc]
    path = ".".join([where, *names] if where else names) or "the config"
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        if _is_model(owner) and issubclass(owner, PlugSection) and (line := owner.lacks(names[-1])):
            return f"{path.rpartition('.')[0]}: {line}"
        known = sorted(owner.model_fields) if _is_model(owner) else []
        here = ".".join("N" if isinstance(part, int) else str(part) for part in loc)
        places = [place for place in _places(model, str(loc[-1])) if place != here]
        elsewhere = [place if "." in place else "the top level of the config" for place in places[:3]]
        place = f" (it belongs at {' or '.join(elsewhere)})" if elsewhere and not where else ""
        return f"{path}: unknown field{place or hint(str(loc[-1]), known)}; allowed here: {', '.join(known)}"
    if kind == "missing":
        return f"{path}: is required"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag = str(context["discriminator"]).strip("'")
        allowed = context.get("expected_tags") or ", ".join(map(repr, _tags(owner, str(loc[-1]), tag)))
        wrong = f"{_show(context['tag'])} is not allowed" if "tag" in context else "is required"
        return f"{path}.{tag}: {wrong}: must be one of {allowed}"
    if kind == "value_error":
        return f"{path}: {context['error']}" if loc or where else str(context["error"])
    return f"{path}: {_show(error['input'])} is not allowed: must {_requirement(error)}"


def _requirement(error: ErrorDetails) -> str:
    """The requirement on the value, continuing "must …"."""
    kind, context = error["type"], error.get("ctx", {})
    plain = {
        "model_type": "be a mapping of fields",
        "list_type": "be a list",
        "tuple_type": "be a list",
        "string_type": "be a text",
        "int_type": "be a whole number",
        "float_type": "be a number",
        "bool_type": "be true or false",
        "finite_number": "be a finite number",
        "string_too_short": "not be empty",
        "string_pattern_mismatch": f"match {context.get('pattern')}",
        "too_short": f"have at least {context.get('min_length')} item(s)",
        "too_long": f"have at most {context.get('max_length')} item(s)",
    }
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return plain.get(kind, f"be {message}")


def _user_path(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[int | str], Any]:
    """`loc` without the tags that pydantic inserts for unions, and the model that owns its last part."""
    path: list[int | str] = []
    owner: Any = model
    for part in loc:
        if isinstance(owner, tuple):  # a union: this part names the chosen member
            owner = next((m for m in owner if part in (m.__name__, *_tag_values(m))), owner[0])
            continue
        path.append(part)
        if len(path) < len(loc) and isinstance(part, str) and _is_model(owner):
            owner = _member(owner, part)
        elif isinstance(owner, list):
            owner = owner[0]
    return path, owner


def _places(root: type[BaseModel], name: str) -> list[str]:
    """Paths of all fields called `name` below `root`, nearest first; N is the number of a list's item."""
    paths: dict[str, None] = {}
    pending: list[tuple[str, type[BaseModel], tuple[Any, ...]]] = [("", root, ())]
    for prefix, model, above in pending:
        for field, info in model.model_fields.items():
            if field == name:
                paths[f"{prefix}{field}"] = None
            numbered = ".N" if "list" in str(info.annotation) else ""
            pending += [
                (f"{prefix}{field}{numbered}.", inner, (*above, model))
                for inner in _models(info.annotation)
                if inner not in (*above, model)
            ]
    return list(paths)


def _member(owner: Any, name: str) -> Any:
    """The model behind field `name`, a tuple of models (union), one of these in a list (list or dict), or the owner."""
    annotation = owner.model_fields[name].annotation if name in owner.model_fields else None
    models = _models(annotation)
    if not models:
        return owner
    member = models[0] if len(models) == 1 else tuple(models)
    return [member] if get_origin(annotation) in (list, dict) else member


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation, including those in unions, containers and `Annotated`."""
    if _is_model(annotation):
        return list(annotation.members()) if issubclass(annotation, PlugSection) else [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _is_model(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseModel)


def _tag_values(model: type[BaseModel]) -> tuple[Any, ...]:
    """The value of the discriminator: the first field that is a Literal of one value."""
    literals = (f.annotation for f in model.model_fields.values() if get_origin(f.annotation) is Literal)
    return next((values for values in map(get_args, literals) if len(values) == 1), ())


def _tags(owner: Any, name: str, tag: str) -> list[Any]:
    members = owner if isinstance(owner, tuple) else _member(owner, name)
    return [value for member in members for value in _tag_values(member)] if isinstance(members, tuple) else [tag]


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
