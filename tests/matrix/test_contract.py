"""The contract scan says of each commit what it does to liger_compat, without running anything of upstream."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from fake_upstream import Repository

Module = Callable[[str], ModuleType]
LOSS, UTILS, MODEL = "loss/loss_utils.py", "modeling_utils.py", "models/toy/modeling_toy.py"

SETTER = "    @loss_function.setter\n    def loss_function(self, value):\n        self._loss_function = value\n"
CALL = "self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)"
SHIFT = '''ignore_index=-100, **kwargs):
    """Shifts."""
    labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
    shift_labels = labels[..., 1:].contiguous()
'''
GUARDED_SHIFT = '''ignore_index=-100, shift_labels=None, **kwargs):
    """Shifts."""
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
'''

# Of a commit: its kind, a part of what is said of it, and what it does: (path, old, new), or a file's whole text (path, new).
DRILLS: dict[str, tuple[str, str, tuple[str | None, ...]]] = {
    "a parameter goes": ("breaking", "without the parameter cache_position", (MODEL, ", cache_position=None", "")),
    "labels go": ("breaking", "without the parameter labels, with targets", (MODEL, "labels=None,", "targets=None,")),
    "order": ("breaking", "another order", (LOSS, "labels, vocab_size, num", "vocab_size, labels, num")),
    "a default goes": ("breaking", "without a default", (LOSS, "_size, num_items_in_batch=None", "_size, num_items_in_batch")),
    "another default": ("behaviour", "other defaults", (LOSS, "_size, num_items_in_batch=None", "_size, num_items_in_batch=1")),
    "needed parameter": ("breaking", "needs reduction", (LOSS, "vocab_size, num", "vocab_size, reduction, num")),
    "swallowed count": ("behaviour", "ForCausalLMLoss.body", (LOSS, "labels, num_items_in_batch, ign", "labels, None, ign")),
    "shift": ("behaviour", "ForCausalLMLoss.body", (LOSS, "labels[..., 1:]", "labels[..., 2:]")),
    "contiguous dropped": ("behaviour", "ForCausalLMLoss.body", (LOSS, "1:].contiguous()", "1:]")),
    "the function is renamed": ("breaking", "ForCausalLMLoss.body removed", (LOSS, "ForCausalLMLoss", "CausalLoss")),
    "the helper is renamed": ("breaking", "fixed_cross_entropy.body removed", (LOSS, "fixed_cross_entropy", "ce")),
    "the mapping leads elsewhere": ("breaking", "leads to another function", (LOSS, 'LM": ForCausalLMLoss', 'LM": Other')),
    "an entry goes": ("breaking", "LOSS_MAPPING['ForCausalLM'].value", (LOSS, '"ForCausalLM": ForCausalLMLoss, ', "")),
    "moved module": ("breaking", "removed", (LOSS, None)),
    "the setter goes": ("breaking", "loss_function.setter", (UTILS, SETTER, "")),
    "no property": ("breaking", "loss_function.property removed", (UTILS, "    @property\n", "")),
    "renamed property": ("breaking", "loss_function.body and 2 more removed", (UTILS, "loss_function(self):", "x(self):")),
    "another head": ("behaviour", "get_output_embeddings.body", (UTILS, "return self.lm_head", "return self.head")),
    "inline": ("breaking", "another way to the loss", (MODEL, CALL, "CrossEntropyLoss()(logits, labels)")),
    "new keyword of the loss": ("behaviour", "other arguments of the loss", (MODEL, "_size, **kw", "_size, shift=True, **kw")),
    "logits cast": ("behaviour", "other operations on the logits", (MODEL, "(hidden_states)\n", "(hidden_states).float()\n")),
    "in place": ("behaviour", "other operations on the logits", (MODEL, "loss = None\n", "logits /= 2\n        loss = None\n")),
    "the class goes": ("breaking", "ToyForCausalLM.exists removed", (MODEL, "ToyForCausalLM", "ToyForRanking")),
    "no Python": ("breaking", "is no valid Python", (LOSS, "def (:\n")),
    # Nothing to be alarmed about.
    "a new parameter": ("additive", "does the same without its new parameters", (LOSS, SHIFT, GUARDED_SHIFT)),
    "a new entry": ("additive", "LOSS_MAPPING['New'].value added", (LOSS, "MAPPING = {", 'MAPPING = {"New": Other, ')),
    "comments": ("cosmetic", "", (LOSS, '"""Shifts."""', '"""Shifts the labels."""  # by one')),
    "annotations": ("cosmetic", "", (MODEL, "labels=None", "labels: torch.Tensor | None = None")),
    "what a logger is told": ("cosmetic", "", (UTILS, "which loss?", "Which loss?")),
    "another class": ("cosmetic", "", (MODEL, "self.embed(input_ids)", "self.embed(input_ids) * 2")),
    "text of a docstring": ("cosmetic", "", (MODEL, "if this were code", "def not_code(:")),
}  # fmt: skip


@pytest.mark.parametrize("name", DRILLS)
def test_break_drills(name, tmp_path, module, capsys, monkeypatch) -> None:
    kind, said, (path, *edit) = DRILLS[name]
    repository = Repository(tmp_path)
    if len(edit) == 2:
        repository.replace(str(path), str(edit[0]), str(edit[1]))
    else:
        repository.write(str(path), edit[0])
    sha = repository.commit("[red]change[/]")
    (finding,) = module("contract.scan").scan(str(tmp_path), repository.start, sha)
    assert finding.commit.sha == sha
    assert finding.kind == kind, finding

    monkeypatch.setenv("LIGER_COMPAT_TRANSFORMERS_REPO", str(tmp_path))
    status = module("__main__").main(["scan", f"{repository.start}..{sha}", "--kind", "cosmetic"])
    printed = capsys.readouterr().out
    assert said in printed
    assert f"{kind:<9} {sha[:10]}" in printed
    assert "[red]change[/]" in printed, "upstream's text is no markup"
    assert status == (kind == "breaking")


def test_a_history(tmp_path: Path, module: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(tmp_path)
    repository.write("models/toy/configuration_toy.py", "x = 2\n")
    repository.commit("nothing that is relied on")
    repository.replace(LOSS, "vocab_size", "size")
    bad = repository.commit("break")
    repository.replace(LOSS, "size", "vocab_size")
    back = repository.commit("revert")
    repository.write(
        "models/new/modeling_new.py", "class NewForCausalLM(A):\n    def forward(self, labels=None):\n        pass\n"
    )
    new = repository.commit("new model")
    found = list(module("contract.scan").scan(str(tmp_path), repository.start, new))
    assert [(finding.commit.sha, finding.kind) for finding in found] == [
        (bad, "breaking"),
        (back, "breaking"),
        (new, "additive"),
    ]
    assert [change.fact for change in found[-1].changes] == ["NewForCausalLM.exists"]

    monkeypatch.setenv("LIGER_COMPAT_TRANSFORMERS_REPO", str(tmp_path))
    main = module("__main__").main
    assert main(["scan", f"{repository.start}..{new}", "--json"]) == 1
    assert [entry["commit"]["sha"] for entry in json.loads(capsys.readouterr().out)] == [bad, back, new]
    assert main(["scan", f"{new}.."]) == 0
    capsys.readouterr()
    assert main(["scan", f"{'0' * 40}..{new}"]) == 2
    assert "git log" in capsys.readouterr().err
    assert main(["scan", new]) == 2
    assert "expected A..B" in capsys.readouterr().err
    assert main(["resolve", "main"]) == 0
    assert capsys.readouterr().out.strip() == new


def test_the_contract_is_that_of_the_shim(module: Module) -> None:
    shim = module("contract.shim")
    assert set(shim._DEFINED_IN) <= shim.names()
    assert shim.imports(), "liger_compat imports something from transformers"
    for imported, name in shim.imports() - {("transformers", "PreTrainedModel")}:
        assert name in shim.relied_on(f"{imported.replace('.', '/')}.py")


def test_the_installed_transformers_keeps_the_contract(module: Module) -> None:
    """The scan sees in upstream's text what liger_compat sees in the running one."""
    facts = module("contract.facts")
    root = Path(transformers.__file__).parents[1]
    loss, utils, llama = (
        facts.of_file(path, (root / path).read_text())
        for path in (f"transformers/{LOSS}", f"transformers/{UTILS}", "transformers/models/llama/modeling_llama.py")
    )
    from liger_compat.upstream import inspect_upstream

    upstream = inspect_upstream()
    assert ("shift_labels" in loss["ForCausalLMLoss.signature"]) == upstream.takes_shift_labels
    assert ("PreTrainedModel.loss_function.setter.body" in utils) == bool(upstream.loss_settable)
    assert "self.loss_function(" in llama["LlamaForCausalLM.forward.loss"]
    assert "self.lm_head(" in llama["LlamaForCausalLM.forward.logits"]
    ast.parse(loss["ForCausalLMLoss.body"].replace("return ", ""))


def test_list(module: Module, capsys: pytest.CaptureFixture[str]) -> None:
    assert module("__main__").main(["list"]) == 0
    assert "4.40.2       floor" in capsys.readouterr().out
