"""The kernels' error against FP64 is not above that of eager PyTorch in the same dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compare import distance
from liger_compat import cross_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = 2.0**-23  # of a loss in FP32


def measure(logits: Tensor, target: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Relative L2 errors of the losses of the rows and of the gradient, against FP64."""
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none")
    grad_loss = torch.full_like(expected, 1 / 3)
    expected.backward(grad_loss)
    mine = logits.clone().requires_grad_()
    loss = function(mine)
    loss.backward(grad_loss.to(loss.dtype))
    return distance(loss.detach(), expected.detach()), distance(mine.grad, exact.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [2, 3, 17, 1000, 1024, 1025, 32000, 50257, 151936, 262144])
def test_error_is_not_above_eager(columns: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    rows = 100 if columns < 2000 else 10
    logits = (torch.randn(rows, columns, device=device) * 3).to(dtype)
    target = torch.randint(0, columns, (rows,), device=device)
    target[2] = -100
    options = {"reduction": "none", "loss_dtype": torch.float32, "backend": backend}
    # As transformers does it: logits upcast, then PyTorch's loss.
    eager = measure(logits, target, lambda x: F.cross_entropy(x.float(), target, reduction="none"))
    ours = measure(logits, target, lambda x: cross_entropy(x, target, **options))
    assert ours[0] <= eager[0] * 1.01 + ROUNDING / 2
    assert ours[1] <= eager[1] * 1.01 + ROUNDING / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("incoming", [1.0, 0.25, 1 / 3])
def test_error_of_a_mean(incoming: float, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Its gradient is rounded before the incoming one is known; FP16, which would underflow, is the exception."""
    logits, target = (torch.randn(50, 1000, device=device) * 3).to(dtype), torch.randint(0, 1000, (50,), device=device)

    def gradient(function: Callable[..., Tensor], logits: Tensor, **options: object) -> Tensor:
        logits = logits.clone().requires_grad_()
        (function(logits, target, **options) * incoming).backward()
        assert logits.grad is not None
        return logits.grad

    exact = gradient(F.cross_entropy, logits.double())
    eager = distance(gradient(lambda x, y: F.cross_entropy(x.float(), y), logits), exact)
    ours = distance(gradient(cross_entropy, logits, loss_dtype=torch.float32, backend=backend), exact)
    once_more = torch.finfo(dtype).eps / 2 if incoming == 1 / 3 and dtype is torch.bfloat16 else 0.0
    assert ours <= eager * 1.01 + ROUNDING / 2 + once_more


def test_one_column(backend: str, device: torch.device) -> None:
    """A single class is certain: loss and gradient are exactly 0."""
    logits = torch.randn(4, 1, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(4, dtype=torch.long, device=device), backend=backend)
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("columns", [1000, 1024, 5000])
def test_softcap_of_strongly_negative_logits(
    columns: int, softcap: float, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """Lanes past a row's end must not take part as a finite -softcap."""
    logits = (torch.randn(3, columns, device=device) * 5 - 200).to(dtype)
    target = torch.randint(0, columns, (3,), device=device)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(softcap * torch.tanh(exact / softcap), target)
    expected.backward()
    mine = logits.clone().requires_grad_()
    loss = cross_entropy(mine, target, softcap=softcap, loss_dtype=torch.float32, backend=backend)
    loss.backward()
    eager = logits.clone().requires_grad_()
    eager_loss = F.cross_entropy(softcap * torch.tanh(eager.float() / softcap), target)
    eager_loss.backward()
    assert abs(loss.item() - expected.item()) <= abs(eager_loss.item() - expected.item()) + ROUNDING * expected.item()
    # 1 - tanh**2 is lost to rounding here: the gradient is compared in absolute terms with eager's own error.
    error, allowed = ((found.double() - exact.grad).abs().max() for found in (mine.grad, eager.grad))
    assert error <= allowed + ROUNDING


def test_logits_of_128k_in_bf16_with_a_large_scale(backend: str, device: torch.device) -> None:
    """The loss stays in FP32 whatever the logits' dtype: BF16 is 0.25 apart near 36."""
    logits = (torch.randn(4, 128256, device=device) * 40).bfloat16()
    target = torch.randint(0, 128256, (4,), device=device)
    loss = cross_entropy(logits, target, loss_dtype=torch.float32, backend=backend)
    assert abs(loss.item() - F.cross_entropy(logits.double(), target).item()) < 1e-3


def test_tanh_of_the_kernels(device: torch.device, backend: str) -> None:
    """The written-out tanh is as good as PyTorch's over the whole range, through the loss of one class against another."""
    u = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([1e-6, -1e-6, 0.0, 0.624, 0.626])]).to(device)
    logits = torch.stack([u, torch.zeros_like(u)], 1)
    target = torch.zeros(len(u), dtype=torch.long, device=device)
    found = cross_entropy(logits, target, softcap=2.0, reduction="none", backend=backend)
    exact = F.cross_entropy(torch.stack([2 * torch.tanh(u.double() / 2), u.double() * 0], 1), target, reduction="none")
    eager = F.cross_entropy(torch.stack([2 * torch.tanh(u / 2), u * 0], 1), target, reduction="none")
    assert (found - exact).abs().max() <= (eager - exact).abs().max() + 2 * ROUNDING
