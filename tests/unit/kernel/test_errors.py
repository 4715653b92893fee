"""What a person is told went wrong, and whether trying again could help."""

from __future__ import annotations

import pytest

from xray_runtime.kernel.errors import may_retry, root_cause


class Wrapper(Exception):
    """As Ray's RayTaskError: what happened elsewhere is in `cause`."""

    def __init__(self, cause: BaseException | None) -> None:
        super().__init__("wrapped")
        self.cause = cause


class OursError(RuntimeError):
    """An error of ours that explains a foreign one."""


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


BAD, LOST = ValueError("lr: too large"), OSError("disk gone")


@pytest.mark.parametrize(
    ("error", "root"),
    [
        (BAD, BAD),
        (Wrapper(BAD), BAD),
        (Wrapper(Wrapper(LOST)), LOST),
        (raised_from(TypeError("while calling"), LOST), LOST),
        (raised_from(TypeError("while calling"), Wrapper(BAD)), BAD),
        (Wrapper(raised_from(TypeError("while calling"), LOST)), LOST),
    ],
)
def test_wrappers_are_opened(error: BaseException, root: BaseException) -> None:
    assert root_cause(error) is root


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, OursError])
def test_our_own_explanation_is_not_traded_for_its_detail(kind: type[Exception]) -> None:
    explained = raised_from(kind("the file is damaged: remove it"), KeyError("x"))
    assert root_cause(explained) is explained
    assert root_cause(Wrapper(explained)) is explained


def test_a_cause_of_another_kind_is_not_one() -> None:
    for cause in (None, "a text"):
        error = Wrapper(cause)  # type: ignore[arg-type]
        assert root_cause(error) is error


def test_a_circle_of_causes_ends() -> None:
    first, second = Wrapper(None), Wrapper(None)
    first.cause, second.cause = second, first
    assert root_cause(first) in (first, second)


@pytest.mark.parametrize(
    ("error", "users"),
    [
        (BAD, True),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), True),  # a file of the user's
        (Wrapper(Wrapper(BAD)), True),
        (raised_from(TypeError("x"), BAD), True),
        (LOST, False),
        (Wrapper(LOST), False),
        (raised_from(OursError("a Workhorse died"), BAD), False),  # what died may live the next time
        (KeyboardInterrupt(), False),
    ],
)
def test_only_the_input_is_not_tried_again(error: BaseException, users: bool) -> None:
    assert may_retry(error) is not users
