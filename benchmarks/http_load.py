"""The load of the HTTP benchmark, from ``wrk``: connections that each send one request after the other."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

LUA = """
bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local at = 0
request = function()
  at = at %% #bodies + 1
  return wrk.format("POST", nil, {["Content-Type"] = "application/json"}, bodies[at])
end
"""
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def measured(url: str, bodies: Sequence[object], clients: int, seconds: float) -> dict[str, float]:
    """Return requests/s, and p50 and p99 in ms, of so many connections. Raise RuntimeError where an answer is no
    success.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines, script = Path(folder) / "bodies.jsonl", Path(folder) / "send.lua"
        lines.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        script.write_text(LUA % lines)
        threads = ["-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "--timeout", "30s"]
        done = subprocess.run(["wrk", *threads, "-s", str(script), url], capture_output=True, text=True, check=True)
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(f"{url}: {done.stdout}")
    found = {"rate": float(re.findall(r"Requests/sec:\s+([\d.]+)", done.stdout)[0])}
    for percentile in (50, 99):
        value, unit = re.findall(rf"{percentile}%\s+([\d.]+)(us|ms|s)", done.stdout)[0]
        found[f"p{percentile}"] = float(value) * UNITS_MS[unit]
    return found
