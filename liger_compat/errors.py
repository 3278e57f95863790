"""Every exception and warning of liger_compat.

LigerCompatError
├── UnsupportedModelError (TypeError)          the model cannot be served; says why for each adapter
│   └── ConflictingPatchError                  because a user or another library has replaced its loss
├── UnsupportedTransformersError (RuntimeError)
├── InvalidOptionError (ValueError)            an option of `patch` that does not exist
├── BackendUnavailableError (RuntimeError)     a backend was asked for that cannot run here
├── NotPatchedError (RuntimeError)             `unpatch` or `report` of a model that is not patched
├── PatchReplacedError (RuntimeError)          something else now stands where the patch was put
└── LogitsError (RuntimeError)                 `outputs.logits` no longer hold logits
    ├── StaleLogitsError                       they were deferred, and what they are computed from has changed
    └── OverwrittenLogitsError                 their memory was given to the gradient (logits="overwrite")

UnservedLossWarning (UserWarning)              a patched model computed its loss without the kernel
"""


class LigerCompatError(Exception):
    """Base of all exceptions of liger_compat."""


class UnsupportedModelError(LigerCompatError, TypeError):
    """The model cannot be served. Nothing was changed; the message has the reason of every adapter."""


class ConflictingPatchError(UnsupportedModelError):
    """The loss of the model was replaced by its user or by another library, which the message names."""


class UnsupportedTransformersError(LigerCompatError, RuntimeError):
    """The installed transformers is older than the oldest release that is tested."""


class InvalidOptionError(LigerCompatError, ValueError):
    """An option of `patch` has a value that does not exist."""


class BackendUnavailableError(LigerCompatError, RuntimeError):
    """A backend was asked for by name and cannot run here; nothing falls back silently."""


class NotPatchedError(LigerCompatError, RuntimeError):
    """The model is not patched by liger_compat."""


class PatchReplacedError(LigerCompatError, RuntimeError):
    """An attribute that `patch` set has been replaced since; `unpatch` changed nothing."""


class LogitsError(LigerCompatError, RuntimeError):
    """`outputs.logits` were read when they no longer held logits."""


class StaleLogitsError(LogitsError):
    """Deferred `outputs.logits` were read after the weights changed or were freed: they would be other logits."""


class OverwrittenLogitsError(LogitsError):
    """`outputs.logits` were read after the loss in the mode "overwrite", which gives their memory to the gradient."""


class UnservedLossWarning(UserWarning):
    """A patched model computed a loss that did not go through the kernel: right, but as slow and large as unpatched."""
