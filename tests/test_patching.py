"""patch and unpatch: what they refuse, what they leave alone, what they put back."""

import gc
import importlib
import sys
import threading
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import liger_compat
from compare import assert_same_as_stock
from families import build, inputs
from liger_compat import upstream
from liger_compat.upstream import inspect_upstream

IDS = torch.arange(3, 35).view(2, 16)


def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
    """`vars` of every module, containers copied: what has to be the same after undo."""

    def value(v: Any) -> Any:
        return dict(v) if isinstance(v, dict) else v

    return {name: {key: value(v) for key, v in vars(module).items()} for name, module in model.named_modules()}


def everything() -> dict[str, int]:
    """Every attribute of torch.nn, torch.nn.functional, transformers.loss and transformers' modeling code, by identity."""
    packages = ("torch.nn.", "transformers.loss", "transformers.modeling_", "transformers.models.")
    modules = [name for name in sys.modules if name.startswith(packages)]
    found = {f"{name}.{key}": id(value) for name in ("torch.nn", *modules) for key, value in vars(sys.modules[name]).items()}
    for cls in (nn.Module, nn.Linear, nn.CrossEntropyLoss, transformers.PreTrainedModel):
        found |= {f"{cls.__name__}.{key}": id(value) for key, value in vars(cls).items()}
    return found


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("family", ["llama", "t5", "gpt2", "mixtral"])
def test_undo_restores_everything(family: str, logits: str) -> None:
    model = build(family)
    model(**inputs(model, IDS))  # upstream puts hooks of its own at the first call
    liger_compat.unpatch(liger_compat.patch(build(family), logits=logits))  # imports are done
    before, members, world = snapshot(model), dict(vars(type(model))), everything()
    liger_compat.patch(model, logits=logits)
    assert everything() == world
    model(**inputs(model, IDS)).loss.backward()
    assert liger_compat.unpatch(model) is model
    assert snapshot(model) == before
    assert dict(vars(type(model))) == members
    assert everything() == world


def test_patching_twice_is_patching_once() -> None:
    model = liger_compat.patch(build("t5"))
    before = snapshot(model)
    assert liger_compat.patch(model) is model
    assert snapshot(model) == before
    model(**inputs(model, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1
    liger_compat.patch(model, logits="overwrite")  # other options: patched anew
    assert liger_compat.report(model).logits == "overwrite"
    liger_compat.unpatch(model)
    assert not liger_compat.is_patched(model)


def test_context_manager() -> None:
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(KeyError), liger_compat.patched(model, logits="overwrite") as same:
        assert same is model
        assert liger_compat.report(model).logits == "overwrite"
        raise KeyError
    assert snapshot(model) == before


def test_context_manager_on_a_patched_model() -> None:
    model = liger_compat.patch(build("llama"), logits="keep", backend="reference")
    with liger_compat.patched(model, logits="overwrite"):
        assert liger_compat.report(model).logits == "overwrite"
    assert liger_compat.report(model).logits == "keep"
    assert liger_compat.report(model).backend == "reference"


def test_a_refused_change_of_options_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = liger_compat.patch(build("llama"))
    before = snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", foreign("liger_cross_entropy", "liger_kernel.transformers.functional"))
        with pytest.raises(liger_compat.ConflictingPatchError):
            liger_compat.patch(model, logits="keep")
    assert snapshot(model) == before


def test_explain_a_patched_model() -> None:
    model = liger_compat.patch(build("llama"))
    assert liger_compat.explain(model, logits="keep").logits == "keep"
    assert liger_compat.explain(model).choices == liger_compat.report(model).choices
    for target in (model, build("llama")):
        with pytest.raises(liger_compat.InvalidOptionError, match="found 'drop'"):
            liger_compat.explain(target, logits="drop")


def test_a_model_inside_is_patched_already() -> None:
    class Around(transformers.LlamaForCausalLM):
        pass

    model = Around(build("llama").config)
    model.inner = liger_compat.patch(build("llama"))
    with pytest.raises(liger_compat.ConflictingPatchError, match="its inner, a LlamaForCausalLM, is patched by liger_compat"):
        liger_compat.patch(model)


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
def test_no_hook_stays_on_a_head_that_was_replaced(logits: str) -> None:
    model = liger_compat.patch(build("t5"), logits=logits)
    old = model.lm_head
    model.set_output_embeddings(nn.Linear(old.in_features, old.out_features, bias=False))
    model(**inputs(model, IDS))
    liger_compat.unpatch(model)
    for head in (old, model.lm_head):
        assert not head._forward_hooks
        assert not head._forward_pre_hooks


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
def test_a_deleted_model_is_freed_at_once(logits: str) -> None:
    """Without the garbage collector, that is: its memory is needed for the next one."""
    gc.collect()
    gc.disable()
    try:
        for patch in (lambda model: model, lambda model: liger_compat.patch(model, logits=logits)):
            model = patch(build("llama"))
            model(**inputs(model, IDS)).loss.backward()
            weight = weakref.ref(model.model.embed_tokens.weight)
            del model
            assert weight() is None
    finally:
        gc.enable()


def test_undo_after_the_wrapper_was_deleted() -> None:
    if not inspect_upstream().loss_settable:
        pytest.skip("na: this transformers has no setter for the loss")
    model = build("llama")
    before = snapshot(model)
    liger_compat.patch(model)
    del model._loss_function
    liger_compat.unpatch(model)
    assert snapshot(model) == before


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("removed", [False, True])
def test_undo_after_an_inner_model_was_wrapped_or_removed(removed: bool) -> None:
    if not inspect_upstream().loss_settable:
        pytest.skip("na: this transformers has no setter for the loss")

    class Around(transformers.LlamaForCausalLM):
        pass

    model = Around(build("llama").config)
    model.inner = build("llama")
    liger_compat.patch(model)
    inner = model.inner
    assert "_loss_function" in vars(inner)
    if removed:
        del model.inner
    else:
        model.inner = Wrapped(inner)
    liger_compat.unpatch(model)
    assert "_loss_function" not in vars(model)
    assert removed or "_loss_function" not in vars(inner)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
def test_a_compiled_forward_is_served(recwarn: pytest.WarningsRecorder) -> None:
    if not inspect_upstream().loss_settable:
        pytest.skip("na: a model that computes its loss inline compiles without the kernel, and says so")
    torch._dynamo.reset()
    model = liger_compat.patch(build("llama"))
    model.forward = torch.compile(model.forward, backend="eager")
    model(**inputs(model, IDS))
    assert not [warning for warning in recwarn if warning.category is liger_compat.UnservedLossWarning]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_defaults_of_torch_do_not_matter(default: torch.dtype) -> None:
    upstream._known.cache_clear()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            assert inspect_upstream().loss_known or inspect_upstream().causal_lm_loss is None
    finally:
        torch.set_default_dtype(torch.float32)


def test_undo_notices_interference() -> None:
    if not inspect_upstream().loss_settable:
        pytest.skip("na: this transformers has no setter for the loss")
    model = liger_compat.patch(build("llama"))
    before = snapshot(model)
    model.loss_function = F.cross_entropy
    for call in (liger_compat.unpatch, liger_compat.patch):
        with pytest.raises(liger_compat.PatchReplacedError, match="_loss_function.*replaced since.*cross_entropy"):
            call(model)
    assert liger_compat.is_patched(model)
    model._loss_function = before[""]["_loss_function"]
    liger_compat.unpatch(model)


def test_undo_of_an_unpatched_model() -> None:
    for call in (liger_compat.unpatch, liger_compat.report):
        with pytest.raises(liger_compat.NotPatchedError, match="LlamaForCausalLM is not patched.*liger_compat.patch"):
            call(build("llama"))


def _llama_part(name: str) -> nn.Module:
    return getattr(transformers, name)(build("llama").config)


REFUSED = {
    "no module": (lambda: 3, "PreTrainedModel or a module that wraps one, found int"),
    "no model of transformers": (lambda: nn.Linear(2, 2), "found Linear, which wraps none"),
    "two models": (lambda: nn.ModuleList([build("llama"), build("t5")]), "wraps LlamaForCausalLM, T5ForConditionalGeneration"),
    "no labels": (lambda: _llama_part("LlamaModel"), "LlamaModel computes no token loss: its forward takes no labels"),
    "no token loss": (lambda: _llama_part("LlamaForSequenceClassification"), "cannot be patched.*loss_function:.*inline:"),
    "no cross-entropy": (
        lambda: transformers.FSMTForConditionalGeneration(
            transformers.FSMTConfig(
                langs=["en", "de"], src_vocab_size=40, tgt_vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1,
                encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
            )
        ),
        "its output embeddings are the Embedding that embeds its inputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_models_are_refused_and_unchanged(case: str) -> None:
    make, message = REFUSED[case]
    model = make()
    before = snapshot(model) if isinstance(model, nn.Module) else None
    for call in (liger_compat.patch, liger_compat.explain):
        with pytest.raises(liger_compat.UnsupportedModelError, match=message):
            call(model)
    if before is not None:
        assert snapshot(model) == before


def test_masked_language_models_are_served() -> None:
    stock, model = build("bert"), liger_compat.patch(build("bert"))
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1


def foreign(name: str, module: str) -> Any:
    function = types.FunctionType((lambda *args, **kwargs: None).__code__, {}, name)
    function.__module__ = module
    function.__qualname__ = name
    return function


def test_patches_of_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = foreign("lce_forward", "liger_kernel.transformers.model.llama")

    model = build("llama")
    model.forward = types.MethodType(theirs, model)
    with pytest.raises(
        liger_compat.ConflictingPatchError, match="forward of this model is liger_kernel.transformers.model.llama"
    ):
        liger_compat.patch(model)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", theirs)
        with pytest.raises(liger_compat.ConflictingPatchError, match="LlamaForCausalLM.forward is liger_kernel"):
            liger_compat.patch(build("llama"))

    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", foreign("liger_cross_entropy", "liger_kernel.transformers.functional"))
        with pytest.raises(liger_compat.ConflictingPatchError, match="F?cross_entropy is liger_kernel.*whole process"):
            liger_compat.patch(build("t5"))

    with monkeypatch.context() as patch:
        t5 = sys.modules[type(build("t5")).__module__]
        patch.setattr(t5, "CrossEntropyLoss", foreign("LigerCrossEntropyLoss", "liger_kernel.transformers"))
        with pytest.raises(liger_compat.ConflictingPatchError, match="CrossEntropyLoss in .*modeling_t5 is liger_kernel"):
            liger_compat.patch(build("t5"))

    if inspect_upstream().causal_lm_loss is not None:
        from transformers.loss import loss_utils

        with monkeypatch.context() as patch:
            patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", foreign("UnslothForCausalLMLoss", "unsloth_zoo.loss_utils"))
            with pytest.raises(
                liger_compat.ConflictingPatchError,
                match="unsloth_zoo.loss_utils.UnslothForCausalLMLoss in transformers",
            ):
                liger_compat.patch(build("llama"))
        with monkeypatch.context() as patch:
            patch.setattr(loss_utils, "fixed_cross_entropy", foreign("fixed_fused", "liger_kernel.transformers"))
            with pytest.raises(liger_compat.ConflictingPatchError, match="fixed_cross_entropy is liger_kernel"):
                liger_compat.patch(build("llama"))


def test_a_forced_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    module = importlib.import_module("liger_compat.kernels.cross_entropy._backend")
    with monkeypatch.context() as patch:
        patch.setattr(module, "triton_problem", lambda: "ModuleNotFoundError: No module named 'triton'")
        for call in (liger_compat.patch, liger_compat.explain):
            with pytest.raises(liger_compat.BackendUnavailableError, match=r'"triton" was.*install "liger_compat\[triton\]"'):
                call(model, backend="triton")
    if not torch.cuda.is_available():
        liger_compat.kernels.triton_problem()  # imported now: whether it interprets is settled then
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(liger_compat.BackendUnavailableError, match="does not run on 'cpu' devices|cannot be loaded"):
            liger_compat.patch(model, backend="triton")
    monkeypatch.setenv("LIGER_COMPAT_BACKEND", "cuda")
    with pytest.raises(liger_compat.InvalidOptionError, match="LIGER_COMPAT_BACKEND to be one of.*found 'cuda'"):
        liger_compat.patch(model)
    assert not liger_compat.is_patched(model)


def test_a_model_that_computes_a_loss_without_the_kernel_says_so() -> None:
    class Elsewhere(transformers.T5ForConditionalGeneration):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.pop("labels", None)
            output = super().forward(*args, decoder_input_ids=labels.clamp(0), **kwargs)
            output.loss = -output.logits.log_softmax(-1).mean()
            return output

    Elsewhere.forward.__signature__ = __import__("inspect").signature(transformers.T5ForConditionalGeneration.forward)
    model = build("t5")
    model.__class__ = Elsewhere
    liger_compat.patch(model)
    with pytest.warns(liger_compat.UnservedLossWarning, match="Elsewhere.*without the kernel"):
        model(**inputs(model, IDS))
    assert liger_compat.report(model).counters.stepped_aside["a loss was computed without the kernel"] == 1


def test_logits_without_a_loss_are_plain() -> None:
    for family in ("llama", "t5"):
        for logits in ("defer", "keep", "overwrite"):
            model = liger_compat.patch(build(family), logits=logits)
            call = inputs(model, IDS)
            labels = call.pop("labels")
            if family == "t5":
                call["decoder_input_ids"] = labels.clamp(0)
            output = model(**call)
            assert (type(output.logits) is torch.Tensor) == (logits != "defer")
            output.logits.sum().backward()


def test_no_logits_are_kept_alive() -> None:
    """A stored loss holds no logits, and stored logits no graph, beyond what the unpatched model's hold."""
    for family in ("llama", "t5"):
        model = liger_compat.patch(build(family))
        output = model(**inputs(model, IDS))
        output.loss.backward()
        reference, loss = weakref.ref(output.logits), output.loss
        del output
        gc.collect()
        assert reference() is None
        assert loss.isfinite()


def test_two_models_in_two_threads() -> None:
    models = {family: liger_compat.patch(build(family)) for family in ("llama", "t5")}
    stock = {family: build(family)(**inputs(model, IDS)).loss for family, model in models.items()}
    losses: dict[str, list[torch.Tensor]] = {family: [] for family in models}

    def work(family: str) -> None:
        for _ in range(5):
            losses[family].append(models[family](**inputs(models[family], IDS)).loss.detach())

    threads = [threading.Thread(target=work, args=(family,)) for family in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family, found in losses.items():
        assert len(found) == 5
        for loss in found:
            torch.testing.assert_close(loss, stock[family].detach())


def test_an_overwritten_output_can_be_shown_and_cast_but_not_read() -> None:
    model = liger_compat.patch(build("llama", dtype=torch.bfloat16), logits="overwrite")
    output = model(**inputs(model, IDS))
    if type(output.logits) is torch.Tensor:
        pytest.skip("na: this transformers hands the loss a copy, and the logits stay readable")
    assert "OverwrittenLogits(shape=(2, 16, 384)" in repr(output)
    assert output.logits.float().dtype == torch.float32
    assert output.logits.detach().to(torch.float16).dtype == torch.float16
    with (
        warnings.catch_warnings(),
        pytest.raises(liger_compat.OverwrittenLogitsError, match='by sum.*logits="overwrite".*logits="keep"'),
    ):
        output.logits.float().sum()
    import copy
    import pickle

    for read in (pickle.dumps, copy.deepcopy, lambda t: t.cpu().numpy(), lambda t: torch.cat([t, t]), list):
        with pytest.raises(liger_compat.OverwrittenLogitsError):
            read(output.logits.detach())
    (gradient,) = torch.autograd.grad(output.loss, output.logits)
    assert gradient.shape == (2, 16, 384)
