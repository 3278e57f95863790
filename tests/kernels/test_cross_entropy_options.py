"""Every option, and all of them together, against FP64."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from compare import distance
from liger_compat import cross_entropy

OPTIONS: dict[str, list[Any]] = {
    "weighted": [False, True],
    "reduction": ["mean", "sum", "none"],
    "label_smoothing": [0.0, 0.1, 1.0],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.3],
    "z_loss": [0.0, 0.01],
}
COMBINATIONS = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]


def check(logits: Tensor, target: Tensor, backend: str, *, weighted: bool, **options: Any) -> None:
    weight = torch.rand(logits.shape[1], device=logits.device) + 0.1 if weighted else None
    exact = logits.double().requires_grad_()
    expected = oracle.cross_entropy(exact, target, weight, **options)
    grad_loss = torch.rand_like(expected)
    expected.backward(grad_loss)
    for overwrite in (False, True):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf * 1, target, weight, overwrite=overwrite, backend=backend, **options)
        loss.backward(grad_loss.float())
        assert loss.shape == expected.shape
        torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
        # What a gradient is the difference of is of the size of the incoming one, and so is its rounding.
        assert (leaf.grad - exact.grad).norm() <= 2e-6 * exact.grad.norm() + 1e-6 * grad_loss.max()


@pytest.mark.parametrize("columns", [7, 1500])
def test_all_combinations(columns: int, backend: str, device: torch.device) -> None:
    for options in COMBINATIONS:
        logits = torch.randn(3, columns, device=device) * 4
        target = torch.randint(0, columns, (3,), device=device)
        target[1] = -100
        check(logits, target, backend, **options)


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 70),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    ignored=st.sets(st.integers(0, 5)),
    options=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200, deadline=None)
def test_any_call(rows: int, columns: int, scale: float, ignored: set[int], options: dict[str, Any], seed: int) -> None:
    """On the reference; the kernels are compared with it above."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * scale
    target = torch.randint(0, columns, (rows,), generator=generator)
    target[[row for row in ignored if row < rows]] = -100
    if (target == -100).all():
        return  # NaN or 0: tests of their own
    check(logits, target, "reference", **options)


@pytest.mark.parametrize("count", [7, 2.5, torch.tensor(7), torch.tensor([[3]])], ids=str)
def test_num_items_in_batch(count: Any, backend: str, device: torch.device) -> None:
    logits = torch.randn(5, 11, device=device)
    target = torch.tensor([1, -100, 3, 10, 0], device=device)
    number = count.item() if isinstance(count, Tensor) else count
    exact = logits.double().requires_grad_()
    expected = oracle.cross_entropy(exact, target, num_items_in_batch=number, z_loss=0.1)
    expected.backward()
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, num_items_in_batch=count, z_loss=0.1, backend=backend)
    loss.backward()
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert distance(leaf.grad, exact.grad) < 1e-6


def test_ignore_index_inside_the_vocabulary(backend: str, device: torch.device) -> None:
    logits = torch.randn(4, 10, device=device)
    target = torch.tensor([3, 1, 3, 9], device=device)
    found = cross_entropy(logits, target, ignore_index=3, backend=backend)
    torch.testing.assert_close(found.double(), oracle.cross_entropy(logits, target, ignore_index=3), rtol=1e-6, atol=0)
