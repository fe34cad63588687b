"""What a checkpoint says of ranks: read, or an error that names the file; never anything untyped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged_sdk.config.ranking import AnswerTokens, PairForm
from paged_sdk.errors import CheckpointError
from paged_sdk.weights.rank_modules import RankModules, read_rank_modules

KINDS = ("Transformer", "LogitScore")
ANSWER = {"true_token_id": 7, "false_token_id": None}


def write(directory: Path, kinds: tuple[str, ...] = KINDS, **files: Any) -> None:
    modules = [{"type": f"library.{kind}", "path": "" if kind == "Transformer" else kind} for kind in kinds]
    contents = {"modules": modules, "LogitScore/config": ANSWER, **files}
    for name, content in contents.items():
        path = directory / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))


def test_checkpoints_that_say_nothing_of_it(tmp_path: Path) -> None:
    assert read_rank_modules(tmp_path) is None
    for kinds in (("Transformer", "Pooling"), ("LogitScore",), (), ("Transformer", "LogitScore", "Dense")):
        write(tmp_path, kinds)
        assert read_rank_modules(tmp_path) is None


def test_what_the_files_say(tmp_path: Path) -> None:
    write(tmp_path, KINDS[:1])
    assert read_rank_modules(tmp_path) == RankModules()
    write(tmp_path)
    assert read_rank_modules(tmp_path) == RankModules(answer=AnswerTokens(true=7))
    message: dict[str, Any] = {"modality_config": {"text": {}, "message": {"method": "forward"}}}
    prompts = {"prompts": {"web": "Find: "}, "default_prompt_name": "web"}
    write(tmp_path, sentence_bert_config=message, config_sentence_transformers=prompts)
    assert read_rank_modules(tmp_path) == RankModules(
        answer=AnswerTokens(true=7), form=PairForm(), instruction="Find: "
    )
    given = {"add_generation_prompt": True, "how": [1], "truncation": True, "restore_suffix": False, "padding": "x"}
    message["processing_kwargs"] = {"chat_template": given, "text": {"padding": True}}
    write(tmp_path, sentence_bert_config=message)
    said = read_rank_modules(tmp_path)
    assert said is not None
    assert said.form == PairForm(add_generation_prompt=True, variables={"how": [1]})


def test_messages_in_parts_are_not_written(tmp_path: Path) -> None:
    write(tmp_path, sentence_bert_config={"modality_config": {"message": {"format": "structured"}}})
    said = read_rank_modules(tmp_path)
    assert said is not None
    assert said.form is None
    assert said.why_not is not None
    assert "messages are 'structured', not flat" in said.why_not


def test_small_letters_of_what_a_template_writes_are_not_made(tmp_path: Path) -> None:
    """A template's own text would be lower case, too, but for the special tokens in it."""
    write(tmp_path, sentence_bert_config={"modality_config": {"message": {}}, "do_lower_case": True})
    said = read_rank_modules(tmp_path)
    assert said is not None
    assert said.why_not is not None
    assert "do_lower_case makes small letters" in said.why_not


@pytest.mark.parametrize(
    "files",
    [
        {"LogitScore/config": {}},
        {"LogitScore/config": {"true_token_id": -1}},
        {"LogitScore/config": {"true_token_id": True}},
        {"LogitScore/config": {"true_token_id": 3, "false_token_id": "no"}},
        {"LogitScore/config": [3]},
        {"config_sentence_transformers": {"prompts": {"web": 3}}},
        {"config_sentence_transformers": {"default_prompt_name": "web"}},
        {
            "sentence_bert_config": {
                "modality_config": {"message": {}},
                "processing_kwargs": {"chat_template": {"add_generation_prompt": "yes"}},
            }
        },
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_file(files: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **files)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_rank_modules(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"modality_config": 3}, {"modality_config": {"message": 3}, "processing_kwargs": [3]}]
)
def test_odd_values_are_as_if_nothing_were_said(settings: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, sentence_bert_config=settings)
    said = read_rank_modules(tmp_path)
    assert said is not None
    assert said.form in (None, PairForm())
