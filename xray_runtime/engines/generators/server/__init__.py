"""vLLM servers elsewhere, found by address: each was started by `xray generator`.

    launch       the command: vLLM's own server, with the options by which a Workhorse's vLLM samples
    worker       runs inside the server: describes its model, and takes the weights that arrive
    chunks       the form in which weights travel; both sides
    connection   the client of one server
    sampler      all servers as one `Sampler`

A stage's weights are pushed to every server that answers, under a name that nobody else gives weights. A reply counts
only if all its tokens were sampled under that name, so a server that was restarted, or that another run has written to,
is found out by its first reply. Whatever fails loses its prompts to the others, and takes all weights again when it
answers again. As every prompt has its own seed, the replies are the same wherever they are sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.capabilities import GeneratorCapabilities
from xray_runtime.engines.generator import Generator
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, RuntimeConfig
from xray_runtime.kernel.config.sources import Address
from xray_runtime.kernel.plugs import unsupported

if TYPE_CHECKING:
    from xray_runtime.engines.sampling import EngineRank, Sampler


class ServerConfig(GeneratorConfig):
    """Sampling with vLLM servers that run elsewhere; `xray generator` starts one."""

    not_in_key: ClassVar[frozenset[str]] = frozenset({"addresses", "concurrency", "timeout_s", "retry_s"})

    engine: Literal["server"] = "server"
    """vLLM servers elsewhere."""
    addresses: Annotated[list[Address], Field(min_length=1, max_length=1024)]
    """Their addresses, as `http://HOST:PORT`; one that does not answer yet may join later. A server works for one stage
    at a time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the servers; `auto`: `bfloat16` for a run on CUDA, else `float32`."""
    concurrency: Count = 256
    """Replies that a server samples at a time."""
    timeout_s: Positive = 600.0
    """A server that takes longer for a reply, or for a piece of the weights, counts as dead."""
    retry_s: NonNegative = 30.0
    """A dead server is asked again before a rollout after so many seconds."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        twice = next((address for address in self.addresses if self.addresses.count(address) > 1), None)
        if twice is not None:
            raise ValueError(f"addresses: {twice!r} is there twice")
        return self

    def precision(self, device: str) -> Literal["float32", "bfloat16"]:
        return super().precision(device) if self.dtype == "auto" else self.dtype

    def check_runtime(self, runtime: RuntimeConfig) -> None:
        super().check_runtime(runtime)
        if runtime.generator_replicas > 1:
            feature = f"runtime.generator_replicas = {runtime.generator_replicas}"
            raise ValueError(unsupported(feature, "generator.engine = 'server'", why="list more addresses"))

    def check_services(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError if no address answers, or if what answers is not a server that can sample for this run."""
        from xray_runtime.engines.generators.server.sampler import NoServersError, find_servers

        try:
            find_servers(self, runtime)
        except NoServersError as error:
            raise ValueError(f"addresses: {error}") from None


class Server(Generator):
    """See `Generator`."""

    config = ServerConfig
    capabilities = GeneratorCapabilities(remote=True, bfloat16_on_gpu=True, own_models=True)

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.generators.server import sampler  # noqa: F401

    def sampler(
        self, directory: Path, max_length: int, config: GeneratorConfig, runtime: RuntimeConfig, rank: EngineRank
    ) -> Sampler:
        from xray_runtime.engines.generators.server.sampler import ServerSampler

        assert isinstance(config, ServerConfig)
        return ServerSampler(directory, max_length, config, runtime)


GENERATOR = Server()
