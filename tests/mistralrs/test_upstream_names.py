"""Each name of mistral.rs's package is here, or is refused or absent with a reason; none is left out."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import upstream_names

from paged_sdk import BlockingModel, ConfigError, ModelLoadError, PagedError, mistralrs
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which
from paged_sdk.mistralrs.absent import METHODS, NAMES, PARAMETERS, AbsentMethodError, AbsentNameError
from paged_sdk.mistralrs.refused import REFUSED, Refused
from paged_sdk.mistralrs.residence import Residence
from paged_sdk.testing import fake_model

PAGE: Final = (Path(__file__).parents[2] / "docs" / "mistralrs.md").read_text(encoding="utf-8")

NEEDED: Final[dict[str, Any]] = {
    "which": Which.Plain("no/such/directory/here"),
    "messages": "Hello!",
    "model": "default",
    "prompt": "Hello!",
    "input": "Hello!",
    "alias": "one",
    "source": "path",
    "generation": "0" * 64,
    "model_id": "model",
    "quantized_model_id": "model",
    "quantized_filename": "file",
}
"""What has to be given to make anything."""

ELSEWHERE: Final = {"CompletionRequest": {"tool_schemas", "tool_choice"}}
"""Class -> parameters that only it refuses."""

OWN: Final = {
    "Which.Plain": "hf_revision",
    "Which.Lora": "hf_revision",
    "Which.MultimodalPlain": f"{upstream_names.NEWER['Which.MultimodalPlain']} hf_revision",
    "Which.Embedding": "hf_revision",
    "Which.GGUF": f"{upstream_names.NEWER['Which.GGUF']} hf_revision",
    "Which.GGML": "hf_revision",
    "Runner": f"{upstream_names.OLDER['runner']} {upstream_names.NEWER['Runner']}",
}
"""Class -> parameters that are this package's, or another version's; they have to be named."""


def found(name: str) -> Any:
    """Return a class of this package by its name."""
    thing: Any = mistralrs
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def classes() -> list[str]:
    return [*upstream_names.MEMBERS, *upstream_names.MAKES, *upstream_names.ATTRIBUTES, "VisionArchitecture"]


def test_every_class_is_here_or_says_why_not() -> None:
    here, refused, absent = set(), set(), set()
    for name in classes():
        first = name.partition(".")[0]
        if first in NAMES:
            absent.add(first)
            with pytest.raises(AbsentNameError, match=first) as caught:
                found(name)
            assert isinstance(caught.value, ImportError)
            assert caught.value.setting == first
        elif inspect.isclass(found(name)) and issubclass(found(name), Refused):
            refused.add(name)
        else:
            here.add(name)
    older = set(upstream_names.OLDER["classes"].split())
    assert absent == set(NAMES) - older
    assert refused == {f"Which.{kind.__name__}" for kind in REFUSED}
    assert len(here) > 35
    assert not set(NAMES) & set(mistralrs.__all__)
    assert Which.VisionPlain is Which.MultimodalPlain
    with pytest.raises(AttributeError, match="Rnner"):
        found("Rnner")
    with pytest.raises(ImportError, match=r"AnyMoeConfig does not exist .* nothing is trained"):
        exec("from paged_sdk.mistralrs import AnyMoeConfig")


@pytest.mark.parametrize("name", [name for name in upstream_names.MEMBERS if name not in NAMES])
def test_every_member_is_here(name: str) -> None:
    kind = found(name)
    assert issubclass(kind, Enum)
    newer = upstream_names.NEWER.get(name, "").split()
    assert not {*upstream_names.MEMBERS[name].split(), *newer} - set(kind.__members__)


@pytest.mark.parametrize("name", [name for name in upstream_names.ATTRIBUTES if name.partition(".")[0] not in NAMES])
def test_every_attribute_is_here(name: str) -> None:
    kind = found(name)
    if kind is mistralrs.LoraAdapterError:
        assert kind("text").code
        return
    own = {attribute.name for attribute in attrs.fields(kind)} if attrs.has(kind) else set()
    newer = upstream_names.NEWER.get(name, "").split()
    assert {*upstream_names.ATTRIBUTES[name].split(), *newer} <= own


MADE: Final = [name for name in upstream_names.MAKES if name.partition(".")[0] not in NAMES]


def refused_parameters(name: str) -> set[str]:
    given = {*upstream_names.MAKES[name].split(), *upstream_names.NEWER.get(name, "").split()}
    return (given & set(PARAMETERS)) | ELSEWHERE.get(name, set())


def make(name: str, **settings: Any) -> Any:
    """Make one with what it needs. A runner finds no model, once it has looked at everything else."""
    kind = found(name)
    needed = {key: value for key, value in NEEDED.items() if key in inspect.signature(kind).parameters}
    try:
        return kind(**(needed | settings))
    except ModelLoadError:
        return None


@pytest.mark.parametrize("name", MADE)
def test_every_parameter_does_what_it_says_or_is_refused(name: str) -> None:
    kind = found(name)
    theirs = upstream_names.MAKES[name].split()
    if issubclass(kind, Refused):
        with pytest.raises(ConfigError, match=name):
            kind(*theirs)
        with pytest.raises(ConfigError, match=name):
            kind(**dict.fromkeys(theirs, "x"))
        return
    parameters = inspect.signature(kind).parameters
    assert list(parameters)[: len(theirs)] == theirs, "positional calls would mean something else"
    assert [*theirs, *OWN.get(name, "").split()] == list(parameters)
    for own in OWN.get(name, "").split():
        assert parameters[own].kind is inspect.Parameter.KEYWORD_ONLY
    for parameter in refused_parameters(name):
        default = parameters[parameter].default
        make(name, **{parameter: default})
        for value in ("something", 5, object()):
            with pytest.raises(ConfigError) as caught:
                make(name, **{parameter: value})
            assert caught.value.setting == parameter
            assert PARAMETERS.get(parameter, "no such feature") in str(caught.value)
    for parameter in set(theirs) - refused_parameters(name):
        # The values of one are not those of another, but no error says that there is no such feature.
        try:
            make(name, **{parameter: "something"})
        except PagedError as error:
            assert "leave it out" not in str(error), parameter


def runner_of_a_fake() -> Runner:
    runner = Runner.__new__(Runner)
    runner._which = Which.Plain("fake")
    runner._residence = Residence(lambda: BlockingModel(fake_model("Hello!")))
    return runner


def test_every_method_is_here_or_says_why_not() -> None:
    with runner_of_a_fake() as runner:
        for name, theirs in upstream_names.METHODS.items():
            if name in METHODS:
                assert not hasattr(runner, name)
                with pytest.raises(AbsentMethodError, match=name) as caught:
                    getattr(runner, name)
                assert METHODS[name] in str(caught.value)
            else:
                assert list(inspect.signature(getattr(runner, name)).parameters) == theirs.split(), name
        assert set(METHODS) <= set(upstream_names.METHODS)
        with pytest.raises(AttributeError, match="send_nothing"):
            getattr(runner, "send_nothing")  # noqa: B009  # a type checker knows that there is no such method


def test_the_page_lists_everything_that_is_not_here() -> None:
    refused = {parameter for name in MADE for parameter in refused_parameters(name)}
    assert refused - ELSEWHERE["CompletionRequest"] <= set(PARAMETERS)
    assert set(PARAMETERS) <= refused
    kinds = {f"Which.{kind.__name__}" for kind in REFUSED}
    names = {*NAMES, *METHODS, *PARAMETERS, *kinds, *refused}
    assert not [name for name in names if f"`{name}`" not in PAGE]


def test_positional_calls_mean_the_same() -> None:
    chat: ChatCompletionRequest[bool] = ChatCompletionRequest("Hello!", "default", False, 1, None, None, 8)
    assert chat.max_tokens == 8
    assert mistralrs.CompletionRequest("Hello!", "default", 1, True).echo_prompt
    assert mistralrs.EmbeddingRequest(["Hello!"], True).truncate_sequence
