"""What weights take in memory, where the system says how much a process has."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import cellrt
from cellrt.language.checkpoints import read_checkpoint

def rss():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS"].split()[0])

def saved(folder, layers, dtype):
    folder.mkdir()
    sizes = {"q": 512, "k": 256, "v": 256, "o": 512}
    shapes = {"model.embed_tokens": (4000, 512), "model.norm": (512,), "lm_head": (4000, 512)}
    for number in range(layers):
        own = {f"self_attn.{name}_proj": (size, 512) for name, size in sizes.items()}
        own |= {"mlp.gate_proj": (1536, 512), "mlp.up_proj": (1536, 512), "mlp.down_proj": (512, 1536)}
        own |= {"input_layernorm": (512,), "post_attention_layernorm": (512,)}
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    weights = {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1536,
              "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
              "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return read_checkpoint(folder)

with cellrt.Engine(page_bytes=1 << 20, workers=1) as engine:
    for name, layers in ("first", 16), ("float32", 16), ("bfloat16", 16):  # the first brings what all have in common
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        checkpoint, before = saved(Path(sys.argv[1]) / name, layers, dtype), rss()
        engine.register(checkpoint.make(name, max_tokens=4))
        engine.submit(name, [1, 2, 3]).result()
        print(name, (rss() - before) / checkpoint.num_bytes)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_are_in_memory_once(tmp_path):
    """Packed ones and pages counted. A model of the same sizes was served before: what is tried and compiled for these
    sizes, once, is not of the weights."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout.splitlines()
    found = {name: float(share) for name, share in map(str.split, lines)}
    assert found["float32"] < 1.2 and found["bfloat16"] < 1.2, found
