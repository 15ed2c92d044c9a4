"""The next token of each row of logits on a CPU, each row as its request asked for it: greedy, or drawn.

    logits += bias;  penalties of the tokens so far;  no end before min_tokens
    nothing but what the row's mask allows
    weights = exp((logits - max) / temperature) of those that top-k, then top-p, then min-p leave
    token: where the running sum of weights passes a uniform number of (seed, position)

A row's bits depend on its logits and its request alone. A row that asks for nothing costs what greedy choice costs.
What is changed in a row's logits is changed back when its token is there: log-probabilities are the model's own.
"""

from __future__ import annotations

import numpy as np

from cellrt.cells._row_kernels import best_column, choose_likeliest
from cellrt.cells._selection import drop_below, heaviest_with, highest_with, keep, keep_best, new_room, place_of, weigh
from cellrt.definition.compiled_form import array_at, nogil, nogil_part
from cellrt.products.packed import FLOAT_BYTES

# The settings of a row, float64.
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(7)
MIN_TOKENS, IGNORES_END, NUM_LOGPROBS, PROMPT, NUM_STOPS, NUM_BIASES, HAS_MASK = range(7, 14)
NUM_SETTINGS = 14
MASK_BITS = 32
"""Tokens of a word of a mask, the lowest bit first."""

# What ``sample_rows`` is told of a task, int64: addresses, and numbers.
SETTINGS, SEEDS, STOPS, BIASES, MASKS, STEPS, PAGES, TABLES, WIDTH, PAGE_SIZE, POSITIONS, NODES = range(12)
TOKEN, LOGPROB, STOP, TOP_TOKEN, TOP_LOGPROB = range(12, 17)
MOST_STOPS, MOST_BIASES, MOST_LOGPROBS, ENDS, NUM_ENDS = range(17, 22)
NUM_WORDS = 22

# The constants of SplitMix64 (Steele, Lea and Flood 2014), of which ``output.py`` has the numbers of a seed and a step.
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@nogil_part
def _mix(bits):  # type: ignore[no-untyped-def]
    bits = np.uint64(bits) + _GOLDEN  # it comes as a signed number, of the same bits
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))


@nogil
def uniform_number(seed, step):  # type: ignore[no-untyped-def]
    """Return a number of (0, 1) for a seed and a step: 48 random bits, as ``uniform`` of ``output.py``."""
    bits = _mix(_mix(np.uint64(seed)) + np.uint64(step) * _GOLDEN)
    return (np.float64(bits >> np.uint64(16)) + 0.5) / 2.0**48


@nogil_part
def whole(number, most):  # type: ignore[no-untyped-def]
    """Return a setting as an integer from 0 to ``most``."""
    return int(number) if 0 <= number < most else most if number >= most else 0


@nogil_part
def steps_made(step, prompt):  # type: ignore[no-untyped-def]
    """Return how many tokens of the answer precede a request's row ``step``.

    ``prompt`` is the number of rows before the answer; negative if the answer began before the request.
    """
    return max(0, step + 1 - int(min(max(prompt, -(2.0**31)), 2.0**31)))


@nogil_part
def remember_tokens(tokens, rows, task):  # type: ignore[no-untyped-def]
    """Append the int64 tokens of all rows to their histories."""
    own, node = array_at(tokens, rows, np.int64), array_at(task[NODES], rows, np.int32)
    position = array_at(task[POSITIONS], rows, np.int32)
    width, size, pages = task[WIDTH], task[PAGE_SIZE], task[PAGES]
    for row in range(rows):
        table = array_at(task[TABLES] + 4 * node[row] * width, width, np.int32)
        page = array_at(pages + 4 * size * table[position[row] // size], size, np.int32)
        page[position[row] % size] = own[row]


@nogil_part
def sample_rows(logits, count, width, rows, task):  # type: ignore[no-untyped-def]
    """Write to the outputs what each of ``count`` rows of float32 logits ``[count, width]`` says; ``rows`` int64 are
    their places in the task."""
    place = array_at(rows, count, np.int64)
    room = new_room(width)
    most = 2 * width + task[MOST_BIASES] + task[MOST_STOPS] + task[NUM_ENDS]
    changes = np.zeros(width, np.int32), np.empty(most, np.int64), np.empty(most, np.float32)
    for k in range(count):
        _sample_row(logits + k * width * FLOAT_BYTES, width, place[k], task, room, changes)


@nogil
def sample_rows_alone(logits, count, width, rows, task):  # type: ignore[no-untyped-def]
    """Call ``sample_rows`` from Python."""
    sample_rows(logits, count, width, rows, task)


@nogil_part
def _sample_row(logits, width, row, task, room, changes):  # type: ignore[no-untyped-def]
    own, setting = array_at(logits, width, np.float32), _setting_of(row, task)
    token, logprob = array_at(task[TOKEN] + 8 * row, 1, np.int64), array_at(task[LOGPROB] + 4 * row, 1, np.float32)
    choose_likeliest(logits, 1, width, task[TOKEN] + 8 * row, task[LOGPROB] + 4 * row)
    best, chance = token[0], logprob[0]
    most = task[MOST_LOGPROBS]
    _list_best(own, best, chance, whole(setting[NUM_LOGPROBS], most), row, task, room)
    step = steps_made(read_step(row, task), setting[PROMPT])
    likeliest = _likeliest_allowed(own, row, task) if setting[HAS_MASK] > 0 else best
    changed = _change(own, row, step, setting, task, changes)
    if setting[TEMPERATURE] > 0:
        number = uniform_number(array_at(task[SEEDS] + 8 * row, 1, np.int64)[0], _position_of(row, task))
        token[0] = _draw(logits, own, setting, number, likeliest, room)
    elif changed > 0:
        place = best_column(logits, width)
        token[0] = place if own[place] > -np.inf else likeliest
    _, where, before = changes
    for k in range(changed - 1, -1, -1):
        own[where[k]] = before[k]
    if token[0] != best:
        logprob[0] = chance + (own[token[0]] - own[best])
    _mark_stop(token[0], setting, row, task)


@nogil_part
def _setting_of(row, task):  # type: ignore[no-untyped-def]
    return array_at(task[SETTINGS] + 8 * NUM_SETTINGS * row, NUM_SETTINGS, np.float64)


@nogil_part
def read_step(row, task):  # type: ignore[no-untyped-def]
    """Return the step of a row in its request's chain or loop."""
    return np.int64(array_at(task[STEPS] + 4 * row, 1, np.int32)[0])


@nogil_part
def _position_of(row, task):  # type: ignore[no-untyped-def]
    return np.int64(array_at(task[POSITIONS] + 4 * row, 1, np.int32)[0])


@nogil_part
def _stops_of(row, setting, task):  # type: ignore[no-untyped-def]
    """Return the stop tokens of a row, and the end tokens."""
    stops = array_at(task[STOPS] + 4 * task[MOST_STOPS] * row, task[MOST_STOPS], np.int32)
    return stops[: whole(setting[NUM_STOPS], task[MOST_STOPS])], array_at(task[ENDS], task[NUM_ENDS], np.int64)


@nogil_part
def _mark_stop(token, setting, row, task):  # type: ignore[no-untyped-def]
    stops, ends = _stops_of(row, setting, task)
    is_stop = False
    for each in stops:
        is_stop |= each == token
    if not setting[IGNORES_END] > 0:
        for end in ends:
            is_stop |= end == token
    array_at(task[STOP] + row, 1, np.uint8)[0] = is_stop


@nogil_part
def _change(own, row, step, setting, task, changes):  # type: ignore[no-untyped-def]
    """Change logits as a row's request asks; return how many changes there are to be taken back."""
    _, where, before = changes
    count, most = 0, task[MOST_BIASES]
    biases = array_at(task[BIASES] + 8 * most * row, (most, 2), np.float32)
    for k in range(whole(setting[NUM_BIASES], most)):
        token = np.int64(whole(np.float64(biases[k, 0]), own.size))
        if token < own.size:
            where[count], before[count] = token, own[token]
            own[token] += biases[k, 1]
            count += 1
    if setting[REPETITION] != 1 or setting[PRESENCE] != 0 or setting[FREQUENCY] != 0:
        count = _penalise(own, count, row, step, setting, task, changes)
    if step < setting[MIN_TOKENS]:
        stops, ends = _stops_of(row, setting, task)
        for number in range(stops.size + ends.size):
            token = np.int64(stops[number]) if number < stops.size else ends[number - stops.size]
            if 0 <= token < own.size:
                where[count], before[count] = token, own[token]
                own[token] = -np.inf
                count += 1
    if setting[HAS_MASK] > 0:
        mask = _mask_of(own, row, task)
        for place in range(own.size):
            if not mask[place >> 5] >> np.uint32(place & 31) & np.uint32(1):
                where[count], before[count] = place, own[place]
                own[place] = -np.inf
                count += 1
    return count


@nogil_part
def _mask_of(own, row, task):  # type: ignore[no-untyped-def]
    words = (own.size + MASK_BITS - 1) // MASK_BITS
    return array_at(task[MASKS] + 4 * words * row, words, np.uint32)


@nogil_part
def _likeliest_allowed(own, row, task):  # type: ignore[no-untyped-def]
    """Return the likeliest of the tokens that the row's mask allows; the first of all if it allows none."""
    mask, found = _mask_of(own, row, task), -1
    for token in range(own.size):
        if mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1) and (found < 0 or own[token] > own[found]):
            found = token
    return max(found, 0)


@nogil_part
def _penalise(own, count, row, step, setting, task, changes):  # type: ignore[no-untyped-def]
    """Change the logits of all tokens so far: divided for repetition, less for each time in the answer."""
    seen, where, before = changes
    first = count
    node = array_at(task[NODES] + 4 * row, 1, np.int32)[0]
    table = array_at(task[TABLES] + 4 * node * task[WIDTH], task[WIDTH], np.int32)
    size, rows = task[PAGE_SIZE], _position_of(row, task) + 1
    for start in range(0, rows, size):
        page = array_at(task[PAGES] + 4 * size * table[start // size], size, np.int32)
        for slot in range(min(size, rows - start)):
            token = page[slot]
            if token < 0 or token >= own.size:
                continue
            if seen[token] == 0:
                where[count], before[count] = token, own[token]
                count += 1
                seen[token] = 1
            seen[token] += start + slot >= rows - step
    repetition, presence = np.float32(setting[REPETITION]), np.float32(setting[PRESENCE])
    frequency = np.float32(setting[FREQUENCY])
    for k in range(first, count):
        token = where[k]
        logit, times = own[token], np.float32(seen[token] - 1)
        seen[token] = 0
        if repetition > 0:
            logit = logit / repetition if logit > 0 else logit * repetition
        own[token] = logit - frequency * times - (presence if times > 0 else np.float32(0))
    return count


@nogil_part
def _draw(logits, own, setting, number, best, room):  # type: ignore[no-untyped-def]
    """Return the token where the running sum of weights passes ``number`` of their sum; ``best`` if nothing is left."""
    likeliest = best_column(logits, own.size)
    highest = own[likeliest]
    if not highest > -np.inf:
        return best
    values, weights, places = room[0], room[1], room[3]
    count, top_k, top_p = own.size, whole(setting[TOP_K], own.size), setting[TOP_P]
    temperature, least, bound = max(setting[TEMPERATURE], 1e-30), min(1.0, setting[MIN_P]), np.float32(-np.inf)
    is_cut = 0 < top_k < own.size
    if is_cut:
        count = keep_best(own, count, top_k, room)
        bound = highest_with(values, weights[:0], count, top_k, room)
        count = keep(values, bound, count, values, places, room)
    given = values if is_cut else own
    total = weigh(given, count, highest, temperature, room)
    if top_p < 1:  # tokens that weigh no more than ``low`` weigh less together than what top-p leaves out
        low = (1 - top_p) * total / max(1, count)
        bound = heaviest_with(given, count, low, top_p * total, room)
    if top_p < 1 or least > 0:
        total = drop_below(given, bound, least, count, room)
    if not total > 0:  # there are logits that are no numbers
        return likeliest
    place = place_of(weights, count, number * total, room)
    return places[place] if is_cut else place


@nogil_part
def _list_best(own, best, chance, count, row, task, room):  # type: ignore[no-untyped-def]
    """Write the likeliest tokens and their log-probabilities, the likeliest first, the lower of equals first; -1 and
    minus infinity behind them. ``chance`` is the log-probability of the best."""
    most = task[MOST_LOGPROBS]
    token = array_at(task[TOP_TOKEN] + 8 * most * row, most, np.int64)
    logprob = array_at(task[TOP_LOGPROB] + 4 * most * row, most, np.float32)
    token[:], logprob[:] = -1, -np.inf
    count = min(count, own.size)
    if count == 0:
        return
    values, places = room[0], room[3]
    kept, found = keep_best(own, own.size, count, room), 0
    for k in range(kept):
        at = min(found, count)
        if at == count and not values[k] > logprob[count - 1]:
            continue
        at = min(at, count - 1)
        while at > 0 and logprob[at - 1] < values[k]:
            token[at], logprob[at] = token[at - 1], logprob[at - 1]
            at -= 1
        token[at], logprob[at] = places[k], values[k]
        found += 1
    for k in range(min(found, count)):
        logprob[k] = chance + (logprob[k] - own[best])
