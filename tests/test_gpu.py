"""What Triton's interpreter cannot show: synchronisation, CUDA graphs, large offsets, device assertions. `pytest -m gpu`."""

import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import liger_compat
from compare import distance
from families import build, inputs
from liger_compat import cross_entropy

pytestmark = pytest.mark.gpu
OVERWRITE = pytest.mark.parametrize("overwrite", [False, True])


def assert_no_wait(step: Callable[[], None]) -> None:
    step()  # compiles
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_kernels_are_used_by_default() -> None:
    assert liger_compat.kernels.choose(None, torch.device("cuda")) == "triton"


@OVERWRITE
@pytest.mark.parametrize("count", [None, 7, "tensor"])
def test_nothing_waits_for_the_device(overwrite: bool, count: object) -> None:
    x = torch.randn(64, 4097, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(0, 4097, (64,), device="cuda")
    number = torch.tensor(7, device="cuda") if count == "tensor" else count

    def step() -> None:
        cross_entropy(x * 1, y, num_items_in_batch=number, z_loss=0.1, overwrite=overwrite).backward()

    assert_no_wait(step)


@pytest.mark.parametrize("logits", ["keep", "overwrite"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_patch_adds_no_wait(family: str, logits: str) -> None:
    """A count on the host and labels on the device, as Trainer hands them over."""
    model = liger_compat.patch(build(family).cuda(), logits=logits)
    ids = torch.arange(3, 35, device="cuda").view(2, 16)
    hidden = torch.randn(2, 16, 64, device="cuda", requires_grad=True)

    def step() -> None:
        scores = model.get_output_embeddings()(hidden)
        F.cross_entropy(scores.view(-1, scores.shape[-1]), ids.view(-1)).backward()

    assert_no_wait(step)


@OVERWRITE
def test_capture_and_replay_with_new_labels(overwrite: bool) -> None:
    x = torch.randn(32, 1000, device="cuda")
    y = torch.randint(0, 1000, (32,), device="cuda")
    leaf = x.clone().requires_grad_()

    def step() -> torch.Tensor:
        leaf.grad = None
        loss = cross_entropy(leaf * 1, y, overwrite=overwrite)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for labels in (torch.randint(0, 1000, (32,), device="cuda"), torch.full((32,), -100, device="cuda")):
        y.copy_(labels)
        graph.replay()
        expected_leaf = x.clone().requires_grad_()
        expected = F.cross_entropy(expected_leaf, labels)
        expected.backward()
        torch.testing.assert_close(loss, expected, equal_nan=True)
        if not expected.isnan():
            torch.testing.assert_close(leaf.grad, expected_leaf.grad)
        else:
            assert (leaf.grad == 0).all()


@OVERWRITE
def test_more_than_2_to_the_31_elements(overwrite: bool) -> None:
    rows, columns = 18000, 131072
    x = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    for start in range(0, rows, 3000):
        x[start : start + 3000].normal_()
    y = torch.randint(0, columns, (rows,), device="cuda")
    looked_at = [0, 16383, 16384, rows - 1]
    exact = x[looked_at].double().requires_grad_()
    expected = F.cross_entropy(exact, y[looked_at], reduction="none")
    expected.backward(torch.ones_like(expected))
    x.requires_grad_()
    loss = cross_entropy(x * 1, y, reduction="none", loss_dtype=torch.float32, overwrite=overwrite)
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    torch.testing.assert_close(loss[looked_at].double(), expected, rtol=1e-5, atol=0)
    assert distance(grad[looked_at], exact.grad) < 2e-3


def test_rows_that_are_far_apart() -> None:
    """A view whose rows are 2**31 elements from the first to the last."""
    base = torch.empty(20000, 131072, device="cuda", dtype=torch.bfloat16)
    view = base[:, :513]
    view.normal_()
    y = torch.randint(0, 513, (20000,), device="cuda")
    found = cross_entropy(view, y, reduction="none", loss_dtype=torch.float32)
    torch.testing.assert_close(found, F.cross_entropy(view.float(), y, reduction="none"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [10, -1])
def test_a_target_out_of_range_asserts_on_the_device(wrong: int) -> None:
    code = (
        "import torch, liger_compat; x = torch.randn(4, 10, device='cuda'); "
        f"y = torch.tensor([3, {wrong}, -100, 2], device='cuda'); "
        "loss = liger_compat.cross_entropy(x, y); torch.cuda.synchronize(); print('no error')"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no error" not in done.stdout
    assert "a target is outside [0, V)" in done.stderr


def test_logits_on_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("na: there is one GPU")
    x = torch.randn(4, 10, device="cuda:1", requires_grad=True)
    loss = liger_compat.for_causal_lm_loss(x, torch.tensor([1, 2, 3, 4]), 10, num_items_in_batch=torch.tensor(3))
    loss.backward()
    assert loss.device == x.grad.device == x.device


@pytest.mark.filterwarnings("ignore")  # Inductor's own, many
def test_compiles_with_inductor() -> None:
    model, stock = liger_compat.patch(build("llama").cuda()), build("llama").cuda()
    compiled = torch.compile(model)
    call = inputs(stock, torch.arange(3, 35).view(2, 16))
    loss, expected = compiled(**call).loss, stock(**call).loss
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert distance(model.lm_head.weight.grad, stock.lm_head.weight.grad) < 1e-3
