"""Block sizes and warps of the Triton kernels, by row length."""

from typing import NamedTuple


class Launch(NamedTuple):
    """How one kernel is launched: columns a tile, warps a program."""

    block: int
    warps: int


# Rows longer than a tile are walked tile by tile. See kernels/README.md for what was measured.
_BY_COLUMNS = (
    (1024, Launch(1024, 4)),
    (4096, Launch(4096, 8)),
    (16384, Launch(8192, 16)),
)
_LONGEST = Launch(16384, 32)

COUNT_BLOCK = 1024
"""Targets that the counting kernel reads at a time."""


def launch_for(columns: int) -> Launch:
    """Tile of a row of `columns` logits; the shortest rows get the smallest power of two that holds them."""
    if columns <= 1024:
        return Launch(max(16, 1 << (columns - 1).bit_length()), 4)
    for limit, launch in _BY_COLUMNS:
        if columns <= limit:
            return launch
    return _LONGEST
