"""A fast, memory-lean cross-entropy for Hugging Face language models, on whatever transformers is installed.

>>> import liger_compat
>>> model = liger_compat.patch(model)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    BackendUnavailableError,
    ConflictingPatchError,
    InvalidOptionError,
    LigerCompatError,
    LogitsError,
    NotPatchedError,
    OverwrittenLogitsError,
    PatchReplacedError,
    StaleLogitsError,
    UnservedLossWarning,
    UnsupportedModelError,
    UnsupportedTransformersError,
)
from .kernels import linear_cross_entropy
from .loss import cross_entropy, for_causal_lm_loss

if TYPE_CHECKING:
    from .patching import is_patched, patch, patched, unpatch
    from .reporting import Report, explain, report

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "ConflictingPatchError",
    "InvalidOptionError",
    "LigerCompatError",
    "LogitsError",
    "NotPatchedError",
    "OverwrittenLogitsError",
    "PatchReplacedError",
    "Report",
    "StaleLogitsError",
    "UnservedLossWarning",
    "UnsupportedModelError",
    "UnsupportedTransformersError",
    "cross_entropy",
    "explain",
    "for_causal_lm_loss",
    "is_patched",
    "linear_cross_entropy",
    "patch",
    "patched",
    "report",
    "unpatch",
]

# These need transformers, whose import takes seconds; `import liger_compat` does not.
_LAZY = {"is_patched": "patching", "patch": "patching", "patched": "patching", "unpatch": "patching"} | {
    "Report": "reporting",
    "explain": "reporting",
    "report": "reporting",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
