"""Processors whose code an installation may bring: code that was compiled for one runs on all that have its features.

Compiled cells are written for the width and number of a machine's vector registers (``products/vectors.py``), and their
weights are packed for it: their code is taken from a processor that equals this machine in that. All other code is
taken from any processor whose features this machine has.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

BROUGHT = Path(__file__).parent / "brought"
"""The folder of an installation's code; ``Baseline.folder`` has the parts."""

Processor = tuple[str, str, str]
"""Numba's name of a processor (``magic_tuple``): LLVM's triple, the processor's name, its features."""

_V3 = "64bit avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf xsave"
_V3 += " sse sse2 sse3 sse4.1 sse4.2 ssse3"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"


class Baseline(NamedTuple):
    """A processor as LLVM names it.

    Attributes:
        architecture: first part of LLVM's triple.
        features: the processor's features.
        lacks: features of a machine whose vector registers are others.
    """

    name: str
    architecture: str
    features: frozenset[str]
    lacks: frozenset[str] = frozenset()

    @property
    def told(self) -> str:
        """The features in the form in which LLVM takes them."""
        return ",".join(f"+{feature}" for feature in sorted(self.features))

    def folder(self, is_vector_code: bool) -> Path:
        """Return the folder where an installation has its code."""
        return BROUGHT / self.name / ("vector" if is_vector_code else "plain")

    def can_run(self, processor: Processor) -> bool:
        """Return whether its code runs on a processor."""
        return processor[0].startswith(f"{self.architecture}-") and self.features <= _features_of(processor)

    def is_as_wide(self, processor: Processor) -> bool:
        """Return whether a processor that can run its code has its vector registers."""
        return not self.lacks & _features_of(processor)


BASELINES = (
    Baseline("x86-64-v4", "x86_64", frozenset(_V4.split())),
    Baseline("x86-64-v3", "x86_64", frozenset(_V3.split()), frozenset({"avx512f"})),
    Baseline("generic", "aarch64", frozenset({"neon"})),
)


@cache
def brought_for(processor: Processor) -> list[tuple[Path, Processor]]:
    """Return the folders whose code a processor may run, each with the processor that it was compiled for."""
    found = []
    for each in filter(lambda one: one.can_run(processor), BASELINES):
        compiled_for = processor[0], each.name, each.told
        found += [(each.folder(is_vector), compiled_for) for is_vector in (True, False)][
            not each.is_as_wide(processor) :
        ]
    return found


def _features_of(processor: Processor) -> frozenset[str]:
    return frozenset(feature[1:] for feature in processor[2].split(",") if feature.startswith("+"))
