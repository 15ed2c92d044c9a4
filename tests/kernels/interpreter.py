"""The side of the process in which kernels are interpreted (see conftest.py)."""

import importlib
import os
import threading
from typing import Any


def set_up() -> None:
    """Makes the first import of Triton in this process an interpreting one, and mends its product of bfloat16."""
    os.environ["TRITON_INTERPRET"] = "1"
    multiply_bfloat16_as_numbers()
    interpret_one_at_a_time()


def interpret_one_at_a_time() -> None:
    """Which program runs, and what the language means, are the process's: while one thread times a kernel, as at
    registration, one that another runs would read the first one's numbers."""
    from triton.runtime.interpreter import GridExecutor

    interpret, lock = GridExecutor.__call__, threading.RLock()

    def interpret_alone(self: Any, *given: Any, **named: Any) -> Any:
        with lock:
            return interpret(self, *given, **named)

    GridExecutor.__call__ = interpret_alone


def multiply_bfloat16_as_numbers() -> None:
    """Triton 3.7 interprets bfloat16 as its bits, and ``tl.dot`` multiplies these as if they were integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def as_numbers(operand: Any) -> Any:
        if operand.dtype != tl.bfloat16 or operand.data.dtype != np.uint16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, as_numbers(a), as_numbers(b), *others)

    InterpreterBuilder.create_dot = multiply_numbers


def call(module: str, function: str, arguments: dict[str, Any]) -> None:
    """Runs one test function of a module of tests."""
    getattr(importlib.import_module(module), function)(**arguments)
