"""Ready-made unfolders: one shape of cell graph a file."""

from cellrt.unfolders.attention import embed, transduce, transduce_with_beams
from cellrt.unfolders.beam import beam_search
from cellrt.unfolders.completion import complete
from cellrt.unfolders.dag import dag
from cellrt.unfolders.encoder_decoder import encoder_decoder
from cellrt.unfolders.generation import generate
from cellrt.unfolders.recurrent import Layer, Stack, from_torch
from cellrt.unfolders.sequences import chain
from cellrt.unfolders.trees import conllu_tree, parent_tree, penn_tree, tree

__all__ = [
    "Layer",
    "Stack",
    "beam_search",
    "chain",
    "complete",
    "conllu_tree",
    "dag",
    "embed",
    "encoder_decoder",
    "from_torch",
    "generate",
    "parent_tree",
    "penn_tree",
    "transduce",
    "transduce_with_beams",
    "tree",
]
