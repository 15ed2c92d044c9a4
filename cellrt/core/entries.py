"""The functions of the compiled core that Python calls. ``at`` is what ``address_of`` returned for the tables."""

from __future__ import annotations

from cellrt.core.completion import completion, lost_worker
from cellrt.core.pages import suspension
from cellrt.core.requests import admission, join_leave, region_entries, session_state
from cellrt.core.scheduling import schedule
from cellrt.core.state.pointers import open_tables, open_template
from cellrt.native.jit import entry, short_entry
from cellrt.native.row_types import Matrix, Rows

_admit, _num_rows, _admit_many = admission.admit, admission.num_rows, admission.admit_many
_deadline_of = admission.deadline_of
_finish_many, _copy_results = admission.finish_many, admission.copy_results
_cancel, _complete, _lose_worker = completion.cancel, completion.complete, lost_worker.lose_worker
_result_rows = completion.result_rows
_schedule, _drop_states = schedule.schedule, session_state.drop_states
_join, _leave = join_leave.join, join_leave.leave
_lift, _take = region_entries.lift, region_entries.take
_has_handed_in, _has_more = region_entries.has_handed_in, region_entries.has_more
_share_states, _cut_back = session_state.share_states, session_state.cut_back
_starvation, _suspend = suspension.starvation, suspension.suspend


@short_entry
def admit_many(
    at: Rows[int],
    template_at: Rows[int],
    lengths: Matrix,
    sequences: Rows[int],
    priority: int,
    client: int,
    deadlines_ns: Matrix,
    streamed: int,
    sessions: Rows[int],
    host_rows: Rows[int],
    ids: Rows[int],
) -> int:
    """Call ``admission.admit_many``; ``template_at`` is ``Template.at``."""
    t, template = open_tables(at), open_template(template_at)
    how = priority, client, deadlines_ns, streamed, sessions
    return _admit_many(t, template, lengths, sequences, *how, host_rows, ids)


@short_entry
def admit_each(
    at: Rows[int],
    templates_at: Rows[int],
    sequences: Rows[int],
    priority: int,
    client: int,
    deadlines_ns: Matrix,
    streamed: int,
    sessions: Rows[int],
    host_rows: Rows[int],
    ids: Rows[int],
) -> int:
    """Call ``admission.admit`` for each request; ``templates_at`` has the ``Template.at`` of each.

    Return how many requests were admitted, in order, with their ids in ``ids`` and their rows one after the other.
    """
    t, first = open_tables(at), 0
    for k in range(sequences.size):
        template, session = open_template(templates_at[k]), sessions[k] if k < sessions.size else -1
        done_ns, begun_ns = _deadline_of(deadlines_ns, k, 0), _deadline_of(deadlines_ns, k, 1)
        how = priority, client, done_ns, begun_ns, streamed, session
        ids[k] = _admit(t, template, sequences[k], *how, host_rows, first)
        if ids[k] < 0:
            return k
        first += _num_rows(template)
    return sequences.size


@short_entry
def result_rows(at: Rows[int], request_ids: Rows[int], positions: Rows[int], rows: Rows[int]) -> None:
    """Call ``completion.result_rows``."""
    _result_rows(open_tables(at), request_ids, positions, rows)


@short_entry
def drop_states(at: Rows[int], session: int, row: int) -> None:
    """Call ``session_state.drop_states``."""
    _drop_states(open_tables(at), session, row)


@short_entry
def finish_many(at: Rows[int], request_ids: Rows[int], started_ns: Rows[int]) -> int:
    """Call ``admission.finish_many``."""
    return _finish_many(open_tables(at), request_ids, started_ns)


@short_entry
def copy_results(at: Rows[int], request_ids: Rows[int], positions: Rows[int], arena: Matrix, values: Matrix) -> None:
    """Call ``admission.copy_results``."""
    _copy_results(open_tables(at), request_ids, positions, arena, values)


@short_entry
def schedule_tasks(at: Rows[int], worker: int, task_ids: Rows[int]) -> int:
    """Call ``schedule.schedule``."""
    return _schedule(open_tables(at), worker, task_ids)


@short_entry
def starvation(at: Rows[int], worker: int) -> int:
    """Call ``suspension.starvation``."""
    return _starvation(open_tables(at), worker)


@short_entry
def suspend(at: Rows[int], worker: int) -> bool:
    """Call ``suspension.suspend``."""
    return _suspend(open_tables(at), worker)


@short_entry
def complete(at: Rows[int], task_id: int, elapsed_ns: int, notices: Matrix) -> int:
    """Call ``completion.complete`` and ``join_leave.leave``."""
    t = open_tables(at)
    return _leave(t, notices, _complete(t, task_id, elapsed_ns, notices, 0), t.settings[0].now_ns)


@short_entry
def join(at: Rows[int]) -> bool:
    """Call ``join_leave.join``."""
    return _join(open_tables(at))


@short_entry
def has_handed_in(at: Rows[int]) -> bool:
    """Return whether a client has handed in what no turn has seen (``region_entries.has_handed_in``)."""
    return _has_handed_in(open_tables(at))


@short_entry
def take_out(at: Rows[int], region: int, submissions: Rows[int]) -> int:
    """Make submissions of all that the client of a region has handed in, and write their numbers to ``submissions``;
    return how many they are. None is admitted, and the region has no more of them."""
    t, count = open_tables(at), 0
    its = t.regions[region]
    while its.is_open != 0 and count < submissions.size and _has_more(its):
        number = _lift(t, its)
        if number < 0:
            break
        submissions[count] = number
        _take(its)
        count += 1
    return count


@short_entry
def cancel(at: Rows[int], request_id: int) -> bool:
    """Call ``completion.cancel``."""
    return _cancel(open_tables(at), request_id)


@entry
def lose_worker(at: Rows[int], worker: int, notices: Matrix) -> int:
    """Call ``lost_worker.lose_worker`` and ``join_leave.leave``."""
    t = open_tables(at)
    return _leave(t, notices, _lose_worker(t, worker, notices), t.settings[0].now_ns)


@short_entry
def share_states(at: Rows[int], session: int, other: int, count: int) -> bool:
    """Call ``session_state.share_states``."""
    return _share_states(open_tables(at), session, other, count)


@short_entry
def cut_back(at: Rows[int], session: int, count: int, rows: int) -> bool:
    """Call ``session_state.cut_back``."""
    return _cut_back(open_tables(at), session, count, rows)
