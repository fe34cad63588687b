"""Adapters that bring the layers that rank texts along, against PEFT around the same classes."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from paged_sdk import AdapterError, TextModelBuilder
from tiny_encoder import DEBERTA_V3, make_ranker, word_pieces
from tiny_ranker import builder_of, logits_of, make_decoder_ranker

QUERY: Final = "boiling tea"
DOCUMENTS: Final = ("the kettle boils", "tea", "a pot of tea, and one more, and one more")
# Families, fields of their configs, and layers that adapters change.
BASES: Final[dict[str, tuple[dict[str, Any], list[str]]]] = {
    "llama": ({}, ["q_proj", "v_proj", "down_proj"]),
    "bert": ({}, ["query", "value"]),
    "roberta": ({"pad_token_id": 1}, ["query", "value"]),
    "mpnet": ({"pad_token_id": 1}, ["q", "v"]),
    "distilbert": ({}, ["q_lin", "v_lin"]),
    "albert": ({}, ["query", "value"]),
    "deberta-v2": (DEBERTA_V3, ["query_proj", "value_proj"]),
}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def make_base(family: str, directory: Path) -> Any:
    changes = BASES[family][0]
    return make_decoder_ranker(family, directory) if family == "llama" else make_ranker(family, directory, **changes)


def adapted(base: Any, family: str, directory: Path, *, seed: int, **options: Any) -> Any:
    """Put PEFT around a ranker, with an adapter of random weights that is saved, too."""
    peft: Any = importlib.import_module("peft")  # it has no annotations
    options = {"target_modules": BASES[family][1], **options}
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, **options)
    made = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    made.save_pretrained(directory)
    return made.eval()


def judged(model: Any, family: str) -> list[float]:
    """Return what transformers or PEFT says of the documents."""
    found = []
    tokenizer = tiny.tokenizer() if family == "llama" else word_pieces()
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        given = {"input_ids": torch.tensor([pair.ids])}
        if family != "llama":
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        if getattr(model.config, "type_vocab_size", 1) > 1:
            given["token_type_ids"] = torch.tensor([pair.type_ids])
        with torch.inference_mode():
            found.append(float(model(**given).logits))
    return found


@pytest.mark.parametrize("family", BASES)
def test_ranks_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """In one batch: the base's, and those of two adapters, one of which is loaded later and again."""
    expected: dict[str | None, list[float]] = {None: judged(make_base(family, tmp_path / "base"), family)}
    for seed, name in enumerate(("first", "second")):
        made = adapted(make_base(family, tmp_path / "base"), family, tmp_path / name, seed=seed)
        expected[name] = judged(made, family)

    async def run() -> None:
        async with builder_of(tmp_path / "base").with_adapter(tmp_path / "first").build() as model:
            await model.load_adapter(tmp_path / "second")
            found = await asyncio.gather(*(model.rank(QUERY, DOCUMENTS, adapter=name) for name in expected))
            for name, response in zip(expected, found, strict=True):
                assert logits_of(response) == pytest.approx(expected[name], abs=2e-5), name
            stored = [each for name in ("first", "second") for each in tensors_of(tmp_path / name)]
            assert sum(info.num_bytes for info in model.adapter_infos) == sum(each.numel() * 4 for each in stored)
            await model.unload_adapter("first")
            await model.load_adapter(tmp_path / "first", name="again")
            again = await model.rank(QUERY, DOCUMENTS, adapter="again")
            assert logits_of(again) == pytest.approx(expected["first"], abs=2e-5)

    asyncio.run(run())
    assert len({tuple(round(each, 3) for each in rank) for rank in expected.values()}) == 3


def tensors_of(directory: Path) -> list[torch.Tensor]:
    return list(load_file(directory / "adapter_model.safetensors").values())


def test_poolers_may_come_along(tmp_path: Path) -> None:
    base = make_base("bert", tmp_path / "base")
    made = adapted(base, "bert", tmp_path / "adapter", seed=0, modules_to_save=["pooler"])
    expected = judged(made, "bert")
    assert any("pooler" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))

    async def run() -> list[float]:
        async with builder_of(tmp_path / "base").with_adapter(tmp_path / "adapter", name="a").build() as model:
            return logits_of(await model.rank(QUERY, DOCUMENTS, adapter="a"))

    assert asyncio.run(run()) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {"target_modules": "all-linear"}),
        ("bert", {"target_modules": ["dense"], "use_dora": True}),
        ("deberta-v2", {"target_modules": "all-linear"}),
        ("albert", {"target_modules": "all-linear"}),
        ("roberta", {"target_modules": ["query", "dense"]}),
    ],
)
def test_poolers_may_be_targets(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """They compute texts, not tokens."""
    base = judged(make_base(family, tmp_path / "base"), family)
    made = adapted(make_base(family, tmp_path / "base"), family, tmp_path / "adapter", seed=0, **options)
    expected = judged(made, family)

    async def run() -> None:
        async with builder_of(tmp_path / "base").with_adapter(tmp_path / "adapter", name="a").build() as model:
            with_adapter, without = await asyncio.gather(
                model.rank(QUERY, DOCUMENTS, adapter="a"), model.rank(QUERY, DOCUMENTS)
            )
            assert logits_of(with_adapter) == pytest.approx(expected, abs=2e-5)
            assert logits_of(without) == pytest.approx(base, abs=2e-5)

    asyncio.run(run())
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    pooler = [name for name in tensors if "pooler" in name and "lora_A" in name]
    assert len(pooler) == (family != "roberta")  # its ranking layers are trained as a whole
    if pooler:
        save_file(tensors | {pooler[0]: torch.zeros(4, 3)}, weights)
        with pytest.raises(AdapterError, match=r"pooler.*updates a matrix of shape \[64, 3\], .* has \[64, 64\]"):
            asyncio.run(_build(builder_of(tmp_path / "base").with_adapter(tmp_path / "adapter")))


def test_other_heads_are_refused(tmp_path: Path) -> None:
    adapted(make_base("llama", tmp_path / "base"), "llama", tmp_path / "adapter", seed=0)
    weights, settings = (tmp_path / "adapter" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    tensors, config = load_file(weights), json.loads(settings.read_text())
    name = "base_model.model.score.weight"
    assert tensors[name].shape == (1, tensors[name].shape[1])

    def refused(why: str, changed: dict[str, torch.Tensor], base: Path = tmp_path / "base", **values: Any) -> None:
        save_file(changed, weights)
        settings.write_text(json.dumps(config | values))
        builder: TextModelBuilder = builder_of(base).with_adapter(tmp_path / "adapter")
        with pytest.raises(AdapterError, match=why) as caught:
            asyncio.run(_build(builder))
        assert str(tmp_path / "adapter") in str(caught.value)

    refused(
        r"'score.weight' has shape \[3, \d+\], the model's has \[1, \d+\]", tensors | {name: tensors[name].repeat(3, 1)}
    )
    refused("lacks tensor 'score.weight'", {each: value for each, value in tensors.items() if each != name})
    bias = {"base_model.model.score.bias": torch.zeros(1)}
    refused(r"'score.bias' is of a module .* of which the model has score.weight", tensors | bias)
    refused("int64: expected numbers", tensors | {name: tensors[name].long()})
    saved = ["score", "lm_head"]
    head = {"base_model.model.lm_head.weight": torch.zeros(3, 3)}
    refused("'lm_head.weight' is of a module that was trained as a whole", tensors | head, modules_to_save=saved)
    refused("lacks tensor 'base_model.model.lm_head.weight'", tensors, modules_to_save=saved)
    refused("names of modules", tensors, modules_to_save="score")
    refused("nothing beside alora_invocation_tokens", tensors, alora_invocation_tokens=[5])
    tiny.make_checkpoint("llama", tmp_path / "generating")
    refused("of which the model has none", tensors, tmp_path / "generating")


async def _build(builder: TextModelBuilder) -> None:
    async with builder.build():
        pass


@pytest.mark.parametrize(
    ("changes", "targets", "options"),
    [
        ({}, ["query_proj", "key_proj"], {"use_dora": True}),
        ({"pos_att_type": ["p2c"]}, ["query_proj", "key_proj"], {}),
        ({"share_att_key": False}, ["query_proj", "pos_key_proj", "pos_query_proj"], {}),
    ],
)
def test_adapters_change_what_distances_add(
    changes: dict[str, Any], targets: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    """Beside rankings by the base, in a step with as many tokens as there are embeddings of distances, too."""

    def base() -> Any:
        return make_ranker("deberta-v2", tmp_path / "base", **DEBERTA_V3 | changes)

    expected: dict[str | None, list[float]] = {None: judged(base(), "deberta-v2")}
    for seed, name in enumerate(("first", "second")):
        made = adapted(base(), "deberta-v2", tmp_path / name, seed=seed, target_modules=targets, **options)
        expected[name] = judged(made, "deberta-v2")
    num_tokens = len(word_pieces().encode(QUERY, DOCUMENTS[0]).ids)
    assert num_tokens < 2 * DEBERTA_V3["position_buckets"]

    async def run() -> None:
        builder = builder_of(tmp_path / "base").with_adapter(tmp_path / "first").with_adapter(tmp_path / "second")
        async with builder.build() as model:
            found = await asyncio.gather(*(model.rank(QUERY, DOCUMENTS, adapter=name) for name in expected))
            for name, response in zip(expected, found, strict=True):
                assert logits_of(response) == pytest.approx(expected[name], abs=2e-5), name

    asyncio.run(run())
    assert len({tuple(round(each, 3) for each in rank) for rank in expected.values()}) == 3
