r"""Answers to problems, and which of them are equal.

number      exact; a decimal equals a value that it does not write out (1/3, π) where six digits agree
percent     `50\%` equals 50%, 50 and 0.5
unit        ignored, unless both are known and differ
list, set   `1, 2`, `1 or 2`, `\{1, 2\}`, `\pm 1`: in any order
pair        `(1, 2)`, an interval too: in this order, with these brackets; a list without brackets may stand for it
x = 5       equals 5; not y = 5
text        `\text{even}`, `(C)`, "yes": without regard to case
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

DIGITS = 30
"""Digits in numerical comparisons of exact values."""
MAX_DIGITS = 1000
"""Numbers with more digits are compared in their first."""
AGREED = 10
"""Digits in which expressions must agree at a point."""
SHOWN = 6
"""Digits in which a decimal must agree with a value that it does not write out."""
POINTS = (
    (0.7390851332, 1.8477590650, 2.6854520010, 0.5671432904, 3.3598856662, 1.2020569031),
    (-1.3247179572, 0.6434105463, -0.2614972128, 2.5029078750, -1.7052111401, 0.3036630029),
    (2.2360679775, -1.4513692349, 1.1319882488, -0.8093940205, 0.4123124100, -2.8077702420),
)
"""Values of symbols at which two expressions must agree."""


@dataclass(frozen=True)
class Text:
    words: str


@dataclass(frozen=True)
class NumberInBase:
    """A number in another base."""

    digits: str
    base: int


@dataclass(frozen=True)
class Value:
    expression: Any
    """A value of sympy."""
    name: str | None = None
    """The name that has this value: x in `x = 5`."""
    percent: bool = False
    unit: str | None = None


@dataclass(frozen=True)
class AnswerGroup:
    brackets: str
    """`{}` for a set, empty for a list, `∪` for a union, `:` for a ratio."""
    items: tuple[Answer, ...]
    name: str | None = None


Answer = Text | NumberInBase | Value | AnswerGroup


def same(gold: Answer, given: Answer) -> bool:
    """Whether the answers are equal, as the module says."""
    if isinstance(gold, AnswerGroup) or isinstance(given, AnswerGroup):
        return _same_groups(_as_group(gold), _as_group(given))
    if isinstance(gold, Value) and isinstance(given, Value):
        return _same_values(gold, given)
    return gold == given


def _as_group(answer: Answer) -> AnswerGroup:
    return answer if isinstance(answer, AnswerGroup) else AnswerGroup("", (answer,))


def _same_groups(gold: AnswerGroup, given: AnswerGroup) -> bool:
    if gold.name and given.name and gold.name != given.name:
        return False
    ordered = bool({gold.brackets, given.brackets} - {"", "{}", "∪"})
    if gold.brackets != given.brackets:
        # A list without brackets stands for a set or a pair, not for an interval of a closed bracket.
        if "" not in (gold.brackets, given.brackets) or not {gold.brackets, given.brackets} <= {"", "{}", "()"}:
            return False
        ordered = ordered and gold.brackets == "()"
    golds, rest = _distinct(gold, ordered), list(_distinct(given, ordered))
    if len(golds) != len(rest):
        return False
    if ordered:
        return all(same(one, other) for one, other in zip(golds, rest, strict=True))
    for one in golds:
        index = next((index for index, other in enumerate(rest) if same(one, other)), None)
        if index is None:
            return False
        del rest[index]
    return True


def _distinct(group: AnswerGroup, ordered: bool) -> list[Answer]:
    """The items, in a set each of them once."""
    distinct: list[Answer] = []
    for item in group.items:
        if ordered or not any(same(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _same_values(gold: Value, given: Value) -> bool:
    if (gold.name and given.name and gold.name != given.name) or (gold.unit and given.unit and gold.unit != given.unit):
        return False
    if gold.percent != given.percent:
        percent, part = (gold, given) if gold.percent else (given, gold)
        return _equal(percent.expression, part.expression) or _equal(percent.expression / 100, part.expression)
    return _equal(gold.expression, given.expression)


def _equal(gold: Any, given: Any) -> bool:
    import sympy

    if isinstance(gold, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase):
        return gold.shape == given.shape and all(map(_equal, gold, given))
    if not isinstance(gold, sympy.Expr) or not isinstance(given, sympy.Expr):
        return _related(gold, given)
    gold, given = (one.replace(sympy.UnevaluatedExpr, lambda of: of) for one in (gold, given))
    if gold == given:
        return True
    if gold.free_symbols or given.free_symbols:
        return gold.free_symbols == given.free_symbols and _agree(gold, given)
    decimal = gold.has(sympy.Float) or given.has(sympy.Float)
    if not _near(gold, given, SHOWN if decimal else DIGITS - 5):
        return False
    # Numbers with finitely many digits are compared in all of them.
    numbers = [_rational(one) for one in (gold, given)]
    return bool(numbers[0] == numbers[1]) if all(map(_is_decimal, numbers)) else True


def _related(gold: Any, given: Any) -> bool:
    """Whether equations, inequalities or sets are equal, by math-verify."""
    from math_verify.grader import sympy_expr_eq

    return bool(gold == given or sympy_expr_eq(gold, given, float_rounding=6, numeric_precision=15))


def _rational(value: Any) -> Any:
    """`value` if it is a rational number of a size that can be written out, else None."""
    import sympy

    if abs(sympy.log(abs(value.evalf(DIGITS)) + 1, 10)) > MAX_DIGITS:
        return None
    try:
        exact = sympy.nsimplify(value.doit(), rational=True)
    except (ValueError, TypeError, AttributeError):
        return None
    return exact if exact.is_Rational else None


def _is_decimal(value: Any) -> bool:
    """Whether a rational number has an end in decimal digits."""
    if value is None:
        return False
    rest = int(value.q)
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


def _near(one: Any, other: Any, digits: int) -> bool:
    """Whether numbers differ by at most one unit of their digit number `digits`."""
    import sympy

    a, b = (_evaluated(value) for value in (one, other))
    if a.is_infinite or b.is_infinite or a == b:
        return bool(a == b)
    size = max(abs(a), abs(b))
    return bool(abs(a - b) <= sympy.Float(10) ** (math.floor(sympy.log(size, 10)) - digits + 1))


def _evaluated(value: Any) -> Any:
    number = value.evalf(DIGITS)
    # With a precision of 1 it is a sum of which no digit is left: perhaps 0.
    return value.doit().evalf(DIGITS) if getattr(number, "_prec", 0) == 1 else number


def _agree(gold: Any, given: Any) -> bool:
    """Whether expressions agree at `POINTS`, wherever both have a value."""
    from sympy import Rational

    symbols = sorted(gold.free_symbols, key=str)
    compared = []
    for point in POINTS:
        at = {symbol: Rational(f"{point[i % len(point)] + i // len(point):.10f}") for i, symbol in enumerate(symbols)}
        values = [one.subs(at).doit().evalf(DIGITS) for one in (gold, given)]
        if all(value.is_number and value.is_finite for value in values):
            compared.append(_near(values[0], values[1], AGREED))
    return bool(compared) and all(compared)
