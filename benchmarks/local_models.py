"""Models as a stage opens them, without Ray: learners in this process, generators in one of their own, which imports
their library once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.plain_errors import plain
from xray_runtime.cluster.protocols import Ready, get
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import reserve_port
from xray_runtime.kernel.config.section import RuntimeConfig

CALL_SECONDS = 300.0


class LocalLearner(Learner):
    """A Learner with the calls of its WholeModel that span several of a Learner's."""

    def save_whole(self, directory: Path, head_file: str | None = None) -> None:
        """As `WholeModel.save`."""
        self.begin_save(directory, 0, 1)
        self.check_saved(directory, head_file, self.save(directory, head_file), self.tried_logprobs())


class GeneratorProcess:
    """A process with a `Generator`, which goes from one model to the next."""

    def __init__(self, runtime: RuntimeConfig, logs: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, runtime, logs), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """`Generator.method(*args)`, or its error. Raises RuntimeError: the process ended or does not answer."""
        try:
            self._ours.send((method, args))
            if not self._ours.poll(CALL_SECONDS):
                raise EOFError
            answer, error = self._ours.recv()
        except (EOFError, OSError) as ended:
            self.close()
            raise RuntimeError(f"the generator's process ended in {method}") from ended
        if error is not None:
            raise error
        return answer

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, runtime: RuntimeConfig, logs: Path) -> None:
    generator = Generator(runtime)
    with contextlib.suppress(EOFError):
        while True:
            method, args = connection.recv()
            if method == "build":
                args = (*args, RankInfo("generator", 0, 0, 1, "127.0.0.1", 0, logs))
            answer: tuple[Any, Exception | None]
            try:
                answer = getattr(generator, method)(*args), None
            except Exception as error:
                answer = None, plain(error)
            connection.send(answer)


class LocalModels:
    """Opens models (`OpenModels`), one of them a generator at most."""

    def __init__(self, runtime: RuntimeConfig, logs: Path) -> None:
        self._runtime, self._logs = runtime, logs
        self._generator: GeneratorProcess | None = None
        os.environ |= {"DS_ACCELERATOR": "cpu"}

    @contextlib.contextmanager
    def __call__(self, specs: Mapping[str, ModelSpec | GeneratorSpec]) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            yield {
                role: self._generator_of(spec) if isinstance(spec, GeneratorSpec) else self._learner(role, spec, stack)
                for role, spec in specs.items()
            }

    def _learner(self, role: str, spec: ModelSpec, stack: contextlib.ExitStack) -> Any:
        learner = LocalLearner(self._runtime)
        with contextlib.closing(reserve_port()) as port:
            learner.build(spec, RankInfo(role, 0, 0, 1, "127.0.0.1", int(port.getsockname()[1]), None))
        stack.callback(learner.unload)
        return _Handle(lambda name: learner.save_whole if name == "save" else getattr(learner, name))

    def _generator_of(self, spec: GeneratorSpec) -> Any:
        if self._generator is None or not self._generator.is_alive():
            self._generator = GeneratorProcess(self._runtime, self._logs)
        call = self._generator.call
        call("build", spec)

        def follow(policy: Any, version: int) -> None:
            call("load_weights", get(policy.export_weights.remote(version, True)))

        return _Handle(lambda name: follow if name == "follow" else partial(call, name))

    def close(self) -> None:
        """End the generator's process."""
        if self._generator is not None:
            self._generator.close()


class _Handle:
    """A `ModelHandle` whose calls are done at once."""

    def __init__(self, find: Callable[[str], Callable[..., Any]]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: Ready(self._find(name)(*args)))
