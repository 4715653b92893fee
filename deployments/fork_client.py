"""Ray runs this in place of Python to start a worker: it asks the fork server for the process (`fork_server.py`).

Without an answer, and for a worker whose environment has other changes than its libraries, it starts the worker as Ray
would. It only uses the standard library, since it delays the start of every worker.

    python -I -S fork_client.py SOCKET VARIABLE PYTHON SCRIPT [ARGUMENT …]
"""

from __future__ import annotations

import json
import os
import socket
import sys

STARTED = b"started"
"""Answer of a server that has started the worker. Others answer with the address of one that has imported more for
it."""
WORKER = "default_worker.py"
SETUP = "setup_worker.py"
"""Ray's scripts: a worker, and the program that prepares a worker's own environment."""
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def worker_command(variable: str, python: str, arguments: list[str]) -> tuple[str, list[str]] | None:
    """(libraries, script and arguments of the worker); None if the fork server has no such worker."""
    libraries = ""
    if arguments[0].endswith(SETUP):
        contexts = [argument[len(CONTEXT) :] for argument in arguments if argument.startswith(CONTEXT)]
        context = json.loads(contexts[0]) if len(contexts) == 1 else {}
        variables = context.pop("env_vars", {})
        different = {name: value for name, value in context.items() if value and value != python}
        if list(variables) != [variable] or different:
            return None
        libraries = variables[variable]
        arguments = [a for a in arguments[1:] if not a.startswith((CONTEXT, LANGUAGE))]
    return (libraries, arguments) if arguments[0].endswith(WORKER) else None


def ask(address: str, request: bytes) -> bytes:
    """The answer of a fork server; empty if it has failed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)


def start(address: str, libraries: str, arguments: list[str]) -> bool:
    """Whether a fork server has started the worker."""
    request = {"libraries": libraries, "arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}
    content = json.dumps(request).encode()
    while address:
        try:
            answer = ask(address, content)
        except OSError:
            return False
        if answer == STARTED:
            return True
        address = answer.decode()
    return False


def main(address: str, variable: str, python: str, *arguments: str) -> None:
    wanted = worker_command(variable, python, list(arguments))
    if wanted is None or not start(address, *wanted):
        os.execv(python, [python, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
