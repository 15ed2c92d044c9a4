"""The description of a model that an architecture's file returns, and the model that is made of it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from cellrt import DefinitionError, Unfolder
from cellrt.cells import language_model
from cellrt.cells.output import NEVER
from cellrt.definition.resting import let_rest
from cellrt.engine.announce import QUIET_S, announced
from cellrt.language.bounded import bounded
from cellrt.language.checkpoint import Kind
from cellrt.language.checkpoints.weights import Plan
from cellrt.unfolders import complete

SAMPLING = partial(language_model, sampling=True)
NEVER_S = threading.TIMEOUT_MAX


@dataclass(frozen=True)
class Found:
    """A model as its architecture's file describes it.

    Attributes:
        kind, vocabulary, context: see ``Checkpoint``.
        plan: the module and its weights.
        cells: ``cells(module, end_token, name=, **options)`` -> the cells of the module.
        unfold: ``unfold(name, cells, **options)`` -> the model.
        finish: the last changes to a module that has its weights.
    """

    kind: Kind
    vocabulary: int
    context: int
    plan: Plan
    cells: Callable[..., Any]
    unfold: Callable[..., Unfolder]
    finish: Callable[[nn.Module], object] = lambda module: None


def decoder(
    vocabulary: int,
    context: int,
    plan: Plan,
    cells: Callable[..., Any] = SAMPLING,
    unfold: Callable[..., Unfolder] = complete,
) -> Found:
    """Return the description of a decoder. Its module has the form of ``Llama``, unless ``cells`` says otherwise."""
    return Found("decoder", vocabulary, context, plan, cells, partial(bounded, context, unfold))


class Maker:
    """The function that makes the model of a checkpoint under any name. Equal options share the same cells.

    Args:
        name: the name of the checkpoint, for the cells.
        found: the description of the model.
        dtype: the dtype of the module's weights.
        end_tokens: the tokens that end a text; cells that support only one get the first.
        is_told: whether to show the progress, by a bar or a line in the log, where reading takes long.
    """

    def __init__(self, name: str, found: Found, dtype: torch.dtype, end_tokens: tuple[int, ...], is_told: bool) -> None:
        self._name, self._found, self._dtype = name, found, dtype
        ends = tuple(end_tokens) or (NEVER,)
        self._ends = ends if found.kind == "decoder" else ends[0]
        self._quiet_s = QUIET_S if is_told else NEVER_S
        self._made: dict[tuple[tuple[str, Any], ...], Any] = {}

    def __call__(self, name: str, **options: Any) -> Unfolder:
        """Return the model. Raise DefinitionError for unknown options, and what the cells raise."""
        known = inspect.signature(self._found.cells).parameters
        given = {key: options.pop(key) for key in list(options) if key in known and key != "name"}
        key = tuple(sorted(given.items()))
        if key not in self._made:
            module = self._module()
            self._made[key] = self._found.cells(module, self._ends, name=self._name, **given)
            let_rest([module])
        try:
            return self._found.unfold(name, self._made[key], **options)
        except TypeError as error:
            raise DefinitionError(f"model {name!r}: {error}") from error

    def _module(self) -> nn.Module:
        """Return the module with its weights. Only cells keep a reference to it."""
        plan = self._found.plan
        with announced(f"Reading the weights of {self._name}", plan.num_weights, self._quiet_s) as count:
            module = plan.fill(self._dtype, count)
        self._found.finish(module)
        return module
