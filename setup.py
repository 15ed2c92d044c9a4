"""With CELLRT_COMPILED_WHEEL=1 in the environment a wheel brings what is compiled; all else is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

from setuptools import Distribution, Extension, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
NEEDED = """CELLRT_COMPILED_WHEEL=1 compiles with what the wheel will run with, and cellrt's dependencies are not here:
%s.
Install them, and build with --no-build-isolation (pip) or --no-isolation (python -m build)."""


class CompiledDistribution(Distribution):
    """One for this Python and machine alone."""

    def has_ext_modules(self) -> bool:
        """Return True: the wheel's name has both."""
        return True


class BuildCompiled(build_py):
    """Copies the package, and compiles in the copy."""

    def run(self) -> None:
        """Copy and compile."""
        super().run()
        if self.editable_mode:  # what is compiled there is kept beside the sources
            return
        try:
            import numba  # noqa: F401
            import torch  # noqa: F401
        except ImportError as error:
            raise SystemExit(NEEDED % error) from None
        command = [sys.executable, "-m", "tools.compile_ahead", str(Path(self.build_lib).resolve())]
        subprocess.run(command, cwd=HERE, check=True)


def in_c(name: str) -> Extension:
    """Return an extension, which knows the checksum of its source."""
    source = f"cellrt/native/{name}.c"
    macros = [("SOURCE", f"{crc32((HERE / source).read_bytes())}U")]
    return Extension(f"cellrt.native._{name}", [source], define_macros=macros, optional=True)


# Where no C compiler is, Python hands in requests, and a crash says nothing of the scheduler.
IN_C = [in_c("hand_in"), in_c("crash_log")]

if os.environ.get("CELLRT_COMPILED_WHEEL", "0") not in ("", "0"):
    setup(ext_modules=IN_C, distclass=CompiledDistribution, cmdclass={"build_py": BuildCompiled})
else:
    setup(ext_modules=IN_C)
