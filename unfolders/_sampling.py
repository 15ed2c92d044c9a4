"""Checks the sampling parameters of a request to a language model, and turns them into inputs of the model's cell."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellrt import Cell, DefinitionError, RequestError
from cellrt.cells import _sampling as places
from cellrt.numbers import as_integer, as_real

HIGHEST_SEED = (1 << 63) - 1
MOST_ANSWERED = 1 << 30


class _Number(NamedTuple):
    """A number that a request may give.

    Attributes:
        place: among the settings.
        usual: without it.
        least, most: it is from the one to the other.
        is_above: above the least, not equal to it.
        is_whole: it is an integer.
    """

    place: int
    usual: float
    least: float = -math.inf
    most: float = math.inf
    is_above: bool = False
    is_whole: bool = False

    def read(self, name: str, given: object) -> float:
        """Return the number. Raise RequestError for another."""
        number = as_integer(given) if self.is_whole else as_real(given)
        is_low = number is not None and (number <= self.least if self.is_above else number < self.least)
        if number is None or not math.isfinite(number) or is_low or number > self.most:
            kind = "an integer" if self.is_whole else "a finite number"
            low = "" if self.least == -math.inf else f" {'above' if self.is_above else 'of at least'} {self.least:g}"
            high = "" if self.most == math.inf else f"{' and' if low else ''} at most {self.most:g}"
            raise RequestError(f"expected {name} as {kind}{low}{high}, got {given!r:.80}")
        return float(number)


NUMBERS = {
    "temperature": _Number(places.TEMPERATURE, 0, least=0),
    "top_k": _Number(places.TOP_K, 0, least=0, is_whole=True),
    "top_p": _Number(places.TOP_P, 1, least=0, most=1, is_above=True),
    "min_p": _Number(places.MIN_P, 0, least=0, most=1),
    "repetition_penalty": _Number(places.REPETITION, 1, least=0, is_above=True),
    "presence_penalty": _Number(places.PRESENCE, 0),
    "frequency_penalty": _Number(places.FREQUENCY, 0),
}
EXAMPLE = {
    **{name: int(number.usual) if number.is_whole else float(number.usual) for name, number in NUMBERS.items()},
    "logit_bias": {0: 0.0},
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_tokens": [0],
    "allowed_tokens": [0],
    "answered": 0,
    "seed": 0,
    "logprobs": 0,
}
"""An example with all fields, from which the schema of requests is derived."""
FIELDS = tuple(EXAMPLE)


class SamplingRequests:
    """Reads the requests of one model."""

    def __init__(self, name: str, cell: Cell) -> None:
        self._vocabulary: int | None = getattr(cell.module, "vocabulary", None)
        if self._vocabulary is None:
            raise DefinitionError(f"model {name!r}: expected a module with an attribute vocabulary, got {cell!r}")
        self._stops, self._biases = (cell.inputs[key].shape[0] for key in ("stops", "biases"))
        self._logprobs = cell.outputs["top_token"].shape[0]
        self._no_stops = torch.full((self._stops,), -1, dtype=torch.int32, device="cpu")
        self._no_biases = torch.zeros(self._biases, 2, device="cpu")
        self._no_mask = torch.zeros(cell.inputs["mask"].shape, dtype=torch.int32, device="cpu")

    def read(self, request: Mapping[str, Any], prompt: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        """Return the inputs of the cell by name, and how many of the likeliest tokens are told.

        ``prompt``: how many rows the loop's first step reads. Raise RequestError for what is wrong.
        """
        settings = np.zeros(places.NUM_SETTINGS)
        for name, number in NUMBERS.items():
            settings[number.place] = number.read(name, request[name]) if name in request else number.usual
        stops, biases, mask = self._read_stops(request), self._read_biases(request), self._read_mask(request)
        answered = _integer(request, "answered", 0, MOST_ANSWERED)
        settings[places.MIN_TOKENS] = _integer(request, "min_tokens", 0, answered + max_tokens)
        settings[places.NUM_LOGPROBS] = told = _integer(request, "logprobs", 0, self._logprobs)
        settings[places.IGNORES_END] = _flag(request, "ignore_eos")
        settings[places.PROMPT] = prompt - answered
        settings[places.HAS_MASK] = mask is not None
        settings[places.NUM_STOPS], settings[places.NUM_BIASES] = len(stops), len(biases)
        seed = _integer(request, "seed", -HIGHEST_SEED - 1, HIGHEST_SEED) if "seed" in request else secrets.randbits(63)
        given = {
            "settings": torch.from_numpy(settings),
            "seed": seed,
            "stops": _filled(self._no_stops, stops),
            "biases": _filled(self._no_biases, list(biases.items())),
            "mask": self._no_mask if mask is None else mask,
        }
        return given, told

    def _read_stops(self, request: Mapping[str, Any]) -> list[int]:
        given = request.get("stop_tokens", ())
        tokens = list(given) if isinstance(given, list | tuple | np.ndarray | Tensor) else None
        if tokens is None or len(tokens) > self._stops:
            got = f"{given!r:.80}" if tokens is None else f"{len(tokens)}"
            raise RequestError(f"expected stop_tokens as a list of at most {self._stops} tokens, got {got}")
        return [self._token("stop_tokens", token) for token in tokens]

    def _read_biases(self, request: Mapping[str, Any]) -> dict[int, float]:
        given = request.get("logit_bias", {})
        if not isinstance(given, Mapping) or len(given) > self._biases:
            got = f"{len(given)}" if isinstance(given, Mapping) else f"{given!r:.80}"
            raise RequestError(f"expected logit_bias as a dict of at most {self._biases} tokens, got {got}")
        most = float(np.finfo(np.float32).max)
        bias = _Number(0, 0, least=-most, most=most)
        found: dict[int, float] = {}
        for key, value in given.items():
            is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20  # as JSON has keys
            token = self._token("logit_bias", int(key) if is_text else key)
            found[token] = found.get(token, 0) + bias.read(f"logit_bias of {token}", value)
        return found

    def _read_mask(self, request: Mapping[str, Any]) -> Tensor | None:
        """Return the bits of the tokens that may be chosen; None where all may."""
        given = request.get("allowed_tokens")
        if given is None:
            return None
        vocabulary, allowed = self._vocabulary or 0, _array_of(given)
        flags = np.zeros(places.MASK_BITS * len(self._no_mask), np.bool_)
        if allowed is not None and allowed.dtype == np.bool_ and allowed.shape == (vocabulary,):
            flags[:vocabulary] = allowed
        elif allowed is not None and allowed.dtype.kind in "iu" and allowed.ndim == 1:
            if allowed.size and not 0 <= allowed.min() <= allowed.max() < vocabulary:
                wrong = allowed.min() if allowed.min() < 0 else allowed.max()
                raise RequestError(f"expected tokens from 0 to {vocabulary - 1} in allowed_tokens, got {wrong}")
            flags[allowed] = True
        elif allowed is None or allowed.size:
            raise RequestError(f"expected allowed_tokens as a list of tokens, or {vocabulary} bools, got {given!r:.80}")
        if not flags.any():
            raise RequestError("expected allowed_tokens with at least one token, got none")
        return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))

    def _token(self, name: str, given: object) -> int:
        token, vocabulary = as_integer(given), self._vocabulary or 0
        if token is None or not 0 <= token < vocabulary:
            raise RequestError(f"expected tokens from 0 to {vocabulary - 1} in {name}, got {given!r:.80}")
        return token


def _array_of(given: object) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return a list of tokens or flags as an array; None for anything else."""
    if isinstance(given, Tensor):
        return given.detach().cpu().numpy() if given.dtype in (torch.bool, torch.int32, torch.int64) else None
    if not isinstance(given, list | tuple | np.ndarray):
        return None
    try:
        found = np.asarray(given)
    except (ValueError, OverflowError):  # rows of several lengths, numbers of more than 64 bits
        return None
    is_plain = isinstance(given, np.ndarray) or all(type(each) is not bool for each in given)
    return found if is_plain else None


def _filled(like: Tensor, values: list[Any]) -> Tensor:
    """Return a copy that begins with these values."""
    if not values:
        return like
    made = like.clone()
    made[: len(values)] = torch.tensor(values, dtype=like.dtype, device="cpu")
    return made


def _integer(request: Mapping[str, Any], name: str, least: int, most: int) -> int:
    given = request.get(name, 0)
    number = as_integer(given)
    if number is None or not least <= number <= most:
        raise RequestError(f"expected {name} as an integer from {least} to {most}, got {given!r:.80}")
    return number


def _flag(request: Mapping[str, Any], name: str) -> bool:
    given = request.get(name, False)
    if not isinstance(given, bool | np.bool_):
        raise RequestError(f"expected {name} as a bool, got {given!r:.80}")
    return bool(given)
