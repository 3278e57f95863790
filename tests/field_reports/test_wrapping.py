"""Copies, files, wrappers, missing libraries."""

import ast
import copy
import functools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import liger_compat
from compare import assert_same_as_stock, gradients
from families import available, build, inputs

IDS = torch.arange(3, 35).view(2, 16)


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r99_copies_are_patched_and_independent(family: str, logits: str) -> None:
    model = liger_compat.patch(build(family), logits=logits)
    model(**inputs(model, IDS))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), AveragedModel(model).module]
    for parameter in model.parameters():
        parameter.data.zero_()
    for twin in twins:
        stock = build(family)
        before = liger_compat.report(twin).counters.kernel_losses
        assert_same_as_stock(twin, stock, logits=logits != "overwrite", **inputs(stock, IDS))
        assert liger_compat.report(twin).counters.kernel_losses == before + 1
        assert not gradients(model)
        liger_compat.unpatch(twin)
        assert not liger_compat.is_patched(twin)
        assert liger_compat.is_patched(model)


def test_r99_a_model_loads_in_a_process_that_imports_liger_compat(tmp_path: Path) -> None:
    torch.save(liger_compat.patch(build("llama")), tmp_path / "model.pt")
    load = f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    code = f"import torch, liger_compat; print(liger_compat.is_patched({load}))"
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r99_saving_writes_nothing_of_the_patch(family: str, tmp_path: Path) -> None:
    stock, model = build(family), liger_compat.patch(build(family))
    assert model.state_dict().keys() == stock.state_dict().keys()
    for each, folder in ((stock, "stock"), (model, "patched")):
        each.save_pretrained(tmp_path / folder)
    for file in (tmp_path / "stock").iterdir():
        assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes()
    loaded = type(stock).from_pretrained(tmp_path / "patched")
    assert not liger_compat.is_patched(loaded)


def test_r98_r99_a_forward_on_the_instance_stays() -> None:
    """accelerate and users put their own wrapper of forward there, before or after."""
    model = build("llama")
    own = functools.partial(model.forward, use_cache=False)
    model.forward = own
    stock = build("llama")
    liger_compat.patch(model)
    assert model.forward is own
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1
    liger_compat.unpatch(model)
    assert model.forward is own


@pytest.mark.parametrize("family", available("mixtral"))
def test_r100_the_auxiliary_loss_of_experts(family: str) -> None:
    """Without the loss's own reach it would be dropped in silence: router gradients equal stock's."""
    for how in ({}, {"output_router_logits": True}):
        stock, model = build(family), liger_compat.patch(build(family))
        found, expected = assert_same_as_stock(model, stock, **inputs(stock, IDS), **how)
        assert found.aux_loss is not None
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)
        routers = [name for name in gradients(model) if "gate" in name or "router" in name]
        assert routers
        for name in routers:
            torch.testing.assert_close(gradients(model)[name], gradients(stock)[name])


BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} or name.startswith({name!r} + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import liger_compat, torch
print(liger_compat.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1])).item())
try:
    liger_compat.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]), backend="triton")
except RuntimeError as error:
    print(error)
"""


def test_r101_triton_is_optional() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", BLOCKED.format(name="triton")], check=True, capture_output=True, text=True
    )
    loss, error = done.stdout.strip().splitlines()
    assert float(loss) == pytest.approx(1.3862943)
    assert "Triton cannot be loaded (ModuleNotFoundError: No module named 'triton')" in error


def test_r101_no_name_of_libdevice_is_needed() -> None:
    """It lies elsewhere in each Triton; the kernels' tanh is written out, and tests/kernels measure it."""
    folder = Path(liger_compat.kernels.cross_entropy.__code__.co_filename).parent
    assert "import" in (folder / "_kernels.py").read_text()
    for file in folder.glob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"libdevice", "math", "extra"}, file
