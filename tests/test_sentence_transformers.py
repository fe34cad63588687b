"""The vectors of checkpoints that sentence-transformers has written are the ones that it computes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.encoder_table import ENCODER_MODEL_TYPES

import tiny
from paged_sdk import InvalidRequestError, TextModelBuilder
from tiny_encoder import make_encoder, make_ranker
from tiny_ranker import RANK_TEMPLATE, YES_NO, logits_of, make_decoder_ranker

library: Any = pytest.importorskip(
    "sentence_transformers", reason="nothing here needs it but these long tests: install it beside the project"
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a small engine",
    "Every page had a number, every reader had a table of numbers, and nobody ever moved a shelf. " * 4,
    "x",
)


def write(
    directory: Path,
    pooling: str,
    *,
    dense: bool,
    normalize: bool,
    include_prompt: bool,
    families: str,
    has_template: bool = False,
) -> Any:
    """Write a checkpoint of random weights, and return the model that wrote it."""
    layers: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    own: dict[str, Any] = (
        {"use_bidirectional_attention": True, "sliding_window": 512} if families == "gemma3_text" else {}
    )
    if families in (*ENCODER_MODEL_TYPES, "t5"):
        make_encoder(families, directory / "decoder")
    else:
        tiny.make_checkpoint(families, directory / "decoder", **own)
    settings = directory / "decoder" / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    if not has_template:  # where there is one, new versions have texts go through it
        content.pop("chat_template", None)
    settings.write_text(json.dumps(content))
    transformer = layers.Transformer(str(directory / "decoder"), max_seq_length=100)
    size = transformer.get_embedding_dimension()
    modules = [transformer, layers.Pooling(size, pooling_mode=pooling, include_prompt=include_prompt)]
    if dense:
        torch.manual_seed(0)
        modules += [layers.Dense(size, 96, activation_function=torch.nn.Tanh())]
        modules += [layers.Dense(96, 40, bias=False, activation_function=torch.nn.Identity())]
    if normalize:
        modules.append(layers.Normalize())
    model = library.SentenceTransformer(modules=modules, prompts={"query": "Find this, "}, device="cpu")
    model.save(str(directory / "written"))
    return model


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("pooling", "dense", "normalize", "include_prompt", "families"),
    [
        ("lasttoken", False, True, True, "qwen3"),
        ("mean", True, True, True, "llama"),
        ("mean", False, False, False, "mistral"),
        ("max", True, False, True, "qwen2"),
        ("cls", False, True, True, "gemma2"),
        ("weightedmean", False, False, True, "llama"),
        ("mean", True, True, True, "gemma3_text"),
        ("cls", False, True, True, "bert"),
        ("mean", True, False, False, "roberta"),
        ("mean", False, True, True, "modernbert"),
        ("mean", False, True, True, "mpnet"),
        ("mean", True, True, True, "t5"),
    ],
)
async def test_checkpoints_give_the_same_vectors(
    pooling: str, dense: bool, normalize: bool, include_prompt: bool, families: str, tmp_path: Path
) -> None:
    library = write(
        tmp_path, pooling, dense=dense, normalize=normalize, include_prompt=include_prompt, families=families
    )
    builder = TextModelBuilder(tmp_path / "written").with_dtype("float32").with_force_cpu().with_num_threads(1)
    async with builder.build() as model:
        for prompt in (None, "query"):
            own = (await model.embed(TEXTS, prompt_name=prompt, truncation=True)).embeddings
            theirs = library.encode(list(TEXTS), prompt_name=prompt, batch_size=1)
            np.testing.assert_allclose(own, theirs, atol=1e-4 * float(np.abs(theirs).max()))
        short = (await model.embed(TEXTS[0], dimensions=16, normalize=True)).embeddings
        theirs = library.encode([TEXTS[0]], truncate_dim=16, normalize_embeddings=True)
        np.testing.assert_allclose(short, theirs, atol=1e-5)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_chat_template_around_texts_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mean", dense=False, normalize=True, include_prompt=True, families="llama", has_template=True)
    async with TextModelBuilder(tmp_path / "written").with_force_cpu().build() as model:
        with pytest.raises(InvalidRequestError, match="chat template"):
            await model.embed(TEXTS[0])


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert", "mpnet"])
async def test_rankers_say_what_cross_encoders_say(model_type: str, tmp_path: Path) -> None:
    make_ranker(model_type, tmp_path / "ranker")
    encoder = library.CrossEncoder(str(tmp_path / "ranker"), device="cpu", max_length=64)
    encoder.save_pretrained(str(tmp_path / "written"))
    query, documents = "boiling tea", ["tea", "the kettle, and more, is boiling", "tea " * 90]
    expected = encoder.predict([(query, each) for each in documents])
    for directory in ("ranker", "written"):
        builder = TextModelBuilder(tmp_path / directory).with_dtype("float32").with_force_cpu().with_max_model_len(64)
        async with builder.build() as model:
            response = await model.rank(query, documents, truncation=True)
        found = [each.score for each in sorted(response.results, key=lambda each: each.index)]
        assert found == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("family", "answer", "opens", "prompts"),
    [
        ("qwen3", YES_NO, True, {}),
        ("llama", (YES_NO[0], None), False, {"web": "Say what it says."}),
        ("gemma2", YES_NO, True, {"web": "Say what it says."}),
    ],
)
async def test_answers_are_those_of_a_logit_score(
    family: str, answer: tuple[int, int | None], opens: bool, prompts: dict[str, str], tmp_path: Path
) -> None:
    """Texts go through the chat template, and what stands after a document is not cut."""
    base: Any = importlib.import_module("sentence_transformers.base.modules")
    layers: Any = importlib.import_module("sentence_transformers.cross_encoder.modules")
    tiny.make_checkpoint(family, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(RANK_TEMPLATE)
    transformer = base.Transformer(
        str(tmp_path / "base"),
        transformer_task="text-generation",
        max_seq_length=190,
        processing_kwargs={"chat_template": {"add_generation_prompt": opens}},
    )
    encoder = library.CrossEncoder(
        modules=[transformer, layers.LogitScore(*answer)],
        prompts=prompts,
        default_prompt_name=next(iter(prompts), None),
        device="cpu",
    )
    encoder.save_pretrained(str(tmp_path / "written"))
    await compare(encoder, tmp_path / "written")


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("family", "template"), [("qwen3", RANK_TEMPLATE), ("qwen2", None), ("llama", tiny.CHAT_TEMPLATE)]
)
async def test_decoders_for_the_classification_of_sequences_say_what_cross_encoders_say(
    family: str, template: str | None, tmp_path: Path
) -> None:
    """With a template for pairs, without one, and with one that passes any role on, as the files then say."""
    make_decoder_ranker(family, tmp_path / "ranker")
    settings = tmp_path / "ranker" / "tokenizer_config.json"
    content = {**json.loads(settings.read_text()), "model_max_length": 190}
    content.pop("chat_template")
    settings.write_text(json.dumps(content))
    if template is not None:
        (tmp_path / "ranker" / "chat_template.jinja").write_text(template)
    encoder = library.CrossEncoder(str(tmp_path / "ranker"), device="cpu")
    encoder.save_pretrained(str(tmp_path / "written"))
    await compare(encoder, tmp_path / "written")
    if template != tiny.CHAT_TEMPLATE:  # which is not taken for one of pairs where no file says so
        await compare(encoder, tmp_path / "ranker")


async def compare(encoder: Any, directory: Path) -> None:
    """Compare the numbers of a query and some documents, one of which is cut."""
    documents = [*TEXTS[:2], "x", "a long text, " * 90]
    query = "Where are the books, and who reads them?"
    pairs = [(query, each) for each in documents]
    expected = encoder.predict(pairs, activation_fn=torch.nn.Identity(), batch_size=2)
    builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    async with builder.build() as model:
        response = await model.rank(query, documents, truncation=True)
    assert logits_of(response) == pytest.approx(expected.tolist(), abs=1e-4 * float(np.abs(expected).max()))
