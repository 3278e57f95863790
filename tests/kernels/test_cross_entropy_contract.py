"""What the loss promises beside its value: memory, layouts, modes, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compare import distance
from liger_compat import cross_entropy


def same_as_torch(logits: Tensor, target: Tensor, backend: str, **options: Any) -> None:
    """Loss and gradient of `logits`' leaf, through whatever views `logits` is made of."""
    (leaf,) = (tensor for tensor in _ancestors(logits) if tensor.is_leaf)
    expected = F.cross_entropy(logits, target.long(), **options)
    grad_loss = torch.rand_like(expected)
    (wanted,) = torch.autograd.grad(expected, leaf, grad_loss, retain_graph=True)
    before = logits.detach().clone()
    loss = cross_entropy(logits, target, backend=backend, **options)
    (found,) = torch.autograd.grad(loss, leaf, grad_loss)
    assert torch.equal(logits, before)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, wanted)


def _ancestors(tensor: Tensor) -> list[Tensor]:
    if tensor.grad_fn is None:
        return [tensor]
    found, pending = [], [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return found


LAYOUTS = {
    "transposed batch": lambda x: x.view(4, 2, 9).transpose(0, 1).reshape(8, 9),
    "column slice": lambda x: x[:, 1:],
    "every other column": lambda x: x[:, ::2],
    "column major": lambda x: x.t().contiguous().t(),
    "rows apart": lambda x: x[::2],
    "one row expanded": lambda x: x[:1].expand(8, 9),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, backend: str, device: torch.device) -> None:
    logits = LAYOUTS[layout](torch.randn(8, 9, device=device, requires_grad=True))
    target = torch.arange(logits.shape[0], device=device) % logits.shape[1]
    same_as_torch(logits, target, backend)


def test_strided_int32_and_uint8_targets(backend: str, device: torch.device) -> None:
    logits = torch.randn(4, 6, device=device, requires_grad=True)
    target = torch.tensor([[0, 9], [5, 9], [2, 9], [1, 9]], device=device)[:, 0]
    same_as_torch(logits, target, backend)
    for dtype in (torch.int32, torch.uint8):
        same_as_torch(logits, target.to(dtype), backend)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shapes_of_pytorch(reduction: str, backend: str, device: torch.device) -> None:
    """(V,), (N, V) and (N, V, d1, ...), as torch.nn.functional.cross_entropy takes them."""
    for shape in ((5,), (3, 5), (3, 5, 2), (2, 5, 3, 2)):
        logits = torch.randn(shape, device=device, requires_grad=True)
        target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
        same_as_torch(logits, target, backend, reduction=reduction)


def test_no_rows(backend: str, device: torch.device) -> None:
    logits = torch.randn(0, 5, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.long, device=device)
    assert cross_entropy(logits, target, backend=backend).isnan()
    loss = cross_entropy(logits, target, reduction="sum", backend=backend)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 5)


def test_all_ignored(backend: str, device: torch.device) -> None:
    """NaN for a mean, as PyTorch; the gradient is exactly 0, and nothing divides by zero in Python."""
    target = torch.full((6,), -100, device=device)
    logits = torch.randn(6, 11, device=device, requires_grad=True)
    loss = cross_entropy(logits, target, backend=backend)
    loss.backward()
    assert loss.isnan()
    assert (logits.grad == 0).all()
    assert cross_entropy(logits, target, num_items_in_batch=5, backend=backend).item() == 0
    assert cross_entropy(logits, target, reduction="sum", backend=backend).item() == 0


@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_rows_of_minus_infinity(place: int, backend: str, device: torch.device) -> None:
    """Whole tiles of -inf before, after or around the only finite score."""
    logits = torch.full((1, 100_000), -torch.inf, device=device)
    logits[0, place] = 10.0
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([place], device=device), backend=backend)
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()
    assert cross_entropy(logits, torch.tensor([(place + 1) % 100_000], device=device), backend=backend).item() == torch.inf


def test_infinite_and_nan_logits_as_torch(backend: str, device: torch.device) -> None:
    logits = torch.randn(4, 8, device=device)
    logits[0, 2], logits[1, 3], logits[2] = torch.inf, torch.nan, -torch.inf
    target = torch.tensor([1, 1, 1, 1], device=device)
    expected = F.cross_entropy(logits, target, reduction="none")
    found = cross_entropy(logits, target, reduction="none", backend=backend)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_loss_does_not_depend_on_the_mode(backend: str, device: torch.device) -> None:
    x = torch.randn(4, 3, device=device)
    y = torch.zeros(4, dtype=torch.long, device=device)
    expected = F.cross_entropy(x, y)
    before = x.clone()
    leaf = x.clone().requires_grad_()
    losses = [cross_entropy(leaf, y, backend=backend), cross_entropy(x, y, backend=backend)]
    with torch.no_grad():
        losses.append(cross_entropy(leaf, y, backend=backend))
    with torch.inference_mode():
        losses.append(cross_entropy(x, y, backend=backend).clone())
    for loss in losses:
        torch.testing.assert_close(loss.detach(), expected)
    assert torch.equal(x, before)
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("producer", [torch.softmax, torch.log_softmax, torch.exp, torch.tanh, torch.sigmoid], ids=str)
def test_producers_that_saved_the_logits(producer: Any, backend: str, device: torch.device) -> None:
    """Their backward needs the values that we read; a kernel that wrote over them would ruin it without a word."""
    z = torch.randn(8, 33, device=device, requires_grad=True)
    y = torch.randint(0, 33, (8,), device=device)
    produce = (lambda t: producer(t, -1)) if producer in (torch.softmax, torch.log_softmax) else producer
    F.cross_entropy(produce(z), y).backward()
    expected, z.grad = z.grad, None
    cross_entropy(produce(z), y, backend=backend).backward()
    torch.testing.assert_close(z.grad, expected)
    # Overwriting them is an error of autograd, not a wrong gradient.
    loss = cross_entropy(produce(z), y, overwrite=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice(backend: str, device: torch.device) -> None:
    x = torch.randn(4, 7, device=device, requires_grad=True)
    y = torch.tensor([0, 6, -100, 3], device=device)
    loss = cross_entropy(x, y, backend=backend)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward(torch.tensor(3.0, device=device))
    torch.testing.assert_close(x.grad, 4 * first)

    x.grad = None
    loss = cross_entropy(x * 1, y, overwrite=True, backend=backend)
    loss.backward(torch.tensor(0.5, device=device), retain_graph=True)
    loss.backward(torch.tensor(3.0, device=device))
    torch.testing.assert_close(x.grad, 3.5 * first)

    half = (x.detach() * 1).half().requires_grad_()
    loss = cross_entropy(half * 1, y, overwrite=True, backend=backend)
    loss.backward(retain_graph=True)
    loss.backward(torch.tensor(2.0, device=device))
    torch.testing.assert_close(half.grad, (3 * first).half(), rtol=2e-3, atol=1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_a_named_error(backend: str, device: torch.device) -> None:
    y = torch.tensor([0, 6, 1, 3], device=device)
    x = torch.randn(4, 7, device=device)
    (expected,) = torch.autograd.grad(F.cross_entropy(x.requires_grad_(), y), x)
    for dtype in (torch.float32, torch.float16):  # whose gradients are made in forward, and in backward
        for overwrite in (False, True):
            logits = x.detach().to(dtype).requires_grad_()
            loss = cross_entropy(logits * 1, y, overwrite=overwrite, backend=backend)
            (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
            torch.testing.assert_close(grad.float(), expected, rtol=0, atol=1e-3)
            with pytest.raises(NotImplementedError, match="double backward"):
                grad.sum().backward()


def test_unreduced_gradient_is_per_row(backend: str, device: torch.device) -> None:
    x = torch.randn(8, 5, device=device, requires_grad=True)
    y = torch.tensor([-100, 1, 2, 3, 4, 0, 1, 2], device=device)
    for weights in (torch.tensor([0.0, -1, 2, 0, 0.5, 1, 1, 1], device=device), torch.ones(1, device=device).expand(8)):
        (wanted,) = torch.autograd.grad((F.cross_entropy(x, y, reduction="none") * weights).sum(), x)
        (found,) = torch.autograd.grad((cross_entropy(x, y, reduction="none", backend=backend) * weights).sum(), x)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("overwrite", [False, True])
def test_loss_is_an_ordinary_tensor(overwrite: bool, backend: str, device: torch.device) -> None:
    x = torch.randn(4, 7, device=device, requires_grad=True)
    y = torch.tensor([0, 6, 1, 3], device=device)
    (once,) = torch.autograd.grad(F.cross_entropy(x, y), x)
    loss = cross_entropy(x * 1, y, overwrite=overwrite, backend=backend)
    loss.retain_grad()
    loss *= 3
    loss /= 2
    loss.backward()
    torch.testing.assert_close(x.grad, 1.5 * once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_as_torch(dtype: torch.dtype, autocast: bool, backend: str, device: torch.device) -> None:
    x = torch.randn(4, 70, device=device, dtype=dtype, requires_grad=True)
    y = torch.randint(0, 70, (4,), device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        expected = F.cross_entropy(x, y)
        loss = cross_entropy(x, y, backend=backend)
    assert loss.dtype == expected.dtype
    (wanted,) = torch.autograd.grad(expected, x)
    (found,) = torch.autograd.grad(loss, x)
    assert found.dtype == dtype
    # PyTorch may round on the way to a loss in FP32 (on CUDA it does, to the dtype of the logits); we round once.
    rounding = {2: torch.finfo(torch.bfloat16).eps, 4: 1e-6, 8: 1e-12}[dtype.itemsize]
    torch.testing.assert_close(loss, expected, rtol=rounding, atol=0)
    torch.testing.assert_close(found, wanted, rtol=2 * rounding, atol=rounding / 10)


@pytest.mark.parametrize("overwrite", [False, True])
def test_fp16_under_a_loss_scale(overwrite: bool, backend: str, device: torch.device) -> None:
    """Gradients of FP16 logits are below its smallest number until the loss scale is applied."""
    columns, rows = 4096, 4
    x = torch.zeros(rows, columns, device=device, dtype=torch.float16, requires_grad=True)
    y = torch.arange(rows, device=device)
    loss = cross_entropy(x * 1, y, num_items_in_batch=1e5, loss_dtype=torch.float32, overwrite=overwrite, backend=backend)
    (loss * 65536).backward()
    exact = torch.zeros(rows, columns, device=device, dtype=torch.float64, requires_grad=True)
    (F.cross_entropy(exact, y, reduction="sum") / 1e5 * 65536).backward()
    assert (x.grad != 0).all()
    assert distance(x.grad, exact.grad) < 1e-3


@pytest.mark.parametrize("wrong", [10, -1, 2**40])
def test_target_out_of_range_is_an_error(wrong: int, backend: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("na: the device asserts, which ends its process; tests/test_gpu.py looks at it in another one")
    x = torch.randn(4, 10, requires_grad=True)
    y = torch.tensor([3, wrong, -100, 2])
    for options in ({}, {"reduction": "none"}, {"num_items_in_batch": 3}, {"overwrite": True}):
        with pytest.raises(IndexError, match=rf"in \[0, 10\).*ignore_index=-100.*found {wrong}"):
            cross_entropy(x * 1, y, backend=backend, **options)
    assert cross_entropy(x, torch.tensor([3, 255, 1, 2]), ignore_index=255, backend=backend).isfinite()


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target": torch.tensor([1, 2])}, ValueError, r"expected target of shape \(3,\).*found \(2,\)"),
    ({"logits": torch.tensor(1.0)}, ValueError, "found a scalar"),
    ({"logits": torch.randn(3, 0)}, ValueError, "at least one class"),
    ({"target": torch.randn(3, 5)}, TypeError, "class indices.*torch.float32.*no probabilities"),
    ({"logits": torch.randint(0, 3, (3, 5))}, TypeError, "floating-point.*torch.int64"),
    ({"logits": [[1.0]]}, TypeError, "torch.Tensor, found list"),
    ({"logits": torch.randn(3, 5).to_sparse()}, TypeError, "plain, dense, local tensor.*sparse"),
    ({"weight": torch.ones(4)}, ValueError, r"\(5,\).*found \(4,\)"),
    ({"weight": torch.ones(5, requires_grad=True)}, ValueError, "need no gradient"),
    ({"reduction": "avg"}, ValueError, "'mean', 'sum', 'none', found 'avg'"),
    ({"label_smoothing": 1.5}, ValueError, r"\[0, 1\], found 1.5"),
    ({"softcap": -1.0}, ValueError, "positive, or None.*-1.0"),
    ({"num_items_in_batch": 3, "reduction": "sum"}, ValueError, "divides a mean.*'sum'"),
    ({"num_items_in_batch": torch.ones(2)}, ValueError, r"one number, found shape \(2,\)"),
    ({"backend": "cuda"}, ValueError, "'triton', 'reference' or None, found 'cuda'"),
    ({"overwrite": True}, ValueError, "leaf"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS, ids=lambda value: str(value)[:40])
def test_bad_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"logits": torch.randn(3, 5, requires_grad=True), "target": torch.tensor([1, 2, 3])}
    with pytest.raises(error, match=message):
        cross_entropy(**{**call, **change})


def test_logits_that_cannot_be_overwritten(backend: str) -> None:
    row = torch.randn(1, 9, requires_grad=True) * 1
    with pytest.raises(ValueError, match="share memory with themselves"):
        cross_entropy(row.expand(6, 9), torch.arange(6), overwrite=True, backend=backend)
    with pytest.raises(ValueError, match="no view of shape"):
        cross_entropy((torch.randn(2, 5, 3, requires_grad=True) * 1).transpose(0, 2), torch.zeros(3, 2).long(), overwrite=True)


def test_overwriting_takes_the_logits_memory(backend: str, device: torch.device) -> None:
    leaf = torch.randn(4, 9, device=device, requires_grad=True)
    logits = leaf * 1
    version = logits._version
    loss = cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=device), overwrite=True, backend=backend)
    assert logits._version > version
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss.backward()
    assert seen == [logits.data_ptr()]
    with torch.no_grad():  # nothing needs a gradient: nothing is overwritten
        before = logits.clone()
        cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=device), overwrite=True, backend=backend)
    assert torch.equal(logits, before)


def test_func_transforms(device: torch.device) -> None:
    x, y = torch.randn(4, 7, device=device), torch.tensor([0, 6, -100, 3], device=device)
    wanted = torch.func.grad(lambda t: F.cross_entropy(t, y))(x)
    torch.testing.assert_close(torch.func.grad(lambda t: cross_entropy(t, y))(x), wanted)
    many = torch.randn(3, 4, 7, device=device)
    wanted = torch.stack([F.cross_entropy(each, y) for each in many])
    torch.testing.assert_close(torch.func.vmap(lambda t: cross_entropy(t, y))(many), wanted)


def test_compiles_without_a_graph_break(device: torch.device) -> None:
    y = torch.tensor([0, 6, -100, 3], device=device)
    compiled = torch.compile(lambda t: cross_entropy(t * 2, y, z_loss=0.1), fullgraph=True, backend="aot_eager")
    a, b = (torch.randn(4, 7, device=device, generator=torch.Generator(device).manual_seed(0)).requires_grad_() for _ in "ab")
    loss, expected = compiled(a), cross_entropy(b * 2, y, z_loss=0.1)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(a.grad, b.grad)


def test_fake_implementations(device: torch.device) -> None:
    x, y = torch.randn(4, 7, device=device, requires_grad=True), torch.tensor([0, 6, 1, 3], device=device)
    options = (-100, 0.1, 5.0, 1.0, 0.1, None)
    torch.library.opcheck(torch.ops.liger_compat.cross_entropy.default, (x, y, None, None, "none", True, *options))
    loss, *statistics, _ = torch.ops.liger_compat.cross_entropy(x.detach(), y, None, None, "mean", False, *options)
    arguments = (torch.ones_like(loss), x.detach(), y, None, *statistics, *options)
    torch.library.opcheck(torch.ops.liger_compat.cross_entropy_backward.default, arguments)


def test_holds_no_full_precision_copy() -> None:
    """The reference works chunk by chunk: what it takes beyond the gradient is a few chunks."""
    from liger_compat.demo import peak_memory
    from liger_compat.kernels.cross_entropy.reference import CHUNK_BYTES

    x = torch.randn(2048, 8000).bfloat16().requires_grad_()
    y = torch.randint(0, 8000, (2048,))
    with peak_memory(torch.device("cpu")) as peak:
        cross_entropy(x, y, backend="reference").backward()
    gradient = x.numel() * 2
    assert gradient <= peak() <= gradient + 4 * CHUNK_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_happens_to_the_logits_afterwards(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """PyTorch's loss keeps a softmax of its own: writes into the logits do not reach its gradient, and not ours."""
    y = torch.tensor([0, 6, 1, 3], device=device)
    for write in (lambda t: t.data.zero_(), lambda t: t.detach().div_(2), lambda t: t.data.fill_(float("nan"))):
        leaf = torch.randn(4, 7, device=device, dtype=dtype, requires_grad=True)
        (wanted,) = torch.autograd.grad(F.cross_entropy(leaf * 1, y), leaf)
        logits = leaf * 1
        loss = cross_entropy(logits, y, backend=backend)
        write(logits)
        (found,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps * 4, atol=1e-3 if dtype.itemsize == 2 else 1e-7)


def test_leaves_are_never_overwritten() -> None:
    from liger_compat import for_causal_lm_loss

    x, y = torch.randn(2, 5, 7, requires_grad=True), torch.randint(0, 7, (2, 5))
    before = x.detach().clone()
    for call in (
        lambda: for_causal_lm_loss(x, y, 7, overwrite=True),
        lambda: cross_entropy(x.view(-1, 7), y.view(-1), overwrite=True),
        lambda: cross_entropy(x[0], y[0], overwrite=True),
    ):
        with pytest.raises(ValueError, match="leaf of the graph"):
            call()
    assert torch.equal(x.detach(), before)


def test_forward_mode_ad(device: torch.device) -> None:
    import torch.autograd.forward_ad as fw

    x, y = torch.randn(4, 7, device=device), torch.tensor([0, 6, -100, 3], device=device)
    tangent = torch.randn_like(x)
    with fw.dual_level():
        dual = fw.make_dual(x, tangent)
        wanted, found = (fw.unpack_dual(function(dual, y)).tangent for function in (F.cross_entropy, cross_entropy))
    torch.testing.assert_close(found, wanted)
