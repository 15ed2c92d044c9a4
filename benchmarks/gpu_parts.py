"""The parts of a run on a GPU, in three sets, the most valuable first: see ``gpu_run.py``, which runs them.

A part is commands that run side by side, and the most seconds that they may take together. ``{python}`` is the Python
that runs, ``{out}`` the folder of results.
"""

from __future__ import annotations

from dataclasses import dataclass

Command = tuple[str, ...]

FIRST_S = 540.0
"""The first set ends within so many seconds."""
STEPS = tuple(f"tests/kernels/test_{name}.py" for name in ("lstm_step", "gru_step", "tree_lstm_step", "lstm_chain"))
OTHERS = tuple(
    f"tests/kernels/test_{name}.py"
    for name in (
        *("project_argmax", "project_logits", "sample", "loop_rows", "paged_attention", "tuning"),
        *("ragged_attention", "combine_rows", "table_rows", "score_tokens"),
    )
)
USUAL = ("bfloat16", "tf32 and not tf32x3")
"""Kinds of numbers that serve; names in a test's id."""
RARE = ("float16 and not bfloat16", "tf32x3", "ieee and float32", "not float16 and not float32")
DECODERS = ("attends and not drawn", "drawn", "not attends and not drawn")
QUICK_FIGURES = ("2.7", "2.8", "2.9", "2.11", "2.13", "2.14", "2.15")


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: what it is called in results.
        limit_s: after so many seconds its processes are ended.
        commands: run side by side.
        dry: commands of it without a GPU; none: it needs one.
        environment: variables of its commands.
        program: what must be on the machine beside Python.
    """

    name: str
    limit_s: float
    commands: tuple[Command, ...]
    dry: tuple[Command, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    program: str = ""


def tests(*arguments: str, python: Command = ("{python}",)) -> Command:
    """A run of pytest that fails where a test is skipped."""
    bare = ("-m", "pytest", "-c", "tests/gpu/bare.ini", "--rootdir", ".", "--confcutdir", ".")
    return (*python, *bare, "-p", "no:cacheprovider", "-q", "-m", "gpu", "--require-gpu", *arguments)


def benchmark(name: str, limit_s: float, *options: str) -> Part:
    """Return a part of ``benchmarks.gpu``."""
    command = ("{python}", "-m", "benchmarks.gpu", "--only", name)
    return Part(name, limit_s, ((*command, *options, "--out", "{out}"),), ((*command, "--dry"),))


def figure(name: str, limit_s: float, *options: str) -> Part:
    """Return a figure of BatchMaker's, made anew: this set has its own way to go on where it stopped."""
    command = ("{python}", "-m", "benchmarks", "figures", "--only", name, "--quick")
    wet = (*command[:-1], *options, "--device", "cuda", "--again", "--out", "{out}")
    return Part(name, limit_s, (wet,), ((*command, "--device", "dry"),))


def of_kinds(files: tuple[str, ...], kinds: tuple[str, ...]) -> tuple[Command, ...]:
    """Return a command for each file and kind of numbers."""
    return tuple(tests("-k", kind, file) for file in files for kind in kinds)


def sanitized(tool: str) -> Command:
    """Run one step and one chain under a tool of ``compute-sanitizer``."""
    checked = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "{python}")
    cases = "(test_kernel_equals_reference_in_every_type or test_groups_share_the_rows) and cuda and not float16"
    return tests("-k", cases, STEPS[0], STEPS[3], python=checked)


VERSIONS: Command = ("{python}", "-m", "benchmarks.gpu_versions")
FIRST = (
    Part("versions", 20, (VERSIONS,)),
    Part("compiled", 150, (("{python}", "-m", "cellrt.engine.compilation"),)),
    Part("device", 40, (tests("tests/gpu/test_cuda_device.py", "tests/kernels/test_signal.py"),)),
    Part("steps and chains", 40, of_kinds(STEPS, USUAL)),
    Part("worker", 70, tuple(tests(f"tests/engine/test_cuda_{name}.py") for name in ("worker", "chains"))),
    benchmark("serving", 140, "--quick"),
    benchmark("lstm", 80, "--quick"),
)
SECOND = (
    benchmark("completion", 40),
    benchmark("kernels", 60),
    Part("other steps and chains", 240, of_kinds(STEPS, RARE)),
    Part("other kernels", 180, tuple(tests(file) for file in OTHERS)),
    benchmark("steps", 120),
    figure("2.3", 60),
    Part("serving tests", 120, (tests("tests/gpu/test_serving.py"), tests("tests/engine/test_compiled_cells.py"))),
    Part("decoders", 180, tuple(tests("-k", kind, "tests/engine/test_cuda_decoders.py") for kind in DECODERS)),
    benchmark("loops", 200, "--quick"),
    benchmark("lm", 200, "--quick"),
    Part("pages", 120, tuple(tests(f"tests/engine/test_cuda_{name}.py") for name in ("pages", "ragged_steps"))),
    *(figure(name, 120, "--quick") for name in QUICK_FIGURES),
)
THIRD = (
    Part("tuner", 400, (("{python}", "-m", "cellrt.kernels.tuning", "--most-s", "340", "--copy-to", "{out}"),)),
    Part("soak", 420, (tests("-k", "soak", "tests/gpu"),), environment=(("CELLRT_SOAK_S", "300"),)),
    *(
        Part(
            tool,
            300,
            (sanitized(tool),),
            environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
            program="compute-sanitizer",
        )
        for tool in ("memcheck", "racecheck")
    ),
)
SETS = {"first": FIRST, "second": SECOND, "third": THIRD}
