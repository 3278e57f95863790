"""Adapter selection, upstream breaks, imports, leaks. The table in README.md says which report each test retells."""

import inspect
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import liger_compat
from compare import assert_same_as_stock
from families import VOCABULARY, available, build, inputs
from liger_compat.upstream import inspect_upstream

IDS = torch.arange(3, 35).view(2, 16)


def run(code: str) -> str:
    """Output of a fresh Python."""
    return subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("family", available("llama", "mistral", "gpt2", "granite", "bart"))
def test_r02_patching_takes_effect_and_can_prove_it(family: str) -> None:
    model = liger_compat.patch(build(family))
    before = liger_compat.kernels.losses_computed()
    model(**inputs(model, IDS)).loss.backward()
    assert liger_compat.kernels.losses_computed() == before + 1
    assert liger_compat.report(model).counters.kernel_losses == 1
    assert not liger_compat.report(model).counters.stepped_aside


def test_r03_the_adapter_is_chosen_by_model_not_by_version() -> None:
    """Within one release some models use the loss API and others do not."""
    upstream = inspect_upstream()
    llama, t5 = (liger_compat.explain(build(name)).adapter for name in ("llama", "t5"))
    assert t5 == "inline"
    assert llama == ("loss_function" if upstream.loss_settable else "inline")
    for name in ("llama", "t5"):
        stock = build(name)
        assert_same_as_stock(liger_compat.patch(build(name)), stock, **inputs(stock, IDS))


def test_r03_a_loss_set_by_the_user_is_not_replaced() -> None:
    if not inspect_upstream().loss_settable:
        pytest.skip("na: this transformers has no setter for the loss")
    model = build("llama")

    def my_loss(logits: Any, labels: Any, **kwargs: Any) -> Any:
        return logits.sum()

    model.loss_function = my_loss
    with pytest.raises(liger_compat.ConflictingPatchError, match="my_loss.*by its user.*nothing was changed"):
        liger_compat.patch(model)
    assert model.loss_function is my_loss
    assert not liger_compat.is_patched(model)


def test_r05_after_undo_the_reference_run_is_stock() -> None:
    watched = _torch_and_transformers()
    model = build("llama")
    liger_compat.unpatch(liger_compat.patch(model))
    liger_compat.unpatch(liger_compat.patch(build("t5")))
    assert _torch_and_transformers() == watched
    before = liger_compat.kernels.losses_computed()
    for stock in (model, build("llama"), build("t5")):
        stock(**inputs(stock, IDS)).loss.backward()
    assert liger_compat.kernels.losses_computed() == before


def _torch_and_transformers() -> dict[str, int]:
    """Identities of everything that a global patch could have replaced."""
    found = {"F.cross_entropy": id(F.cross_entropy), "nn.CrossEntropyLoss": id(nn.CrossEntropyLoss)}
    for family in ("llama", "t5"):
        cls = type(build(family))
        found |= {f"{cls.__name__}.{name}": id(value) for name, value in vars(cls).items()}
    try:
        from transformers.loss import loss_utils
    except ImportError:
        return found
    return found | {f"LOSS_MAPPING[{key}]": id(value) for key, value in loss_utils.LOSS_MAPPING.items()}


def test_r07_patching_one_model_leaves_others_alone() -> None:
    """Others of the same class, made before or after, and of classes that share its code."""
    families = available("qwen2", "qwen3", "llama", "mistral")
    before = [build(name) for name in families]
    liger_compat.patch(build("qwen2"))
    after = [build(name) for name in families]
    count = liger_compat.kernels.losses_computed()
    for model in before + after:
        model(**inputs(model, IDS)).loss.backward()
    assert liger_compat.kernels.losses_computed() == count


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r08_the_class_keeps_its_forward(family: str) -> None:
    model = build(family)
    members = dict(vars(type(model)))
    liger_compat.patch(model)
    assert dict(vars(type(model))) == members
    assert "forward" not in vars(model)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r10_wrappers_are_unwrapped(family: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = build(family)
    for wrapper in (Wrapper(model), Wrapper(Wrapper(model)), torch.compile(model, backend="eager")):
        assert liger_compat.patch(wrapper) is wrapper
        assert liger_compat.is_patched(model)
        assert liger_compat.is_patched(wrapper)
        assert liger_compat.unpatch(wrapper) is wrapper
        assert not liger_compat.is_patched(model)


@pytest.mark.parametrize("family", available("llava", "qwen2_vl", "qwen2_5_vl"))
def test_r11_r16_r25_vision_language_models(family: str) -> None:
    """Decided by the function that the model would call, not by one key of LOSS_MAPPING; text-only batch, padded."""
    stock = build(family)
    model = liger_compat.patch(build(family))
    try:
        build(family)(**inputs(stock, IDS))
    except AttributeError:  # a release that cannot do without a picture: then neither can the patched model
        with pytest.raises(AttributeError):
            model(**inputs(stock, IDS))
        return
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1


def test_r13_r15_importing_loads_no_model_and_no_transformers() -> None:
    loaded = run("import sys, liger_compat; print([m for m in sys.modules if m.startswith(('transformers', 'triton'))])")
    assert loaded.strip() == "[]"


def test_r13_a_broken_model_file_breaks_no_other_model() -> None:
    code = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformers.models.gemma."):
            raise ImportError("upstream deleted a name")
sys.meta_path.insert(0, Broken())
import liger_compat
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
print(liger_compat.is_patched(liger_compat.patch(LlamaForCausalLM(config))))
"""
    assert run(code).strip() == "True"


def test_r15_only_names_that_every_release_has_are_imported() -> None:
    """The package imports from transformers PreTrainedModel and, where it exists, ForCausalLMLoss; nothing private."""
    import ast
    from pathlib import Path

    allowed = {"PreTrainedModel", "ForCausalLMLoss"}
    for file in Path(liger_compat.__file__).parent.rglob("*.py"):
        if file.name in ("demo.py", "doctor.py"):
            continue  # they build a Llama, and list the classes of the release
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                assert {alias.name for alias in node.names} <= allowed, file


def test_r16_sizes_come_from_the_logits() -> None:
    """A configuration that has no vocab_size for us to read."""
    model = build("llama")
    stock = build("llama")
    liger_compat.patch(model)
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    loss = liger_compat.for_causal_lm_loss(torch.randn(2, 5, 7), torch.zeros(2, 5, dtype=torch.long))
    assert loss.isfinite()


@pytest.mark.parametrize("family", available("llama", "t5", "bart", "gemma2", "gpt2"))
def test_r18_generation_and_signature_are_unchanged(family: str) -> None:
    stock, model = build(family).eval(), liger_compat.patch(build(family)).eval()
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(IDS, **options), stock.generate(IDS, **options))


@pytest.mark.parametrize(
    ("logits", "backend"), list(itertools.product(("defer", "keep", "overwrite"), (None, "reference", "triton")))
)
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_r20_every_combination_of_options(family: str, logits: str, backend: str | None) -> None:
    if backend == "triton" and (problem := liger_compat.kernels.device_problem("cpu")) is not None:
        pytest.skip(f"na: {problem}")
    stock = build(family)
    model = liger_compat.patch(build(family), logits=logits, backend=backend)
    kept = liger_compat.report(model).logits != "overwrite"
    assert_same_as_stock(model, stock, logits=kept, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1


def test_r21_a_loss_that_is_already_a_kernel_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' use_kernels=True swaps in a hub kernel's loss; and it may call the loss without logits."""
    upstream = inspect_upstream()
    if upstream.causal_lm_loss is None or not upstream.loss_settable:
        pytest.skip("na: this transformers has no loss API with a setter")

    class LigerForCausalLMLossLayer:
        __module__ = "liger_kernels.layers"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    model = build("llama")
    model.loss_function = LigerForCausalLMLossLayer()
    with pytest.raises(liger_compat.ConflictingPatchError, match="liger_kernels.layers"):
        liger_compat.patch(model)

    model = liger_compat.patch(build("llama"))
    with pytest.raises(AttributeError):  # what upstream's own function says to it
        model.loss_function(None, IDS, VOCABULARY, hidden_states=torch.randn(2, 16, 64))
    assert liger_compat.report(model).counters.stepped_aside


def test_r23_drift_of_the_unpatched_model_is_not_ours() -> None:
    """A collapsed attention mask changes both curves alike: patched is compared with unpatched of the same release."""
    stock, model = build("bert"), liger_compat.patch(build("bert"))
    for each in (stock, model):
        each.bert.encoder.layer[0].attention.self.query.weight.data.zero_()
    assert_same_as_stock(model, stock, **inputs(stock, IDS))


def test_r24_ties_do_not_fail_a_comparison() -> None:
    """Runs are compared by distance, never by the order of top-k tokens: two equal maxima are no difference."""
    from compare import distance

    tied = torch.tensor([[1.0, 1.0, 0.0]])
    assert distance(tied + torch.tensor([[0.0, 1e-7, 0.0]]), tied) < 1e-6
    assert transformers.__version__
