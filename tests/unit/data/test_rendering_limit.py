"""Chat templates that loop without end, recurse or write without end are refused in one line."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

from xray_runtime.data import rendering_limit
from xray_runtime.data.chat_format import ChatFormat
from xray_runtime.data.tokenizing import train_tokenizer

BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + BODY,
    "nested loops of a list": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro f() %}{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}"
    "{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    "loops that filter": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "macros that call each other": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "a range of 10^9": "{% for a in range(10 ** 9) %}{% endfor %}" + BODY,
    "a doubled text": "{% set ns = namespace(t='x') %}{% for a in range(28) %}{% set ns.t = ns.t + ns.t %}{% endfor %}"
    "{{ ns.t }}" + BODY,
    "growing sums": "{% set ns = namespace(t=[1]) %}{% for a in range(99999) %}{% set ns.t = ns.t + [a] %}{% endfor %}"
    "{{ ns.t|sum }}" + BODY,
}


@pytest.fixture(scope="module")
def plain() -> Any:
    return train_tokenizer(["a user says something", "and is answered"] * 5, 300)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_one_line(name: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering_limit, "LIMIT_S", 0.1)
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = HOSTILE[name]
    found = ChatFormat(tokenizer)
    for call in (lambda: found.prompts([[{"role": "user", "content": "hi"}]]), lambda: found.end_of_turn):
        with pytest.raises(ValueError, match=r"^the chat template (refuses|leaves)") as error:
            call()
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500


def test_the_limit_reaches_only_the_rendering_that_is_late(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering_limit, "LIMIT_S", 0.5)
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = HOSTILE["nested loops"]
    hostile, good = ChatFormat(tokenizer), ChatFormat(plain)
    said = list[str]()

    def render() -> None:
        try:
            hostile.prompts([[{"role": "user", "content": "hi"}]])
        except ValueError as error:
            said.append(str(error))

    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    expected = good.prompts([[{"role": "user", "content": "hi"}]])
    while any(thread.is_alive() for thread in threads):
        assert good.prompts([[{"role": "user", "content": "hi"}]]) == expected
    assert said == ["the chat template refuses a conversation (it is not done after 0.5 s)"] * 3
    # Nothing is left that would reach this thread later.
    for _ in range(1000):
        assert sum(range(100)) == 4950
