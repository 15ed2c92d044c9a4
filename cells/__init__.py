"""Ready-made cells: one family a file, each with its equations and the paper they come from."""

from cellrt.cells.attention import AdditiveAttention, AttentionKeys, DotAttention
from cellrt.cells.attention_decoder import AttentionGRUDecoder, AttentionLSTMDecoder
from cellrt.cells.beam import BeamEnd, BeamStart, BeamStep
from cellrt.cells.bridge import Bridge
from cellrt.cells.cached_attention import (
    append_key_values,
    cached_attention,
    cross_attention,
    key_values,
    span_attention,
)
from cellrt.cells.child_sum_tree_lstm import ChildSumTreeLSTMCell, EmbeddingChildSumTreeLSTMCell
from cellrt.cells.decoder import EmbeddingGRUDecoder, EmbeddingLSTMDecoder, SamplingDecoder
from cellrt.cells.gru import (
    EmbeddingGRUCell,
    GRUCell,
    GRUInput,
    GRURecurrent,
)
from cellrt.cells.language_models import (
    GreedyLanguageModel,
    LayeredModel,
    SamplingLanguageModel,
    language_model,
    layered_language_model,
)
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.lstm import (
    EmbeddingLSTMCell,
    LSTMCell,
    LSTMInput,
    LSTMRecurrent,
)
from cellrt.cells.output import Argmax, Projection, ProjectionArgmax, Sample
from cellrt.cells.sampling import Sampler, SamplingLimits
from cellrt.cells.stacked import BothInputs, Joined, JoinedCell
from cellrt.cells.transformer_beams import transformer_beam_step
from cellrt.cells.transformer_stack import StackSizes, TransformerStack, encoder_decoder_cells, sentence_encoder
from cellrt.cells.tree_lstm import BinaryTreeLSTMCell, EmbeddingTreeLSTMLeaf, NaryTreeLSTMCell, TreeLSTMLeaf

__all__ = [
    "AdditiveAttention",
    "Argmax",
    "AttentionGRUDecoder",
    "AttentionKeys",
    "AttentionLSTMDecoder",
    "BeamEnd",
    "BeamStart",
    "BeamStep",
    "BinaryTreeLSTMCell",
    "BothInputs",
    "Bridge",
    "ChildSumTreeLSTMCell",
    "DotAttention",
    "EmbeddingChildSumTreeLSTMCell",
    "EmbeddingGRUCell",
    "EmbeddingGRUDecoder",
    "EmbeddingLSTMCell",
    "EmbeddingLSTMDecoder",
    "EmbeddingTreeLSTMLeaf",
    "GRUCell",
    "GRUInput",
    "GRURecurrent",
    "GreedyLanguageModel",
    "Joined",
    "JoinedCell",
    "LSTMCell",
    "LSTMInput",
    "LSTMRecurrent",
    "LayeredModel",
    "Llama",
    "LlamaSizes",
    "NaryTreeLSTMCell",
    "Projection",
    "ProjectionArgmax",
    "Sample",
    "Sampler",
    "SamplingDecoder",
    "SamplingLanguageModel",
    "SamplingLimits",
    "StackSizes",
    "TransformerStack",
    "TreeLSTMLeaf",
    "append_key_values",
    "cached_attention",
    "cross_attention",
    "encoder_decoder_cells",
    "key_values",
    "language_model",
    "layered_language_model",
    "sentence_encoder",
    "span_attention",
    "transformer_beam_step",
]
