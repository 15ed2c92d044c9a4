"""Reader of GGUF, the files of llama.cpp: fields by name, then tensors, some of them in blocks of few bits.

Sizes in a file are compared with the size of the file before anything is allocated for them.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellrt import DefinitionError
from cellrt.definition.resting import set_aside
from cellrt.language.checkpoints.weights import Stored

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_TENSORS, MOST_NAME, MOST_FIELD_BYTES = 1 << 16, 1 << 16, 1 << 28
ITEM_BYTES = 32
"""The bytes counted for an item of a list beside its text. All fields together may take ``MOST_FIELD_BYTES``."""
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of ``struct`` by the kinds of fields that are numbers."""
TEXT, ARRAY = 8, 9
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are not in blocks."""


class GgufFile(NamedTuple):
    """The content of a file.

    Attributes:
        fields: numbers, texts, and lists of them, by name.
        tensors: by name, as ``Weights`` takes them; those in blocks become float32.
    """

    fields: dict[str, Any]
    tensors: dict[str, Stored]


def read_gguf(path: Path) -> GgufFile:
    """Return the content of a file, without reading its tensors yet.

    Raise DefinitionError for a file that is no whole GGUF file, and for unsupported types of tensors.
    """
    try:
        if not path.is_file():
            raise DefinitionError(f"{path}: expected a plain file")
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return _Reader(path, content).read()
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise DefinitionError(f"{path}: it is no whole GGUF file: {error}") from error


class _Reader:
    """A reader of a file from its beginning. It raises ValueError or struct.error where the file ends too early."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0
        self._left = MOST_FIELD_BYTES

    def read(self) -> GgufFile:
        magic, version, num_tensors, num_fields = self._unpack("4sIQQ")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if num_tensors > MOST_TENSORS or num_fields > MOST_TENSORS:
            raise ValueError(f"it has {num_tensors} tensors and {num_fields} fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text(MOST_NAME)
            fields[name] = self._value(self._unpack("I")[0], name)
        described = [self._described() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise ValueError(f"general.alignment is {alignment!r:.80}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._stored(name, start, *told) for name, told in described}
        if len(tensors) < num_tensors:
            raise ValueError("two tensors have one name")
        return GgufFile(fields, tensors)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _text(self, most: int) -> str:
        (size,) = self._unpack("Q")
        if size > min(most, len(self._content) - self._at):
            raise ValueError(f"a text of {size} bytes at {self._at}")
        self._take(size + ITEM_BYTES)
        self._at += size
        return self._content[self._at - size : self._at].decode(errors="replace")

    def _value(self, kind: int, name: str) -> Any:
        if kind in NUMBERS:
            return self._unpack(NUMBERS[kind])[0]
        if kind == TEXT:
            return self._text(MOST_FIELD_BYTES)
        if kind != ARRAY:
            raise ValueError(f"{name} is of the unknown kind {kind}")
        of, count = self._unpack("IQ")
        self._take(ITEM_BYTES * count)
        if of in NUMBERS:
            return list(self._unpack(f"{count}{NUMBERS[of]}"))
        if of != TEXT:
            raise ValueError(f"{name} is a list of the kind {of}")
        return [self._text(MOST_FIELD_BYTES) for _ in range(count)]

    def _take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise ValueError(f"its fields take more than {MOST_FIELD_BYTES} bytes")

    def _described(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Return the name of a tensor, and its shape, type and offset."""
        name, (dimensions,) = self._text(MOST_NAME), self._unpack("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = self._unpack(f"{dimensions}Q")[::-1]
        if not 1 <= math.prod(shape) < 1 << 48:
            raise ValueError(f"{name} has the shape {list(shape)}")
        kind, offset = self._unpack("IQ")
        return name, (shape, kind, offset)

    def _stored(self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> Stored:
        first, where = start + offset, f"{self._path}: the tensor {name}"
        if kind in PLAIN:
            dtype, num_bytes = PLAIN[kind], PLAIN[kind].itemsize * math.prod(shape)
        else:
            block, block_bytes = _block_of(kind, where)
            if shape[-1] % block:
                raise ValueError(f"{name} has rows of {shape[-1]} numbers in blocks of {block}")
            dtype, num_bytes = torch.float32, math.prod(shape) // block * block_bytes
        if first + num_bytes > len(self._content) or first % dtype.itemsize:
            raise ValueError(f"{name} of {num_bytes} bytes at {first}")
        content = self._content
        read: Callable[[], Tensor]
        if kind in PLAIN:
            count = math.prod(shape)
            read = lambda: torch.frombuffer(content, dtype=dtype, count=count, offset=first).view(shape)  # noqa: E731
        else:
            read = lambda: _of_blocks(content, first, num_bytes, shape, kind)  # noqa: E731
        return Stored(str(self._path), shape, dtype, read)


def _block_of(kind: int, where: str) -> tuple[int, int]:
    """Return the numbers in a block of this type, and its bytes."""
    gguf = _package(where)
    if kind not in list(gguf.GGMLQuantizationType):
        raise DefinitionError(f"{where} is of the unknown type {kind}")
    quantization = gguf.GGMLQuantizationType(kind)
    if quantization not in gguf.quants._type_traits:
        raise DefinitionError(f"{where} is of the type {quantization.name}, which the package gguf cannot read")
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    return block, block_bytes


def _of_blocks(content: mmap.mmap, first: int, num_bytes: int, shape: tuple[int, ...], kind: int) -> Tensor:
    """Return the numbers of blocks. Memory that the blocks' pages take is released: the file still has them."""
    gguf = _package("a tensor")
    rows = np.frombuffer(content, np.uint8, num_bytes, first).reshape(*shape[:-1], -1)
    made = set_aside(torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType(kind))).view(shape))
    page = first // mmap.PAGESIZE * mmap.PAGESIZE
    content.madvise(mmap.MADV_DONTNEED, page, first + num_bytes - page)
    return made


def _package(where: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise DefinitionError(f"{where} is in blocks of few bits: pip install gguf") from error
    return gguf
