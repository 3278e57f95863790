"""The ways to reach a model's loss, in order of preference, and the choice among them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .. import inspection
from ..replacement import Replacement
from ..upstream import Upstream
from . import head, inline, loss_function, watch
from .settings import Settings

ADAPTERS = (loss_function, inline)
"""Modules with NAME and `examine(model, upstream, logits)`."""


@dataclass(frozen=True)
class Refusal:
    """An adapter that was not taken, and why."""

    adapter: str
    why: str


@dataclass(frozen=True)
class Choice:
    """The adapter that reaches the loss of one model, or None, with all reasons."""

    model: str
    """Name of the model's class."""
    path: str
    """Where it is inside the model that was given; empty for that model itself."""
    adapter: str | None
    why: str
    refused: tuple[Refusal, ...]
    logits: str
    """What happens to the logits: the mode asked for, or "keep" where that cannot be had."""
    logits_why: str
    """Why that is not the mode asked for; empty if it is."""
    watches_head: bool
    """Whether the logits are watched on their way from the output head to the loss."""

    def __str__(self) -> str:
        where = f"{self.model}{f' at {self.path}' if self.path else ''}"
        lines = [f"{where}: {self.adapter or 'no adapter'}" + (f", because {self.why}" if self.adapter else "")]
        lines += [f"  not {refusal.adapter}: {refusal.why}" for refusal in self.refused]
        if self.logits_why:
            lines.append(f"  logits are kept: {self.logits_why}")
        return "\n".join(lines)


def choose(model: PreTrainedModel, upstream: Upstream, logits: str, path: str = "") -> Choice:
    """The first adapter that can serve `model`, whose loss is made in its own forward, in the mode `logits`."""
    refused: list[Refusal] = []
    for adapter in ADAPTERS:
        accepted, why = adapter.examine(model, upstream, logits)
        if accepted:
            return _accept(model, adapter.NAME, path, why, tuple(refused), logits)
        refused.append(Refusal(adapter.NAME, why))
    return Choice(type(model).__name__, path, None, "", tuple(refused), logits, "", watches_head=False)


def _accept(model: PreTrainedModel, adapter: str, path: str, why: str, refused: tuple[Refusal, ...], logits: str) -> Choice:
    watches = adapter == inline.NAME or logits != "keep"
    if not watches and inspection.calls_cross_entropy(model, head.output_head(model)):
        watches = True
        why += " (it computes torch.nn.functional.cross_entropy too, which is served as well)"
    problem = head.problem(model) if watches else None
    kept_because = {"defer": head.deferral_problem, "overwrite": head.problem}.get(logits, lambda _: None)(model) or ""
    return Choice(
        type(model).__name__,
        path,
        adapter,
        why,
        refused,
        logits="keep" if kept_because else logits,
        logits_why=kept_because,
        watches_head=watches and problem is None,
    )


def apply(choices: Sequence[Choice], model: PreTrainedModel, upstream: Upstream, settings: Settings) -> Iterator[Replacement]:
    """Lets the chosen adapters serve `model` and the models inside it; yields the attributes that were replaced."""
    watch.install(model, settings)
    for choice in choices:
        served: Any = model.get_submodule(choice.path)
        if choice.watches_head:
            head.install(served, settings)
        if choice.adapter == loss_function.NAME:
            yield loss_function.apply(served, choice.path, upstream, settings)
