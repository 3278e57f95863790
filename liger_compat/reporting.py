"""What was, or would be, done to a model and why."""

from dataclasses import dataclass

from torch import nn

from . import kernels
from .adapters import Choice, head
from .counters import Counters
from .errors import NotPatchedError
from .patching import Record, check_options, decide, record_of, unwrap
from .upstream import Upstream, inspect_upstream


@dataclass(frozen=True)
class Report:
    """How a model is, or would be, served. `print` it."""

    patched: bool
    choices: tuple[Choice, ...]
    """The model's own choice, then those of the models inside it that are served."""
    transformers: str
    transformers_commit: str | None
    backend: str
    counters: Counters

    @property
    def choice(self) -> Choice:
        """The choice that serves the model: the first with an adapter."""
        return next(choice for choice in self.choices if choice.adapter is not None)

    @property
    def adapter(self) -> str:
        """Name of the adapter that serves the model."""
        return str(self.choice.adapter)

    @property
    def logits(self) -> str:
        """The mode of `outputs.logits` that is in force."""
        return self.choice.logits

    def __str__(self) -> str:
        commit = f" at {self.transformers_commit[:10]}" if self.transformers_commit else ""
        counters = self.counters
        lines = [
            f"{'patched' if self.patched else 'not patched'}, transformers {self.transformers}{commit}, "
            f"backend {self.backend}, logits {self.logits}",
            *map(str, self.choices),
            f"losses by the kernel: {counters.kernel_losses} (without logits: {counters.fused}, overwriting logits: "
            f"{counters.overwritten}); head calls: {counters.head_calls} (deferred: {counters.deferred})",
            *(f"  logits computed {count} times, for {name}" for name, count in counters.materialised.most_common()),
            *(f"  {count} times: {why}" for why, count in counters.stepped_aside.most_common()),
        ]
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """How a patched model is served, and what it has done so far.

    Raises:
        NotPatchedError: if the model is not patched; `explain` says how it would be served.
    """
    target = unwrap(model)
    record = record_of(target)
    if record is None:
        msg = (
            f"this {type(target).__name__} is not patched by liger_compat: patch it with liger_compat.patch(model), or see "
            "how it would be served with liger_compat.explain(model)"
        )
        raise NotPatchedError(msg)
    backend = _backend(target, record.settings.backend)
    return _report(record.choices, inspect_upstream(), backend, _counters(target, record), patched=True)


def explain(model: nn.Module, *, logits: str = "defer", backend: str | None = None) -> Report:
    """How `patch` with these options would serve the model; changes nothing.

    Raises:
        UnsupportedModelError, ConflictingPatchError, UnsupportedTransformersError, InvalidOptionError,
        BackendUnavailableError: as `patch` would.
    """
    check_options(logits, backend, None)
    target = unwrap(model)
    upstream = inspect_upstream()
    choices = decide(target, upstream, logits)
    return _report(choices, upstream, _backend(target, backend), Counters(), patched=record_of(target) is not None)


def _report(choices: tuple[Choice, ...], upstream: Upstream, backend: str, counters: Counters, *, patched: bool) -> Report:
    return Report(patched, choices, upstream.version, upstream.commit, backend, counters)


def _counters(model: nn.Module, record: Record) -> Counters:
    parts = [record.settings.counters, *head.counters_in(model, record.settings.token)]
    return sum({id(part): part for part in parts}.values(), Counters())


def _backend(model: nn.Module, requested: str | None) -> str:
    parameter = next(model.parameters(), None)
    if parameter is None:
        return requested or "reference"
    return requested or kernels.choose(None, parameter.device)
