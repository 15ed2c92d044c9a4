"""The constants of the scheduler that no setting replaces, in one table."""

from __future__ import annotations

import numpy as np

# Short tasks after a run answer the requests that ended in it (``schedule.py``).
SHORT_NS = 300_000.0
"""The most ns that short tasks after a run take together: they are not worth a turn of their own."""
TASK_NS = np.float32(50_000)
"""The ns that a task costs besides its step, about."""
RUNS_BEFORE = np.float32(6)
"""The factor by which runs must take longer than the short tasks of their ended rows that follow the last of them."""

# A few rows wait for more (``gathering.py``).
MOST_STEPS = np.float32(12)
"""The longest time that a few rows wait, in steps of theirs."""
MOST_OF_A_CHAIN = np.float32(4)
"""The same for chains and loops, whose tasks have many steps, and so cost fewer turns however small they are."""
GAINS = 1.25
"""The factor by which a step of all rows must be slower than one of each worker's share for rows to be shared out."""
NEARLY_BEST = np.float32(1.1)
"""The largest time of a row, as a multiple of the time in the best batch, in a batch that counts as large enough."""

# How long a run is (``batching.py``).
LATELY_RUNS = 50
"""The number of longest runs after which a higher client priority that was served is no longer likely to come again."""
MIN_RUN_S = 0.7e-3
"""The default of ``min_run_s`` for one worker, in seconds.

Several workers share the turns that shorter runs cost, and have twice that.
"""

# The least time of a request (``step_times.py``).
HOST_NS = 500_000
"""The most ns that a task takes besides its steps."""
CERTAIN = 0.5
"""The share of the least measured time that counts as the least: a step may be quicker than any before it."""
