"""Options of an answer: its length, its end, and how each token is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from cellrt.errors import RequestError
from cellrt.language.grammar import Grammar, schema_of
from cellrt.language.language import Language
from cellrt.language.masks import Mask
from cellrt.numbers import as_integer

MOST_UNSAID = 4096
"""The most tokens of an answer without ``max_tokens``, where the context has room for more."""
OF_DRAWING = ("temperature", "top_k", "top_p", "min_p")
"""Options without effect where the likeliest token is taken."""
INTEGERS = ("max_tokens", "min_tokens", "seed", "logprobs")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_tokens": ([], ()),
    "logprobs": (0,),
    "seed": (),
}
"""Values that change nothing; the model does not get them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an answer. None: the value in the checkpoint's generation_config.json, and else the greedy answer.

    Attributes:
        max_tokens: the most tokens; None: as many as the context has room for, up to 4,096.
        stop: texts before which the answer ends, or one text.
        temperature: 0 takes the likeliest token; else tokens are drawn.
        top_k, top_p, min_p: limit the tokens that may be drawn.
        repetition_penalty, presence_penalty, frequency_penalty: penalties of tokens that occurred before.
        logit_bias: numbers to add to the logits of tokens.
        min_tokens: the least tokens before the answer may end by itself, or by a stop string.
        ignore_eos: whether the tokens that end a text are tokens like others.
        stop_tokens: further tokens that end the answer.
        seed: the same one draws the same tokens; of several answers each has the next. None: a random one.
        logprobs: the number of the likeliest tokens to return beside each that was chosen.
        mask: a function that takes the tokens of the answer so far, and returns those that may follow: a list of
            them, bool ``[vocabulary]``, or None for all. No answer ends before one of its end tokens is allowed.
            An error that it raises is that of this answer alone. Several answers share it.
        response_format: as OpenAI's: ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema":
            {"schema": ...}}``. The package ``llguidance`` finds what may follow.

    Raises RequestError for a field of another type.
    """

    max_tokens: int | None = None
    stop: Sequence[str] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: Sequence[int] = ()
    seed: int | None = None
    logprobs: int = 0
    mask: Mask | Grammar | None = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in INTEGERS:
            value = getattr(self, name)
            if as_integer(value) is None and (value is not None or name == "min_tokens"):
                raise RequestError(f"{name}: expected an integer, got {value!r:.80}")
        if not isinstance(self.stop, Sequence):
            raise RequestError(f"stop: expected a list of texts, got {self.stop!r:.80}")
        tokens = self.stop_tokens
        if not isinstance(tokens, Sequence) or not all(as_integer(token) is not None for token in tokens):
            raise RequestError(f"stop_tokens: expected a list of tokens, got {tokens!r:.80}")

    def prepared(self, language: Language) -> Self:
        """Return the options with the grammar of ``response_format`` as the mask, which may take a second.

        Raise RequestError for a mask or format that the model does not support.
        """
        schema = None if self.response_format is None else schema_of(self.response_format)
        if self.mask is not None and not (callable(self.mask) or isinstance(self.mask, Grammar)):
            raise RequestError(f"mask: expected a function, got {self.mask!r:.80}")
        if (schema is not None or self.mask is not None) and language.kind != "decoder":
            raise RequestError(f"model {language.name!r}: no mask and no response_format, only a decoder has those")
        if schema is None:
            return replace(self, response_format=None)
        if self.mask is not None:
            raise RequestError("response_format: expected no mask beside it")
        if self.ignore_eos:
            raise RequestError("response_format: expected no ignore_eos beside it: the form ends the answer")
        return replace(self, response_format=None, mask=language.grammars.of(schema))

    def ends_in(self, language: Language) -> frozenset[int]:
        """Return the tokens of a model that end an answer."""
        return frozenset((*(() if self.ignore_eos else language.end_tokens), *self.stop_tokens))

    def new_mask(self) -> Mask | None:
        """Return the mask of one more answer, if there is one."""
        return self.mask.begin() if isinstance(self.mask, Grammar) else self.mask

    def request(self, language: Language, tokens: Sequence[int], room: int, number: int = 0) -> dict[str, Any]:
        """Return the request that the model's unfolder takes for a prompt.

        Args:
            language: the model's language.
            tokens: the tokens of the prompt.
            room: the most tokens that the answer may have.
            number: that of the answer, among several to one prompt.

        Raise RequestError for more tokens than ``room``, and for an encoder.
        """
        most = min(room, MOST_UNSAID) if self.max_tokens is None else self.max_tokens
        if not 1 <= most <= room:
            raise RequestError(f"max_tokens: expected 1 to {room}, which the context has room for, got {most}")
        if language.kind == "encoder":
            raise RequestError(f"model {language.name!r} makes embeddings, and no texts")
        if language.kind == "encoder-decoder":
            if unknown := self._chosen(language, number):
                raise RequestError(
                    f"model {language.name!r} gives the likeliest tokens alone: it knows no {list(unknown)}"
                )
            return {"source": list(tokens), "max_steps": most}
        return {"prompt": list(tokens), "max_tokens": most, **self._chosen(language, number)}

    def _chosen(self, language: Language, number: int) -> dict[str, Any]:
        """Return the options of how tokens are chosen, without those that change nothing."""
        chosen = {name: getattr(self, name) for name in NEUTRAL}
        for name, value in self._of_checkpoint(language).items():
            if chosen[name] is None:
                chosen[name] = value
        if self.seed is not None:
            chosen["seed"] = self.seed + number
        if not chosen["temperature"]:
            chosen = {name: value for name, value in chosen.items() if name not in (*OF_DRAWING, "seed")}
        return {name: value for name, value in chosen.items() if value is not None and value not in NEUTRAL[name]}

    def _of_checkpoint(self, language: Language) -> dict[str, Any]:
        """Return the options of how tokens are chosen in the checkpoint's generation_config.json."""
        said = language.generation
        found = {"repetition_penalty": said.get("repetition_penalty")}
        if said.get("do_sample"):
            found |= {"temperature": 1.0} | {name: said[name] for name in OF_DRAWING if said.get(name) is not None}
        return found
