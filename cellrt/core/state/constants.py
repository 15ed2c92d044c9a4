"""The numbers that the scheduler goes by where no setting says otherwise, in one table."""

from __future__ import annotations

import numpy as np

# Who ended in a run goes first (``schedule.py``).
SHORT_NS = 300_000.0
"""ns that short tasks behind a run take together, at most: what takes no longer is not worth a turn of its own."""
TASK_NS = np.float32(50_000)
"""ns that a task costs besides its step, about."""
RUNS_BEFORE = np.float32(6)
"""What ended rows made ready follows a run once that, and the runs before it, took so many times as long."""

# A few rows wait for company (``gathering.py``).
MOST_STEPS = np.float32(12)
"""So many of their steps a few rows wait, at most."""
MOST_OF_A_CHAIN = np.float32(4)
"""The same of chains and loops, whose tasks have many steps, and so cost fewer turns however small they are."""
GAINS = 1.25
"""A step of all rows takes so many times as long as one of each worker's share, or they are not shared out."""
NEARLY_BEST = np.float32(1.1)
"""Rows that take so many times as long as in the best batch, or less, are in one that is large enough."""

# How long a run is (``batching.py``).
LATELY_RUNS = 50
"""Where a higher client priority was served so many longest runs ago or less, it is likely to come again."""
MIN_RUN_S = 0.7e-3
"""Seconds: the default of ``min_run_s`` for one worker; several share the turns that shorter runs cost, and have twice
that."""

# What no request takes less than (``step_times.py``).
HOST_NS = 500_000
"""ns: a task takes no longer than that beside its steps."""
CERTAIN = 0.5
"""So much of the least time is counted: a step may be quicker than any before it."""
