"""Products and cells at the width of the machine, and at narrower ones, which Numba compiles for on a wide one too."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cellrt.cells import BinaryTreeLSTMCell, GRUCell, LSTMCell
from cellrt.products.packed import pack_linear, project
from cellrt.products.tile import rows_of_tile
from cellrt.products.vectors import LANES, REGISTERS, registers_of

ROOT = Path(__file__).resolve().parents[2]
AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c"
NAMES = {16: "skylake-avx512", 8: "haswell", 4: "x86-64"}
FEATURES = {16: f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl", 8: AVX2, 4: "+sse,+sse2"}

only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86-64 processors")


@pytest.mark.parametrize(
    ("is_arm", "features", "expected"),
    [
        (False, {"sse2", "avx", "avx2", "avx512f"}, (16, 32)),
        (False, {"sse2", "avx"}, (8, 16)),
        (False, {"sse2"}, (4, 16)),
        (False, set(), (4, 16)),
        (True, {"neon"}, (4, 32)),
    ],
)
def test_registers_follow_from_the_features(is_arm, features, expected):
    assert registers_of(is_arm, features) == expected


def test_a_tile_fits_the_registers():
    for groups in (1, 2, 3, 4):
        rows = rows_of_tile(groups)
        assert rows * groups + min(rows, groups) + 1 <= REGISTERS


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    packed, out = pack_linear(weight), x.new_empty(len(x), len(weight))
    project(
        x.data_ptr(), len(x), x.shape[1], packed.address, bias.data_ptr(), len(weight), out.data_ptr()
    )  # fmt: skip
    return out


def check_product() -> None:
    """Every way to share rows out to tiles, a depth of several blocks, columns that fill no panel."""
    x, weight, bias = torch.randn(99, 301), torch.randn(77, 301), torch.randn(77)
    together = product(x, weight, bias)
    torch.testing.assert_close(together, (x.double() @ weight.double().T + bias).float(), rtol=1e-4, atol=1e-4)
    for rows in range(1, len(x)):
        alone = product(x[:rows], weight, bias)
        assert torch.equal(alone, together[:rows]), f"the bits of {rows} rows depend on their company"


def check_cells() -> None:
    """Each family: what the plain form gives, and the same bits alone and in company."""
    size = 37
    cells = {
        LSTMCell(size, size): ("x", "h", "c"),
        GRUCell(size, size): ("x", "h"),
        BinaryTreeLSTMCell(size, size): ("h_left", "c_left", "h_right", "c_right", "x"),
    }
    for cell, names in cells.items():
        given = {name: torch.randn(110, size) for name in names}
        plain = cell(**given)
        with torch.inference_mode():
            together = cell(**given)
            for rows in (slice(0, 1), slice(3, 10), slice(9, 40), slice(2, 99)):
                alone = cell(**{name: value[rows].clone() for name, value in given.items()})
                for one, all_of_them in zip(alone, together, strict=True):
                    assert torch.equal(one, all_of_them[rows]), f"{type(cell).__name__}: {rows}"
        for one, expected in zip(together, plain, strict=True):
            torch.testing.assert_close(one, expected.detach(), rtol=1e-5, atol=1e-5)


def test_rows_of_a_product_have_the_same_bits_in_any_company():
    check_product()


def test_rows_of_a_cell_have_the_same_bits_in_any_company():
    check_cells()


def run(lanes: int, program: str, cache: Path) -> str:
    """What a program prints in a process whose kernels are compiled for so many lanes and kept in this folder."""
    named = {"NUMBA_CPU_NAME": NAMES[lanes], "NUMBA_CPU_FEATURES": FEATURES[lanes], "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.cells.test_lanes import *\nassert LANES == {lanes}\n{program}"],
        env=os.environ | named, cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@only_x86
def test_code_on_disk_is_of_the_width_of_the_process(tmp_path):
    """A process that packs for 8 lanes never gets what one compiled for 16, nor the other way round."""
    widths = [lanes for lanes in (16, 8, 4) if lanes <= LANES]
    program = "check_product(); print(sum(project.stats.cache_hits.values()))"
    assert [run(lanes, program, tmp_path) for lanes in widths] == ["0"] * len(widths)
    assert [run(lanes, program, tmp_path) for lanes in widths] == ["1"] * len(widths)


@pytest.mark.slow
@only_x86
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_cells_are_right_at_every_width(lanes, tmp_path):
    if lanes > LANES:
        pytest.skip(f"this machine has {LANES} lanes")
    run(lanes, "check_cells()", tmp_path)


@pytest.mark.slow
@only_x86
@pytest.mark.parametrize(("lanes", "register"), [(16, "zmm"), (8, "ymm")])
def test_the_inner_loop_fills_whole_registers(lanes, register, tmp_path):
    """Also where LLVM prefers narrower ones (it does so for this processor with 16 lanes); nothing is run here."""
    program = f"""
from cellrt.definition.compiled_form import nogil
project.compile((numba.int64,) * 7)
code = " ".join(project.inspect_asm().values())
print(len(re.findall(r"vfmadd\\w+ps.*%{register}", code)))
"""
    rows = {16: 6, 8: 3}[lanes]
    assert int(run(lanes, f"import re, numba\nassert rows_of_tile(4) == {rows}{program}", tmp_path)) >= 4 * rows
