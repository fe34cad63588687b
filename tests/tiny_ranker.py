"""Tiny decoders that rank texts: by a layer of their own, or by how they answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

import tiny
from paged_sdk import RankResponse, TextModelBuilder

__all__ = [
    "INSTRUCTION",
    "RANK_TEMPLATE",
    "YES_NO",
    "builder_of",
    "chat_text",
    "logits_of",
    "make_answering_ranker",
    "make_decoder_ranker",
    "pair_logit",
    "write_modules",
]

INSTRUCTION: Final = "Find what answers the query"
# Of the form that published checkpoints have.
RANK_TEMPLATE: Final = (
    "<|im_start|>system\nJudge the Document.<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    f"default('{INSTRUCTION}') }}}}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
YES_NO: Final = (301, 300)
"""Any two tokens."""


def builder_of(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)


def make_decoder_ranker(family: str, directory: Path, *, num_labels: int = 1, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights of the class for the classification of sequences, and return the model.

    :param changes: fields of its config
    """
    tiny.make_checkpoint(family, directory, **changes)
    config: Any = AutoConfig.from_pretrained(directory)
    config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
        body: Any = tiny.build_model(family, **changes)
        model.get_decoder().load_state_dict(body.get_decoder().state_dict())
        model.score.weight.data.normal_(0, 0.3)
    model.float().eval().save_pretrained(directory)
    made: PreTrainedModel = model
    return made


def make_answering_ranker(
    family: str, directory: Path, files: dict[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """Write a checkpoint that generates text, with the files of sentence-transformers that make it a ranker.

    :param files: what they say, see :func:`write_modules`
    :param changes: fields of its config
    """
    tiny.make_checkpoint(family, directory, **changes)
    (directory / "chat_template.jinja").write_text(RANK_TEMPLATE)
    write_modules(directory, **(files or {}))
    return tiny.build_model(family, **changes)


def write_modules(
    directory: Path,
    *,
    answer: Sequence[int | None] | None = YES_NO,
    message: bool = True,
    variables: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """Write the files of sentence-transformers.

    :param answer: the tokens; None: there is no LogitScore
    :param message: whether texts go through the chat template
    :param variables: what it gets
    :param others: what config_sentence_transformers.json has
    """
    kinds = {"": "base.modules.transformer.Transformer", "1": "cross_encoder.modules.logit_score.LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules[: 1 if answer is None else 2]))
    if answer is not None:
        (directory / "1").mkdir(exist_ok=True)
        (directory / "1" / "config.json").write_text(
            json.dumps(dict(zip(("true_token_id", "false_token_id"), answer, strict=True)))
        )
    params = {"method": "forward", "method_output_name": "logits"}
    settings: dict[str, Any] = {"modality_config": {"text": params}}
    if message:
        settings["modality_config"]["message"] = {**params, "format": "flat"}
        settings["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True, **(variables or {})}}
    (directory / "sentence_bert_config.json").write_text(json.dumps(settings))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(others))


def chat_text(query: str, document: str, instruction: str = INSTRUCTION, *, opens: bool = True) -> str:
    """Return what the template makes of a pair, written down anew."""
    turn = "<|im_start|>assistant\n<think>\n\n</think>\n\n" if opens else ""
    return (
        "<|im_start|>system\nJudge the Document.<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n{turn}"
    )


def pair_logit(model: Any, token_ids: Sequence[int], answer: Sequence[int | None] = YES_NO) -> float:
    """Return what transformers says of a pair.

    :param answer: the tokens whose logits count, where the model has no layer of its own
    """
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)])).logits
    if logits.ndim == 2:
        return float(logits)
    true, false = answer
    return float(logits[0, -1, true] - (0 if false is None else logits[0, -1, false]))


def logits_of(response: RankResponse) -> list[float]:
    """Return the numbers in the documents' order."""
    return [each.logit for each in sorted(response.results, key=lambda each: each.index)]
