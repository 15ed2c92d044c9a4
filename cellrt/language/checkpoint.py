"""A checkpoint that was read: weights, tokenizer and template of a model, whatever files they came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cellrt.graph.unfolder import Unfolder


@dataclass(frozen=True)
class Checkpoint:
    """A model as a file or folder has it, ready to be served.

    Attributes:
        name: of the folder or file, or what the caller says.
        kind: whether it goes on with a text, makes embeddings, or makes a text of another.
        architecture: as the files call it: "LlamaForCausalLM", "llama".
        vocabulary: the number of tokens.
        context: the most tokens of a prompt and its answer.
        end_tokens: those that end a text.
        start_token: of an encoder-decoder the decoder's first; of a decoder the one that begins texts, if any.
        make: from a name and options of ``complete``, ``embed`` or ``transduce`` to the model to register.
        tokenizer: a tokenizer.json (of a GGUF file: converted), for ``tokenizers.Tokenizer.from_buffer``.
        chat_template: in jinja2's language.
        special_tokens: bos_token, eos_token and others, for the template.
        generation: generation_config.json, as it is.
        num_bytes: of the weights as they lie in memory.
    """

    name: str
    kind: Literal["decoder", "encoder", "encoder-decoder"]
    architecture: str
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]
    start_token: int | None
    make: Callable[..., Unfolder]
    tokenizer: bytes | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
    generation: Mapping[str, object]
    num_bytes: int
