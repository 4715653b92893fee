r"""Final answers in mathematics, read whole or not at all. `answer_equality` says which are equal.

latex2sympy, math-verify's reader, reads one value at a time. Lists, pairs, intervals, units and texts are taken apart
here, since it guesses there: it reads `(5,3)` as an empty interval, `101_2` as 101 and `R^2-r^2` as 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from xray_runtime.rewards.answer_equality import Answer, AnswerGroup, NumberInBase, Text, Value, same
from xray_runtime.rewards.answer_text import (
    boxed,
    check_tokens,
    closing,
    final_answers,
    spelled,
    split_top,
    without_choice,
    without_unit,
    words,
)

COMMA = re.compile(r"[,;]|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s\d)}])(?:and|or)(?![A-Za-z])")
CUP, COLON = re.compile(r"\\cup(?![A-Za-z])"), re.compile(":")
RELATION = re.compile(r"((?:<|>)\s*=?|\\(?:leq?|geq?|lt|gt)(?![A-Za-z]))")
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,]*,\d{3})")
SYMBOL = (
    r"(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu|phi|omega))(?:_(?:\w|\{\s*\w+\s*\}))?"
    r"(?:\([a-z](?:,\s*[a-z])*\))?|\([A-Za-z](?:,\s*[A-Za-z])+\)"
)
"""Names that an answer may begin with: `x`, `x_1`, `f(x)`, `(a, b)`."""
CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
NUMBER = r"-?(?:\d+(?:\.\d*)?|\.\d+)"


REMEDY = "write it in LaTeX, a text as \\text{...}"


def read_gold(value: Any) -> Answer:
    r"""The answer in a dataset: a number, LaTeX, or a text; of a solution what follows `####`, or is boxed.

    Raises:
        ValueError: it is not read whole, so replies would be compared with something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a number or a text, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be finite")
    return _read_gold(value if isinstance(value, str) else f"{value:.15g}" if isinstance(value, float) else str(value))


@lru_cache(maxsize=1024)
def _read_gold(text: str) -> Answer:
    content = boxed(text)
    if "####" in text:
        content = text.rsplit("####", 1)[1]
    try:
        return _read(spelled(text if content is None else content))
    except Exception as error:  # of latex2sympy, of any kind
        why = str(error).split("\n", 1)[0]
        raise ValueError(f"it is not read whole ({' '.join(why.split())}); {REMEDY}") from error


def right(reply: str, gold: Answer) -> bool:
    """Whether the reply's final answer is `gold`."""
    texts = final_answers(reply)
    if isinstance(gold, Text):
        return any(_says(spelled(text), gold.words) for text in texts)
    for text in texts:
        try:
            answer = _read(without_choice(spelled(text))[1].lstrip("= "), lenient=True)
        except (RecursionError, MemoryError):
            raise
        except Exception:
            continue
        if not _has_text(answer) or _has_text(gold):
            return same(gold, answer)
    return False


def _has_text(answer: Answer) -> bool:
    return isinstance(answer, Text) or (isinstance(answer, AnswerGroup) and any(map(_has_text, answer.items)))


def _says(text: str, gold: str) -> bool:
    letter, rest = without_choice(text)
    return gold in (words(text), letter) or (letter is not None and words(rest) == gold)


def _read(text: str, lenient: bool = False) -> Answer:
    """The answer that `text`, as `spelled`, is. Raises ValueError or an error of latex2sympy if it is none."""
    text_words = words(text)
    # A lone letter is a choice if it is a capital or in brackets, else a symbol.
    if text_words is not None and not re.fullmatch("[a-z]", text):
        return Text(text_words)
    named = re.fullmatch(rf"({SYMBOL})\s*(?:=|\\in(?![A-Za-z]))\s*([^=<>]*)", text)
    name, inner = (named[1].replace(" ", ""), named[2]) if named is not None else (None, text)
    for read in (_group, _interval, _base):
        answer = read(inner, lenient)
        if answer is not None:
            return (
                AnswerGroup(answer.brackets, answer.items, name) if name and isinstance(answer, AnswerGroup) else answer
            )
    return _value(inner, name, lenient)


def _group(text: str, lenient: bool) -> Answer | None:
    """The answer as a list, a set, a pair, an interval, a union or a ratio, if it is one."""
    for separator, kind in ((CUP, "∪"), (COMMA, ""), (COLON, ":")):
        if kind == "" and THOUSANDS.fullmatch(text.removesuffix("%").removesuffix("\\").strip().lstrip("\\$ ")):
            continue
        parts = split_top(text, separator)
        if kind == "" and len(parts) > 1:
            parts = [part for part in parts if part]  # `1, 2, and 3`
            if re.search(r"\d,\d{3}(?!\d)", text) and re.search(r",\s|;|and|or", text):
                parts = split_top(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text), COMMA)
        if kind == ":" and len(parts) == 2 and not CLOCK.fullmatch(text):
            return _read(rf"\frac{{{parts[0]}}}{{{parts[1]}}}", lenient)
        if len(parts) > 1:
            members = tuple(_read(part, lenient) for part in parts)
            if len({isinstance(member, Text) for member in members}) > 1:
                raise ValueError("words are among numbers")
            return AnswerGroup(kind, members)
    signs = re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)
    if signs and len(signs) <= 3:
        choices = list(product("+-", repeat=len(signs)))
        if r"\mp" in signs:
            choices = [tuple("+-"[(sign == r"\mp") ^ flip] for sign in signs) for flip in (False, True)]
        return AnswerGroup("", tuple(_read(_filled(text, choice), lenient) for choice in choices))
    begin = next((one for one in ("(", "[", r"\{") if text.startswith(one)), None)
    if begin is None or split_top(text, re.compile(r"(?!)")) != [text] or len(text) < 2:
        return None
    end = next((one for one in (")", "]", r"\}") if text.endswith(one)), None)
    if end is None or (begin == r"\{") != (end == r"\}") or not _encloses(text):
        return None
    items = split_top(text[len(begin) : -len(end)], re.compile("[,;]"))
    if len(items) == 1 and begin != r"\{":
        return None
    brackets = "{}" if begin == r"\{" else begin + end
    return AnswerGroup(brackets, tuple(_read(item, lenient) for item in items if item))


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last."""
    return closing(text, 1 if text.startswith("\\") else 0) == len(text)


def _filled(text: str, signs: Sequence[str]) -> str:
    """`text` with each ± replaced."""
    rest = iter(signs)
    filled = re.sub(r"\\(?:pm|mp)(?![A-Za-z])", lambda _: next(rest), text).strip()
    return re.sub(r"(^|[=({])\s*\+", r"\1", filled)


def _interval(text: str, lenient: bool) -> AnswerGroup | None:
    """`x > 3`, `1 < x <= 2` as intervals."""
    relations = [one.replace(r"\lt", "<").replace(r"\gt", ">").replace(" ", "") for one in RELATION.findall(text)]
    parts = split_top(text, RELATION)
    names = [index for index, part in enumerate(parts) if re.fullmatch(SYMBOL, part)]
    ups = {one.startswith(("<", r"\le")) for one in relations}
    if not relations or len(parts) not in (2, 3) or len(ups) != 1 or (names != [1] and (len(parts) == 3 or not names)):
        return None
    if "=" in "".join(parts):
        return None
    closed = [len(one) > 1 for one in relations]
    if not ups.pop():
        parts, closed = parts[::-1], closed[::-1]
    at = next(index for index, part in enumerate(parts) if re.fullmatch(SYMBOL, part))
    low, high = (parts[0], parts[-1]) if len(parts) == 3 else (parts[0], "") if at else ("", parts[1])
    begin = "[" if low and closed[0] else "("
    end = "]" if high and closed[-1] else ")"
    items = (_read(low or r"-\infty", lenient), _read(high or r"\infty", lenient))
    return AnswerGroup(begin + end, items, parts[at])


def _base(text: str, lenient: bool) -> NumberInBase | None:
    match = re.fullmatch(r"(?:\\text\{\s*)?([0-9A-Fa-f]+)\}?\s*_\s*\{?\s*(\d+)\s*\}?", text)
    if match is None or not match[1][0].isdigit():
        return None
    if not 2 <= int(match[2]) <= 16 or any(int(digit, 16) >= int(match[2]) for digit in match[1]):
        raise ValueError(f"{match[1]!r} is not a number in base {match[2]}")
    return NumberInBase(match[1].lower(), int(match[2]))


def _value(text: str, name: str | None, lenient: bool) -> Value:
    chain = re.split(r"(?<![<>!])=", text)
    has_symbols = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text))
    if len(chain) > 1 + (1 if has_symbols else 0) and (lenient or not has_symbols):
        text = chain[-1].strip()  # `2 + 3 = 5`
    plain, unit = without_unit(text, lenient)
    percent = re.fullmatch(r"(.*?)\s*(?:\\?%|\\text\{\s*percent\s*\})", plain)
    if unit == "percent":
        percent, unit = re.fullmatch("(.*)", plain), None
    expression = parsed(percent[1] if percent else plain)
    if (plain != text or percent) and expression.free_symbols:
        raise ValueError(f"{text[len(plain) :]!r} follows something that is not a number")
    return Value(expression, name, percent is not None, unit)


@lru_cache(maxsize=1024)
def parsed(text: str) -> Any:
    """sympy's expression of LaTeX. Raises ValueError or an error of latex2sympy if it is not read whole."""
    import sympy

    if re.fullmatch(NUMBER, text):  # most answers; the reader's grammar takes milliseconds
        return sympy.Float(text) if "." in text else sympy.Integer(int(text))
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    text = _repeating(text.strip())
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+)\s*\^\s*\{?\s*\\circ\s*\}?", r"(\1\\cdot \\pi /180)", text)
    check_tokens(text)
    # In both cases of a letter, since R is not r.
    config = ConversionConfig(lowercase_symbols=False)
    expression = latex2sympy(text, is_real=None, normalization_config=None, conversion_config=config)
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        raise ValueError("it is no expression")
    expression = expression.subs(sympy.Symbol("i"), sympy.I)
    if expression.has(sympy.nan, sympy.zoo, sympy.Interval):  # `_group` reads intervals
        raise ValueError("it has no value")
    return expression


def _repeating(text: str) -> str:
    r"""Repeating decimals, `0.1\overline{6}`, as fractions."""

    def fraction(match: re.Match[str]) -> str:
        whole, fixed, repeated = match.groups()
        nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
        return rf"\frac{{{int(whole + fixed + repeated or 0) - int((whole + fixed) or 0)}}}{{{nines}}}"

    return re.sub(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?", fraction, text)
