import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_weights import PackedWeights
from cellrt.kernels.lstm_chain import ChainPlan, find_plan, lstm_chain, make_scratch, reference
from cellrt.kernels.lstm_chain.plan import choose_plan, persistent_plan, rows_plan
from cellrt.kernels.lstm_step import pack_weights
from cellrt.kernels.tiles import Tile, device_limits
from cellrt.worker.device.executor import DeviceOptions
from tests.kernels.ahead import Launch, compile_ahead, compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.step_cases import Arenas, assert_same, like
from tests.kernels.tolerances import KINDS, Kind

ROWS = ChainPlan(Tile(16, 16, 32, 4, 2), groups=0)
FULL = (torch.float32, "ieee")
H100 = (132, 232_448)
A100 = (108, 166_912)


def check(
    device: str,
    kind: Kind,
    sizes: list[int],
    *,
    hidden: int,
    plan: ChainPlan,
    unwritten: int = 0,
    launches: int = 1,
    in_turns: bool = False,
    index: torch.dtype = torch.int32,
    most_rows: int = 0,
    most_steps: int = 0,
) -> None:
    """The kernel writes what the reference writes, and nothing else; ``in_turns``, steps write the same rows.

    With ``most_rows`` and ``most_steps`` the launch is one for so many, and reads how many there are.
    """
    from cellrt.kernels.lstm_chain import triton

    dtype, precision = kind
    arenas = Arenas(device, dtype)
    weight, bias = arenas.random(4 * hidden, hidden, scale=hidden**-0.5), arenas.random(4 * hidden)
    gates = arenas.inputs(sum(sizes), 4 * hidden)
    h, c = arenas.inputs(sizes[0], hidden), arenas.inputs(sizes[0], hidden)
    if in_turns:
        h_out, c_out = (take_turns(arenas.outputs(2 * sizes[0], hidden), sizes) for _ in range(2))
    else:
        h_out, c_out = (arenas.outputs(sum(sizes), hidden, unwritten) for _ in range(2))
    expected_h, expected_c = like(h_out), like(c_out)
    batch_sizes = torch.tensor(sizes, dtype=index, device=device)
    reference.lstm_chain(weight, bias, batch_sizes, gates=gates, h=h, c=c, h_out=expected_h, c_out=expected_c)
    weights = pack_weights(weight, bias)
    if most_rows:
        batch_sizes = torch.cat([batch_sizes, batch_sizes.new_zeros(most_steps - len(sizes))])
        h, c = (among_others(arena, most_rows) for arena in (h, c))
        gates, h_out, c_out = (among_others(arena, most_rows * most_steps) for arena in (gates, h_out, c_out))
    scratch = make_scratch(weights, len(h.rows))
    scratch.h.fill_(torch.nan)
    scratch.c.fill_(torch.nan)
    for _ in range(launches):
        triton.lstm_chain(
            weights,
            batch_sizes,
            gates=gates,
            h=h,
            c=c,
            h_out=h_out,
            c_out=c_out,
            scratch=scratch,
            precision=precision,
            plan=plan,
        )
        assert not scratch.has_failed()
    assert_same(h_out, expected_h, kind, hidden, len(sizes))
    assert_same(c_out, expected_c, kind, hidden, len(sizes))


def among_others(arena: ArenaRows, most: int) -> ArenaRows:
    """Behind the rows that there are come others, which are not in the arena."""
    return ArenaRows(arena.values, torch.cat([arena.rows, arena.rows.new_full((most - len(arena.rows),), 1 << 28)]))


def take_turns(arena: ArenaRows, sizes: list[int]) -> ArenaRows:
    """Every other step has the first half of an arena's rows, the others the second."""
    halves = arena.rows.chunk(2)
    return ArenaRows(arena.values, torch.cat([halves[step % 2][:size] for step, size in enumerate(sizes)]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_equal_reference_in_every_type(device: str, kind: Kind) -> None:
    check(device, kind, [18, 17, 3], hidden=32, plan=ROWS, unwritten=5)


@pytest.mark.parametrize(("sizes", "hidden"), [([1], 8), ([1, 1, 1, 1], 37), ([20, 16, 2, 1, 1], 21)])
def test_rows_with_odd_sizes(device: str, sizes: list[int], hidden: int) -> None:
    check(device, FULL, sizes, hidden=hidden, plan=ROWS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_persistent_equals_reference_in_every_type(device: str, kind: Kind) -> None:
    """One slice, so that the interpreter, which runs one program after another, passes the barrier."""
    check(device, kind, [18, 17, 3], hidden=32, plan=ChainPlan(Tile(16, 32, 16, 4, 1), groups=1), unwritten=5)


@pytest.mark.parametrize(("sizes", "hidden"), [([1], 8), ([40, 33, 17, 1], 21)])
def test_groups_share_the_rows(device: str, sizes: list[int], hidden: int) -> None:
    check(device, FULL, sizes, hidden=hidden, plan=ChainPlan(Tile(16, 32, 16, 4, 1), groups=2))


@pytest.mark.parametrize("plan", [ROWS, ChainPlan(Tile(16, 32, 32, 4, 1), groups=3)], ids=["rows", "persistent"])
@pytest.mark.parametrize("sizes", [[1], [40, 17, 16, 1], [33, 33]], ids=str)
def test_one_launch_serves_runs_of_fewer_rows_and_steps(device: str, plan: ChainPlan, sizes: list[int]) -> None:
    check(device, FULL, sizes, hidden=21, plan=plan, most_rows=64, most_steps=6)


@pytest.mark.parametrize("plan", [ROWS, ChainPlan(Tile(16, 32, 32, 4, 1), groups=1)], ids=["rows", "persistent"])
def test_one_launch_leaves_nothing_that_disturbs_the_next(device: str, plan: ChainPlan) -> None:
    check(device, FULL, [3, 2], hidden=16, plan=plan, launches=2)


@pytest.mark.parametrize("plan", [ROWS, ChainPlan(Tile(16, 32, 32, 4, 1), groups=2)], ids=["rows", "persistent"])
def test_steps_may_write_the_same_rows_and_the_last_one_stays(device: str, plan: ChainPlan) -> None:
    check(device, FULL, [35, 34, 20, 20, 1], hidden=21, plan=plan, in_turns=True, index=torch.int64)


@pytest.mark.parametrize("device", ["cpu"])
def test_a_barrier_that_nobody_comes_to_ends(device: str) -> None:
    """In the interpreter the second of two slices runs after the first, which gives up and says so."""
    from cellrt.kernels.lstm_chain import triton

    arenas = Arenas(device, torch.float32)
    weights = pack_weights(arenas.random(64, 16))
    state, out, gates = arenas.inputs(2, 16), arenas.outputs(4, 16), arenas.inputs(4, 64)
    scratch = make_scratch(weights, 2)
    triton.lstm_chain(
        weights,
        torch.tensor([2, 2], dtype=torch.int32),
        gates=gates,
        h=state,
        c=state,
        h_out=out,
        c_out=out,
        scratch=scratch,
        precision="ieee",
        plan=ChainPlan(Tile(16, 8, 16, 4, 1), groups=1),
    )
    assert scratch.has_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("hidden", [256, 500, 1024])
def test_planned_forms_equal_reference_on_a_device(kind: Kind, hidden: int) -> None:
    """Both forms, or the one by rows where the weights do not fit on the chip."""
    dtype, precision = kind
    weights = pack_weights(torch.zeros(4 * hidden, hidden, dtype=dtype, device="cuda"))
    processors, shared_bytes = device_limits(torch.device("cuda"))
    persistent = persistent_plan(weights, 64, precision, processors, shared_bytes)
    for plan in filter(None, (rows_plan(weights, precision, shared_bytes), persistent)):
        check("cuda", kind, [64, 63, 40, 17, 16, 1], hidden=hidden, plan=plan, launches=2)


def test_reference_equals_torch_and_serves_a_cpu() -> None:
    module = torch.nn.LSTM(3, 9)
    steps = torch.nn.utils.rnn.pack_sequence([torch.randn(length, 3) for length in (4, 2, 2, 1)])
    arenas = Arenas("cpu", torch.float32)
    h, c = arenas.inputs(4, 9), arenas.inputs(4, 9)
    with torch.no_grad():
        expected, _ = module(steps, (h.gather()[None], c.gather()[None]))
        sums = steps.data @ module.weight_ih_l0.T + module.bias_ih_l0
    positions = len(steps.data)
    gates = ArenaRows(sums, torch.arange(positions))
    h_out, c_out = arenas.outputs(positions, 9), arenas.outputs(positions, 9)
    weights = pack_weights(module.weight_hh_l0, module.bias_hh_l0)
    lstm_chain(
        weights,
        steps.batch_sizes.to(torch.int32),
        gates=gates,
        h=h,
        c=c,
        h_out=h_out,
        c_out=c_out,
        scratch=make_scratch(weights, 4),
    )
    torch.testing.assert_close(h_out.gather(), expected.data)


def test_scratch_of_another_size_is_refused() -> None:
    arenas = Arenas("cpu", torch.float32)
    weights = pack_weights(arenas.random(16, 4))
    state, gates = arenas.inputs(3, 4), arenas.inputs(3, 16)
    sizes = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="not for 3 rows"):
        lstm_chain(
            weights, sizes, gates=gates, h=state, c=state, h_out=state, c_out=state, scratch=make_scratch(weights, 2)
        )


def half_weights(hidden: int) -> PackedWeights:
    return pack_weights(torch.zeros(4 * hidden, hidden, dtype=torch.bfloat16))


def test_persistent_form_needs_weights_that_fit_on_chip() -> None:
    plan = persistent_plan(half_weights(1024), 64, "ieee", *H100)
    assert plan is not None
    assert plan.groups * -(-1024 // plan.tile.units) <= H100[0]
    assert persistent_plan(half_weights(2048), 64, "ieee", *H100) is None
    assert choose_plan(half_weights(2048), 64, "ieee", *H100) is None
    assert find_plan(half_weights(2048), 64) is None
    assert choose_plan(half_weights(128), 512, "ieee", *H100) is not None
    assert find_plan(half_weights(128), 512).groups == 0


def test_what_fits_need_not_be_what_the_rule_takes() -> None:
    """With many rows a program has many blocks: that is measured where it can be."""
    assert find_plan(half_weights(1024), 512) is not None
    assert choose_plan(half_weights(1024), 512, "ieee", *H100) is None


def launch_of(kind: Kind, hidden: int, plan: ChainPlan) -> Launch:
    """With rows and sizes in int64, as the runtime has them."""
    from cellrt.kernels.lstm_chain import triton

    dtype, precision = kind
    weights = pack_weights(torch.zeros(4 * hidden, hidden, dtype=dtype))
    rows = torch.empty(64, dtype=torch.int64)
    state = ArenaRows(torch.empty(64, hidden, dtype=dtype, device="meta"), rows)
    gates = ArenaRows(torch.empty(64, 4 * hidden, dtype=dtype, device="meta"), rows)
    with recorded_launches() as launches:
        triton.lstm_chain(
            weights,
            torch.empty(4, dtype=torch.int64),
            gates=gates,
            h=state,
            c=state,
            h_out=state,
            c_out=state,
            scratch=make_scratch(weights, 64),
            precision=precision,
            plan=plan,
        )
    return launches[0]


@needs_compiler
def test_persistent_kernel_keeps_its_weights_on_chip() -> None:
    hidden = 1024
    plan = persistent_plan(half_weights(hidden), 64, "ieee", *A100)
    assert plan is not None
    launch = launch_of((torch.bfloat16, "ieee"), hidden, plan)
    assert launch.options["launch_cooperative_grid"]
    for compiled in compile_everywhere([launch]):
        assert compiled.stack_bytes == 0
        assert A100[1] >= compiled.shared_bytes >= 2 * 4 * plan.tile.units * hidden


@needs_compiler
def test_a_program_arrives_at_the_barrier_before_it_fetches_what_others_do_not_write() -> None:
    """One thread counts it in and one looks; between the two, gates of the next step are on their way."""
    plan = persistent_plan(half_weights(256), 64, "ieee", *A100)
    assert plan is not None
    for compiled in compile_everywhere([launch_of((torch.bfloat16, "ieee"), 256, plan)]):
        assert "atom." not in compiled.ptx and compiled.ptx.count("@first red.release.gpu") == 2
        (before, first, last) = compiled.ptx.split("ld.acquire.gpu.global.u32 seen")
        assert before.rindex("red.release.gpu") < before.rindex("ld.global.b16")
        assert first.index("bar.sync") < first.rindex("ld.global.b16")
        assert "trap;" in first and "trap;" in last  # what a program does that waits in vain


def test_the_watchdog_gives_a_device_up_before_a_barrier_does() -> None:
    from cellrt.kernels.lstm_chain.barrier import MAX_WAIT_S

    assert 10 * DeviceOptions().hang_s < MAX_WAIT_S


@needs_compiler
def test_a_barrier_waits_as_long_as_it_is_told() -> None:
    """By the device's clock: not for a number of looks, which take as long as the device makes them."""
    plan = persistent_plan(half_weights(256), 64, "ieee", *A100)
    launch = launch_of((torch.bfloat16, "ieee"), 256, plan)
    assert launch.arguments["limit_ns"] == 600 * 10**9
    assert "%globaltimer" in compile_ahead(launch, 90).ptx
