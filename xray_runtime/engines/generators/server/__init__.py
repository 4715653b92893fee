"""vLLM servers elsewhere, found by address: each was started by `xray generator`.

    launch       the command: vLLM's own server, with the options by which a Workhorse's vLLM samples
    worker       runs inside the server: describes its model, and takes the weights that arrive
    chunks       the form in which weights travel; both sides
    connection   the client of one server
    servers      those of a run: which answer, and whether they fit
    sampler      all servers as one `Sampler`
    config       the fields

A stage's weights are pushed to every server that answers, under a name that no other stage uses. A reply counts
only if all its tokens were sampled under that name, so a server that was restarted, or that another run has written to,
is found out by its first reply. Whatever fails loses its prompts to the others, and takes all weights again when it
answers again. As every prompt has its own seed, the replies are the same wherever they are sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.engines.capabilities import GeneratorCapabilities
from xray_runtime.engines.generator import GenerationEngine
from xray_runtime.engines.generators.server.config import ServerConfig
from xray_runtime.engines.sampling_config import MOST_REPORTED

if TYPE_CHECKING:
    from pathlib import Path

    from xray_runtime.engines.layouts import GeneratorConfig
    from xray_runtime.engines.sampling import EngineRank, Sampler
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.lora import LoRAConfig


class Server(GenerationEngine):
    """See `GenerationEngine`."""

    config = ServerConfig
    capabilities = GeneratorCapabilities(remote=True, bfloat16_on_gpu=True, own_models=True, top_logprobs=MOST_REPORTED)

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.generators.server import sampler  # noqa: F401

    def sampler(
        self,
        directory: Path,
        max_length: int,
        config: GeneratorConfig,
        runtime: RuntimeConfig,
        rank: EngineRank,
        adapter: LoRAConfig | None = None,
    ) -> Sampler:
        from xray_runtime.engines.generators.server.sampler import ServerSampler

        assert isinstance(config, ServerConfig)
        return ServerSampler(directory, max_length, config, runtime)


GENERATOR = Server()
