"""Weights of BERT's family (Devlin et al. 2019) as ``transformers`` has them: MiniLM and other sentence encoders."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from cellrt import DefinitionError
from cellrt.cells._made_apart import making_apart
from cellrt.cells.transformer_stack import StackSizes, TransformerStack

LAYER_NAMES = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
"""Our names, and those of ``transformers``."""


@making_apart
def encoder_from_bert(state: Mapping[str, Tensor], heads: int, epsilon: float = 1e-12) -> TransformerStack:
    """Return an encoder with a copy of the weights in the state of a ``BertModel``; all tokens are of its first type.

    Raise DefinitionError if a weight is missing.
    """

    def weight(name: str) -> Tensor:
        if name not in state:
            raise DefinitionError(f"encoder_from_bert: expected a weight {name}, which is not there")
        return state[name].detach()

    words, places = weight("embeddings.word_embeddings.weight"), weight("embeddings.position_embeddings.weight")
    layers = 1 + max((int(name.split(".")[2]) for name in state if name.startswith("encoder.layer.")), default=-1)
    inner = weight("encoder.layer.0.intermediate.dense.weight").shape[0]
    sizes = StackSizes(len(words), len(places), words.shape[1], inner, layers, heads, epsilon=epsilon, norms_first=True)
    found = {
        "embedding.weight": words,
        "positions.weight": places + weight("embeddings.token_type_embeddings.weight")[0],
    }
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = weight(f"embeddings.LayerNorm.{kind}")
        for layer in range(layers):
            for ours, theirs in LAYER_NAMES.items():
                found[f"layers.{layer}.{ours}.{kind}"] = weight(f"encoder.layer.{layer}.{theirs}.{kind}")
    made = TransformerStack(sizes).to(words.dtype)
    made.load_state_dict(found)
    return made.eval()
