"""Makes enforceable JSON schemas of pydantic models, where pydantic's own are not enforceable or too lax.

Only :mod:`paged_sdk.calls.structured` imports this, and only for a pydantic model: pydantic is no dependency.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

__all__ = ["ModelSchema"]

_LABEL: Final = "[a-z0-9]+(?:-[a-z0-9]+)*"
_AFTER_SCHEME: Final = rf"://(?:{_LABEL}\.){{0,4}}[a-z]{{1,63}}(?::[1-9]\d{{0,3}})?(?:/[A-Za-z0-9._~=&?-]*)*"
_MAX_DECIMAL: Final = 10**15 - 1
_MAX_DECIMAL_PLACES: Final = 9


class ModelSchema(GenerateJsonSchema):
    """Makes schemas that are stricter than pydantic's for numbers and URLs, and laxer for sets and bytes.

    The model's own validation checks what the schema leaves out: a set drops repeated items of its list.
    """

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a number without exponent, with as many digits as are allowed."""
        places, digits = schema.get("decimal_places"), schema.get("max_digits")
        most = _MAX_DECIMAL if digits is None else 10 ** (digits - (places or 0)) - 1
        described: dict[str, Any] = {"type": "number", "minimum": -most, "maximum": most}
        if places is not None:
            described["multipleOf"] = 10 ** -min(places, _MAX_DECIMAL_PLACES)
        elif digits is not None:
            described["multipleOf"] = 1
        for bound, keyword in (("ge", "minimum"), ("le", "maximum")):
            if schema.get(bound) is not None:
                described[keyword] = (max if bound == "ge" else min)(described[keyword], float(schema[bound]))
        for bound, keyword in (("gt", "exclusiveMinimum"), ("lt", "exclusiveMaximum")):
            if schema.get(bound) is not None:
                described[keyword] = float(schema[bound])
        return described

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a URL with an allowed scheme."""
        schemes = schema.get("allowed_schemes")
        if not schemes:
            return super().url_schema(schema)
        pattern = f"^(?:{'|'.join(schemes)}){_AFTER_SCHEME}$"
        return {"type": "string", "pattern": pattern, "maxLength": schema.get("max_length", 2083)}

    def bytes_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe text whose UTF-8 encoding gives the bytes."""
        described = super().bytes_schema(schema)
        if described.get("format") == "binary":
            del described["format"]
        return described

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a list that may repeat items."""
        return _not_unique(super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        """Describe a list that may repeat items."""
        return _not_unique(super().frozenset_schema(schema))


def _not_unique(described: JsonSchemaValue) -> JsonSchemaValue:
    if described.get("minItems", 0) <= 1:
        described.pop("uniqueItems", None)
    return described
