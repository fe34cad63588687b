"""Every kind of model that mistral.rs's programs describe makes vectors, sees images, drafts, and goes and comes."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import numpy as np
import PIL.Image
import pytest
from transformers import CONFIG_MAPPING

import tiny
from assistant_checkpoints import make_assistant, make_target
from mmproj_files import write_vision_gguf
from mtp_checkpoints import make_mtp_checkpoint
from paged_sdk import (
    BlockingModel,
    ConfigError,
    InvalidRequestError,
    IsqType,
    LayerTopology,
    ModelClosedError,
    ModelLoadError,
    RequestError,
    TextModelBuilder,
    Topology,
    mistralrs,
)
from paged_sdk.mistralrs import (
    Architecture,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingArchitecture,
    EmbeddingRequest,
    IsqOrganization,
    ModelDType,
    MultimodalArchitecture,
    Runner,
    Which,
)
from tiny_vision import make_vision_checkpoint, picture

GREEDY: dict[str, Any] = {"model": "default", "max_tokens": 8}


def say(runner: Runner, messages: Any = "Hello!", **fields: Any) -> str | None:
    request: ChatCompletionRequest[Literal[False]] = ChatCompletionRequest(messages=messages, **(GREEDY | fields))
    return runner.send_chat_completion_request(request).choices[0].message.content


@pytest.fixture(scope="module")
def which(tiny_checkpoint: Path) -> Any:
    return Which.Plain(str(tiny_checkpoint), Architecture.Llama, dtype=ModelDType.F32)


@pytest.fixture(scope="module")
def runner(which: Any) -> Iterator[Runner]:
    with Runner(which, pa_ctxt_len=2048) as runner:
        yield runner


def test_vectors(tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint("qwen3", tmp_path)
    texts = ["Graphene conducts.", "A kettle"]
    which = Which.Embedding(str(checkpoint), EmbeddingArchitecture.Qwen3Embedding, dtype=ModelDType.F32)
    with Runner(which) as runner, BlockingModel(TextModelBuilder(checkpoint).with_dtype("float32").build()) as model:
        expected = model.embed(texts).embeddings
        vectors = runner.send_embedding_request(EmbeddingRequest(texts))
        assert isinstance(vectors[0][0], float)
        np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
        ids = [model.tokenize(text, add_special_tokens=True) for text in texts]
        np.testing.assert_array_equal(runner.send_embedding_request(EmbeddingRequest(ids)), vectors)
        assert runner.send_embedding_request(EmbeddingRequest(ids[0])) == vectors[:1]
        assert runner.send_embedding_request(EmbeddingRequest(texts[1])) == vectors[1:]
        long = "word " * 3000
        assert len(runner.send_embedding_request(EmbeddingRequest(long, truncate_sequence=True))) == 1
        for wrong in (EmbeddingRequest(long), EmbeddingRequest([]), "text"):
            with pytest.raises(RequestError):
                runner.send_embedding_request(wrong)  # type: ignore[arg-type]  # of the text
    with pytest.raises(ConfigError, match="qwen3"):
        Runner(Which.Embedding(str(checkpoint), EmbeddingArchitecture.EmbeddingGemma))


def test_images(tmp_path: Path) -> None:
    make_vision_checkpoint("llava", tmp_path / "llava")
    file = tmp_path / "picture.png"
    PIL.Image.fromarray(picture(40, 60)).save(file)
    data = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    other = io.BytesIO()
    PIL.Image.fromarray(picture(40, 60, seed=1)).save(other, "PNG")

    def asks(url: str) -> list[dict[str, Any]]:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        return [{"role": "user", "content": parts}]

    which = Which.MultimodalPlain(str(tmp_path / "llava"), MultimodalArchitecture.LLaVA, dtype="float32")
    with Runner(which) as runner:
        said = [say(runner, asks(url)) for url in (data, str(file), f" {file}", f"file://{file}")]
        assert len(set(said)) == 1
        assert said[0] != say(runner, asks("data:image/png;base64," + base64.b64encode(other.getvalue()).decode()))
        for url in ("https://example.org/picture.png", str(tmp_path / "none.png")):
            with pytest.raises(InvalidRequestError, match="image"):
                say(runner, asks(url))
    assert Which.VisionPlain is Which.MultimodalPlain
    assert mistralrs.VisionArchitecture is MultimodalArchitecture
    with pytest.raises(ConfigError, match="llava"):
        Runner(Which.VisionPlain(str(tmp_path / "llava"), MultimodalArchitecture.Qwen2VL))
    with pytest.raises(ConfigError, match="which_draft"):
        Runner(which, which_draft=Which.Plain("another"))


def test_images_of_gguf_models(tmp_path: Path) -> None:
    make_vision_checkpoint("gemma3", tmp_path / "checkpoint")
    model, encoder = write_vision_gguf("gemma3", tmp_path / "checkpoint", tmp_path / "gguf")
    PIL.Image.fromarray(picture(40, 60)).save(tmp_path / "picture.png")
    parts = [{"type": "image_url", "image_url": {"url": str(tmp_path / "picture.png")}}, {"type": "text", "text": "Hi"}]
    said = []
    for given in (encoder.name, [encoder.name], str(encoder)):
        with Runner(Which.GGUF(str(model.parent), model.name, mmproj_filename=given)) as runner:
            said.append(say(runner, [{"role": "user", "content": parts}]))
    assert said[0]
    assert len(set(said)) == 1
    for wrong in ([], [encoder.name, "other"], 5):
        with pytest.raises(ConfigError, match="mmproj_filename"):
            Which.GGUF("model", "file", mmproj_filename=wrong)  # type: ignore[arg-type]  # of the number


def test_names_of_families_are_those_that_checkpoints_say() -> None:
    families = [*Architecture, *MultimodalArchitecture, *EmbeddingArchitecture]
    unknown = {family.name for family in families if family.value not in CONFIG_MAPPING}
    assert unknown == {"MiniCpmO", "Phi3V", "Phi4MM"}, "which come with code of their own"


def test_smolvlm_is_an_idefics3() -> None:
    for loaded in ("idefics3", "smolvlm"):
        MultimodalArchitecture.Idefics3.check(loaded)
    with pytest.raises(ConfigError, match="idefics2"):
        MultimodalArchitecture.Idefics3.check("idefics2")


def test_a_models_own_layer_drafts(tmp_path: Path) -> None:
    which = Which.Plain(str(make_mtp_checkpoint("glm4_moe", tmp_path)))
    with Runner(which) as plain, Runner(which, mtp_n_predict=3) as drafted:
        assert drafted._model.config.gamma == 3
        assert say(drafted, max_tokens=24) == say(plain, max_tokens=24)
        assert drafted._model.stats().drafted_tokens
    others: dict[str, Any]
    for others in ({"which_draft": which}, {"speculative_gamma": 4}):
        with pytest.raises(ConfigError, match="mtp_n_predict = 3 is not allowed: expected None beside"):
            Runner(which, mtp_n_predict=3, **others)
    with pytest.raises(ConfigError, match="mtp_n_predict = 0 is not allowed"):
        Runner(which, mtp_n_predict=0)


def test_an_assistant_drafts(tmp_path: Path) -> None:
    target = make_target("shared keys", tmp_path / "target")
    which, assistant = Which.Plain(str(target)), str(make_assistant(target, tmp_path / "assistant"))
    with Runner(which) as plain, Runner(which, mtp_model=assistant, mtp_n_predict=3) as drafted:
        assert drafted._model.config.gamma == 3
        assert say(drafted, max_tokens=24) == say(plain, max_tokens=24)
        assert drafted._model.stats().drafted_tokens
    others: dict[str, Any]
    for others in ({"which_draft": which}, {"speculative_gamma": 4}):
        with pytest.raises(ConfigError, match=r"mtp_model = .* is not allowed: expected None beside"):
            Runner(which, mtp_model=assistant, **others)
    with pytest.raises(ConfigError, match="mtp_n_predict = 0 is not allowed"):
        Runner(which, mtp_model=assistant, mtp_n_predict=0)
    with pytest.raises(ConfigError, match="mtp_model = 1 is not allowed: expected a path or a hub id"):
        Runner(which, mtp_model=1)  # type: ignore[arg-type]


def test_a_draft_model_changes_no_text(which: Any, runner: Runner, tiny_checkpoint: Path) -> None:
    expected = say(runner, max_tokens=24)
    with Runner(which, which_draft=which, speculative_gamma=3) as drafted:
        assert drafted._model.config.gamma == 3
        assert say(drafted, max_tokens=24) == expected
        assert drafted._model.stats().accepted_tokens
    with Runner(which, which_draft=which) as drafted:
        assert drafted._model.config.gamma == 32
    with Runner(which, speculative_gamma=5) as guessing:
        assert guessing._model.config.gamma == 5
        assert say(guessing, max_tokens=24) == expected
    settings: dict[str, Any]
    for settings in (
        {"which_draft": "path"},
        {"speculative_gamma": 0},
        {"which_draft": which, "speculative_gamma": "8"},
    ):
        with pytest.raises(ConfigError, match=r"speculative_gamma|which_draft"):
            Runner(which, **settings)


def test_experts_alone_are_quantized(tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint("mixtral", tmp_path)
    topology = Topology.empty().with_regex("experts", LayerTopology(isq=IsqType.Q4_0))
    with BlockingModel(TextModelBuilder(checkpoint).with_dtype("float32").with_topology(topology).build()) as model:
        expected = model.send_chat_request([{"role": "user", "content": "Hello!"}]).choices[0].message.content[:20]
    which = Which.Plain(str(checkpoint), organization=IsqOrganization.MoQE, dtype=ModelDType.F32)
    with Runner(which, in_situ_quant="Q4_0") as runner:
        assert (say(runner, max_tokens=64) or "")[:20] == expected
        with pytest.raises(ConfigError, match="organization"):
            runner.send_re_isq("Q8_0")
    whole = Which.Plain(str(checkpoint), organization=IsqOrganization.Default, dtype=ModelDType.F32)
    with Runner(whole, in_situ_quant="Q4_0") as runner:
        assert (say(runner, max_tokens=64) or "")[:20] != expected
    with pytest.raises(ConfigError, match="organization"):
        Runner(which)
    with pytest.raises(ConfigError, match="organization"):
        Which.Plain("model", organization="moqe")  # type: ignore[arg-type]


def test_a_model_goes_and_comes_back(which: Any, tiny_checkpoint: Path) -> None:
    name = str(tiny_checkpoint)
    with Runner(which) as runner:
        assert runner.list_models() == [name]
        assert runner.get_default_model_id() == name
        runner.set_default_model_id(name)
        assert (runner.is_model_loaded(name), runner.get_model_status(name)) == (True, "loaded")
        expected = say(runner)
        request = ChatCompletionRequest("Hello!", **GREEDY)
        assert runner.send_chat_completion_request_to_model(request, name).choices[0].message.content == expected
        text = CompletionRequest("Once", **GREEDY)
        told = [runner.send_completion_request_to_model(text, name), runner.send_completion_request(text, name)]
        assert told[0].choices == told[1].choices
        runner.unload_model(name)
        assert not runner.is_model_loaded(name)
        assert runner.list_models_with_status() == [(name, "unloaded")]
        assert runner.list_unloaded_models() == [name]
        with pytest.raises(ConfigError, match="unload_model"):
            runner.unload_model(name)
        assert say(runner) == expected  # which loads it
        assert runner.list_unloaded_models() == []
        runner.unload_model(name)
        runner.reload_model(name)
        assert runner.get_model_status(name) == "loaded"
        with pytest.raises(ConfigError, match="reload_model"):
            runner.reload_model(name)
        with pytest.raises(ConfigError, match="unload the model"):
            runner.remove_model(name)
        other: Any
        for other in ("another", None, 5):
            assert runner.get_model_status(other) is None
            for method in ("set_default_model_id", "is_model_loaded", "unload_model", "reload_model", "remove_model"):
                with pytest.raises(ConfigError, match="model_id"):
                    getattr(runner, method)(other)
    for use in (lambda: say(runner), lambda: runner.max_sequence_length()):
        with pytest.raises(ModelClosedError):
            use()


def test_a_model_whose_files_are_gone_stays_unloaded(tmp_path: Path) -> None:
    checkpoint = tiny.make_checkpoint("llama", tmp_path / "model")
    with Runner(Which.Plain(str(checkpoint))) as runner:
        runner.unload_model(str(checkpoint))
        checkpoint.rename(tmp_path / "moved")
        for _ in range(2):
            with pytest.raises(Exception, match="model"):
                runner.reload_model(str(checkpoint))
            assert runner.list_unloaded_models() == [str(checkpoint)]
        (tmp_path / "moved").rename(checkpoint)
        assert say(runner) is not None


def test_how_hard_a_model_thinks() -> None:
    def options(**fields: Any) -> tuple[bool | None, str | None]:
        built = ChatCompletionRequest("Hello!", "default", **fields).build(seed=None, default_temperature=None).options
        return built.enable_thinking, built.reasoning_effort

    assert options() == (True, None)
    assert options(enable_thinking=False) == (False, None)
    assert options(reasoning_effort=" High ") == (True, "high")
    assert options(reasoning_effort="max", enable_thinking=True) == (True, "xhigh")
    assert options(reasoning_effort="none") == options(reasoning_effort="off", enable_thinking=False) == (False, None)
    wrong: list[dict[str, Any]] = [
        {"reasoning_effort": "much"},
        {"reasoning_effort": 3},
        {"reasoning_effort": "off", "enable_thinking": True},
        {"reasoning_effort": "low", "enable_thinking": False},
    ]
    for fields in wrong:
        with pytest.raises(InvalidRequestError, match="reasoning_effort"):
            options(**fields)


def offline_hub(directory: Path, name: str, files: Path) -> None:
    """Make a cache of the Hub's that has one repository."""
    repository = directory / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(files, repository / "snapshots" / ("0" * 40))


def test_hub_ids_are_found_in_the_cache_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_vision_checkpoint("llava", tmp_path / "llava")
    offline_hub(tmp_path / "hub", "org/llava", tmp_path / "llava")
    (tmp_path / "tokenizer").mkdir()
    tiny.tokenizer().save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    offline_hub(tmp_path / "hub", "org/tokenizer", tmp_path / "tokenizer")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tiny.make_gguf(tmp_path, quantization="Q8_0").name
    with Runner(Which.GGUF(str(tmp_path), file)) as runner:
        expected = runner.send_completion_request(CompletionRequest("Once", **GREEDY)).choices
    with Runner(Which.GGUF(str(tmp_path), file, tok_model_id="org/tokenizer")) as runner:
        assert runner.send_completion_request(CompletionRequest("Once", **GREEDY)).choices == expected
    with pytest.raises(ModelLoadError, match="org/none"):
        Runner(Which.GGUF(str(tmp_path), file, tok_model_id="org/none"))
    with Runner(Which.MultimodalPlain("org/llava", MultimodalArchitecture.LLaVA)) as runner:
        assert runner.list_models() == ["org/llava"]
    with pytest.raises(ConfigError, match="llava"):
        Runner(Which.MultimodalPlain("org/llava", MultimodalArchitecture.Gemma3))
