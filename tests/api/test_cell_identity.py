"""The identity of a cell: what makes two of them one type, in one process and in every other."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from cellrt.cells import EmbeddingGRUCell, EmbeddingGRUDecoder, EmbeddingLSTMCell, LSTMCell
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from tests.api.models import INTEGER, SIZE, linear_of, recurrent

ROOT = Path(__file__).parents[2]


class Flagged(nn.Module):
    """A module whose behaviour hangs on attributes that are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear_of(0)
        self.activation = "tanh"
        self._scale = 1.0
        self.options = {"sizes": [1, 2], "kind": {"b", "a"}}
        self.function = torch.tanh
        self.table = torch.arange(SIZE).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)) * self._scale + self.table


def identity(module: Any, **options: Any) -> str:
    return cell(module, {"x": (SIZE,)}, **options).identity


def flagged(**changes: Any) -> str:
    module = Flagged()
    for name, value in changes.items():
        setattr(module, name, value)
    return identity(module)


def test_equal_weights_and_definition_are_one_type() -> None:
    assert flagged() == flagged()
    assert flagged(activation="".join(["ta", "nh"]), options={"sizes": [1, 2], "kind": {"a", "b"}}) == flagged()
    assert identity(linear_of(1), carry={}) == identity(copy.deepcopy(linear_of(1)), carry={})


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "relu"},
        {"_scale": 2.0},
        {"_scale": 1},
        {"options": {"sizes": [1, 3], "kind": {"b", "a"}}},
        {"function": torch.relu},
        {"table": torch.ones(SIZE)},
        {"linear": linear_of(1)},
        {"linear": nn.Identity()},
        {"extra": None},
        {"forward": lambda x: x},
    ],
)
def test_any_change_of_a_module_is_another_type(change: dict[str, Any]) -> None:
    assert flagged(**change) != flagged()


def test_a_single_bit_of_a_weight_is_another_type() -> None:
    changed = linear_of(1)
    with torch.no_grad():
        changed.weight[0, 0] = torch.nextafter(changed.weight[0, 0], torch.tensor(10.0))
    assert identity(changed) != identity(linear_of(1))


def test_hooks_count() -> None:
    hooked = linear_of(1)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert identity(hooked) != identity(linear_of(1))


def test_code_of_functions_counts() -> None:
    def scaled(factor: float) -> Any:
        return lambda x: x * factor

    assert identity(lambda x: x + 1) == identity(lambda x: x + 1)
    assert identity(lambda x: x + 1) != identity(lambda x: x + 2)
    assert identity(lambda x: x + 1) != identity(lambda x: x - 1)
    assert identity(lambda x: torch.relu(x)) != identity(lambda x: torch.tanh(x))
    assert identity(scaled(2.0)) == identity(scaled(2.0)) != identity(scaled(3.0))
    assert identity(scaled(torch.ones(1))) == identity(scaled(torch.ones(1))) != identity(scaled(torch.zeros(1)))
    assert identity(functools.partial(torch.add, torch.ones(1))) != identity(
        functools.partial(torch.add, torch.zeros(1))
    )


HELPER_MODULE = """
import torch
from torch import nn
def helper(x): return x {operator} 1
class Base(nn.Module):
    def forward(self, x): return helper(x)
class Derived(Base):
    pass
function = lambda x: helper(x)
"""


def test_code_that_is_used_from_elsewhere_counts() -> None:
    made = []
    for operator in ("+", "+", "-"):
        space: dict[str, Any] = {"__name__": f"somewhere{len(made)}"}
        exec(HELPER_MODULE.format(operator=operator), space)
        made.append((identity(space["Derived"]()), identity(space["function"])))
    assert made[0] == made[1]
    assert made[0][0] != made[2][0] and made[0][1] != made[2][1]


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.jit.script
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.mark.parametrize("hold", [lambda bound: bound, lambda bound: lambda x: bound(x)])
def test_the_object_of_a_built_in_method_counts(hold: Any) -> None:
    def made(factor: float) -> str:
        bound = torch.full((SIZE,), factor).mul
        return identity(hold(bound)) + flagged(function=bound)

    assert made(2.0) == made(2.0) != made(3.0)


def test_a_function_that_wraps_one_of_a_library_counts_by_its_code() -> None:
    wrapped = [functools.wraps(torch.nn.functional.relu)(lambda x, k=k: x * 2) for k in (1, 1)]
    other = functools.wraps(torch.nn.functional.relu)(lambda x, k=1: x * 3)
    assert identity(wrapped[0]) == identity(wrapped[1]) != identity(other)


def test_code_of_scripted_functions_counts() -> None:
    def calls(script: Any) -> Any:
        space: dict[str, Any] = {"__name__": "somewhere", "scale": script}
        exec("function = lambda x: scale(x)", space)
        return space["function"]

    assert identity(calls(double)) == identity(calls(double)) != identity(calls(triple))


def test_code_of_a_module_that_is_named_like_one_of_python_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("token")
    own.__file__ = "/models/token.py"
    monkeypatch.setitem(sys.modules, "token", own)
    exec("double = lambda x: x * 2\ntriple = lambda x: x * 3", vars(own))
    assert identity(own.double) != identity(own.triple)


def test_a_module_that_stays_in_training_is_another_type() -> None:
    class Stays(nn.Module):
        def train(self, mode: bool = True) -> Stays:
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.training else x

    other = Stays()
    other.training = False
    assert identity(Stays()) != identity(other)


def test_what_a_class_of_classes_computes_counts() -> None:
    def made(factor: float) -> Any:
        class Meta(type):
            def scaled(cls, x: torch.Tensor) -> torch.Tensor:
                return x * factor

        class Of(metaclass=Meta):
            pass

        return lambda x: Of.scaled(x)

    assert identity(made(2.0)) == identity(made(2.0)) != identity(made(3.0))


def test_names_of_the_fields_of_an_array_count() -> None:
    one, other = ([(name, float) for name in names] for names in ("ab", "ba"))
    assert flagged(options=np.array((1.0, 2.0), one)) != flagged(options=np.array((1.0, 2.0), other))


def test_classes_of_the_standard_library_count_by_name() -> None:
    kinds = [FunctionType, RuntimeError, functools.partial]
    assert len({flagged(options={"kind": kind}) for kind in kinds}) == len(kinds)


def test_specs_and_use_count() -> None:
    plain = identity(torch.tanh)
    assert plain == identity(torch.tanh, priority=3, min_batch=4, name="other")
    assert plain != identity(torch.tanh, max_batch=8)
    assert plain != identity(torch.tanh, finite=["output"])
    assert plain != identity(torch.tanh, carry={"x": "output"})
    assert plain != cell(torch.tanh, {"x": (SIZE + 1,)}).identity
    assert plain != cell(torch.tanh, {"x": rows(SIZE, dtype=torch.float64)}).identity


def test_what_cannot_be_compared_is_like_no_other() -> None:
    def holding(something: object) -> Any:
        module = linear_of(1)
        module.something = something  # type: ignore[assignment]
        return identity(module)

    class Opaque:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("cannot be pickled")

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    opaque = Opaque()
    assert holding(opaque) != holding(opaque)
    looped: list[Any] = []
    looped.append(looped)
    assert holding(looped) == holding(copy.deepcopy(looped)) != holding([[]])


class Whole(nn.Module):
    """A module of torch over whole sequences ``[rows, steps, SIZE]`` in a cell."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        return made[0] if isinstance(made, tuple) else made


class WeaklyHolding(nn.Linear):
    """Knows one of its own tensors by a weak reference alone."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.references = [weakref.ref(self.weight)]


OF_TORCH: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(SIZE, SIZE, num_layers=2, bidirectional=True, batch_first=True),
    "GRU": lambda: nn.GRU(SIZE, SIZE, batch_first=True),
    "RNN": lambda: nn.RNN(SIZE, SIZE, batch_first=True),
    "LSTM with normed weights": lambda: parametrizations.weight_norm(nn.LSTM(SIZE, SIZE), "weight_hh_l0"),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(SIZE, 2, 8, batch_first=True),
    "Conv1d": lambda: nn.Conv1d(SIZE, SIZE, 3, padding=1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(SIZE),
    "normed weights": lambda: parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    "orthogonal weights": lambda: parametrizations.orthogonal(nn.Linear(SIZE, SIZE)),
    "weak references": WeaklyHolding,
}


def identity_over_sequences(module: nn.Module) -> str:
    return cell(module, {"x": (SIZE, SIZE)}).identity


def identities_of_torch() -> list[str]:
    return [identity_over_sequences(Whole(make)) for make in OF_TORCH.values()]


@pytest.mark.parametrize("name", OF_TORCH)
def test_equal_modules_of_torch_are_one_type(name: str) -> None:
    one, other = Whole(OF_TORCH[name]), Whole(OF_TORCH[name])
    assert identity_over_sequences(one) == identity_over_sequences(other)
    with torch.no_grad():
        next(iter(other.inner.parameters())).add_(1)
    assert identity_over_sequences(one) != identity_over_sequences(other)


def test_what_a_parametrized_class_computes_counts() -> None:
    def normed(operator: str) -> str:
        space: dict[str, Any] = {"__name__": "somewhere"}
        exec(f"from torch import nn\nclass Mine(nn.Linear):\n def forward(self, x): return x {operator} 1", space)
        torch.manual_seed(1)
        return identity(parametrizations.weight_norm(space["Mine"](SIZE, SIZE)))

    assert normed("+") == normed("+") != normed("-")


def test_what_a_function_of_a_library_encloses_counts() -> None:
    plain = nn.functional.tanhshrink
    mapped = [flagged(function=torch.func.vmap(plain)) for _ in range(2)]
    assert mapped[0] == mapped[1] != flagged(function=plain)


SCRIPT = """
import sys
import torch
from torch import nn
from cellrt.definition.define import cell
from cellrt.cells import EmbeddingGRUDecoder, LSTMCell
from cellrt.definition.spec import rows
from tests.api.models import attending, child_sum, counter, embedded, leaf, recurrent
from tests.api.test_cell_identity import identities_of_torch
torch.manual_seed(0)
size = {"h": (16,), "c": (16,)}
made = [attending(), child_sum(), counter(), embedded(), leaf(), recurrent()]
made.append(cell(LSTMCell(8, 16), {"x": (8,), **size}))
made.append(cell(EmbeddingGRUDecoder(9, 8, 16, 1), {"token": rows(dtype=torch.int64), "h": (16,)}))
made.append(cell(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), {"src": (5, 8)}))
print(*[each.identity for each in made], *identities_of_torch())
"""


@pytest.mark.slow
def test_identity_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    exec(SCRIPT, {"__name__": "another"})
    here = capsys.readouterr().out.split()
    assert finished.stdout.split() == here and len(set(here)) == 9 + len(OF_TORCH)
    assert here[5] == recurrent().identity


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (EmbeddingGRUCell(20, 4, 8), {"token": INTEGER, "h": (8,)}),
        (EmbeddingGRUDecoder(20, 4, 8, 1), {"token": INTEGER, "h": (8,)}),
        (EmbeddingLSTMCell(20, 4, 8), {"token": INTEGER, "h": (8,), "c": (8,)}),
        (LSTMCell(4, 8), {"x": (4,), "h": (8,), "c": (8,)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_caches_inside_a_module_do_not_matter(module: nn.Module, inputs: dict[str, Any]) -> None:
    before = cell(module, inputs)
    with torch.inference_mode():
        example = before.example_inputs(3)
        module.eval()(*example)
        before.run(*example)
    after = cell(module, inputs)
    again = cell(before.module, inputs)
    assert before.identity == after.identity == again.identity
    assert before.has_steps
    for one, two in zip(before.run(*example), after.run(*example)):
        torch.testing.assert_close(one, two)


SETTINGS_MODULE = """
import functools, types
import torch
from torch import nn
SETTINGS = {settings}
@functools.lru_cache
def scale(): return SETTINGS["scale"]
helpers = types.ModuleType("helpers")
exec("def scaled(x): return x * {settings}['scale']", helpers.__dict__)
class Reads(nn.Module):
    def forward(self, x): return x * SETTINGS["scale"]
class Holds(nn.Module):
    SETTINGS = [SETTINGS]
    def forward(self, x): return x * self.SETTINGS[0]["scale"]
made = [Reads(), Holds(), lambda x: x * SETTINGS["scale"], lambda x: x * scale(), lambda x: helpers.scaled(x)]
"""


def test_settings_count_wherever_code_finds_them() -> None:
    one, same, other = ([identity(each) for each in made_with({"scale": scale})] for scale in (2.0, 2.0, 3.0))
    assert one == same
    assert not set(one) & set(other)


def made_with(settings: dict[str, float]) -> list[Any]:
    space: dict[str, Any] = {"__name__": "somewhere"}
    exec(SETTINGS_MODULE.format(settings=settings), space)
    made: list[Any] = space["made"]
    return made


def test_caches_of_installed_packages_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    function = pytest.importorskip  # any function of a package that is neither ours nor torch's
    cache: dict[int, int] = {}
    names = {name for name in function.__code__.co_names if name in function.__globals__}
    monkeypatch.setitem(function.__globals__, min(names), cache)
    before = identity(lambda x: x if x is not None else function("never"))
    cache[1] = 1
    assert identity(lambda x: x if x is not None else function("never")) == before


class Node:
    """A part of a network of objects in which each knows all others."""

    def __init__(self) -> None:
        self.others: list[Node] = []
        self.name = "node"


def shared_by_all(depth: int) -> list[Any]:
    value: list[Any] = [1.0]
    for _ in range(depth):
        value = [value, value]
    return value


def network(size: int) -> list[Node]:
    nodes = [Node() for _ in range(size)]
    for node in nodes:
        node.others = nodes
    return nodes


def holding(value: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * bool(value)


@pytest.mark.parametrize(("make", "size"), [(shared_by_all, 100), (network, 30)])
def test_an_object_that_many_hold_is_read_once(make: Callable[[int], Any], size: int) -> None:
    """By paths these would take years."""
    one, same, other = make(size), make(size), make(size + 1)
    assert identity(holding(one)) == identity(holding(same)) != identity(holding(other))


def test_whether_a_value_is_shared_or_equal_does_not_count() -> None:
    shared = [2.0]
    assert identity(holding([shared, shared])) == identity(holding([[2.0], [2.0]]))


DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(100_000), [])


def test_what_lies_too_deep_to_read_is_like_no_other() -> None:
    assert identity(lambda x: x * bool(DEEP)) != identity(lambda x: x * bool(DEEP))


def test_what_a_tool_writes_into_code_does_not_count() -> None:
    """Pytest rewrites asserts; what it calls knows the whole test run."""

    def checked(x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2
        return x

    assert any(name.startswith("@") for name in checked.__code__.co_names)
    assert identity(checked) == identity(checked)
