r"""The text of a mathematical answer: where a reply names it, and its one spelling in LaTeX (`spelled`).

Only what is listed here can be read (`COMMANDS`, single letters, numbers, operators), so that nothing is skipped in
silence: `4x-7 foo`, `3 3` or `x \text{ is even}` is no answer.
"""

from __future__ import annotations

import re

SYMBOLS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "π": r"\pi ",
    "θ": r"\theta ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "∪": r"\cup ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "°": r"^\circ ",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "²": "^{2}",
    "³": "^{3}",
    "“": '"',
    "”": '"',
    "’": "'",
    "\xa0": " ",
}
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp"
COMMANDS = frozenset(
    f"{GREEK} {FUNCTIONS} pi infty frac sqrt binom cdot times div le leq ge geq lt gt ne neq lfloor rfloor lceil rceil "
    "emptyset sum prod int lim to min max gcd lcm vert lvert rvert".split()
)
"""LaTeX commands that an answer may have, besides those that `spelled` replaces."""
RENAMED = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom"}
RENAMED |= {"varnothing": "emptyset", "leqslant": "le", "geqslant": "ge", "lbrace": "{", "rbrace": "}"}
DROPPED = re.compile("left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?")
SPACES = re.compile("q?quad|space")
TEXTS = re.compile("text(?:bf|it|rm|tt|normal)?|math(?:rm|bf|it|sf)|[mh]box|emph")

UNITS = {
    name: names[0]
    for names in (
        one.split()
        for one in """mm millimeter millimetre;cm centimeter centimetre;km kilometer kilometre;m meter metre;in inch
inche;ft foot feet;yd yard;mi mile;mg milligram;kg kilogram;g gram;lb pound;oz ounce;ton tonne;s sec second;ms
millisecond;min minute;h hr hour;day;week;month;yr year;l liter litre;ml milliliter millilitre;gal gallon;mph;
dollar usd;cent;euro;rupee;degree deg;rad radian;unit;hz hertz;n newton;j joule;ev;w watt;v volt;k kelvin;mol mole;
pa pascal;percent""".replace("\n", " ").split(";")
    )
    for name in names
}
UNITS["mph"] = "mi h"
"""A unit's names → the one that stands for all."""
MODIFIERS = {"square", "squared", "sq", "cubic", "cubed", "cu", "per"}
WORDS = {"no", "on", "up", "am", "pm"}
"""Words of two letters; other runs of two are products (`xy`)."""

MATH = re.compile(r"(?<!\\)\$\$.+?(?<!\\)\$\$|(?<![\\$])\$(?!\s)[^\n$]+?(?<!\\)\$|\\\[.+?\\\]|\\\(.+?\\\)", re.DOTALL)
"""A formula in its delimiters."""
MARKER = re.compile(r"(?i:\banswer\b(?:\s*\*\*)?(?:[^.:=\n]{0,60}?\b(?:is|equals)\b|\s*[:=])\s*:?)|####")
NUMBER = r"-?(?:\d+(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
PLAIN = re.compile(
    rf"(?<![\w.^+*/\\{{}}(\[:,-])(?:[$€£]\s?)?(?=[-.\d])({NUMBER}(?:\s?/\s?\d+)?(?:\s?\\?%)?)(?<=[\d%])(?![\w^*/\\(+:]|[.,]\d|-\w)"
)
"""A number that stands alone in prose, perhaps a fraction, with its sign and percent."""


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, or of several that belong together, as a list; None if there is none."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    if not re.search(r"\\f?boxed\s*\{", text):
        return None
    content: str = extract_boxed_content(text, mode="last")
    # Without its closing brace it was cut off.
    return None if content.count("{") != content.count("}") else content


def final_answers(reply: str) -> list[str]:
    """Texts of which the first that can be read is the reply's final answer: what is boxed, what follows the last
    `####` or "answer is", the whole reply, or else its last formula or number."""
    content = boxed(reply)
    if content is not None or re.search(r"\\f?boxed\b", reply):
        return [content or ""]
    marks = list(MARKER.finditer(reply))
    if marks:
        return _after(reply[marks[-1].end() :])
    answers = [(one.end(), one.group()) for one in MATH.finditer(reply)]
    prose = MATH.sub(lambda one: " " * len(one.group()), reply)
    answers += [(one.end(), one.group(1)) for one in PLAIN.finditer(prose)]
    return [reply, reply.strip().rsplit("\n", 1)[-1], *([max(answers)[1]] if answers else [])]


def _after(rest: str) -> list[str]:
    """Readings of the text after a mark: its line, its sentence, or the formula or number it begins with."""
    rest = rest.strip().strip("*").lstrip()
    line = rest.split("\n", 1)[0] if not rest.startswith(("$$", r"\[")) else rest
    sentence = re.split(r"\.\s|\.?\s+I hope\b|,?\s+(?:because|since|so|which|as)\b", line, maxsplit=1)[0].rstrip("*. ")
    first = MATH.match(rest) or PLAIN.match(rest)
    answers = [one.group() for one in (MATH.finditer(sentence) if MATH.search(sentence) else PLAIN.finditer(sentence))]
    named = [first.group()] if first else answers if len(answers) == 1 else []
    return [sentence, *named, re.split(r"[,.;:*]", sentence, maxsplit=1)[0]]


def spelled(text: str) -> str:
    """`text` in one spelling, without what does not change the value: spaces, sizes, delimiters of formulas."""
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"(?<!\\)\\[()\[\]]|\\?\$", "", text.strip().strip("*")).strip()
    text = re.sub(r"(?<=\d)(?:,\s*\\!|\{,\}|\\,|\\ (?=\d{3}))\s*(?=\d)", "", text)
    text = re.sub(r"(?<!\\)\\[,;:!>\s]|~", " ", text)
    text = re.sub(r"\\math(?:bf|it)\s*\{\s*([A-Za-z])\s*\}", r"\1", text)
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    text = re.sub(r"\\([A-Za-z]+)", _command, text)
    text = re.sub(r"_\s*(\w)", r"_{\1}", text)
    text = re.sub(r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(rf"(?<![A-Za-z\\])(sqrt|pi|{FUNCTIONS.replace(' ', '|')})(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text.replace("**", "^"))
    text = re.sub(r"\^\s*([-+]?\d+)", r"^{\1}", text)
    text = re.sub(r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![A-Za-z\d.])", r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"10\^\{\+", "10^{", text)
    text = re.sub(
        r"(\d)(?:\^?\{?\\text\{\s*(?:th|st|nd|rd)\s*\}\}?|\^\{(?:th|st|nd|rd)\}|(?:th|st|nd|rd)\b)", r"\1", text
    )
    text = re.sub(r"\\text\{\s*([A-Za-z])\s*\}(?=\s*[=<>^_+*)-])|\\text\{\s*\}", r"\1", text)
    text = _arguments(text.replace("*", r"\cdot "))
    text = re.sub(r"(?<![\d.}])(-?\d+) +(\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text)
    return " ".join(text.rstrip(" .,;").split())


def _command(match: re.Match[str]) -> str:
    name = RENAMED.get(match[1], match[1])
    if DROPPED.fullmatch(name) or SPACES.fullmatch(name):
        return " " if SPACES.fullmatch(name) else ""
    return r"\text" if TEXTS.fullmatch(name) else f"\\{name}"


def _arguments(text: str) -> str:
    r"""Braces around the arguments of `\frac`, `\binom` and `\sqrt` that have none: `\frac12`, `\sqrt2`."""
    match = re.search(r"\\(?:frac|binom|(sqrt))(?![A-Za-z])\s*(?(1)(?:\[[^\]]*\])?)", text)
    if match is None:
        return text
    rest, given = text[match.end() :], []
    for _ in range(1 if match[1] else 2):
        rest = rest.lstrip()
        size = closing(rest, 0) if rest.startswith("{") else len(re.match(r"\\[A-Za-z]+|\w?", rest)[0])  # type: ignore[index]
        inner = rest[1 : size - 1] if rest.startswith("{") else rest[:size]
        given.append(f"{{{_arguments(inner)}}}")
        rest = rest[size:]
    return f"{text[: match.start()]}{match[0].rstrip()}{''.join(given)}{_arguments(rest)}"


def closing(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`; the text's length if none does."""
    depth = 0
    for index in range(start, len(text)):
        escaped = index and text[index - 1] == "\\"
        if text[index] in "({[" and not (escaped and text[index] != "{"):
            depth += 1
        elif text[index] in ")}]" and not (escaped and text[index] != "}"):
            depth -= 1
            if not depth:
                return index + 1
    return len(text)


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """`text` split where `separator` matches outside of brackets."""
    parts, start, index = [], 0, 0
    while index < len(text):
        if text[index] in "({[":
            index = closing(text, index)
        elif (match := separator.match(text, index)) is not None and match.end() > index:
            parts.append(text[start:index])
            start = index = match.end()
        elif text[index] == "\\" and (begin := re.compile(r"\\begin\s*\{(\w+)\}").match(text, index)) is not None:
            end = text.find(rf"\end {{{begin[1]}}}", index)
            index = len(text) if end < 0 else end + 4
        else:
            index += 2 if text[index] == "\\" and text[index + 1 : index + 2] not in "{}([" else 1
    return [part.strip() for part in (*parts, text[start:])]


def without_unit(text: str, lenient: bool) -> tuple[str, str | None]:
    r"""(`text` without the unit, degrees or currency of a number; the unit's name if it is known).

    Args:
        lenient: any words may follow the number, as in a reply: "42 apples in all".
    """
    text = re.sub(r"^(-?)\s*[€£]\s*", r"\1", text)
    degrees = re.fullmatch(r"(.*?)\s*\^\s*\{?\s*\\circ\s*\}?(?:\s*(?:\\text\{\s*)?([CF])\}?)?", text)
    if degrees is not None and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return degrees[1], f"degree{degrees[2] or ''}"
    power = r"(?:\s*\^\s*\{?-?\d\}?)?"
    inside = rf"\\text\{{(?:[^{{}}]|\^\{{-?\d\}})*\}}{power}"
    match = re.fullmatch(rf"(.*?\S)\s*((?:{inside}[\s/]*|\\cdot\s*(?=\\text))+)", text)
    bare = re.fullmatch(rf"(-?[\d.,/ ]*\d(?: ?\\frac\{{\d+\}}\{{\d+\}})?)\s*((?:[A-Za-z]+\.?{power}[\s/]*)+)", text)
    if match is not None:
        phrase = re.sub(rf"\\text\{{|{power}\}}{power}|\\cdot|\^\{{-?\d\}}|[/.°]", " ", match[2])
        words = phrase.split()
        known = all(map(_is_unit, words)) or (len(words) == 1 and len(words[0]) > 2)
        if phrase.replace(" ", "").isalpha() and (lenient or known):
            return match[1], _unit(words)
    elif bare is not None:
        words = re.findall(r"[A-Za-z]+", bare[2])
        # `3m` may be a product; `3 m` and `3cm` are units.
        apart = bare[0][len(bare[1])].isspace()
        known = all(map(_is_unit, words)) and (apart or min(map(len, words)) > 1)
        if known or (lenient and apart and max(map(len, words)) > 2):
            return bare[1], _unit(words)
    return text, None


def _is_unit(word: str) -> bool:
    return word.lower() in MODIFIERS or _name(word) is not None


def _name(word: str) -> str | None:
    word = word.lower()
    return UNITS.get(word) or (UNITS.get(word.removesuffix("s")) if len(word) > 2 else None)


def _unit(words: list[str]) -> str | None:
    names = [_name(word) for word in words if word.lower() not in MODIFIERS]
    return " ".join(name for name in names if name is not None) if names and None not in names else None


def words(text: str) -> str | None:
    r"""The words of an answer that is a text (`\text{even}`, `(C)`, "Yes"), in lower case; None if it is none."""
    inside = re.fullmatch(r"\s*\\text\{([^{}\\]*)\}\s*", text)
    plain = " ".join((inside[1] if inside else text).strip(" .*'\"").split()).lower()
    letter = re.fullmatch(r"\(?([a-z])\)?", plain)
    if letter is not None:
        return letter[1]
    if inside is not None and re.search(r"[a-z]", plain):
        return plain
    is_word = len(plain) > 2 and not _is_product(plain)
    if re.fullmatch(r"[a-z]+(?:['-][a-z]+)*(?: [a-z]+(?:['-][a-z]+)*)*", plain) and (is_word or plain in WORDS):
        return plain
    return None


def _is_product(letters: str) -> bool:
    """Whether letters are a product, which is written in alphabetical order: `xyz`, `abc`."""
    return len(letters) < 3 or (list(letters) == sorted(set(letters)) and not set(letters) & set("eiou"))


def without_choice(text: str) -> tuple[str | None, str]:
    r"""(the letter of the choice that a text begins with, in lower case; the rest): `\text{(C) } 5`."""
    letter = r"\\text\{\s*\(?([A-Z])\)?[).:]?\s*\}|\(([A-Z])\)|([A-Z])[).:]"
    match = re.fullmatch(rf"\s*(?:{letter})\s*(?![,;]|and\b|or\b)(\S.*)", text, re.DOTALL)
    return (None, text) if match is None else ((match[1] or match[2] or match[3]).lower(), match[4])


TOKEN = re.compile(
    r"(?P<name>\\(?:begin|end|mathbb)\s*\{(?:[pbvBV]?matrix|[RCNZQ])\})|\\(?P<command>[A-Za-z]+)|\\[{}|]|\\\\|"
    r"(?P<number>\d+\.?\d*|\.\d+)|(?P<letters>[A-Za-z]+)|[-+/^_!|(){}\[\]=<>,&]"
)


def check_tokens(text: str) -> None:
    """Raise ValueError if `text` has anything that the reader of LaTeX would skip or join."""
    index, before, apart = 0, "", False
    while index < len(text):
        match = TOKEN.match(text, index)
        if match is None or (match["command"] and match["command"] not in COMMANDS):
            raise ValueError(f"{text[index : index + 20]!r} is not known")
        kind, token = match.lastgroup or match[0], match[0]
        if kind == "letters":
            wrong = not _is_product(token.lower()) or (before == "letters" and apart and len(token) > 1)
        elif kind == "number":
            wrong = before == "number" or (before == "letters" and apart)
        else:
            wrong = (kind == "_" and before in ("number", ")", "}")) or kind == before == "!"
        if wrong:
            raise ValueError(f"{token!r} does not belong to what is before it")
        index, before = match.end(), kind
        spaces = len(text) - index - len(text[index:].lstrip())
        index, apart = index + spaces, spaces > 0
