"""The layouts that the planner chooses among."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of one model over tp · pp · dp · sp devices."""

    zero_stage: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    """Data-parallel ranks that share the experts of each layer, so that none gathers those of others."""
    sp: int = 1
    """Ranks that share the tokens of each row."""

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.num_copies

    @property
    def num_copies(self) -> int:
        """Ranks that hold, or shard, the same weights."""
        return self.dp * self.sp
