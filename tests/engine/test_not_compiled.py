"""What cannot be compiled is refused by name, before anything is compiled."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt import RaggedRows
from cellrt.definition.aot.form import compile_cell, compile_cells
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.step_program import export_step
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.compiled_form import CompiledForm
from tests.waiting import until

NUMBERS = {"x": (4,)}


def counting() -> nn.Module:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * min(self.calls, 1)

    return Counting()


def over_span() -> nn.Module:
    class OverSpan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 4)

        def forward(self, memory: RaggedRows) -> Tensor:
            parts = memory.values.tensor_split(memory.offsets[1:-1].tolist())
            return torch.stack([self.gru(part)[1][0] for part in parts])

    return OverSpan()


@torch.library.custom_op("cellrt_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return x.relu()


def jittered(x: Tensor) -> Tensor:
    return x + 0.01 * random.random()


TOKEN = {"i": cellrt.token}
TOKENS = {"a": cellrt.token, "b": cellrt.token}

REFUSED = {
    Reason.OTHER_MODE: lambda: cellrt.cell(in_autocast, NUMBERS),
    Reason.UNCHECKED_INDICES: lambda: cellrt.cell(
        lambda i: torch.zeros(i.shape[0], 4).scatter(1, i[:, None], 1.0), TOKEN
    ),
    Reason.UNCHECKED_DIVISION: lambda: cellrt.cell(lambda a, b: a // b, TOKENS),
    Reason.RANDOM: lambda: cellrt.cell(lambda x: x + torch.rand_like(x), NUMBERS),
    Reason.CUSTOM_OPERATOR: lambda: cellrt.cell(lambda x: doubled(x), NUMBERS),
    Reason.BY_VALUES: lambda: cellrt.cell(lambda x: -x if bool((x > 1).any()) else x, NUMBERS),
    Reason.FIXED_ROWS: lambda: cellrt.cell(lambda x: x + torch.zeros(len(x), 4), NUMBERS),
    Reason.MEMORY: lambda: cellrt.cell(counting(), NUMBERS),
    Reason.RECURRENT: lambda: cellrt.cell(over_span(), {"memory": cellrt.ragged(4)}),
    Reason.FINITE: lambda: cellrt.cell(
        nn.Linear(4, 4).double(), {"input": cellrt.rows(4, dtype=torch.float64)}, finite="output"
    ),
    Reason.BATCH_SIZES: lambda: cellrt.cell(nn.Linear(4, 4), {"input": (4,)}, batch_sizes=[4, 8]),
}


@pytest.mark.parametrize("reason", REFUSED, ids=lambda reason: reason.name)
def test_what_cannot_be_compiled_is_refused_by_name(tmp_path, reason: Reason) -> None:
    with pytest.raises(NotCompiledError) as refused:
        compile_cell(REFUSED[reason](), LibraryStore(tmp_path))
    assert refused.value.reason is reason
    assert str(refused.value).startswith(str(reason))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.irfft(torch.fft.rfft(x), n=4),
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x.view(-1, 2, 2))),
        lambda x: torch.fft.hfft(torch.fft.fft(x)),
        lambda x: torch.fft.fftfreq(4) + x,
    ],
    ids=["irfft", "irfft2", "hfft", "fftfreq"],
)
def test_a_fourier_transform_to_real_numbers_is_refused_before_it_is_compiled(function) -> None:
    with pytest.raises(NotCompiledError, match=r": aten\.fft_") as refused:
        export_step(cellrt.cell(function, NUMBERS))
    assert refused.value.reason is Reason.NO_C_INTERFACE


def test_fourier_transforms_of_complex_numbers_are_not_refused() -> None:
    weight = torch.randn(4)
    made = cellrt.cell(lambda x: torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(weight)).real, NUMBERS)
    assert export_step(made).least_rows == 1


def with_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


class Scattering(nn.Module):
    """Calls an operator that is refused from a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, i: Tensor) -> Tensor:
        ones = torch.ones(i.shape[0], 4)
        return self.linear(torch.zeros(i.shape[0], 4).scatter_reduce(1, i[:, None], ones, "amax"))


class Within(nn.Module):
    """Another module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scattering()

    def forward(self, i: Tensor) -> Tensor:
        return torch.relu(self.inner(i))


class Choosing(nn.Module):
    """Looks at values in a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(x)

    def chosen(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_the_line_that_calls_what_is_refused_is_told() -> None:
    told = r'aten\.scatter_reduce\.two, at test_not_compiled\.py:\d+: return self\.linear\(.*"amax"\)\); index_reduce'
    with pytest.raises(NotCompiledError, match=told):
        export_step(cellrt.cell(Within(), TOKEN))
    told = r"aten\.rand_like\.default, at test_not_compiled\.py:\d+: return x \+ torch\.rand_like\(x\)$"
    with pytest.raises(NotCompiledError, match=told):
        export_step(cellrt.cell(with_noise, NUMBERS))
    told = r"at test_not_compiled\.py:\d+: return x if x\.sum\(\) > 0 else -x$"
    with pytest.raises(NotCompiledError, match=told) as refused:
        export_step(cellrt.cell(Choosing(), NUMBERS))
    assert refused.value.reason is Reason.BY_VALUES


@pytest.mark.slow
def test_an_operator_without_a_c_interface_is_named(tmp_path) -> None:
    with pytest.raises(NotCompiledError, match=r"no C interface: aten::median.dim") as refused:
        compile_cell(cellrt.cell(lambda x: x.median(1).values, NUMBERS), LibraryStore(tmp_path))
    assert refused.value.reason is Reason.NO_C_INTERFACE


def test_a_weight_of_a_dtype_that_rows_cannot_have_is_refused(tmp_path) -> None:
    made = cellrt.cell(lambda x: x, NUMBERS)
    turned = nn.Linear(4, 4, dtype=torch.complex64).requires_grad_(False)
    made.module = turned
    with pytest.raises(NotCompiledError) as refused:
        compile_cell(made, LibraryStore(tmp_path))
    assert refused.value.reason is Reason.DTYPE


@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod])
@pytest.mark.slow
def test_integers_are_divided_by_what_cannot_be_zero(divide) -> None:
    """A division by zero, which raises in the module, would end the process in compiled code."""
    cases = {
        "any": (lambda a, b: divide(a, b), False),
        "at least 0": (lambda a, b: divide(a, b.clamp(min=0)), False),
        "at least 1": (lambda a, b: divide(a, b.clamp(min=1)), True),
        "from 1 to 9": (lambda a, b: divide(a, b.clamp(1, 9)), True),
        "at least 1, at most 0": (lambda a, b: divide(a, b.clamp(1, 0)), False),
        "a number": (lambda a, b: divide(a, 3) + b, True),
        "floats": (lambda a, b: divide(a.double(), b), True),
    }
    for function, is_taken in cases.values():
        made = cellrt.cell(function, TOKENS, name="divide")
        if is_taken:
            export_step(made)
            continue
        with pytest.raises(NotCompiledError) as refused:
            export_step(made)
        assert refused.value.reason is Reason.UNCHECKED_DIVISION


@pytest.mark.slow
def test_what_changes_from_call_to_call_is_not_fixed_as_it_was_when_traced(tmp_path) -> None:
    class Tally:
        def __init__(self) -> None:
            self.so_far = 0

    class Tallying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tally = Tally()

        def forward(self, x: Tensor) -> Tensor:
            self.tally.so_far += 1
            return x + 0.0001 * self.tally.so_far

    cells = [cellrt.cell(function, NUMBERS) for function in (Tallying(), jittered)]
    for made in compile_cells(cells, LibraryStore(tmp_path)):
        assert isinstance(made, NotCompiledError)
        assert made.reason is Reason.OTHER_RESULTS_AGAIN


@pytest.mark.slow
def test_what_one_cell_does_to_its_fork_costs_the_others_nothing(tmp_path) -> None:
    class Leaving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_exporting():
                os._exit(3)
            return x

    good = [cellrt.cell(nn.Linear(4, 4), {"input": (4,)}, name=f"good{k}") for k in range(2)]
    leaving = cellrt.cell(Leaving(), NUMBERS)
    store = LibraryStore(tmp_path)
    first, lost, second = compile_cells([good[0], leaving, good[1]], store)
    assert isinstance(first, CompiledForm) and isinstance(second, CompiledForm)
    assert isinstance(lost, NotCompiledError)
    assert store.num_compiled == 1, "two of one structure have one library"


@pytest.mark.slow
def test_who_does_not_wait_for_the_rest_leaves_no_process_behind(tmp_path) -> None:
    store = LibraryStore(tmp_path)
    forms = compile_cells([cellrt.cell(nn.Linear(4, 4 + k), {"input": (4,)}) for k in range(3)], store)
    assert isinstance(next(forms), CompiledForm)
    (process,) = store._running
    forms.close()
    assert not store._running

    def is_gone() -> bool:  # those that were killed are there until the system's first process has looked at them
        try:
            os.killpg(process, 0)
        except ProcessLookupError:
            return True
        return False

    until(is_gone, "no process of its group is left")
