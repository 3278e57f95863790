"""The operator `liger_compat::linear_cross_entropy` and its gradient, opaque to torch.compile, with fakes."""

from typing import Any

import torch
from torch import Tensor

from ..cross_entropy._autograd import multiplied, refuse_double_backward
from ..cross_entropy._options import Options
from ._chunked import Gradients, Operands, Settings, backward, forward

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
    *operands, _, _, ctx.wanted = inputs[:8]
    ctx.settings = inputs[8:]
    ctx.early = len(output) > 4
    # The gradients themselves, or what they are made from; never both, which would keep hidden states alive for nothing.
    ctx.save_for_backward(*(output[4:] if ctx.early else (*operands, *output[1:4])))
    ctx.set_materialize_grads(False)  # zeros as large as the gradients, for outputs that nobody differentiates


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    grad_loss = grads[0]
    if grad_loss is None:
        return (None,) * (8 + len(ctx.settings))
    if ctx.early:
        backend = ctx.settings[5]
        gradients = [multiplied(gradient, grad_loss, backend) for gradient in ctx.saved_tensors]
    else:
        operands, statistics = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        gradients = linear_cross_entropy_backward(*operands, *statistics, grad_loss, ctx.wanted, *ctx.settings)
    present = [gradient if want else None for gradient, want in zip(gradients, ctx.wanted, strict=True)]
    return (*present, *(None,) * (5 + len(ctx.settings)))


linear_cross_entropy.register_autograd(_backward, setup_context=_save_for_backward)
linear_cross_entropy_backward.register_autograd(refuse_double_backward, setup_context=lambda ctx, inputs, output: None)


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
