"""Block sizes and warps of the Triton kernels, by row length."""

from typing import NamedTuple


class Launch(NamedTuple):
    """How one kernel is launched."""

    block: int
    """Columns a tile; rows that are longer are walked tile by tile."""
    warps: int
    lanes: int = 8
    """Neighbouring columns that a thread takes together: 16 bytes of 16-bit logits."""


# See kernels/README.md for what was measured.
_BY_COLUMNS = (
    (1024, Launch(1024, 4)),
    (4096, Launch(4096, 8)),
    (65536, Launch(8192, 16)),
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
