"""Small random models of many families, by name, on whatever transformers is installed. Nothing is downloaded."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

VOCABULARY = 384
"""Room for every byte, and no power of two."""

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_PROPHETNET = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "encoder_ffn_dim": 128,
    "num_encoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": 128,
    "ngram": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
}
_QWEN_VL = {
    **_DECODER,
    "vision_config": _QWEN_VISION,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    **{f"{name}_token_id": 300 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end", "vision"))},
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

# Name -> (class, what it has over `_DECODER`, or all of its configuration). Classes that the release lacks are left out.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _DECODER),
    "llama_tied": ("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", _DECODER),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, **_EXPERTS}),
    "gemma2": ("Gemma2ForCausalLM", {**_DECODER, "head_dim": 16, "sliding_window": 32, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", {**_DECODER, "head_dim": 16, "sliding_window": 32}),
    "cohere": ("CohereForCausalLM", {**_DECODER, "logit_scale": 0.25}),
    "granite": ("GraniteForCausalLM", {**_DECODER, "logits_scaling": 4.0}),
    "phi3": ("Phi3ForCausalLM", _DECODER),
    "olmo2": ("Olmo2ForCausalLM", _DECODER),
    "gpt_oss": ("GptOssForCausalLM", {**_DECODER, **_EXPERTS, "head_dim": 16, "sliding_window": 32}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "opt": ("OPTForCausalLM", {**_DECODER, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "bert": ("BertForMaskedLM", _DECODER),
}  # fmt: skip

# Trained for a step, not to convergence: their text side is one of the above, or not every mode serves them.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_DECODER},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
        },
    ),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _QWEN_VL),
    "prophetnet": ("ProphetNetForConditionalGeneration", _PROPHETNET),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _QWEN_VL),
}
_ALL = FAMILIES | OTHERS


def available(*wanted: str) -> list[Any]:
    """The families, or those of `wanted`, that the installed transformers has; if it has none, one that is skipped."""
    found = [name for name in wanted or FAMILIES if hasattr(transformers, _ALL[name][0])]
    missing = pytest.mark.skip(reason=f"na: this transformers has none of {', '.join(wanted)}")
    return found or [pytest.param(wanted[0], marks=missing)]


def upstream_problem(name: str) -> str | None:
    """Why upstream cannot make even the default configuration of a family, or None. Seen on its main branch."""
    cls = getattr(transformers, _ALL[name][0])
    try:
        cls.config_class()
    except Exception as error:
        return f"{cls.config_class.__name__}() fails by itself: {type(error).__name__}: {error}".replace("\n", " ")
    return None


def build(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """The same random model whenever it is asked for, without dropout, in train mode."""
    cls = getattr(transformers, _ALL[name][0])
    config = cls.config_class(**{**_ALL[name][1], **options})
    for attribute in [key for key in vars(config) if key.endswith(("dropout", "_pdrop", "dropout_rate", "dropout_prob"))]:
        setattr(config, attribute, 0.0)
    if cls.__name__.startswith(("T5", "Bart")):
        for key in ("decoder_start_token_id", "pad_token_id"):  # recent releases keep these elsewhere
            setattr(config, key, {**_ALL[name][1], **options}[key])
    torch.manual_seed(0)
    return cls(config).to(dtype).train()  # type: ignore[no-any-return]


def inputs(model: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a training step on `rows` of tokens passes: the last row is padded, and every prompt is ignored."""
    ids = rows.to(next(model.parameters()).device).clone()
    mask = torch.ones_like(ids)
    mask[-1, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
