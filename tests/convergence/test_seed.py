"""The bug that this project began with, on both sides of the transformers commit that uncovered it.

A kernel that writes the gradient over its input was harmless while transformers copied the shifted logits. Commit 8ebe9d7
(4.49.0) stopped copying; from then on such a kernel turns the logits of an FP32 model into gradients, without a word.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_compat
from families import VOCABULARY, build


def check_logits(model: nn.Module, stock: nn.Module) -> None:
    """The seed's test: FP32 logits of a patched model are those of the unpatched one, before and after `backward()`."""
    ids = torch.randint(3, VOCABULARY, (2, 16))
    expected = stock(input_ids=ids, labels=ids)
    output = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits), "outputs.logits are not the model's scores"
    output.loss.backward()
    assert torch.equal(output.logits, expected.logits), "outputs.logits are not the model's scores after backward()"


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("logits", ["defer", "keep"])
def test_logits_are_scores(logits: str, backend: str) -> None:
    if backend == "triton" and (problem := liger_compat.kernels.device_problem("cpu")) is not None:
        pytest.skip(f"na: {problem}")
    check_logits(liger_compat.patch(build("llama"), logits=logits, backend=backend), build("llama"))


def test_logits_are_never_gradients_when_overwritten() -> None:
    model = liger_compat.patch(build("llama"), logits="overwrite")
    ids = torch.randint(3, VOCABULARY, (2, 16))
    output = model(input_ids=ids, labels=ids)
    stock = build("llama")(input_ids=ids, labels=ids).logits
    if type(output.logits) is torch.Tensor:  # this release hands the loss a copy
        assert torch.equal(output.logits, stock)
        return
    for read in (
        torch.sum,
        Tensor.numpy,
        Tensor.tolist,
        lambda t: t.clone().sum(),
        lambda t: t[0],
        lambda t: t.data,
        lambda t: t + 1,
    ):
        with pytest.raises(liger_compat.OverwrittenLogitsError):
            read(output.logits)
    assert output.logits.shape == stock.shape
    assert output.logits.dtype == stock.dtype


def test_a_naive_kernel_fails_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check is worth: a kernel of the kind that caused the bug fails it wherever transformers does not copy."""
    copies = _upstream_copies_logits()
    monkeypatch.setattr(F, "cross_entropy", _naive_cross_entropy(F.cross_entropy))
    stock = build("llama")
    stock.forward = _with(stock.forward, F, "cross_entropy", _naive_cross_entropy.original)  # type: ignore[attr-defined]
    if copies:
        check_logits(build("llama"), stock)
    else:
        with pytest.raises(AssertionError, match="not the model's scores"):
            check_logits(build("llama"), stock)


def _naive_cross_entropy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
            with torch.enable_grad():
                copy = logits.detach().clone().requires_grad_()
                loss = original(copy, target, reduction=reduction, ignore_index=ignore_index)
                (grad,) = torch.autograd.grad(loss, copy)
            logits.data.copy_(grad)  # as a Triton kernel writes: past autograd
            ctx.save_for_backward(logits.detach())
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            return ctx.saved_tensors[0] * grad_output, None, None, None

    def cross_entropy(
        input: Tensor,  # noqa: A002
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        return InPlace.apply(input, target, reduction, ignore_index)  # type: ignore[no-any-return]

    _naive_cross_entropy.original = original  # type: ignore[attr-defined]
    return cross_entropy


def _with(function: Callable[..., Any], owner: Any, name: str, value: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            return function(*args, **kwargs)

    return call


def _upstream_copies_logits() -> bool:
    """Whether the FP32 logits of a Llama and what its cross-entropy reads are different memory."""
    model = build("llama")
    read: list[int] = []
    original = F.cross_entropy
    ids = torch.randint(3, VOCABULARY, (2, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "cross_entropy", lambda x, *a, **k: read.append(x.data_ptr()) or original(x, *a, **k))
        output = model(input_ids=ids, labels=ids)
    return read != [output.logits.data_ptr()]
