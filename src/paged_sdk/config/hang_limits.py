"""Say when a replica counts as hung."""

from __future__ import annotations

from attrs import field, frozen

from paged_sdk.config.checks import NumberBetween, as_optional_float

__all__ = ["HangLimits"]


@frozen(kw_only=True)
class HangLimits:
    """Says when a replica that runs in a process of its own has hung, so that it is ended as one that has died.

    Loading a model is not limited, nor is what goes on between steps, such as ``re_isq_model``.

    :ivar silent_seconds: a process has hung of which nothing is heard for so long, as one that was stopped; it is asked
        ten times meanwhile, under Ray Serve three times. None: it may be silent for ever
    :ivar step_seconds: an engine has hung one step of which takes so long, as one that waits for a device that is gone.
        A first step that compiles, or a long prompt on a slow CPU, takes minutes: set it lower where steps are
        short. None: a step may take for ever
    :raises ConfigError: a limit that is not a number of seconds > 0
    """

    silent_seconds: float | None = field(
        default=60.0, converter=as_optional_float, validator=NumberBetween(0, low_open=True, optional=True)
    )
    step_seconds: float | None = field(
        default=600.0, converter=as_optional_float, validator=NumberBetween(0, low_open=True, optional=True)
    )
