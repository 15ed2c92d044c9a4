"""What memory a process has for itself, and checkpoints to see it with."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
"""The sizes of SmolLM2-135M."""
TINY = {**SMOLLM2, "vocab_size": 100, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 3}
"""Hardly any weights, and keys and values of the same pages, which are no weights."""


def can_tell() -> bool:
    """Whether the system says so."""
    return Path("/proc/self/smaps").exists()


def trim() -> None:
    """Give back what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def own_bytes(process: int | str = "self") -> int:
    """Bytes in memory, without pages of libraries and other code that are as they are in their files: all processes
    share those. With pages of weights' files, and of files without a name."""
    total, is_code = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            path = line.split(maxsplit=5)[5:]
            is_code = bool(path) and path[0].startswith("/") and not _is_of_weights(path[0])
        elif key == ("Anonymous:" if is_code else "Rss:"):
            total += 1024 * int(rest.split()[0])
    return total


def files_of(process: int) -> set[str]:
    """The names of the files that a process has mapped."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {path for line in lines for path in line.split(maxsplit=5)[5:]}


def saved(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> Path:
    """A checkpoint of random weights, the head among the embeddings as SmolLM2 has it."""
    folder.mkdir()
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    wide, narrow = (64 * sizes[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    layer = {f"self_attn.{name}_proj": (size, hidden) for name, size in {"q": wide, "k": narrow, "v": narrow}.items()}
    layer |= {"self_attn.o_proj": (hidden, wide), "mlp.down_proj": (hidden, inner)}
    layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
    shapes: dict[str, Any] = {"model.embed_tokens": (sizes["vocab_size"], hidden), "model.norm": (hidden,)}
    for number in range(sizes["num_hidden_layers"]):
        own = layer | dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    weights = {f"{name}.weight": (0.02 * torch.randn(shape)).to(dtype) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    return folder


def _is_of_weights(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", "(deleted)"))
