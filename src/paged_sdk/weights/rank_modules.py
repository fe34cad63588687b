"""Read how a checkpoint ranks texts, from sentence-transformers' files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from paged_sdk.config.checks import is_token_id
from paged_sdk.config.ranking import AnswerTokens, PairForm
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import read_json, read_json_if_there
from paged_sdk.weights.sentence_modules import read_modules, read_prompts

__all__ = ["RankModules", "read_rank_modules"]

# Keys of ``processing_kwargs`` that are passed to the tokenizer, not to the chat template.
_OF_TOKENIZERS: Final = frozenset({"padding", "truncation", "max_length", "return_tensors", "restore_suffix"})
_GENERATION: Final = "add_generation_prompt"


@frozen(kw_only=True)
class RankModules:
    """Holds the settings of the files. The fields are those of :class:`~paged_sdk.config.ranking.RankRecipe` that the
    files determine.

    :ivar form: None: both texts are encoded as a pair by the tokenizer
    """

    answer: AnswerTokens | None = None
    form: PairForm | None = None
    instruction: str | None = None
    why_not: str | None = None


def read_rank_modules(directory: Path) -> RankModules | None:
    """Read the files; None if there are none, or if their modules do not rank texts.

    :raises CheckpointError: a file cannot be read, or has invalid values
    """
    modules = read_modules(directory)
    match [] if modules is None else [module.kind for module in modules]:
        case ["Transformer"]:
            answer = None
        case ["Transformer", "LogitScore"]:
            assert modules is not None
            answer = _answer(modules[1].directory / "config.json")
        case _:
            return None
    assert modules is not None
    prompts, default = read_prompts(directory)
    instruction = None if default is None else prompts[default]
    path = modules[0].directory / "sentence_bert_config.json"
    settings = read_json_if_there(path)
    is_lower = bool(settings.get("do_lower_case", False))
    said = RankModules(answer=answer, instruction=instruction.lower() if instruction and is_lower else instruction)
    message = _mapping(settings.get("modality_config")).get("message")
    if message is None:
        return said
    if is_lower:
        return evolve(
            said, why_not=f"{path}: do_lower_case makes small letters of a chat template's text, which is not done here"
        )
    shape = _mapping(message).get("format", "flat")
    if shape != "flat":
        return evolve(said, why_not=f"{path}: messages are {shown(shape)}, not flat (a text each)")
    given = dict(_mapping(_mapping(settings.get("processing_kwargs")).get("chat_template")))
    opens = given.pop(_GENERATION, False)
    if not isinstance(opens, bool):
        raise CheckpointError(f"{path}: {_GENERATION} = {shown(opens)}: expected true or false", path=path)
    variables = {key: value for key, value in given.items() if key not in _OF_TOKENIZERS}
    return evolve(said, form=PairForm(add_generation_prompt=opens, variables=variables))


def _answer(path: Path) -> AnswerTokens:
    settings = read_json(path)
    true, false = settings.get("true_token_id"), settings.get("false_token_id")
    if true is None or not is_token_id(true) or not (false is None or is_token_id(false)):
        raise CheckpointError(
            f"{path}: true_token_id = {shown(true)}, false_token_id = {shown(false)}: expected token ids, of which the "
            "second may be null",
            path=path,
        )
    return AnswerTokens(true=true, false=false)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
