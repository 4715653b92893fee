"""Import what torch and transformers import when a process makes its first model: 2 CPU seconds and 140 MiB, which
forks of a process that has imported this module share."""

# `torch.use_deterministic_algorithms` imports it, and with it the modules of torch.compile.
import torch._inductor.config  # noqa: F401

# Models of every family import it.
import transformers.modeling_layers

# Every loading of weights asks it.
import transformers.quantizers.auto  # noqa: F401
