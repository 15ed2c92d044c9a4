"""The constants of the scheduler that no setting replaces, in one table."""

from __future__ import annotations

import numpy as np

# Short tasks after a run answer the requests that ended in it (``schedule.py``).
SHORT_TASKS_NS = 300_000.0
"""The most time of the short tasks after a run, together: the scheduler forms them in the same turn as the run."""
TASK_OVERHEAD_NS = np.float32(50_000)
"""The time that a task costs besides its step, roughly."""
SHORT_TASK_WAITS = np.float32(6)
"""A short task follows a run if its rows have waited this many times as long as the task takes, or longer."""

# A few rows wait for more (``gathering.py``).
MAX_WAIT_STEPS = np.float32(12)
"""The longest wait of a small batch for more rows, in times of one of its steps."""
MAX_WAIT_STEPS_OF_CHAINS = np.float32(4)
"""The same for chains and loops. They wait less: a task takes many steps of them, so small tasks cost fewer turns."""
SHARING_GAIN = 1.25
"""Sharing rows out gains if a step of all rows takes this many times as long as one of a worker's share."""
LARGE_BATCH_SLACK = np.float32(1.1)
"""A batch counts as large enough if its time for a row is at most this many times that of the best batch."""

# How long a run is (``batching.py``).
PRIORITY_MEMORY_RUNS = 50
"""After this many times the longest run, a higher client priority that was served is not expected again."""
MIN_RUN_S = 0.7e-3
"""The default of ``min_run_s`` for one worker, in seconds.

With several workers it is twice that, as shorter runs cost more turns, which all workers share.
"""

# The least time of a request (``step_times.py``).
MAX_OVERHEAD_NS = 500_000
"""The most time that a task takes besides its steps."""
CERTAIN_PART = 0.5
"""The part of the least measured time that every step is expected to take, as one may be quicker than any before."""
