"""`patch` and `unpatch`: one model, in place, undone exactly."""

import inspect
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from . import kernels
from .adapters import Choice, apply, choose, head
from .adapters.settings import Settings
from .conflicts import find_conflict
from .errors import (
    BackendUnavailableError,
    ConflictingPatchError,
    InvalidOptionError,
    NotPatchedError,
    UnsupportedModelError,
)
from .replacement import Replacement
from .upstream import Upstream, inspect_upstream

M = TypeVar("M", bound=nn.Module)

MODES = ("defer", "keep", "overwrite")
"""What happens to `outputs.logits`: see `patch`."""

_RECORD = "_liger_compat"  # attribute of a patched model


@dataclass
class Record:
    """What was done to a model; kept on it, so that copies of the model have their own."""

    settings: Settings
    choices: tuple[Choice, ...]
    replacements: list[Replacement]


def patch(model: M, *, logits: str = "defer", backend: str | None = None, chunk_bytes: int | None = None) -> M:
    """Lets a Hugging Face language model compute its loss by the kernel. In place; returns `model`.

    Only this instance changes: neither its class nor transformers nor torch. `unpatch` undoes it exactly. Patching a
    patched model changes its options, and nothing if they are the same.

    Args:
        model: a `PreTrainedModel` whose forward takes labels, or a wrapper around one (PEFT, DDP, FSDP, torch.compile).
        logits: "defer": `outputs.logits` are computed when something reads them, and the loss without them. They are right
            while the weight of the output head is unchanged and resident (with FSDP2: before `backward()`); reading them
            later raises `StaleLogitsError`. Where they cannot be deferred they are kept, and `report` says why.
            "keep": `outputs.logits` are what the unpatched model returns, before and after `backward()`.
            "overwrite": the gradient takes their memory when the loss is computed; reading them then raises
            `OverwrittenLogitsError`. Where that is not possible the logits are kept, and `report` says why.
        chunk_bytes: memory for logits in the mode "defer", as in `linear_cross_entropy`.
        backend: "triton", "reference", or None for Triton on devices where it runs and the reference elsewhere.

    Raises:
        UnsupportedModelError: if the model cannot be served, with the reason of every adapter.
        ConflictingPatchError: if its user or another library has replaced its loss.
        UnsupportedTransformersError: if transformers is older than 4.40.
        InvalidOptionError: for an unknown option.
        BackendUnavailableError: if the backend asked for cannot run here.
    """
    check_options(logits, backend, chunk_bytes)
    target = unwrap(model)
    record = record_of(target)
    if record is not None:
        for replacement in record.replacements:
            replacement.check(target)
        if record.settings.options == (logits, backend, chunk_bytes):
            return model
    upstream = inspect_upstream()
    choices = decide(target, upstream, logits)  # before anything is undone: a refusal leaves the model as it was
    if record is not None:
        unpatch(target)
    settings = Settings(uuid.uuid4().hex, logits, backend, chunk_bytes)
    record = Record(settings, choices, [])
    try:
        for replacement in apply(choices, target, upstream, settings):
            record.replacements.append(replacement)
    except BaseException:
        _undo(target, record)
        raise
    setattr(target, _RECORD, record)
    return model


def unpatch(model: M) -> M:
    """Undoes `patch` exactly: `vars` of the model and its modules are what they were. Returns `model`.

    Raises:
        NotPatchedError: if the model is not patched.
        PatchReplacedError: if something has replaced what `patch` set; nothing is changed then.
    """
    target = unwrap(model)
    record = record_of(target)
    if record is None:
        msg = f"this {type(target).__name__} is not patched by liger_compat; liger_compat.patch(model) patches it"
        raise NotPatchedError(msg)
    for replacement in record.replacements:
        replacement.check(target)
    _undo(target, record)
    delattr(target, _RECORD)
    return model


@contextmanager
def patched(model: M, *, logits: str = "defer", backend: str | None = None, chunk_bytes: int | None = None) -> Iterator[M]:
    """`patch` on entry; on exit `unpatch`, or for a model that was patched before, the options that it had."""
    record = record_of(unwrap(model))
    patch(model, logits=logits, backend=backend, chunk_bytes=chunk_bytes)
    try:
        yield model
    finally:
        if record is None:
            unpatch(model)
        else:
            logits, backend, chunk_bytes = record.settings.options
            patch(model, logits=logits, backend=backend, chunk_bytes=chunk_bytes)


def is_patched(model: nn.Module) -> bool:
    """Whether `model`, or the model that it wraps, is patched."""
    return record_of(unwrap(model)) is not None


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The one `PreTrainedModel` that `model` is or wraps, however deep.

    Raises:
        UnsupportedModelError: if there is none, or more than one.
    """
    if not isinstance(model, nn.Module):
        msg = f"expected a transformers.PreTrainedModel or a module that wraps one, found {type(model).__name__}"
        raise UnsupportedModelError(msg)
    found = _outermost(model)
    if len(found) != 1:
        names = ", ".join(type(each).__name__ for each in found) or "none"
        msg = (
            f"expected a transformers.PreTrainedModel or a module that wraps one, found {type(model).__name__}, "
            f"which wraps {names}"
        )
        raise UnsupportedModelError(msg)
    return found[0]


def record_of(model: PreTrainedModel) -> Record | None:
    """What `patch` did to this very model, or None."""
    return vars(model).get(_RECORD)


def decide(model: PreTrainedModel, upstream: Upstream, logits: str) -> tuple[Choice, ...]:
    """The adapter of the model, then those of the models inside it that make a loss of their own.

    A model may hand its labels to a model inside (Kosmos-2, Fuyu, a seq2seq BLIP-2), which then is the one to serve. Each
    loss is computed by one of them, so serving them all counts nothing twice.

    Raises:
        UnsupportedModelError: if no adapter can serve any of them.
        ConflictingPatchError: if the loss of one was replaced by somebody else.
    """
    name = type(model).__name__
    models = [(path, each) for path, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    for path, each in models:
        conflict = find_conflict(each, upstream)
        if path and record_of(each) is not None:
            conflict = f"its {path}, a {type(each).__name__}, is patched by liger_compat on its own"
        if conflict is not None:
            msg = f"{name} cannot be patched: {conflict}. Undo that first; it was not replaced, and nothing was changed."
            raise ConflictingPatchError(msg)
    if not _takes_labels(model):
        msg = f"{name} computes no token loss: its forward takes no labels. Nothing was changed."
        raise UnsupportedModelError(msg)
    choices = [choose(each, upstream, logits, path) for path, each in models if _takes_labels(each)]
    choices = [choice for choice in choices if not choice.path or choice.adapter is not None]
    if all(choice.adapter is None for choice in choices):
        why = "; ".join(f"{refusal.adapter}: {refusal.why}" for refusal in choices[0].refused)
        msg = f"{name} cannot be patched with transformers {upstream.version}. {why}. Nothing was changed."
        raise UnsupportedModelError(msg)
    return tuple(choices)


def check_options(logits: str, backend: str | None, chunk_bytes: int | None) -> None:
    """Raises InvalidOptionError or BackendUnavailableError for options that `patch` does not take here."""
    if logits not in MODES:
        msg = f"expected logits to be one of {', '.join(map(repr, MODES))}, found {logits!r}"
        raise InvalidOptionError(msg)
    if chunk_bytes is not None and chunk_bytes <= 0:
        msg = f"expected chunk_bytes to be positive, or None for the default, found {chunk_bytes}"
        raise InvalidOptionError(msg)
    try:
        kernels.check_request(backend)
    except ValueError as error:
        raise InvalidOptionError(str(error)) from None
    except RuntimeError as error:
        raise BackendUnavailableError(str(error)) from None


def _outermost(module: nn.Module) -> list[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        return [module]
    return list(dict.fromkeys(found for child in module.children() for found in _outermost(child)))


def _takes_labels(model: PreTrainedModel) -> bool:
    return "labels" in inspect.signature(model.forward).parameters


def _undo(model: PreTrainedModel, record: Record) -> None:
    for replacement in reversed(record.replacements):
        replacement.undo(model)
    head.remove(model, record.settings)
