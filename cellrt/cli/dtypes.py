"""The dtype of a checkpoint's language model, as an option of commands."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

ENVIRONMENT = "CELLRT_DTYPE"
"""The variable that all processes read that read checkpoints."""


class DType(enum.StrEnum):
    """The dtypes that ``cellrt.load`` takes."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"


DTypeOption = Annotated[
    DType | None,
    typer.Option(
        help=(
            "What checkpoints of language models compute in; int8: float32, with weights of linear layers in 8 bits."
            f" Default: what {ENVIRONMENT} says, or float32."
        )
    ),
]
