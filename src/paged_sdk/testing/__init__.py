"""Provide models without weights, for applications' own tests::

from paged_sdk.testing import fake_model

async with fake_model("Hello!") as model:
    ...
"""

from __future__ import annotations

from paged_sdk.testing.fake_model import FakeModel, FakeRequest, fake_model

__all__ = ["FakeModel", "FakeRequest", "fake_model"]
