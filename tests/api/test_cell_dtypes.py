"""Rows of every dtype go through an engine bit by bit; what cannot is refused where the cell is defined."""

from __future__ import annotations

import pytest
import torch

from cellrt.definition.bits import DTYPES
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.errors import CellError, DefinitionError
from cellrt.graph.reference import run_one_by_one
from tests.api.models import model
from tests.engine.helpers import small_engine

NAMES = [name for name in sorted(vars(torch)) if isinstance(getattr(torch, name), torch.dtype)]
OTHERS = {getattr(torch, name) for name in NAMES} - set(DTYPES)


@pytest.mark.parametrize("dtype", sorted(OTHERS, key=str), ids=str)
def test_other_dtypes_are_refused_where_the_cell_is_defined(dtype: torch.dtype) -> None:
    with pytest.raises(
        DefinitionError, match=f"input 'x': expected rows of float16, .*, got {dtype}".replace("torch.", "")
    ):
        cell(lambda x: x, {"x": rows(2, dtype=dtype)})


def values_of(dtype: torch.dtype, steps: int) -> torch.Tensor:
    """Rows ``[steps, 3]`` with the smallest and largest numbers of a dtype among them."""
    if dtype is torch.bool:
        return torch.arange(3 * steps).reshape(steps, 3) % 2 == 0
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    values = torch.arange(3 * steps).reshape(steps, 3).to(dtype)
    values[0, 0], values[-1, 2] = info.min, info.max
    return values


@pytest.mark.one_in(3)
@pytest.mark.parametrize("worker", ["cpu", "dry"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_supported_dtype_works_end_to_end(dtype: torch.dtype, worker: str) -> None:
    """In chains, loops, results, states of a session, and beside a row that fails."""

    def take(x: torch.Tensor, kept: torch.Tensor, count: torch.Tensor) -> dict[str, torch.Tensor]:
        if count.device.type == "cpu" and bool((count > 5).any()):
            raise ValueError("too many")
        return {"kept": torch.where(count.view(-1, 1) % 2 == 0, x, kept), "count": count + 1, "stop": count >= 3}

    row = rows(3, dtype=dtype)
    made = cell(take, {"x": row, "kept": row, "count": rows(dtype=torch.int32)}, max_batch=16)

    def write(graph, request):  # type: ignore[no-untyped-def]
        chain = graph.chain(made, x=request["x"], kept=request["x"][0], count=request["count"])
        loop = graph.loop(made, x=chain.last.kept, until="stop", max_steps=6)
        return {"steps": chain.kept, "last": chain.last.kept, "loop": loop.kept, "end": loop.last.kept}

    def request_of(steps: int, count: int = 0) -> dict[str, object]:
        return {"x": values_of(dtype, steps), "count": torch.tensor(count, dtype=torch.int32)}

    unfolder = model(write, request_of(2))
    requests = [request_of(1 + k % 4, count=9 if k == 3 else 0) for k in range(8)]
    with small_engine([worker], arena_bytes=1 << 18) as engine:
        engine.register(unfolder)
        for k, future in enumerate(engine.submit_many("m", requests)):
            if k == 3:
                with pytest.raises(CellError, match="too many"):
                    future.result(60)
                continue
            for name, value in run_one_by_one(unfolder, requests[k]).items():
                assert torch.equal(future.result(60)[name], value), name
        assert engine.drain(60)
        engine.check()


def test_a_part_of_a_conjugate_is_an_output_like_any_other() -> None:
    made = cell(lambda x: torch.fft.rfft(x).conj().imag, {"x": (4,)})
    unfolder = model(lambda graph, x: {"y": made(x=x).output}, torch.randn(4))
    with small_engine(arena_bytes=1 << 18) as engine:
        engine.register(unfolder)
        got = engine.submit("m", unfolder.example).result(60)["y"]
    torch.testing.assert_close(got, -torch.fft.rfft(unfolder.example).imag)
