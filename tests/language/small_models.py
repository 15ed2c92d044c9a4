"""Small random models of ``transformers``, saved as its checkpoints are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 60
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 24, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 50, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 5,
    "n_groups": 2, "chunk_size": 8, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "SmolLM": (
        "LlamaForCausalLM",
        {**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "Llama 3": ("LlamaForCausalLM", {**SIZES, "rope_parameters": LLAMA3, "eos_token_id": [2, 5]}),
    "Mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 7}),
    "Qwen 2": ("Qwen2ForCausalLM", {**SIZES, "rope_parameters": YARN}),
    "Qwen 3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "GPT-2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "Mamba 2": ("Mamba2ForCausalLM", MAMBA2),
    "T5": ("T5ForConditionalGeneration", T5),
    "T5 1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "BERT": ("BertModel", {**SIZES, "type_vocab_size": 3}),
}
"""Architectures, and what their configurations say."""


def saved(name: str, folder: Path, **options: Any) -> Any:
    """A model of that name, saved in a folder."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    kind = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    model = kind(kind.config_class(**MODELS[name][1])).eval()
    with torch.no_grad():
        for weight in model.parameters():  # so that biases and norms play a part
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder, **options)
    return model
