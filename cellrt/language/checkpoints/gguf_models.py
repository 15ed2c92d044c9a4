"""Models of Llama's form in GGUF files: Llama, SmolLM, Mistral, Qwen 2 and 3."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cellrt import DefinitionError
from cellrt.cells.llama import LlamaSizes
from cellrt.cells.llama_weights import GGUF, neighbours_to_halves
from cellrt.cells.positions import LinearScaling, Scaling, YarnScaling
from cellrt.definition.resting import set_aside
from cellrt.language.checkpoints.config import MOST_TOKENS, Config
from cellrt.language.checkpoints.found import Found
from cellrt.language.checkpoints.gguf_file import GgufFile
from cellrt.language.checkpoints.llama import of_sizes
from cellrt.language.checkpoints.weights import Stored, Weights

ARCHITECTURES = "llama", "qwen2", "qwen3"
FACTORS = "rope_freqs.weight"


class Factors(NamedTuple):
    """A rotary scaling that divides each frequency by a factor of its own, as files of Llama 3.1 have it."""

    factors: tuple[float, ...]
    amplitude: float = 1.0

    @property
    def factor(self) -> float:
        """The largest of the factors."""
        return max(self.factors)

    def kept(self, frequencies: Tensor, base: float) -> Tensor:
        """Return the part of each frequency that stays unscaled, so that each is divided by its own factor."""
        if self.factor == 1.0:
            return torch.ones_like(frequencies)
        return (1 / torch.tensor(self.factors) - 1 / self.factor) / (1 - 1 / self.factor)


def of_gguf(where: str, file: GgufFile) -> Found:
    """Return the description of the model in a file.

    Raise DefinitionError for another architecture, and as for folders.
    """
    config = Config(where, file.fields)
    config.text("general.architecture")
    name = config.expect("general.architecture", *ARCHITECTURES)
    weights = Weights(where, file.tensors)
    own = Config(f"{where}, {name}", _within(file, name))
    heads = own.count("attention.head_count", most=1 << 14)
    vocabulary, hidden = _of_two(weights, "token_embd.weight")
    if own.count("embedding_length") != hidden:
        raise DefinitionError(f"{own.where}: expected embedding_length {hidden}, that of token_embd.weight")
    head_dim = own.count("attention.key_length", most=1 << 14) if "attention.key_length" in own else None
    size = hidden // heads if head_dim is None else head_dim
    own.expect("rope.dimension_count", size)
    own.expect("attention.value_length", size)
    if name == "llama":
        weights = Weights(where, {key: _in_halves(key, each, size) for key, each in file.tensors.items()})
    sizes = LlamaSizes(
        vocabulary=vocabulary,
        hidden=hidden,
        inner=own.count("feed_forward_length"),
        layers=own.count("block_count", most=len(weights)),
        heads=heads,
        kv_heads=own.count("attention.head_count_kv", heads, most=heads),
        head_dim=head_dim,
        epsilon=own.number("attention.layer_norm_rms_epsilon"),
        rotary_base=own.number("rope.freq_base", 10_000.0),
        scaling=_scaling_of(own, weights, size),
        window=own.count("attention.sliding_window", 0, least=0, most=MOST_TOKENS),
        is_tied="output.weight" not in weights,
        has_bias=name == "qwen2",
        norms_heads=name == "qwen3",
    )
    return of_sizes(sizes, own.count("context_length", most=MOST_TOKENS), weights, GGUF)


def _within(file: GgufFile, name: str) -> dict[str, object]:
    return {key.removeprefix(f"{name}."): value for key, value in file.fields.items() if key.startswith(f"{name}.")}


def _of_two(weights: Weights, name: str) -> tuple[int, int]:
    shape = weights.shape_of(name)
    if len(shape) != 2:
        raise DefinitionError(f"{weights.where}: expected the weight {name} with two dimensions, got {list(shape)}")
    return shape[0], shape[1]


def _scaling_of(own: Config, weights: Weights, size: int) -> Scaling | None:
    kind = own.expect("rope.scaling.type", "none", "linear", "yarn")
    if FACTORS in weights:
        weights.expect(FACTORS, [size // 2])
        factors = weights.read(FACTORS, torch.float32).tolist()
        if kind != "none" or not all(math.isfinite(one) and one >= 1 for one in factors):
            raise DefinitionError(f"{weights.where}: expected numbers from 1 in {FACTORS}, and no other scaling")
        return Factors(tuple(factors))
    if kind == "none":
        return None
    factor = own.number("rope.scaling.factor", most=1e6)
    if kind == "linear":
        return LinearScaling(factor)
    return YarnScaling(factor, own.count("rope.scaling.original_context_length", most=MOST_TOKENS))


def _in_halves(name: str, stored: Stored, head_dim: int) -> Stored:
    """Return projections of queries and keys with rotary pairs in halves; Llama's own files have them as neighbours."""
    if not name.endswith((".attn_q.weight", ".attn_k.weight")):
        return stored
    return stored._replace(read=lambda: set_aside(neighbours_to_halves(stored.read(), head_dim)))
