"""Decides whether a model drafts with its layer for multi-token prediction (MTP)."""

from __future__ import annotations

from paged_sdk.build.loading import Loading
from paged_sdk.build.sizing import resolve_draft
from paged_sdk.config.env import MTP
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger

__all__ = ["loads_mtp"]

_log = get_logger(__name__)


def loads_mtp(loading: Loading, placement: Placement, *, name: str, has_layer: bool, is_divided: bool) -> bool:
    """Return whether a checkpoint's layer for multi-token prediction is to be loaded.

    :param name: the checkpoint's name
    :param has_layer: whether it has such a layer
    :param is_divided: whether the model is divided among ranks
    :raises ConfigError: the builder asks for it, and the model cannot draft with it; if the environment does, which may
        be meant for another model of the process, there is a line in the log instead
    """
    settings, environment = loading.settings, loading.environment
    asked = environment.mtp if settings.mtp is None else settings.mtp
    if not asked or (settings.mtp is None and resolve_draft(settings, environment) is not None):
        return False
    needed = None
    if not has_layer:
        needed = f"a checkpoint with a layer for multi-token prediction: {name} has none that is known here"
    elif is_divided:
        needed = "a model in one process: ranks do not draft"
    elif not placement.is_one_device or placement.embedding.type != "cpu":
        needed = f"a model on the CPU, here {placement}"
    if needed is None:
        return True
    if settings.mtp is not None:
        raise ConfigError.of("mtp", True, needed)
    _log.info("%s has no effect here: it needs %s.", MTP, needed)
    return False
