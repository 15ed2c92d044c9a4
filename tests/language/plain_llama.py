"""A tiny checkpoint of Llama's form, written file by file, for which ``transformers`` is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
LAYER = {
    "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
    **{f"self_attn.{name}_proj": (8, 8) for name in "qkvo"},
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}


def tensors() -> dict[str, torch.Tensor]:
    """Random weights by name."""
    shapes = {"model.embed_tokens": (20, 8), "model.norm": (8,), "lm_head": (20, 8)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, files: int = 1, weights: dict[str, torch.Tensor] | None = None, **changed: Any) -> Path:
    """Write the checkpoint, its weights in so many files; of the configuration what is None is left out."""
    config = {key: value for key, value in {**CONFIG, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    weights = tensors() if weights is None else weights
    if files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    index = {name: f"model-{1 + number % files}.safetensors" for number, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: weights[name] for name in names if index[name] == file}, folder / file)
    write_index(folder, index)
    return folder


def write_index(folder: Path, index: Any) -> None:
    """Write an index of the names of files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
