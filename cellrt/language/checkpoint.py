"""The description of a model in a checkpoint, with the function that makes the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cellrt import Unfolder

Kind = Literal["decoder", "encoder", "encoder-decoder"]


@dataclass(frozen=True)
class Checkpoint:
    """A model as a folder or file has it, ready to be served.

    Attributes:
        name: that of the folder or file, or the one that the caller gave.
        kind: the kind of model: a decoder is served by ``complete``, an encoder by ``embed``, an encoder-decoder by
            ``transduce``.
        architecture: as the file names it, such as "LlamaForCausalLM" or "llama".
        vocabulary: the number of tokens in the vocabulary.
        context: the most tokens of a prompt and its answer together; of an encoder, of a text.
        end_tokens: the tokens that end a text.
        start_token: a decoder's first token, or that of an encoder-decoder's decoder; None if there is none.
        make: ``make(name, **options)`` -> the model to register. Options are those of the cells (``page_size``,
            ``max_batch``, ``max_batch_rows``) and of ``complete``, ``embed`` or ``transduce``. Weights are read when it
            is first called; calls with the same options for the cells share them.
        tokenizer: the bytes that ``tokenizers.Tokenizer.from_buffer`` takes; None if there is no tokenizer.
        chat_template: a template of Jinja 2 for conversations.
        special_tokens: texts by their names, such as "bos_token", for the template.
        generation: the content of generation_config.json.
        num_bytes: the bytes of the weights as they lie in memory, each counted once.
    """

    name: str
    kind: Kind
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
