"""Models that call `self.loss_function` (transformers >= 4.46): the function they would call is wrapped, on the instance."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .. import inspection
from ..deferred import DeferredLogits
from ..kernels import is_plain
from ..loss import for_causal_lm_loss
from ..replacement import Replacement
from ..tracking import TrackedLogits
from ..upstream import Upstream
from .settings import Settings

NAME = "loss_function"


def examine(model: PreTrainedModel, upstream: Upstream, logits: str) -> tuple[bool, str]:
    """Whether `model.loss_function` is what its forward calls, and a function that we know; in every mode."""
    del logits
    if not inspection.calls_loss_function(model):
        return False, "its forward does not call self.loss_function"
    if not upstream.loss_settable:
        return False, upstream.loss_settable.reason
    resolved = original(model)
    if resolved is not upstream.causal_lm_loss:
        return False, f"its loss function is {describe(resolved)}, not ForCausalLMLoss"
    if not upstream.loss_known:
        return False, upstream.loss_known.reason
    return True, "its forward calls self.loss_function, which is ForCausalLMLoss"


def original(model: PreTrainedModel) -> Any:
    """The loss function of a model, as it is without our wrapper."""
    function = model.loss_function
    return function.__wrapped__ if isinstance(function, CausalLMLoss) else function


def apply(model: PreTrainedModel, path: str, upstream: Upstream, settings: Settings) -> Replacement:
    """Puts the wrapper on the instance, through the setter. `path` says where that is in the patched model."""
    wrapper = CausalLMLoss(model.loss_function, settings, takes_shift_labels=upstream.takes_shift_labels)
    # The setter stores to `_loss_function`. Assigning an nn.Module would not: nn.Module.__setattr__ files it as a child.
    replacement = Replacement.of(model, path, "_loss_function", wrapper)
    model.loss_function = wrapper
    return replacement


def describe(function: Any) -> str:
    """A loss function's name with its module, for messages."""
    function = getattr(function, "func", function)  # partial
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


class CausalLMLoss:
    """`ForCausalLMLoss` by the kernel. Looks like the original: other libraries read its name, module and signature.

    A class at module level without a reference to the model, so that a patched model can be pickled and copied.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, original: Callable[..., Any], settings: Settings, *, takes_shift_labels: bool) -> None:
        update_wrapper(self, original)
        self._settings = settings
        self._takes_shift_labels = takes_shift_labels

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, as `for_causal_lm_loss` documents it."""
        if not self._takes_shift_labels:
            shift_labels = None  # swallowed by upstream's **kwargs
        if not isinstance(logits, DeferredLogits | TrackedLogits) and not is_plain(logits):
            # Nothing we could read: DTensor, or None where upstream's own kernels take the hidden states.
            self._settings.step_aside(f"loss left to transformers: the logits are a {type(logits).__name__}")
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            loss: Tensor = self.__wrapped__(logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs)
            return loss

        def compute(logits: Tensor, overwrite: bool) -> Tensor:
            return for_causal_lm_loss(
                logits,
                labels,
                vocab_size,
                num_items_in_batch,
                ignore_index,
                shift_labels,
                overwrite=overwrite,
                backend=self._settings.backend,
                chunk_bytes=self._settings.chunk_bytes,
            )

        return self._settings.serve(logits, compute)
