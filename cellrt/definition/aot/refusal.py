"""The reasons why the compiler makes no form of a cell, which then stays eager."""

from __future__ import annotations

from enum import StrEnum

from cellrt.errors import DefinitionError


class Reason(StrEnum):
    """A reason why a cell is not compiled."""

    BATCH_SIZES = "it takes certain numbers of rows only"
    FINITE = "its finite=... names an output that is not float32, and compiled code checks float32 alone"
    NO_JIT = "Numba compiles nothing (NUMBA_DISABLE_JIT)"
    DEVICE = "its weights do not lie on the CPU as plain dense tensors"
    DTYPE = "a weight has a dtype that rows cannot have"
    MEMORY = "it keeps values between calls"
    RANDOM = "it draws random numbers"
    CUSTOM_OPERATOR = "it calls an operator that is not torch's own"
    RECURRENT = "it runs a recurrent torch module, which torch does not export for every number of rows"
    BY_VALUES = "it decides by the values of tensors"
    PAGES = "it reads or writes pages otherwise than by attention of cellrt.cells"
    OTHER_MODE = "it enters a mode of torch, such as autocast"
    UNCHECKED_INDICES = "it calls an operator whose compiled code does not check indices"
    UNCHECKED_DIVISION = "it divides integers by numbers that may be zero, which compiled code does not check"
    FIXED_ROWS = "it fixes the number of rows"
    OUTPUTS = "its outputs are not rows of the declared shapes for every number of rows"
    NOT_EXPORTED = "torch cannot export it"
    NO_COMPILER = "there is no C++ compiler"
    NO_FOLDER = "there is no folder for what is compiled"
    NOT_COMPILED = "AOTInductor cannot compile it"
    NO_C_INTERFACE = "it calls an operator that has no C interface"
    NOT_TRIED = "the module raised on random rows, so the compiled code was not tried"
    OTHER_RESULTS_AGAIN = "its module gives other results for the same rows at another call"
    OTHER_RESULTS = "the compiled code gave other results than the module"
    SLOWER = "the compiled code takes longer than the module"


class NotCompiledError(DefinitionError):
    """A cell cannot be compiled.

    Attributes:
        reason: the kind of reason.
        detail: the place or the cause.
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason, self.detail = reason, detail

    @property
    def partial_fx_graph(self) -> str:
        """An attribute that is not there: torch would print the graph so far to the standard error."""
        raise AttributeError

    @partial_fx_graph.setter
    def partial_fx_graph(self, graph: str) -> None:
        pass
