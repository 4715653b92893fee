"""Agents for the tests; worker processes import them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import httpx


def send(url: str, content: Any, headers: dict[str, str]) -> httpx.Response:
    """A request that loads no certificates: that takes longer than all else in an episode."""
    return httpx.post(url, json=content, headers=headers, timeout=60, verify=False)


def ask(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """One call, without an SDK, which takes a second to import."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = {"model": "x", "messages": messages} | fields
    answer = send(f"{url}/chat/completions", body, {"authorization": f"Bearer {key}"})
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


def post(value: Any) -> None:
    url, key = os.environ["XRAY_EPISODE_URL"], os.environ["OPENAI_API_KEY"]
    send(f"{url}/reward", value, {"x-api-key": key})


def two_turns(task: dict[str, Any]) -> float:
    """The number of letters of two replies, and a branch from the first."""
    first = [{"role": "user", "content": task["prompt"]}]
    answer = ask(first)
    more = [*first, {"role": "assistant", "content": answer["content"]}]
    end = ask([*more, {"role": "user", "content": "go on"}])
    ask([*more, {"role": "user", "content": "another way"}])
    return float(len(answer["content"]) + len(end["content"]))


async def is_async(task: dict[str, Any]) -> dict[str, Any]:
    ask([{"role": "user", "content": task["prompt"]}])
    return {"value": 0.5, "info": {"steps": 1}}


def faulty(task: dict[str, Any]) -> Any:
    """Does what its task names."""
    ask([{"role": "user", "content": task["prompt"]}])
    match task["fault"]:
        case "nothing":
            return None
        case "raises":
            raise OSError("the page is gone")
        case "hangs":
            time.sleep(1000)
        case "exits":
            os._exit(3)
        case "leaks":
            leak = []
            while True:
                leak.append(bytearray(2**24))
        case "boolean":
            return True
        case "list":
            return [1.0]
        case "another":
            steal(os.environ["XRAY_EPISODE_URL"])
        case "calls":
            for number in range(100):
                ask([{"role": "user", "content": f"again {number}"}])
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "unusable":
            return {"unusable": "the site was down"}
        case "kills":
            os.kill(os.getppid(), 9)
            time.sleep(1000)
        case "after":
            post({"value": 0.25})
            try:
                ask([{"role": "user", "content": "more"}])
            finally:
                post({"value": 100})
        case "daemon":
            # A grandchild in a session of its own.
            code = f"import subprocess; subprocess.Popen(['sleep', '{task['seconds']}'], start_new_session=True)"
            subprocess.run([sys.executable, "-c", code], check=True)
    return 1.0


def steal(own: str) -> None:
    """Calls and rewards of other episodes with the own token, and of the own one with another. Raises if one passes."""
    name = own.rpartition("/")[2]
    others = [own.replace(name, f"{name.rpartition('-')[0]}-{row}") for row in range(10)]
    body = {"model": "x", "messages": [{"role": "user", "content": "stolen"}]}
    for url, key in [*((url, os.environ["OPENAI_API_KEY"]) for url in others if url != own), (own, "xray-guessed")]:
        for path, content in (("v1/chat/completions", body), ("reward", {"value": 100})):
            answer = send(f"{url}/{path}", content, {"x-api-key": key})
            if answer.status_code != 401:
                raise ValueError(f"{path} of another episode answers {answer.status_code}")


FAULTS = ["none", "nothing", "raises", "boolean", "list", "text", "nan", "another", "after", "calls"]


def of_table(task: dict[str, Any]) -> Any:
    """The fault at the number in the prompt."""
    return faulty(task | {"fault": FAULTS[int(task["prompt"][-1])]})


def kills_once(task: dict[str, Any]) -> float:
    """The first worker dies."""
    ask([{"role": "user", "content": task["prompt"]}])
    try:
        os.mkdir(os.environ["XRAY_TEST_MARKER"])
    except FileExistsError:
        return 1.0
    os.kill(os.getppid(), 9)
    time.sleep(1000)
    return 0.0


def says(task: dict[str, Any]) -> float:
    ask([{"role": "user", "content": os.environ.get("XRAY_TEST_SAYS", "same")}])
    return 1.0


def by_number(task: dict[str, Any]) -> Any:
    """A fault or none, by the number in the prompt."""
    faults = ("none", "raises", "unusable", "nothing", "none")
    return faulty(task | {"fault": faults[int(task["prompt"][-1]) % len(faults)]})


def waits(task: dict[str, Any]) -> float:
    """Two calls. Where the task's prompt ends with 3, a version of the policy must come between them."""
    first = [{"role": "user", "content": task["prompt"]}]
    answer = ask(first)
    if task["prompt"].endswith("3"):
        await_version()
    ask([*first, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}])
    return float(len(answer["content"]))


def first_pauses(task: dict[str, Any]) -> float:
    """Two calls, between which the first agent of all waits for a later version of the policy."""
    first = [{"role": "user", "content": task["prompt"]}]
    answer = ask(first)
    try:
        os.mkdir(f"{os.environ['XRAY_TEST_VERSIONS']}/first")
        await_version()
    except FileExistsError:
        pass
    ask([*first, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}])
    return float(len(answer["content"]))


def first_waits(task: dict[str, Any]) -> float:
    """One call, which the first agent of all makes only at a later version of the policy."""
    try:
        os.mkdir(f"{os.environ['XRAY_TEST_VERSIONS']}/first")
        await_version()
    except FileExistsError:
        pass
    return float(len(ask([{"role": "user", "content": task["prompt"]}])["content"]))


def await_version() -> None:
    """Wait until a file says that the policy was updated often enough."""
    path = f"{os.environ['XRAY_TEST_VERSIONS']}/2"
    while not os.path.exists(path):
        time.sleep(0.02)


def seven_of_eight_fail(task: dict[str, Any]) -> float:
    """Of the first eight agents, all but the last find their page gone."""
    ask([{"role": "user", "content": task["prompt"]}])
    for number in range(1000):
        try:
            os.mkdir(f"{os.environ['XRAY_TEST_CLAIMED']}/{number}")
        except FileExistsError:
            continue
        if number < 7:
            raise OSError("the page is gone")
        return float(number % 2)
    raise AssertionError("too many agents")
