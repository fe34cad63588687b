"""Models without a decoder here run through transformers' classes, or are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from benchmarks import support_table
from benchmarks.encoder_table import ENCODER_MODEL_TYPES, judge_encoder
from benchmarks.image_table import judge_images
from benchmarks.support_table import (
    BEGIN,
    ENCODERS,
    END,
    IMAGES,
    PAGE,
    PROMPTS,
    encoder_table,
    greedy_of_transformers,
    image_table,
    judge,
    load,
    table,
)
from benchmarks.tiny_classes import MODEL_TYPES, tiny_config, tiny_model
from benchmarks.tiny_image_classes import IMAGE_MODEL_TYPES
from benchmarks.verdicts import Verdict
from reference_decoding import DictSource
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.gpt_neox import modeling_gpt_neox

import tiny
from paged_sdk import (
    BlockingModel,
    CompletionResponse,
    ConfigError,
    Constraint,
    IsqType,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessageRole,
    TextModelBuilder,
)
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.kernels.placement import Placement
from paged_sdk.models import any_model
from paged_sdk.models.any_model import plan_model
from paged_sdk.models.transformers_door.loading import open_door
from paged_sdk.models.transformers_door.seam import Seam
from tiny_encoder import DEBERTA_V3

CPU = torch.device("cpu")
PROMPT = "Once upon a time there was a small engine that could read a long letter word by word."


# Parallel residuals; matrices with a row per input and tied embeddings; learned positions with an offset; values of
# another size than keys, and experts of one tensor each; queries that depend on which experts were chosen; sinks, and
# windows in some layers.
@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "opt", "deepseek_v2", "jetmoe", "granite_swa"])
def test_class_says_what_transformers_says(model_type: str) -> None:
    outcome = judge(model_type)
    assert outcome.verdict is Verdict.RUNS, outcome.reason


def test_an_output_projection_of_its_own_that_the_config_ties() -> None:
    """As transformers has it: what a checkpoint holds counts."""
    reference = tiny_model("gpt2", tie_word_embeddings=False)
    model = load(reference, open_door(reference.config.to_dict() | {"tie_word_embeddings": True}, torch.float32))
    assert support_table.greedy(model, PROMPTS) == [greedy_of_transformers(reference, prompt) for prompt in PROMPTS]


# Learned positions, some of which begin after the padding token's; layers that share their weights; windows in some
# layers, and rotations; numbers of distances.
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "albert", "modernbert", "nomic_bert", "mpnet"])
def test_encoder_computes_what_transformers_computes(model_type: str) -> None:
    outcome = judge_encoder(model_type)
    assert outcome.verdict is Verdict.RUNS, outcome.reason


# Numbers of distances by token: of queries, keys or both, from matrices of their own or the tokens'; in buckets, or
# without; distances beyond the last bucket.
@pytest.mark.parametrize(
    "changes",
    [
        {"relative_attention": False, "position_biased_input": True, "type_vocab_size": 2},
        {},
        {"share_att_key": False},
        {"pos_att_type": ["c2p"], "norm_rel_ebd": "none"},
        {"pos_att_type": ["p2c"]},
        {"pos_att_type": []},
        {"position_buckets": -1},
        {"position_buckets": -1, "max_relative_positions": 4},
        {"position_buckets": 4, "max_relative_positions": 8},
    ],
)
def test_forms_of_deberta(changes: dict[str, Any]) -> None:
    outcome = judge_encoder("deberta-v2", **{**DEBERTA_V3, **changes})
    assert outcome.verdict is Verdict.RUNS, outcome.reason


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("longformer", {}, "does not use transformers' attention interface"),
        ("esm", {"position_embedding_type": "rotary"}, "counts the positions of a text in a way of its own"),
        # Embeddings are scaled by the number of mask tokens in a text.
        ("esm", {"token_dropout": True, "mask_token_id": 4}, "see each other elsewhere than in attention"),
        ("bart", {}, "different numbers of heads"),
        ("deberta-v2", {"conv_kernel_size": 3}, "a convolution lets neighbouring tokens see each other"),
    ],
)
def test_encoder_that_cannot_run_is_refused(model_type: str, changes: dict[str, Any], reason: str) -> None:
    outcome = judge_encoder(model_type, **changes)
    assert outcome.verdict is Verdict.REFUSED
    assert reason in outcome.reason


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "does not use transformers' attention interface"),
        ("gptj", "does not use transformers' attention interface"),
        ("mamba", "keeps other states"),
        ("lfm2", "keeps other states .* conv"),
        ("bart", "positions are not those"),
        ("doge", "computes its masks itself"),
        ("bert", "is to generate text, and its tokens attend to later ones"),
        ("fuyu", "more than text"),
        ("t5", "no class of this name"),
        ("no_model", r"transformers [\d.]+ does not know it; a newer one may"),
    ],
)
def test_what_cannot_run_is_refused(model_type: str, reason: str) -> None:
    is_tiny = model_type not in ("t5", "no_model")
    content: dict[str, Any] = tiny_config(model_type).to_dict() if is_tiny else {"model_type": model_type}
    if model_type == "bert":
        content |= {"is_decoder": False, "architectures": ["BertLMHeadModel"]}

    def run() -> None:
        door = open_door(content, torch.float32)
        load(tiny_model(model_type), door)

    with pytest.raises(UnsupportedArchitectureError, match=reason) as caught:
        run()
    assert caught.value.architecture == model_type


def test_tokens_that_meet_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that smuggles something from one token to the next would mix texts."""
    plain: Any = modeling_gpt_neox.GPTNeoXMLP.forward

    def mixed(self: Any, hidden: Tensor) -> Any:
        return plain(self, hidden) + 1e-6 * hidden.roll(1, 1)

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXMLP, "forward", mixed)
    with pytest.raises(UnsupportedArchitectureError, match="see each other elsewhere"):
        load(tiny_model("gpt_neox"), open_door(tiny_config("gpt_neox").to_dict(), torch.float32))


def test_layers_of_other_rows_than_tokens_are_not_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is found by the token of a row, which such rows are not."""
    plain: Any = modeling_gpt_neox.GPTNeoXMLP.forward

    def shared(self: Any, hidden: Tensor) -> Any:
        other = self.dense_h_to_4h(torch.ones(3, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device))
        return plain(self, hidden) + 1e-3 * other.mean()

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXMLP, "forward", shared)
    outcome = judge("gpt_neox")
    assert outcome.verdict is Verdict.RUNS, outcome.reason
    model = load(tiny_model("gpt_neox"), open_door(tiny_config("gpt_neox").to_dict(), torch.float32))
    assert {shape.name.rpartition(".")[2] for shape in model.adaptable} == {"dense", "dense_4h_to_h", "query_key_value"}


def test_option_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = modeling_gpt_neox.GPTNeoXAttention.forward

    def biased(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs, position_bias=torch.ones(()))

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXAttention, "forward", biased)
    with pytest.raises(UnsupportedArchitectureError, match="its attention has position_bias"):
        open_door(tiny_config("gpt_neox").to_dict(), torch.float32)


def test_missing_tensor_is_named() -> None:
    tensors = dict(tiny_model("gpt_neox").state_dict())
    del tensors["gpt_neox.layers.2.mlp.dense_4h_to_h.weight"]
    door = open_door(tiny_config("gpt_neox").to_dict(), torch.float32)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.dense_4h_to_h"):
        door.load(DictSource(tensors), dtype=torch.float32, placement=Placement.on(CPU, 3))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_model, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedArchitectureError, match=r"paged-sdk\[transformers\]"):
        plan_model({"model_type": "gpt_neox"}, torch.float32)


def test_two_models_have_seams_of_their_own() -> None:
    models = [load(tiny_model("gpt_neox"), open_door(tiny_config("gpt_neox").to_dict(), torch.float32)) for _ in "ab"]
    first, second = (model.seam for model in models)
    assert isinstance(first, Seam)
    assert first is not second
    assert [seam.attend for seam in (first, second)] == [model.attend for model in models]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model = tiny_model("gpt_neox", vocab_size=tiny.VOCAB_SIZE, max_position_embeddings=512)
    model.generation_config = GenerationConfig.from_dict({"eos_token_id": 2})
    return model


@pytest.fixture(scope="module")
def directory(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("door")
    reference.save_pretrained(path)
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    words = {"eos_token": "<|im_end|>", "chat_template": tiny.CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(words))
    return path


@pytest.fixture(scope="module")
def builder(directory: Path) -> TextModelBuilder:
    meta = PagedAttentionMeta(block_size=16)
    builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_paged_attn(meta)
    return builder.with_max_num_batched_tokens(24).with_num_threads(1)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_len=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> str:
    ids = torch.tensor([tiny.tokenizer().encode(PROMPT).ids])
    generate: Any = reference.generate
    with torch.inference_mode():
        out = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tiny.tokenizer().decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


@pytest.mark.anyio
async def test_texts_side_by_side_with_cached_prefixes(builder: TextModelBuilder, expected: str) -> None:
    prompts = [PROMPT, *(PROMPT[:40] + word for word in (" dogs", " cats", ""))]
    answers: dict[str, CompletionResponse] = {}

    async def ask(model: Model, prompt: str) -> None:
        answers[prompt] = await model.send_completion_request(prompt, sampling=greedy(24))

    async with builder.build() as model:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(ask, model, prompt)
            assert answers[PROMPT].choices[0].text == expected
    details = answers[PROMPT].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens >= 16


def test_class_in_use_is_logged(builder: TextModelBuilder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paged_sdk"), BlockingModel(builder.build()):
        pass
    lines = [record.message for record in caplog.records if "transformers" in record.message]
    assert lines == ["gpt_neox has no decoder here: transformers' GPTNeoXForCausalLM runs it."]


@pytest.mark.parametrize("way", ["contiguous", "speculation", "fp8", "isq", "bfloat16"])
def test_other_settings_run(builder: TextModelBuilder, expected: str, way: str) -> None:
    match way:
        case "contiguous":
            builder = builder.without_paged_attn()
        case "speculation":
            builder = builder.with_speculation(SpeculativeConfig(gamma=4))
        case "fp8":
            builder = builder.with_paged_attn(PagedAttentionMeta(cache_type=PagedCacheType.F8E4M3))
        case "isq":
            builder = builder.with_isq(IsqType.Q8_0)
        case "bfloat16":
            builder = builder.with_dtype("bfloat16")
    with BlockingModel(builder.build()) as model:
        text = model.send_completion_request(PROMPT, sampling=greedy(24)).choices[0].text
    # Other numbers may say something else after a few tokens.
    assert text == expected if way in ("contiguous", "speculation") else text[:4] == expected[:4]


def test_constraint_holds(builder: TextModelBuilder) -> None:
    request = RequestBuilder().add_message(TextMessageRole.USER, "Which?").with_sampling(SamplingParams(max_len=8))
    with BlockingModel(builder.build()) as model:
        answer = model.send_chat_request(request.with_constraint(Constraint.regex("yes|no")))
    assert answer.choices[0].message.content in ("yes", "no")


def test_batch_invariance_is_refused(builder: TextModelBuilder) -> None:
    with pytest.raises(ConfigError, match=r"with_batch_invariance = True .*a class of transformers computes gpt_neox"):
        BlockingModel(builder.with_batch_invariance().build())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_table_of_all_classes() -> None:
    """The page says of every class what is so, and none is wrong."""
    outcomes = [judge(model_type) for model_type in MODEL_TYPES]
    assert [outcome for outcome in outcomes if outcome.verdict is Verdict.WRONG] == []
    page = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert page.strip() == table(outcomes)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_table_of_all_classes_that_take_images() -> None:
    """The page says of every class what is so, and none is wrong."""
    outcomes = [judge_images(model_type) for model_type in IMAGE_MODEL_TYPES]
    assert [outcome for outcome in outcomes if outcome.verdict is Verdict.WRONG] == []
    page = PAGE.read_text().partition(IMAGES)[2].partition(END)[0]
    assert page.strip() == image_table(outcomes)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # transformers' own, of MobileBERT
def test_table_of_all_encoders() -> None:
    """The page says of every class what is so, and none is wrong."""
    outcomes = [judge_encoder(model_type) for model_type in ENCODER_MODEL_TYPES]
    assert [outcome for outcome in outcomes if outcome.verdict is Verdict.WRONG] == []
    page = PAGE.read_text().partition(ENCODERS)[2].partition(END)[0]
    assert page.strip() == encoder_table(outcomes)
