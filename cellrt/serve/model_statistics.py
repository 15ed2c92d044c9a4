"""A model's counts in the form of Triton's statistics extension, for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_statistics(name: str, version: str, counts: Mapping[str, Any], last_ms: int) -> dict[str, Any]:
    """Return Triton's counts of ``Engine.statistics()["models"][name]``. A request counts as one inference without
    batch.

    ``last_ms``: when the last one was, in milliseconds since 1970; 0: there was none.
    """
    done, failed = counts["done"], sum(counts["errors"].values())
    queueing_ns, computation_ns = (
        round(1e9 * counts["histograms"][part]["sum_s"]) for part in ("queueing", "computation")
    )

    def spent(count: int, ns: int) -> dict[str, int]:
        return {"count": count, "ns": ns}

    return {
        "name": name,
        "version": version,
        "last_inference": last_ms,
        "inference_count": done,
        "execution_count": done,
        "inference_stats": {
            "success": spent(done, queueing_ns + computation_ns),
            "fail": spent(failed, 0),
            "queue": spent(done, queueing_ns),
            "compute_input": spent(done, 0),
            "compute_infer": spent(done, computation_ns),
            "compute_output": spent(done, 0),
        },
        "batch_stats": [],
    }
