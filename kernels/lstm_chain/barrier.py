"""A barrier between the programs of a group, all of which are on the device at once, in two halves.

Between ``arrive`` and ``wait_for`` a program does what needs nobody. One thread of a program counts it in, by a
reduction that releases what the program's threads wrote before, and alone looks, by loads that acquire, whether all are
there; the others wait at the program's own barrier.

Whether a device is lost is the watchdog's to say (``DeviceOptions.hang_s``), which knows what else the device has to
do. Long after that the thread gives up, says so in the error flag, and ends the launch by a trap, so that a device of
which a program never started is not busy for ever. In the interpreter programs run one after the other: what is not
there at once never will be.
"""

import triton
import triton.language as tl

MAX_WAIT_S = 600.0


@triton.jit
def arrive(p_arrivals, IS_INTERPRETED: tl.constexpr):
    """Count this program in; nothing that it wrote before is seen later than that."""
    tl.debug_barrier()
    if IS_INTERPRETED:
        tl.atomic_add(p_arrivals, 1)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [p_arrivals.to(tl.int64, bitcast=True)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for(p_arrivals, p_error, target, limit_ns, IS_INTERPRETED: tl.constexpr):
    """Wait until ``target`` programs were counted in; False, or a trap, if they were not after ``limit_ns``."""
    if IS_INTERPRETED:
        is_complete = tl.load(p_arrivals) >= target
        if not is_complete:
            tl.store(p_error, 1)
    else:
        is_complete = True
        tl.inline_asm_elementwise(
            """{
            .reg .pred stop;
            .reg .u32 seen;
            .reg .u64 begun, now;
            mov.u32 $0, 0;
            mov.u32 seen, %tid.x;
            setp.ne.u32 stop, seen, 0;
            @stop bra done;
            mov.u64 begun, %globaltimer;
            look:
            ld.acquire.gpu.global.u32 seen, [$1];
            setp.ge.s32 stop, seen, $3;
            @stop bra done;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, begun;
            setp.lt.u64 stop, now, $4;
            @stop bra look;
            st.global.u32 [$2], 1;
            fence.acq_rel.sys;
            trap;
            done:
            }""",
            "=r,l,l,r,l",
            [p_arrivals.to(tl.int64, bitcast=True), p_error.to(tl.int64, bitcast=True), target, limit_ns],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
    return is_complete
