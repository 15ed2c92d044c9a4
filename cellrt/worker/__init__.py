"""Workers: each runs tasks in order on one device, and counts those that are done."""
