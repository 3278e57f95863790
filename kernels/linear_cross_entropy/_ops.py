"""The operator `liger_compat::linear_cross_entropy` and its gradient, opaque to torch.compile, with fakes."""

from typing import Any

import torch
from torch import Tensor

from ..cross_entropy._options import Options
from ._chunked import Gradients, Operands, Settings, backward, forward, rescale

_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_SETTINGS = (
    "int ignore_index, float label_smoothing, float softcap, float logit_scale, float z_loss, str? backend,"
    " ScalarType compute_dtype, int? chunk_bytes"
)


@torch.library.custom_op(
    "liger_compat::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? divisor, str reduction, bool[] wanted, {_SETTINGS}) -> Tensor[]",
)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    wanted: list[bool],
    *settings: Any,
) -> list[Tensor]:
    """Loss, maximum, total, divisors, and the gradients for an incoming gradient of 1 if they could be made; else 4 tensors."""
    operands = Operands(hidden, weight, bias, target, class_weight)
    result = forward(operands, divisor, reduction, _settings(settings), (wanted[0], wanted[1], wanted[2]))
    return [*result[:4], *([] if result.gradients is None else _present(result.gradients, hidden))]


@linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    wanted: list[bool],
    *settings: Any,
) -> list[Tensor]:
    dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    rows = hidden.new_empty(hidden.shape[0], dtype=dtype)
    outputs = [
        torch.empty_like(rows) if reduction == "none" else rows.new_empty(()),
        torch.empty_like(rows),
        rows,
        rows.new_empty(2),
    ]
    if any(wanted) and reduction != "none" and _settings(settings).compute_dtype is not torch.float16:
        outputs += _present(_fake_gradients(hidden, weight, bias, wanted), hidden)
    return outputs


@torch.library.custom_op(
    "liger_compat::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor maximum, Tensor total, Tensor divisors, Tensor grad_loss, bool[] wanted, {_SETTINGS})"
    " -> Tensor[]",
)
def linear_cross_entropy_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    divisors: Tensor,
    grad_loss: Tensor,
    wanted: list[bool],
    *settings: Any,
) -> list[Tensor]:
    """The three gradients, empty where not wanted."""
    operands = Operands(hidden, weight, bias, target, class_weight)
    flags = (wanted[0], wanted[1], wanted[2])
    return _present(backward(operands, maximum, total, divisors, grad_loss, _settings(settings), flags), hidden)


@linear_cross_entropy_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return _present(_fake_gradients(hidden, weight, bias, rest[6]), hidden)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *operands, _, _, ctx.wanted, ctx.settings = inputs[:5] + inputs[5:8] + (inputs[8:],)
    ctx.save_for_backward(*operands, *output[1:])
    ctx.spent = False


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    grad_loss = grads[0]
    operands, (maximum, total, divisors, *early) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    if grad_loss is None:
        return (None,) * (8 + len(ctx.settings))
    if not early or ctx.spent:
        gradients = linear_cross_entropy_backward(*operands, maximum, total, divisors, grad_loss, ctx.wanted, *ctx.settings)
    elif torch.compiler.is_compiling():
        gradients = [gradient * grad_loss for gradient in early]
    else:
        # In the memory that they have: a second backward, which would find them scaled, makes them anew.
        ctx.spent = True
        rescale((early[0], early[1], early[2]), grad_loss, ctx.settings[5])
        gradients = early
    present = [gradient if want else None for gradient, want in zip(gradients, ctx.wanted, strict=True)]
    return (*present, *(None,) * (5 + len(ctx.settings)))


def _refuse_double_backward(ctx: Any, *_: object) -> None:
    msg = (
        "double backward through liger_compat's linear_cross_entropy is not implemented: its gradient was asked for with "
        "create_graph=True and is differentiated again. Use torch.nn.functional.cross_entropy where that is needed."
    )
    raise NotImplementedError(msg)


linear_cross_entropy.register_autograd(_backward, setup_context=_save_for_backward)
linear_cross_entropy_backward.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)


def _settings(flat: tuple[Any, ...]) -> Settings:
    *options, backend, compute_dtype, chunk_bytes = flat
    return Settings(Options(*options), backend, compute_dtype, chunk_bytes)


def _present(gradients: Gradients, like: Tensor) -> list[Tensor]:
    """Operators return tensors only: an empty one for a gradient that is not wanted."""
    return [like.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> Gradients:
    return (
        hidden.new_empty(hidden.shape) if wanted[0] else None,
        torch.empty_like(weight) if wanted[1] else None,
        torch.empty_like(bias) if bias is not None and wanted[2] else None,
    )
