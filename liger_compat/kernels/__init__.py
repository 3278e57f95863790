"""The kernels of liger_compat, by name. Their sources are under kernels/ at the root of the repository."""

try:
    from .cross_entropy import cross_entropy, is_traced, overwrite_problem
except ModuleNotFoundError as error:  # pragma: no cover  # a checkout that was not installed
    if error.name != f"{__name__}.cross_entropy":
        raise
    msg = (
        "liger_compat.kernels is empty: this is a checkout that is not installed, and its kernels lie under kernels/. "
        'Run "pip install -e ." at its root, or leave the root if liger_compat is installed elsewhere.'
    )
    raise ImportError(msg) from error
from .cross_entropy._autograd import multiplied
from .cross_entropy._backend import BACKENDS, check_request, choose, device_problem, triton_problem
from .cross_entropy._ops import gradient_of_logits, row_statistics
from .cross_entropy._validation import plain as is_plain
from .linear_cross_entropy import linear_cross_entropy
from .linear_cross_entropy._chunked import Operands, rows_in_chunks
from .linear_cross_entropy._chunked import Settings as ChunkSettings
from .linear_cross_entropy._chunked import backward as chunked_backward
from .linear_cross_entropy._chunked import forward as chunked_forward

__all__ = [
    "BACKENDS",
    "ChunkSettings",
    "Operands",
    "check_request",
    "choose",
    "chunked_backward",
    "chunked_forward",
    "cross_entropy",
    "device_problem",
    "gradient_of_logits",
    "is_plain",
    "is_traced",
    "linear_cross_entropy",
    "losses_computed",
    "multiplied",
    "overwrite_problem",
    "row_statistics",
    "rows_in_chunks",
    "triton_problem",
]


def losses_computed() -> int:
    """How many losses the kernels have computed in this process: 0 proves that a run was stock."""
    from .cross_entropy import _ops

    return _ops.calls
