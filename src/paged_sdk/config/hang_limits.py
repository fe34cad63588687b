"""Say when a replica counts as hung."""

from __future__ import annotations

from attrs import field, frozen

from paged_sdk.config.checks import NumberBetween, as_optional_float

__all__ = ["HangLimits"]


@frozen(kw_only=True)
class HangLimits:
    """Says when a replica in its own process counts as hung, and is killed and treated as dead.

    Loading a model and work between steps, such as ``re_isq_model``, are not limited.

    :ivar silent_seconds: nothing was heard from the process, for example because it was stopped. It is polled ten times
        in that time, under Ray Serve three times. None: no limit
    :ivar step_seconds: one engine step takes this long, for example because the device is gone. A first step that
        compiles, or a long prompt on a slow CPU, can take minutes: set a lower limit where steps are short. None: no
        limit
    :raises ConfigError: a limit that is not a number of seconds > 0
    """

    silent_seconds: float | None = field(
        default=60.0, converter=as_optional_float, validator=NumberBetween(0, low_open=True, optional=True)
    )
    step_seconds: float | None = field(
        default=600.0, converter=as_optional_float, validator=NumberBetween(0, low_open=True, optional=True)
    )
