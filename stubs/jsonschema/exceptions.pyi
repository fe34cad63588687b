"""What the tests call of jsonschema.exceptions."""

from collections.abc import Iterable

from jsonschema import ValidationError

def best_match(errors: Iterable[ValidationError]) -> ValidationError | None: ...
