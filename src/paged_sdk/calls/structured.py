"""Makes a model answer with an instance of a type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from attrs import evolve, frozen

from paged_sdk.constraints.schema_parts import schemas_in
from paged_sdk.errors import ConstraintError, InvalidRequestError, ModelClosedError, shortened, shown
from paged_sdk.types.constraint import Constraint
from paged_sdk.types.function_arguments import convert
from paged_sdk.types.function_schema import describe_type
from paged_sdk.types.request import RequestBuilder
from paged_sdk.types.response import ChatCompletionResponse

__all__ = ["Structure"]

InstanceT = TypeVar("InstanceT")


@frozen
class Structure(Generic[InstanceT]):
    """Holds the JSON schema of a type and its parser.

    :ivar constraint: JSON schema of the type
    :ivar parse: makes an instance from JSON
    """

    name: str
    constraint: Constraint
    parse: Callable[[str], InstanceT]

    @classmethod
    def of(cls, type_: type[InstanceT]) -> Structure[InstanceT]:
        """Make the structure of a type: attrs classes, dataclasses, TypedDicts, pydantic models, and types composed of
        these.

        :raises ConstraintError: the type, or a type in it, has no JSON equivalent
        """
        if isinstance(type_, Mapping):
            raise ConstraintError(
                f"type_ = {shown(type_)} is no type: for a schema, use with_constraint(Constraint.json_schema(schema))",
                kind="json_schema",
            )
        name = shown(type_) if not hasattr(type_, "__qualname__") else shortened(str(type_.__qualname__))
        describe, validate = getattr(type_, "model_json_schema", None), getattr(type_, "model_validate_json", None)
        try:
            if callable(describe) and callable(validate):  # a pydantic model
                from paged_sdk.calls.pydantic_schema import ModelSchema

                return cls(name, _closed(describe(schema_generator=ModelSchema)), validate)
            schema = describe_type(type_)
        except InvalidRequestError as error:
            reason = f"{shortened(str(error.value))} is not one of {error.allowed}"
            # Not from the error, which says the same of tools.
            raise ConstraintError(f"type_ = {name} has no JSON schema: {reason}", kind="json_schema") from None
        except ConstraintError:
            raise
        except Exception as error:  # from pydantic or the type's annotations
            reason = shortened(str(error))
            raise ConstraintError(f"type_ = {name} has no JSON schema: {reason}", kind="json_schema") from error
        return cls(name, _closed(schema), lambda text: convert(type_, json.loads(text), name))

    def asked(self, request: RequestBuilder) -> RequestBuilder:
        """Return the request with the type as its constraint. Its tools, if any, are not called: the model is told of
        them as in the chat's other turns, so that the prompt's beginning stays the same.

        :raises InvalidRequestError: it has a constraint already, asks for several choices, or requires a call
        """
        if request.options.constraint is not None:
            raise InvalidRequestError.of("constraint", request.options.constraint, "none: the type is the constraint")
        sampling = request.options.sampling
        if sampling is not None and sampling.n_choices > 1:
            raise InvalidRequestError.of("n_choices", sampling.n_choices, "1: one instance is returned")
        return evolve(request, options=evolve(request.options, constraint=self.constraint, must_answer=True))

    def read(self, response: ChatCompletionResponse) -> InstanceT:
        """Return the instance that an answer describes.

        :raises ConstraintError: the answer was cut off, or the type's own validation refuses it
        :raises ModelClosedError: the answer was cut off because the model was closed
        """
        choice = response.choices[0]
        if choice.finish_reason == "canceled":
            raise ModelClosedError("the model was closed before the answer was complete")
        if choice.finish_reason == "stop":
            try:
                return self.parse(choice.message.content or "")
            except Exception as error:  # from one of the type's own validators
                problem: Exception = error
            reason = f"the answer is not a valid {self.name}: {shortened(str(problem))}"
        else:
            after = f"after {response.usage.completion_tokens} tokens ({choice.finish_reason})"
            problem = ValueError("cut off")
            reason = f"the answer was cut off {after}: allow more, or limit the lengths of texts and lists in the type"
        raise ConstraintError(
            reason, request_id=response.id, partial_response=response, kind="json_schema"
        ) from problem


def _closed(schema: dict[str, Any]) -> Constraint:
    """Return the constraint of a schema in which objects have only the properties that are named."""
    for _, each in list(schemas_in(schema)):
        if "properties" in each:
            each.setdefault("additionalProperties", False)
    return Constraint.json_schema(schema)
