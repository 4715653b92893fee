"""Review: a person judges, without knowing which model is on which side; verdicts are those of `xray compare`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from xray.studio.access import Fields
from xray.studio.feedback_client import send_feedback
from xray.studio.studio import Link, Pages, Studio, page, studio_of
from xray.tasks.output_directory import file_lock, saved_config
from xray_runtime.data.pairs import prompt_text
from xray_runtime.data.reasoning import split_reasoning
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.comparisons import SESSION, SESSIONS
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.report.rendering import counted
from xray_runtime.live.feedback.judgements import KEYS, left_model
from xray_runtime.live.feedback.publication import publish
from xray_runtime.live.feedback.recorded_review import keep_feedback, recorded_questions, signals_of
from xray_runtime.live.feedback.session import Session, read_sessions

router = APIRouter()
PAGES = Pages(router, (Link("/review", "Review", 30),))

JUDGE = "xray_judge"
MAX_NAME = 80


def judge_of(request: Request) -> str:
    """The name that a person judges under."""
    return unquote(request.cookies.get(JUDGE, ""))[:MAX_NAME] or studio_of(request).by


def _session(studio: Studio, name: str) -> Path:
    directory = studio.output / SESSIONS / name
    if Path(name).name != name or not (directory / SESSION).is_file():
        raise ConfigError(f"session: {name!r} is not allowed: there is none in {str(studio.output / SESSIONS)!r}")
    return directory


@router.get("/review")
def sessions(request: Request) -> Response:
    """Everything that can be judged."""
    studio, judge = studio_of(request), judge_of(request)
    return page(request, "review.html", sessions=_open(studio, judge), recorded=_recorded(studio, judge), judge=judge)


def _open(studio: Studio, judge: str) -> list[tuple[Session, int]]:
    return [(session, len(session.open_questions(judge))) for session in read_sessions(studio.output)]


def _recorded(studio: Studio, judge: str) -> int | None:
    return len(recorded_questions(studio.output, judge)) if (studio.output / RECORDED).is_dir() else None


def waiting_reviews(studio: Studio, judge: str) -> list[tuple[str, str]]:
    """(address, text) of what this judge has not judged."""
    counts = [(f"/review/{s.name}", n, "comparison") for s, n in _open(studio, judge)]
    counts.append(("/review/recorded", _recorded(studio, judge) or 0, "recorded answer"))
    return [(address, f"{counted(number, what)} to judge") for address, number, what in counts if number]


@router.post("/review")
def name_judge(request: Request, fields: Fields) -> Response:
    name = fields.get("judge", "").strip()[:MAX_NAME]
    if not name.isprintable() or not name:
        raise ConfigError(f"judge: {name!r} is not allowed: must be a name")
    response = RedirectResponse("/review", 303)
    response.set_cookie(JUDGE, quote(name), httponly=True, samesite="strict")
    return response


@router.post("/review/publish")
def publish_verdicts(request: Request, fields: Fields) -> Response:
    """Publish as `xray preferences` does."""
    studio = studio_of(request)
    done = publish(studio.store(), saved_config(studio.output).project, judge_of(request))
    return page(request, "published.html", done=done)


@router.get("/review/recorded")
def recorded(request: Request) -> Response:
    return _recorded_page(request, "question.html", "")


@router.post("/review/recorded")
def judge_recorded(request: Request, fields: Fields) -> Response:
    studio, judge = studio_of(request), judge_of(request)
    question = next((q for q in recorded_questions(studio.output, judge) if q.id == fields.get("question")), None)
    if question is None:
        raise ConfigError("question: it was judged already, or is gone: load the page again")
    key, correction = fields.get("key", ""), fields.get("correction", "").strip() or None
    if key != "s":
        feedback = [(answer, judge, signals) for answer, signals in signals_of(question, key, correction)]
        if studio.serve and studio.feedback_key:
            send_feedback(studio.serve, studio.feedback_key, feedback)
        else:
            keep_feedback(studio.output, "studio", feedback)
    return _recorded_page(request, "question_part.html", question.id if key == "s" else "")


def _recorded_page(request: Request, template: str, skipped: str) -> Response:
    """The next question; after `skipped`, where it was skipped."""
    questions = recorded_questions(studio_of(request).output, judge_of(request))
    ids = [question.id for question in questions]
    position = ids.index(skipped) + 1 if skipped in ids else 0
    question = questions[position] if position < len(questions) else None
    return page(
        request,
        template,
        title="Recorded answers",
        action="/review/recorded",
        judge=judge_of(request),
        left_over=len(questions) - position,
        question=question.id if question else "",
        prompt=question.prompt if question else "",
        replies=[split_reasoning(answer.text) for answer in question.answers] if question else [],
        keys={**question.keys, "s": "skip"} if question else {},
        before=None,
    )


@router.get("/review/{name}")
def review(request: Request, name: str, number: int | None = None) -> Response:
    session = Session.read(_session(studio_of(request), name))
    return _page(request, "question.html", session, number)


@router.post("/review/{name}")
def judge_session(request: Request, name: str, fields: Fields) -> Response:
    directory, judge = _session(studio_of(request), name), judge_of(request)
    key, number = fields.get("key", ""), fields.get("question", "")
    with file_lock(directory):
        session = Session.read(directory)
        if key not in KEYS:
            raise ConfigError(f"key: {key!r} is not allowed: must be one of {', '.join(KEYS)}")
        if number not in {str(question.number) for question in session.questions}:
            raise ConfigError(f"question: {number!r} is not allowed: {name} does not have it")
        session.judge(int(number), judge, key, fields.get("correction", "").strip() or None)
    return _page(request, "question_part.html", session, None, int(number))


def _page(request: Request, template: str, session: Session, number: int | None, before: int | None = None) -> Response:
    """Question `number`, by default the first that is open; `before`: the one that was just judged."""
    judge = judge_of(request)
    open_questions = session.open_questions(judge)
    question = next((q for q in session.questions if q.number == number), None) if number is not None else None
    question = question or next(iter(open_questions), None)
    replies = [question.a, question.b] if question is not None else []
    if question is not None and left_model(session.setup.seed, judge, question.number) == "b":
        replies.reverse()
    return page(
        request,
        template,
        title=f"Comparison {session.name}",
        action=f"/review/{session.name}",
        judge=judge,
        left_over=len(open_questions),
        question=str(question.number) if question else "",
        prompt=prompt_text(question.prompt) if question else "",
        replies=[split_reasoning(reply) for reply in replies],
        keys={"1": "the left is better", "2": "the right is better", "t": "a tie", "b": "both are bad", "s": "skip"},
        before=before,
    )
