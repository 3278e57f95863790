"""A toy transformers in a git repository, with a history of changes."""

import subprocess
from pathlib import Path

LOSS = '''
def fixed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index)
    return loss


def ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    """Shifts."""
    labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
    shift_labels = labels[..., 1:].contiguous()
    return fixed_cross_entropy(logits, shift_labels, num_items_in_batch, ignore_index, **kwargs)


LOSS_MAPPING = {"ForCausalLM": ForCausalLMLoss, "ForMaskedLM": ForMaskedLMLoss}
'''

MODELING_UTILS = """
class EmbeddingAccessMixin:
    def get_output_embeddings(self):
        return self.lm_head


class PreTrainedModel(nn.Module):
    @property
    def loss_function(self):
        logger.warning_once("which loss?")
        return LOSS_MAPPING[self.loss_type]

    @loss_function.setter
    def loss_function(self, value):
        self._loss_function = value
"""

MODEL = '''
class ToyModel(ToyPreTrainedModel):
    def forward(self, input_ids):
        return self.embed(input_ids)


@auto_docstring
class ToyForCausalLM(
    ToyPreTrainedModel,
    GenerationMixin,
):
    def forward(self, input_ids: torch.LongTensor = None, labels=None, cache_position=None, **kwargs):
        r"""
Text at the left margin.
        """
        hidden_states = self.model(input_ids)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


TOY_DOCSTRING = """
if this were code
"""
'''

FILES = {
    "loss/loss_utils.py": LOSS,
    "modeling_utils.py": MODELING_UTILS,
    "models/toy/modeling_toy.py": MODEL,
    "models/toy/configuration_toy.py": "x = 1\n",
}


class Repository:
    """The repository, and the commit that it is at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._git("init", "--quiet", "--initial-branch=main")
        for path, text in FILES.items():
            self.write(path, text)
        self.start = self.commit("start")

    def write(self, path: str, text: str | None) -> None:
        """Gives a file below src/transformers another text; None removes it."""
        file = self.folder / "src" / "transformers" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            file.unlink()
        else:
            file.write_text(text)

    def replace(self, path: str, old: str, new: str) -> None:
        """Changes a part of a file."""
        text = (self.folder / "src" / "transformers" / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def commit(self, subject: str) -> str:
        """Commits everything; returns the id."""
        self._git("add", "--all")
        self._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", subject)
        return self._git("rev-parse", "HEAD").strip()

    def _git(self, *args: str) -> str:
        command = ["git", "-C", str(self.folder), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
