"""The config of a run whose generator is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, RuntimeConfig
from xray_runtime.kernel.config.sources import Address
from xray_runtime.kernel.plugs import unsupported

if TYPE_CHECKING:
    from xray_runtime.engines.generators.server.servers import Needs


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
            raise ValueError(f"addresses: {twice!r} is listed twice")
        return self

    def precision(self, device: str) -> Literal["float32", "bfloat16"]:
        return super().precision(device) if self.dtype == "auto" else self.dtype

    def check_runtime(self, runtime: RuntimeConfig, path: str) -> None:
        super().check_runtime(runtime, path)
        if runtime.generator_replicas > 1:
            feature = f"runtime.generator_replicas = {runtime.generator_replicas}"
            raise ValueError(unsupported(feature, f"{path}.engine = 'server'", why="list more addresses"))

    def check_services(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError if no address answers, or if what answers is not a server that can sample for this run."""
        from xray_runtime.engines.generators.server.servers import NoServersError, find_servers

        try:
            find_servers(self.addresses, self.needs(runtime), self.timeout_s)
        except NoServersError as error:
            raise ValueError(f"addresses: {error}") from None

    def needs(self, runtime: RuntimeConfig) -> Needs:
        """The needs of a run, whose models are not known yet."""
        from xray_runtime.engines.generators.server.servers import Needs

        return Needs(self.precision(runtime.device), runtime.threads)
