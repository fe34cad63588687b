"""Complete the options of Ray Serve deployments."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from paged_sdk.config.build import BuildSettings
from paged_sdk.config.checks import is_finite, plain
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.errors import ConfigError
from paged_sdk.logs import get_logger

__all__ = [
    "REPLACEMENT_SECONDS",
    "checked_limits",
    "checked_seconds",
    "engine_options",
    "most_replicas",
    "ray_serve",
    "resources_of",
    "with_health_checks",
    "with_resources",
]

_log = get_logger(__name__)

SEQUENCES_PER_REPLICA: Final = 32
"""Default number of running and waiting sequences per replica that autoscaling aims at."""
REPLACEMENT_SECONDS: Final = 120.0
"""Time that requests wait while there is no replica: Ray Serve needed 9 to 13 s to replace one, plus a large model's
loading time."""
DEFAULTS: Final[Mapping[str, Any]] = {
    "name": "engine",
    "max_ongoing_requests": 1_000_000,  # the engine's queue has its own limit, with a typed error
    "graceful_shutdown_timeout_s": 60.0,
    "graceful_shutdown_wait_loop_s": 0.5,
    "logging_config": {"enable_access_log": False},  # one line per message would be about 300 per second
}
HEALTH_CHECK_SECONDS: Final = 2.0
"""Interval of health checks, so that a dead replica is soon replaced; Ray Serve's default is 10."""
FAILED_CHECKS: Final = 3
"""Number of health checks in a row that a replica has to miss before Ray Serve ends it."""
FOR_EVER: Final = 1e9


def ray_serve() -> ModuleType:
    """Return the module ``ray.serve``.

    :raises ConfigError: it is not installed, or too old
    """
    try:
        serve = import_module("ray.serve")
        import_module("ray.serve.request_router")
    except ImportError as error:
        raise ConfigError(
            f"replicas under Ray Serve need {error.name}: pip install 'paged-sdk[ray]'",
            setting="ray",
            allowed="Ray 2.60 or later, with its extra serve",
        ) from None
    return serve


def checked_seconds(given: float) -> float:
    """Return a checked ``replacement_seconds``.

    :raises ConfigError: not a number of seconds
    """
    seconds = plain(given)
    if not (is_finite(seconds) and seconds >= 0):
        raise ConfigError.of("replacement_seconds", given, "a finite number of seconds >= 0")
    return float(seconds)


def checked_limits(given: object) -> HangLimits | None:
    """Return checked ``hang_limits``; None: the environment decides.

    :raises ConfigError: another type
    """
    if not isinstance(given, HangLimits | None):
        raise ConfigError.of("hang_limits", given, "HangLimits or None")
    return given


def with_health_checks(options: Mapping[str, Any], limits: HangLimits) -> dict[str, Any]:
    """Return a deployment's options with health checks that detect a silent process. Options that are set win."""
    seconds = FOR_EVER if limits.silent_seconds is None else limits.silent_seconds / FAILED_CHECKS
    period = min(HEALTH_CHECK_SECONDS, seconds)
    return {"health_check_period_s": period, "health_check_timeout_s": seconds, **options}


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the replicas' deployment, with defaults.

    :param given: options of ``ray.serve.deployment``, which win over the defaults
    :raises ConfigError: Ray Serve is not installed, or a value cannot be used
    """
    ray_serve()
    from ray.serve.config import RequestRouterConfig

    options = {**DEFAULTS, **given}
    if "request_router_config" in given:
        raise ConfigError.of(
            "request_router_config",
            given["request_router_config"],
            "absent: replicas are chosen by paged_sdk.routing.Router",
        )
    options["request_router_config"] = RequestRouterConfig(
        request_router_class="paged_sdk.ray.request_router:DirectedCalls"
    )
    if options.get("num_replicas") == "auto" and "autoscaling_config" not in given:
        options["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 100}
    scaling = options.get("autoscaling_config")
    if scaling is not None:
        options["autoscaling_config"] = _autoscaling(scaling)
        options.pop("num_replicas", None)
    return options


def with_resources(options: Mapping[str, Any], builder: object, *, other_cpus: float = 0) -> dict[str, Any]:
    """Return the options of the replicas' deployment with the resources of a replica, unless they are set.

    They depend on the cluster's resources, which are unknown until Ray runs: see :func:`resources_of`.

    :param other_cpus: CPUs of the cluster that the application needs for other processes
    """
    if "ray_actor_options" in options:
        return dict(options)
    ray = import_module("ray")
    cluster = None
    if ray.is_initialized():
        cluster = dict(ray.cluster_resources())
        cluster["CPU"] = cluster.get("CPU", 0) - other_cpus
    resources = resources_of(builder, most_replicas(options), cluster)
    if cluster is None:
        _log.warning(
            "Ray is not running yet, so its resources are unknown: each replica gets %s. Call ray.init() first, or set "
            "ray_actor_options.",
            resources,
        )
    return {**options, "ray_actor_options": resources}


def resources_of(builder: object, num_replicas: int, cluster: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the resources that Ray reserves for each replica: GPUs if the cluster has any that the model may use;
    otherwise the builder's number of threads, or a share of the CPUs.

    :param num_replicas: maximum number of replicas
    :param cluster: the cluster's resources; None: unknown. A replica then gets GPUs only if the builder asks for CUDA,
        and one CPU unless the builder sets a number of threads
    """
    settings = getattr(builder, "settings", None)
    if not isinstance(settings, BuildSettings):
        return {"num_cpus": 1}
    ranks = settings.tensor_parallel if isinstance(settings.tensor_parallel, int) else 1
    if cluster is None:
        uses_gpu = settings.device.startswith("cuda")
    else:
        uses_gpu = cluster.get("GPU", 0) > 0 and not settings.device.startswith("cpu")
    if uses_gpu:
        return {"num_cpus": 1, "num_gpus": ranks}
    share = 1 if cluster is None else int(cluster.get("CPU", 1)) // num_replicas
    return {"num_cpus": settings.num_threads or max(share, 1)}


def most_replicas(options: Mapping[str, Any]) -> int:
    """Return the maximum number of replicas by a deployment's options."""
    scaling = options.get("autoscaling_config")
    most = options.get("num_replicas", 1) if scaling is None else scaling.get("max_replicas", 1)
    return most if isinstance(most, int) and most > 0 else 1


def _autoscaling(given: object) -> dict[str, Any]:
    values = given if isinstance(given, Mapping) else getattr(given, "model_dump", dict)(exclude_unset=True)
    if not isinstance(values, Mapping):
        raise ConfigError.of("autoscaling_config", given, "a mapping, as Ray Serve has it")
    if values.get("min_replicas", 1) < 1:
        raise ConfigError.of(
            "min_replicas", values["min_replicas"], "at least 1: the server process starts from a running replica"
        )
    policy = {"policy_function": "paged_sdk.ray.autoscaling:replicas_for_sequences"}
    return {"target_ongoing_requests": SEQUENCES_PER_REPLICA, "policy": policy, **values}
