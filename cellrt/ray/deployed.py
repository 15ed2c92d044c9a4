"""An application of Ray Serve: fronts and replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cellrt.errors import DefinitionError
from cellrt.process.model_names import sources_of
from cellrt.ray.front import Front, make_front
from cellrt.ray.replica import LEAVE_S, Replica
from cellrt.ray.routing import SessionRouter
from cellrt.ray.scaling import QueueingPolicy, Scaling
from cellrt.serve.server_settings import Limits, Settings

MOST_ONGOING = 100_000
"""The number of requests that Ray Serve lets into a replica. It is large: the engine itself answers 429 when full."""
END_S = 5.0
"""The time for a replica's engine to end, after all requests have ended."""


def application(
    models: Sequence[str],
    *,
    replicas: int | Scaling = 1,
    fronts: int = 1,
    resources: Mapping[str, Any] | None = None,
    **settings: Any,
) -> serve.Application:
    """Return an application that serves models over HTTP as ``cellrt serve`` does, on replicas of an engine.

    It is for ``serve.run``, or ``serve deploy``.

    Args:
        models: each "module:attribute", "path.py:attribute", "path.py", or the name g2p, on each machine.
        replicas: the number of replicas, or the limits between which it follows the load.
        fronts: processes that read and answer HTTP.
        resources: the Ray resources of a replica: ``num_cpus`` (1 by default), ``num_gpus`` and others.
        settings: see ``cellrt.serve.server_settings.Settings``: ``workers``, ``max_queued_requests``, ``api_keys``,
            ``drain_s``, ``limits`` and others; host, ports and front ends are set in Ray Serve.

    Raise DefinitionError.
    """
    ours = {"models", "host", "port", "grpc_port", "front_ends", "address"}
    unknown = settings.keys() - (Settings.__dataclass_fields__.keys() - ours)
    if unknown:
        raise DefinitionError(f"application: unknown are {sorted(unknown)}")
    made = Settings(models=sources_of(models), **{"workers": 1, **settings})
    common = {"max_ongoing_requests": MOST_ONGOING, "logging_config": {"enable_access_log": False}}
    engines = serve.deployment(
        Replica,
        name="Engine",
        ray_actor_options={"num_cpus": 1, **(resources or {})},
        request_router_config=RequestRouterConfig(
            request_router_class=SessionRouter, request_router_kwargs={"num_fallback_replicas": 0}
        ),
        health_check_period_s=1.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=made.drain_s + LEAVE_S + END_S,
        **common,
        **_how_many(replicas),
    ).bind(made)
    return serve.deployment(
        serve.ingress(make_front)(Front),
        name="Front",
        num_replicas=fronts,
        ray_actor_options={"num_cpus": 0},
        **common,
    ).bind(made, engines)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return an ``application``, given the ``args`` of a Ray Serve configuration.

    There it is named by ``import_path: cellrt.ray:build``.

    ``replicas`` may be an object with the fields of ``Scaling``. Raise DefinitionError.
    """
    replicas, limits = arguments.get("replicas", 1), arguments.get("limits", {})
    try:
        given = {**arguments, "limits": Limits(**limits)}
        if isinstance(replicas, dict):
            given["replicas"] = Scaling(**replicas)
        return application(**given)
    except TypeError as error:
        raise DefinitionError(f"args: {error}") from None


def _how_many(replicas: int | Scaling) -> dict[str, Any]:
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    policy = AutoscalingPolicy(policy_function=QueueingPolicy, policy_kwargs={"target_s": replicas.queueing_s})
    config = AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=replicas.max_replicas,
        upscale_delay_s=replicas.up_after_s,
        downscale_delay_s=replicas.down_after_s,
        metrics_interval_s=1.0,
        look_back_period_s=max(2.0, replicas.up_after_s),
        policy=policy,
    )
    return {"autoscaling_config": config}
