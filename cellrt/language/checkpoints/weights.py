"""The tensors of a checkpoint by name, each checked before it is read; those of safetensors are mapped from their
files.

Nothing of a file is executed: safetensors has numbers alone, and files of pickles are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cellrt import DefinitionError
from cellrt.cells.attention import Linear
from cellrt.cells.int8 import with_int8_weights
from cellrt.cells.made_unfilled import unfilled
from cellrt.definition.resting import give_back, keep_constant, set_aside
from cellrt.language.checkpoints.config import read_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_BYTES = 1 << 26
MOST_INDEX_BYTES = 1 << 24
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""The dtypes that weights may have. A file may have tensors of others, which no model takes."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: its path, for errors.
        shape, dtype: as stored; ``dtype`` None: one that no weight may have.
        read: returns the tensor.
        close: closes the file until the next read.
    """

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]
    close: Callable[[], object] = lambda: None


class Weights:
    """The tensors of a checkpoint.

    ``expect`` checks the shape of each tensor that a model takes; ``refuse_others`` names the tensors that it did not
    take.
    """

    def __init__(self, where: str, tensors: Mapping[str, Stored]) -> None:
        self.where, self._tensors = where, dict(tensors)
        self._expected: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def renamed(self, rename: Callable[[str], str]) -> Weights:
        """Return the same tensors under other names. Raise DefinitionError if two get one name."""
        made: dict[str, Stored] = {}
        for name, stored in self._tensors.items():
            if (other := rename(name)) in made:
                raise DefinitionError(f"{self.where}: two weights are {other}, one of them {name}")
            made[other] = stored
        return Weights(self.where, made)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raise DefinitionError, like ``expect``, for a tensor that is not there."""
        if name not in self._tensors:
            raise DefinitionError(f"{self.where}: expected a weight {name}, which is not there")
        return self._tensors[name].shape

    def expect(self, name: str, shape: Iterable[int]) -> None:
        """Raise DefinitionError unless there is a weight of that name and shape."""
        found, wanted = self.shape_of(name), tuple(shape)
        stored = self._tensors[name]
        if found != wanted:
            raise DefinitionError(f"{stored.file}: expected the weight {name} {list(wanted)}, got {list(found)}")
        if stored.dtype is None:
            raise DefinitionError(f"{stored.file}: expected floats in the weight {name}, got none")
        self._expected.add(name)

    def refuse_others(self, *ignored: str) -> None:
        """Raise DefinitionError if there are tensors that were not expected.

        ``ignored``: regular expressions of names that may be there.
        """
        pattern = re.compile("|".join(f"(?:{one})" for one in ignored) or "(?!)")
        others = sorted(name for name in self._tensors.keys() - self._expected if not pattern.fullmatch(name))
        if others:
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            raise DefinitionError(f"{self.where}: the model has no use for the weights {', '.join(others[:5])}{more}")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a weight in a dtype.

        If it is stored in that dtype it is mapped from its file, and must not be written to.
        """
        stored = self._tensors[name]
        try:
            return stored.read() if stored.dtype == dtype else set_aside(stored.read().to(dtype))
        except (SafetensorError, OSError, ValueError) as error:
            raise DefinitionError(f"{stored.file}: the weight {name} cannot be read: {error}") from error

    def close(self) -> None:
        """Close files; they are opened again when something is read."""
        for stored in self._tensors.values():
            stored.close()


def read_folder(folder: Path) -> Weights:
    """Return the weights of a folder, in one file or in several with an index. Nothing of them is read yet.

    Raise DefinitionError, naming the file, if there are none, for files that are cut off or hold something else, and
    for an index that leads out of the folder or to a file or weight that is not there.
    """
    if not (folder / INDEX).exists():
        if not (folder / WHOLE).exists():
            raise DefinitionError(f"{folder}: expected {WHOLE}, or {INDEX} with the files that it names")
        return Weights(str(folder), _read_file(folder / WHOLE))
    where = folder / INDEX
    named = read_json(where, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise DefinitionError(f"{where}: expected weight_map, file names by those of weights")
    files = sorted(set(named.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise DefinitionError(f"{where}: expected names of safetensors files in its own folder, got {file!r:.80}")
    found: dict[str, Stored] = {}
    for file in files:
        tensors = _read_file(folder / file)
        for name in tensors:
            if named.get(name) != file:
                raise DefinitionError(f"{where}: {file} has the weight {name}, which the index has not there")
        found |= tensors
    if missing := sorted(named.keys() - found.keys()):
        raise DefinitionError(f"{where}: {named[missing[0]]} has no weight {missing[0]}, which the index has there")
    return Weights(str(folder), found)


def _read_file(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file of safetensors; its library checks that all of them lie in it, without gaps."""
    try:
        if not path.is_file():
            raise DefinitionError(f"{path}: expected a file of safetensors, which is not there")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if size > MOST_HEADER_BYTES:
            raise DefinitionError(f"{path}: expected a header of at most {MOST_HEADER_BYTES} bytes, got {size}")
        whole = _File(path)
        return {name: whole.stored(name) for name in whole.opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise DefinitionError(f"{path}: it is no whole file of safetensors: {error}") from error


class _File:
    """A file of safetensors, open while it is read. Its tensors are memory of the file, and keep it mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def opened(self) -> Any:
        """The library's reader of the file."""
        return safe_open(self._path, "pt")

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        vars(self).pop("opened", None)

    def stored(self, name: str) -> Stored:
        """Return the tensor of that name."""
        told = self.opened.get_slice(name)
        shape, dtype = tuple(told.get_shape()), DTYPES.get(told.get_dtype())
        return Stored(str(self._path), shape, dtype, lambda: self.opened.get_tensor(name), self.close)


class Plan:
    """The way from a checkpoint's weights to a module's.

    Args:
        make: makes the module, whose first weights do not matter.
        names: returns the name in the checkpoint of each weight of the module.
        weights: the tensors of the checkpoint.
        turned: the module's weights that are stored transposed.
        tied: the module's weights that equal another one of its weights, by name.

    Raises DefinitionError, as ``Weights.expect``.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        names: Callable[[str], str],
        weights: Weights,
        *,
        turned: Collection[str] = (),
        tied: Mapping[str, str] = NOTHING,
    ) -> None:
        self._make, self._weights, self._turned, self._tied = make, weights, turned, tied
        with unfilled(has_values=False):
            made = make()
        shapes = {name: value.shape for name, value in made.state_dict().items()}
        wanted = {name: shape for name, shape in shapes.items() if name not in tied}
        self._names = {name: names(name) for name in wanted}
        for name, shape in wanted.items():
            weights.expect(self._names[name], reversed(shape) if name in turned else shape)
        self._sizes: dict[str, int] = {self._names[name]: math.prod(shape) for name, shape in wanted.items()}
        linear = [f"{name}.weight" for name, part in made.named_modules() if type(part) is Linear]
        self._linear = [(shapes[name], name in tied) for name in linear]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the module's weights, each counted once; with int8 only those of its linear layers are
        int8.
        """
        wide_bytes: int = torch.float32.itemsize if dtype is torch.int8 else dtype.itemsize
        num_bytes: int = wide_bytes * sum(self._sizes.values())
        if dtype is torch.int8:
            for shape, is_looked_up in self._linear:
                wide = 0 if is_looked_up else wide_bytes * math.prod(shape)
                num_bytes += math.prod(shape) + wide_bytes * shape[0] - wide
        return num_bytes

    @property
    def num_weights(self) -> int:
        """The number of weights that are read."""
        return len(self._names)

    def fill(self, dtype: torch.dtype, count: Callable[[], object] = lambda: None) -> nn.Module:
        """Return the module with its weights; ``count`` is called after each of them."""
        found, wide = {}, torch.float32 if dtype is torch.int8 else dtype
        for name, theirs in self._names.items():
            value = self._weights.read(theirs, wide)
            found[name] = set_aside(value.t()) if name in self._turned else value
            count()
        self._weights.close()
        found |= {name: found[other] for name, other in self._tied.items()}
        with unfilled():
            made = self._make()
        made.load_state_dict(found, assign=True)
        for name, other in self._tied.items():
            part, _, last = name.rpartition(".")
            setattr(made.get_submodule(part), last, made.get_parameter(other))
        if dtype is torch.int8:
            keep_constant(found.values())
            made = with_int8_weights(made)
            give_back(found.values())  # most of which the module has no more
        keep_constant((*made.requires_grad_(False).parameters(), *made.buffers()))
        return made.eval()
