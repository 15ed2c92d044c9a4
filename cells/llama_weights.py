"""Weights of Llama's family as others have them: modules of ``transformers``, and GGUF files of llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cellrt import DefinitionError
from cellrt.cells._made_apart import made_apart
from cellrt.cells.llama import Llama, LlamaSizes

NAMES = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}
LAYER_NAMES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention.query": ("self_attn.q_proj", "attn_q"),
    "attention.key": ("self_attn.k_proj", "attn_k"),
    "attention.value": ("self_attn.v_proj", "attn_v"),
    "attention.out": ("self_attn.o_proj", "attn_output"),
    "attention.query_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.key_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
"""Our names, those of ``transformers``, and those of GGUF."""
TRANSFORMERS, GGUF = 0, 1


def llama_from_transformers(state: Mapping[str, Tensor], sizes: LlamaSizes) -> Llama:
    """Return a model with a copy of the weights in the state of ``LlamaForCausalLM``, or of a Mistral or Qwen of that
    form.

    Raise DefinitionError if a weight is missing.
    """
    return _load(state, sizes, TRANSFORMERS)


def llama_from_gguf(path: str | os.PathLike[str]) -> Llama:
    """Return the model in a GGUF file of the architecture "llama", as float32 whatever the file has; needs the package
    ``gguf``.

    Raise DefinitionError for another architecture, for scaled rotary positions and if a weight is missing.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    sizes = _sizes(reader)
    state = {one.name: torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).copy()) for one in reader.tensors}
    for name in state:
        if ".attn_q." in name or ".attn_k." in name:
            state[name] = neighbours_to_halves(state[name], sizes.attention.size)
    return _load(state, replace(sizes, is_tied="output.weight" not in state), GGUF)


def neighbours_to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Return the rows of a query's or key's projection, in which neighbours make a rotary pair, in the order of
    ``RotaryPositions``.
    """
    halves: Tensor = weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return halves


def _sizes(reader: Any) -> LlamaSizes:
    fields = reader.fields

    def value(name: str, *others: Any) -> Any:
        if name not in fields and others:
            return others[0]
        if name not in fields:
            raise DefinitionError(f"llama_from_gguf: expected {name} in the file")
        return fields[name].contents()

    architecture = value("general.architecture")
    scaling = value("llama.rope.scaling.type", "none")
    if architecture != "llama" or scaling != "none" or any(one.name == "rope_freqs.weight" for one in reader.tensors):
        raise DefinitionError(
            "llama_from_gguf: expected the architecture llama and rotary positions without scaling, got "
            f"{architecture} and {scaling}"
        )
    heads = value("llama.attention.head_count")
    embedding = next(one for one in reader.tensors if one.name == "token_embd.weight")
    return LlamaSizes(
        vocabulary=int(embedding.shape[1]),
        hidden=value("llama.embedding_length"),
        inner=value("llama.feed_forward_length"),
        layers=value("llama.block_count"),
        heads=heads,
        kv_heads=value("llama.attention.head_count_kv", heads),
        head_dim=value("llama.attention.key_length", None),
        epsilon=value("llama.attention.layer_norm_rms_epsilon"),
        rotary_base=value("llama.rope.freq_base", 10_000.0),
    )


def _load(state: Mapping[str, Tensor], sizes: LlamaSizes, whose: int) -> Llama:
    with torch.device("meta"):
        wanted = Llama(sizes).state_dict()
    found = {}
    for name in wanted:
        theirs = their_name("embedding.weight" if name == "head.weight" and sizes.is_tied else name, whose)
        if theirs not in state:
            raise DefinitionError(f"Llama: expected a weight {theirs}, which is not there")
        found[name] = state[theirs].detach()
    with made_apart():
        made = Llama(sizes).to(found["embedding.weight"].dtype)
        made.load_state_dict(found)
    return made.eval()


def their_name(name: str, whose: int) -> str:
    """Return the name that ``transformers`` or GGUF has for a weight of ours."""
    part, _, kind = name.rpartition(".")
    if not part.startswith("layers."):
        return f"{NAMES[part][whose]}.{kind}"
    _, number, part = part.split(".", 2)
    return f"{('model.layers', 'blk')[whose]}.{number}.{LAYER_NAMES[part][whose]}.{kind}"
