"""Determine how a model ranks documents, from its layers, files and settings."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.chat.pair_writer import carries_pairs, names_pairs
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.ranking import AnswerTokens, PairForm, RankRecipe
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.logs import get_logger
from paged_sdk.models.any_model import AnyModel
from paged_sdk.models.causal_model import RankingModel
from paged_sdk.models.family import has_head
from paged_sdk.weights.checkpoint import Checkpoint
from paged_sdk.weights.rank_modules import RankModules, read_rank_modules

__all__ = ["find_ranking"]

_log = get_logger(__name__)
_SETTING = "with_ranking_tokens"
_TEMPLATE = "a chat template that writes a message of the role 'query' and one of the role 'document'"


def find_ranking(
    checkpoint: Checkpoint, model: AnyModel, shape: DecoderConfig, text: TextProcessor, settings: BuildSettings
) -> RankRecipe | None:
    """Return how a model ranks documents; None if it does not.

    :raises ConfigError: the model cannot rank by the tokens or the chat template in the settings
    :raises CheckpointError: a file of the checkpoint cannot be read
    """
    head = model.rank_head if isinstance(model, RankingModel) else None
    pooling = None if head is None else head.pooling
    said = None if checkpoint.metadata is not None else read_rank_modules(checkpoint.path)
    answer = None if said is None else said.answer
    if settings.ranking_tokens is not None:
        if pooling is not None or shape.bidirectional or not has_head(checkpoint.config):
            allowed = f"a model that generates text, which {checkpoint.path.name} does not"
            raise ConfigError.of(_SETTING, settings.ranking_tokens, allowed)
        answer = _answer(settings.ranking_tokens, text)
    if pooling is None and answer is None:
        return None
    largest = 0 if answer is None else max(answer.true, answer.false or 0)
    if largest >= shape.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path.name} ranks by token id {largest}, beyond its vocabulary of {shape.vocab_size} tokens",
            path=checkpoint.path,
        )
    recipe = RankRecipe(
        pooling=pooling,
        answer=answer if pooling is None else None,
        instruction=None if said is None else said.instruction,
        padding=None if shape.bidirectional else _padding(checkpoint),
    )
    return _with_form(recipe, checkpoint.path.name, said, text, settings)


def _answer(texts: tuple[str, str | None], text: TextProcessor) -> AnswerTokens:
    ids = []
    for each in texts:
        tokens = [] if each is None else text.tokenizer.encode(each, add_special_tokens=False)
        if each is not None and len(tokens) != 1:
            raise ConfigError.of(_SETTING, each, f"a text that is one token: it is {len(tokens)}")
        ids.append(tokens[0] if tokens else None)
    true, false = ids
    assert true is not None
    return AnswerTokens(true=true, false=false)


def _padding(checkpoint: Checkpoint) -> int | None:
    value = checkpoint.config.get("pad_token_id")
    return value if type(value) is int else None


def _with_form(
    recipe: RankRecipe, name: str, said: RankModules | None, text: TextProcessor, settings: BuildSettings
) -> RankRecipe:
    """Add the form of pairs: the one in the checkpoint, or a chat template written for pairs. With another form than in
    training, scores would be meaningless.
    """
    if said is not None and said.why_not is not None:
        return evolve(recipe, why_not=said.why_not)
    if said is not None and said.form is not None:
        if carries_pairs(text, said.form):
            return evolve(recipe, form=said.form)
        lacks = "its chat template leaves them out" if text.template is not None else "it has no chat template"
        why_not = (
            f"texts are to go through {_TEMPLATE}, and {lacks}: give one with with_chat_template (--chat-template)"
        )
        return evolve(recipe, why_not=why_not)
    form = PairForm()
    if (said is None or settings.chat_template is not None) and names_pairs(text, form):
        return evolve(recipe, form=form)
    if settings.ranking_tokens is not None and said is None:
        raise ConfigError.of(_SETTING, settings.ranking_tokens, f"{_TEMPLATE}: give one with with_chat_template")
    if text.template is not None and said is None:
        _log.info("%s: a query and a document are ranked as the tokenizer writes a pair, not as a chat.", name)
    return recipe
