"""Facts about the installed transformers, each with its reason. The only module that looks at its version.

transformers is imported inside functions: importing liger_compat must not load it.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from .errors import UnsupportedTransformersError

OLDEST = Version("4.40")
"""The oldest release that is tested."""


@dataclass(frozen=True)
class Fact:
    """Something that holds for the installed transformers, or does not, and how that is known."""

    holds: bool
    reason: str

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class Upstream:
    """What the installed transformers does about losses."""

    version: str
    commit: str | None
    """The git commit, where the installation recorded one (PEP 610)."""
    causal_lm_loss: Callable[..., Any] | None
    """`ForCausalLMLoss`, which models reach as `self.loss_function`. Since 4.46."""
    loss_settable: Fact
    """Whether one model's `loss_function` can be replaced. Since 4.48.3; 4.46 to 4.48.2 have a property without setter."""
    loss_known: Fact
    """Whether `ForCausalLMLoss` computes what `loss.for_causal_lm_loss` computes."""
    takes_shift_labels: bool
    """Whether `ForCausalLMLoss` accepts labels that are shifted already. Since 4.51."""


def inspect_upstream() -> Upstream:
    """Looks at the installed transformers.

    Raises:
        UnsupportedTransformersError: if it is older than `OLDEST`.
    """
    import transformers

    if Version(transformers.__version__) < OLDEST:
        msg = (
            f"transformers {transformers.__version__} is older than {OLDEST}, the oldest release liger_compat is tested with. "
            f'Install "transformers>={OLDEST}".'
        )
        raise UnsupportedTransformersError(msg)
    function = _causal_lm_loss()
    known = Fact(False, "this transformers has no transformers.loss") if function is None else _known(function)
    shifts = function is not None and "shift_labels" in inspect.signature(function).parameters
    return Upstream(transformers.__version__, _commit(), function, _settable(), known, shifts)


def _causal_lm_loss() -> Callable[..., Any] | None:
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return None
    return ForCausalLMLoss


def _settable() -> Fact:
    from transformers import PreTrainedModel

    found = inspect.getattr_static(PreTrainedModel, "loss_function", None)
    if found is None:
        return Fact(False, "PreTrainedModel has no loss_function")
    if not isinstance(found, property) or found.fset is None:
        return Fact(False, "PreTrainedModel.loss_function has no setter")
    return Fact(True, "PreTrainedModel.loss_function has a setter")


_PARAMETERS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels", "kwargs")


@cache
def _known(function: Callable[..., Any]) -> Fact:
    """Tries upstream's function on a few numbers: a release that changed its meaning must not be guessed at."""
    parameters = tuple(inspect.signature(function).parameters)
    if parameters not in (_PARAMETERS, tuple(p for p in _PARAMETERS if p != "shift_labels")):
        return Fact(False, f"ForCausalLMLoss has parameters this release does not know: {', '.join(parameters)}")
    # On the CPU in FP32, whatever the defaults are.
    generator = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(2, 6, 7, generator=generator, device="cpu", dtype=torch.float32)
    labels = torch.randint(0, 7, (2, 6), generator=generator, device="cpu")
    labels[0, :3] = -100
    other_index = labels.masked_fill(labels == -100, 3)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((logits, labels, 7), {}),
        ((logits, other_index, 7), {"num_items_in_batch": 5, "ignore_index": 3, "label_smoothing": 0.5}),
        ((logits.flatten(0, 1), labels.flatten(), 7), {"num_items_in_batch": torch.tensor(5, device="cpu")}),
    ]
    if "shift_labels" in parameters:
        calls.append(((logits, None, 7), {"shift_labels": labels}))
    for args, kwargs in calls:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            found, expected = function(*args, **kwargs), _expected(*args, **kwargs)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-5, atol=0):
            return Fact(False, f"ForCausalLMLoss gives {found.tolist()} where other releases give {expected.tolist()}")
    return Fact(True, "ForCausalLMLoss has known parameters and gives the known results")


def _expected(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What `ForCausalLMLoss` has computed in every release since 4.46, and `loss.for_causal_lm_loss` computes."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, target = logits.view(-1, vocab_size), shift_labels.reshape(-1)
    if num_items_in_batch is None:
        return F.cross_entropy(rows, target, ignore_index=ignore_index)
    return F.cross_entropy(rows, target, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


def _commit() -> str | None:
    try:
        record = metadata.distribution("transformers").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    commit = json.loads(record).get("vcs_info", {}).get("commit_id") if record else None
    return str(commit) if commit else None
