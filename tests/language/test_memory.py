"""What weights take in memory, where the system says how much a process has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.language import memory

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
"""The sizes of SmolLM2-135M."""
TINY = {**SMOLLM2, "vocab_size": 100, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 3}
"""Hardly any weights, and keys and values of the same pages, which are no weights."""
SCRIPT = """
import sys
from pathlib import Path
import torch
import cellrt
from cellrt.language.checkpoints import read_checkpoint
from tests.language.memory import own_bytes, trim

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
with cellrt.Engine(page_bytes=1 << 20, workers=1) as engine:
    for name in ("tiny", "large"):
        trim()
        before, checkpoint = own_bytes(), read_checkpoint(folder / name, dtype=dtype)
        engine.register(checkpoint.make(name, max_tokens=4))
        engine.submit(name, [1, 2, 3]).result()
        print(own_bytes() - before, checkpoint.num_bytes)
"""


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stored", "served"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "int8"),
        ("bfloat16", "int8"),
    ],
)
def test_weights_are_in_memory_once(stored: str, served: str, tmp_path: Path) -> None:
    """The first model of a process: packed weights counted, and what is tried and compiled for its sizes; all that it
    has for itself beyond an engine that serves a model of hardly any weights."""
    if not memory.can_tell():
        pytest.skip("needs /proc")
    for name, sizes in {"tiny": TINY, "large": SMOLLM2}.items():
        saved(tmp_path / name, sizes, getattr(torch, stored))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), served]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout.splitlines()
    grown, num_bytes = map(int, lines[-1].split())
    print(f"{stored} served in {served}: {grown / num_bytes:.3f} of {num_bytes} bytes")
    assert grown < 1.2 * num_bytes
