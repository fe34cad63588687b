"""What the tests call of jsonschema.validators."""

from collections.abc import Callable, Iterator, Mapping

from jsonschema import ValidationError, _Validator

def extend(
    validator: type[_Validator],
    validators: Mapping[str, Callable[[object, float, object, object], Iterator[ValidationError]]],
) -> type[_Validator]: ...
