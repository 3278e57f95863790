"""Which label belongs to which logits: as the release has it, wrong or right."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import liger_compat
from compare import assert_same_as_stock
from families import VOCABULARY, build
from liger_compat.upstream import inspect_upstream


def test_r45_labels_shifted_by_the_caller() -> None:
    upstream = inspect_upstream()
    logits = torch.randn(1, 8, 11)
    labels = torch.randint(0, 11, (1, 8))
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    whole = liger_compat.for_causal_lm_loss(logits, labels, 11)
    torch.testing.assert_close(liger_compat.for_causal_lm_loss(logits, None, 11, shift_labels=shifted), whole)
    # Sequence parallelism: shards with labels that were shifted before the cut, weighted by what they count.
    halves = [
        liger_compat.for_causal_lm_loss(logits[:, part], None, 11, shift_labels=shifted[:, part])
        for part in (slice(4), slice(4, 8))
    ]
    torch.testing.assert_close((halves[0] * 4 + halves[1] * 3) / 7, whole)
    # On a model: honoured from the release that has the argument on, ignored before, as stock does.
    if upstream.causal_lm_loss is not None:
        found = liger_compat.patch(build("llama")).loss_function(logits, labels, 11, shift_labels=labels)
        torch.testing.assert_close(found, upstream.causal_lm_loss(logits, labels, 11, shift_labels=labels))


def test_r45_only_shifted_labels_as_stock() -> None:
    """Heads ask whether there are labels: with shift_labels alone they return no loss."""
    if not inspect_upstream().takes_shift_labels:
        pytest.skip("na: this transformers has no shift_labels")
    ids = torch.randint(3, VOCABULARY, (1, 8))
    assert build("llama")(input_ids=ids, shift_labels=ids).loss is None
    assert liger_compat.patch(build("llama"))(input_ids=ids, shift_labels=ids).loss is None


def vision_encoder_decoder() -> nn.Module:
    encoder = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=4
    )
    decoder = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=32, add_cross_attention=True, is_decoder=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    torch.manual_seed(0)
    return transformers.VisionEncoderDecoderModel(config=config).train()


def test_r49_history_is_not_monotonic() -> None:
    """Inline, then the loss API with a second shift, then inline again: whatever the installed release does."""
    stock, model = vision_encoder_decoder(), vision_encoder_decoder()
    labels = torch.randint(3, VOCABULARY, (2, 6))
    liger_compat.patch(model)
    assert_same_as_stock(model, stock, pixel_values=torch.randn(2, 3, 8, 8), labels=labels)
    assert liger_compat.report(model).counters.kernel_losses == 1


def test_r51_rows_that_were_flattened_before_the_loss() -> None:
    """Two-dimensional logits and one-dimensional labels, by position: the shift crosses row ends, as upstream's does."""
    logits, labels = torch.randn(10, 11), torch.randint(0, 11, (10,))
    expected = F.cross_entropy(logits[:-1], labels[1:])
    torch.testing.assert_close(liger_compat.for_causal_lm_loss(logits, labels, 11), expected)
    upstream = inspect_upstream()
    if upstream.causal_lm_loss is not None:
        model = liger_compat.patch(build("llama"))
        torch.testing.assert_close(
            model.loss_function(logits, labels, vocab_size=11), upstream.causal_lm_loss(logits, labels, 11)
        )
