"""What a text-only training step passes to a model; the signature of its forward decides, and a few classes need more."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tiny import vocabulary

ROWS, COLUMNS = 2, 16


def batch_of(model: Any) -> dict[str, Any]:
    """Inputs and labels, always the same."""
    random = torch.Generator().manual_seed(0)
    parameters = inspect.signature(model.forward).parameters
    ids = torch.randint(10, max(12, min(vocabulary(model.config), 900)), (ROWS, COLUMNS), generator=random)
    batch: dict[str, Any] = {}
    if "input_ids" in parameters:
        batch["input_ids"] = ids
        if "attention_mask" in parameters:
            batch["attention_mask"] = torch.ones_like(ids)
    else:
        batch |= _main_input(model, random)
    batch["labels"] = ids.clone()
    batch["labels"][:, :3] = -100
    if "use_cache" in parameters and type(model.config).__name__ == "BltConfig":
        batch["use_cache"] = False
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    name = type(model).__name__
    if "pixel_values" in parameters and ("pixel_values" in required or name in _WITH_PICTURES):
        batch["pixel_values"] = _picture(model, random)
    return _SPECIAL[name](model, batch, random) if name in _SPECIAL else batch


def _main_input(model: Any, random: torch.Generator) -> dict[str, Tensor]:
    name, config = getattr(model, "main_input_name", "input_ids"), model.config
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        frames = 2 * getattr(config, "max_source_positions", 50)
        shape = (ROWS, bins, frames) if config.model_type == "whisper" else (ROWS, frames, bins)
    elif name == "input_values":
        shape = (ROWS, 4000)
    else:
        shape = (ROWS, 3, 32, 32)
    return {name: torch.randn(shape, generator=random)} if name in inspect.signature(model.forward).parameters else {}


def _picture(model: Any, random: torch.Generator) -> Tensor:
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    return torch.randn(ROWS, getattr(vision, "num_channels", 3) or 3, size, size, generator=random)


def _codebooks(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(10, 60, (ROWS, COLUMNS, model.config.num_codebooks), generator=random)
    return {"input_ids": ids.transpose(1, 2).reshape(-1, COLUMNS), "labels": ids}


def _few_codes(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    short = {name: value[:, : model.config.num_codebooks] for name, value in batch.items()}
    codes = short["input_ids"] % 50
    return short | {"input_ids": codes, "labels": codes.clone()}


def _embeddings(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    shape = batch.pop("input_ids").shape
    return batch | {"inputs_embeds": torch.randn(*shape, model.config.hidden_size, generator=random)}


def _boxes(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    return batch | {"bbox": torch.zeros(ROWS, COLUMNS, 4)}


def _patches(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    size = 2 + model.config.vision_config.patch_embed_hidden_size
    return batch | {"flattened_patches": torch.rand(ROWS, 9, size, generator=random)}


def _prefixed(batch: dict[str, Any], count: int, token: int) -> dict[str, Any]:
    """The batch with `count` places for a picture before the text."""
    prefix = torch.full((ROWS, count), token)
    ids = torch.cat([prefix, batch["input_ids"]], 1)
    labels = torch.cat([torch.full_like(prefix, -100), batch["labels"]], 1)
    return batch | {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def _query_former(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    config = model.config
    if "qformer_input_ids" in inspect.signature(model.forward).parameters:
        batch["qformer_input_ids"] = torch.randint(10, 100, (ROWS, 4), generator=random)
    if "Video" in type(model).__name__:
        batch["pixel_values"] = batch["pixel_values"][:, None]
    token = next(
        (t for n in ("image_token_index", "image_token_id", "video_token_index") if (t := getattr(config, n, None))), None
    )
    return batch if token is None else _prefixed(batch, config.num_query_tokens, token)


def _kosmos(model: Any, batch: dict[str, Any], random: torch.Generator) -> dict[str, Any]:
    count = model.config.latent_query_num
    batch = _prefixed(batch, count, 5)
    where = torch.zeros_like(batch["input_ids"])
    where[:, :count] = 1
    pictures = torch.randn(ROWS, count, model.config.text_config.embed_dim, generator=random)
    return batch | {"image_embeds": pictures, "image_embeds_position_mask": where}


_WITH_PICTURES = {"GitForCausalLM", "PPFormulaNetForConditionalGeneration"}
_SPECIAL: dict[str, Callable[[Any, dict[str, Any], torch.Generator], dict[str, Any]]] = {
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "CsmDepthDecoderForCausalLM": _few_codes,
    "SeamlessM4TTextToUnitForConditionalGeneration": _embeddings,
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": _embeddings,
    "UdopForConditionalGeneration": _boxes,
    "Pix2StructForConditionalGeneration": _patches,
    "Blip2ForConditionalGeneration": _query_former,
    "InstructBlipForConditionalGeneration": _query_former,
    "InstructBlipVideoForConditionalGeneration": _query_former,
    "Kosmos2ForConditionalGeneration": _kosmos,
}
