"""References within JSON schemas are resolved by one rule, for constraints and for grammars of calls."""

from __future__ import annotations

from typing import Any, Final

import pytest

from paged_sdk.types.schema_references import resolve_reference

ROOT: Final[dict[str, Any]] = {
    "$id": "https://example.com/root",
    "$defs": {"a/b": {"type": "string"}, "c~d": False, "e%20f": {}, "own": {"$id": "own", "$defs": {"x": {}}}},
}


def test_references_lead_to_parts_of_the_document() -> None:
    assert resolve_reference(ROOT, "#") is ROOT
    assert resolve_reference(ROOT, "#/$defs/a~1b") is ROOT["$defs"]["a/b"]
    assert resolve_reference(ROOT, "#/$defs/c~0d") is False
    assert resolve_reference(ROOT, "#/$defs/own") is ROOT["$defs"]["own"]


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (None, "out of the schema"),
        ("https://example.com/a", "out of the schema"),
        ("#anchor", "out of the schema"),
        ("#/$defs/e%20f", "percent-encoded"),
        ("#/$defs/own/$defs/x", r"\$id"),
        ("#/$defs/missing", "nowhere"),
        ("#/$defs/a~1b/type/x", "nowhere"),
    ],
)
def test_what_libraries_read_differently_is_not_resolved(reference: object, reason: str) -> None:
    with pytest.raises(LookupError, match=reason):
        resolve_reference(ROOT, reference)
