"""What a file for ``paged-sdk serve --config`` says, and that what it cannot say is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import fields_dict
from jsonschema import Draft202012Validator, ValidationError
from typer.testing import CliRunner

from paged_sdk import IsqType, MemoryGpuConfig, PagedCacheType, TextModelBuilder
from paged_sdk.cli import serving
from paged_sdk.cli.app import app
from paged_sdk.cli.options import EngineOptions, ModelOptions, PagedOptions
from paged_sdk.cli.server_options import ServerOptions
from paged_sdk.cli.service_file import RENAMED, ModelFile, Paged, Server, service_file_schema, write_service_file

PUBLISHED: Final = Path(__file__).parents[2] / "docs" / "serve.schema.json"
WHOLE: Final[dict[str, Any]] = {
    "$schema": "serve.schema.json",
    "model": "some/model",
    "name": "ours",
    "isq": "Q4K",
    "topology": {"0-8": {"isq": "Q3K"}, "/down_proj/": {"isq": "Q6K", "device": None}},
    "paged": {"memory_mb": 512, "block_size": 16, "cache_type": "f8e4m3"},
    "max_seqs": 8,
    "max_queue": 64,
    "speculate": 4,
    "adapters": {"poems": "adapters/poems"},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "seed": None},
    "server": {"host": "127.0.0.1", "port": 0, "api_keys": ["k"], "max_body_mb": 8, "timeout": 60.5, "page": False},
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return what runs a command line with a file, and returns what would have been served: the builder of the only
    model, or all models, and the settings.
    """

    def run(content: object, *arguments: str, code: int = 0) -> Any:
        calls: list[tuple[Any, dict[str, Any]]] = []

        def keep_serving(models: Any, terminal: Any, **settings: Any) -> None:
            (builder, name) = (models[0].builder, models[0].name) if len(models) == 1 else (models, None)
            calls.append((builder, settings | {"name": name}))

        monkeypatch.setattr(serving, "keep_serving", keep_serving)
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        named = [] if content is None else ["--config", str(path)]
        result = CliRunner().invoke(app, ["serve", *named, *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return calls[0] if calls else result.output

    return run


def test_a_whole_file(serve: Any) -> None:
    builder, settings = serve(WHOLE)
    assert isinstance(builder, TextModelBuilder)
    assert builder.source.location == "some/model"
    said = builder.settings
    assert said.isq is IsqType.Q4K
    assert said.topology is not None
    assert [str(each) for each in said.topology.selectors] == ["0-8", "/down_proj/"]
    meta = said.paged_meta
    assert meta is not None
    assert (meta.block_size, meta.cache_type, meta.gpu_memory) == (16, PagedCacheType.F8E4M3, MemoryGpuConfig.MB(512))
    assert (said.max_num_seqs, said.max_queue, said.gamma) == (8, 64, 4)
    assert [(each.name, each.location) for each in said.adapters] == [("poems", "adapters/poems")]
    assert settings["sampling"] == {"temperature": 0.7, "top_p": 0.9}
    assert settings["name"] == "ours"
    assert (settings["port"], settings["api_keys"], settings["page"]) == (0, ("k",), False)
    assert (settings["max_body_bytes"], settings["timeout"], settings["drain_timeout"]) == (8 << 20, 60.5, 60.0)


def test_a_file_can_say_what_options_can() -> None:
    names = {
        name for group in (ModelOptions, PagedOptions, EngineOptions, ServerOptions) for name in fields_dict(group)
    }
    said = {RENAMED.get(key, key) for key in ModelFile.__annotations__}
    said |= {RENAMED[f"paged.{key}"] for key in Paged.__annotations__}
    said |= {RENAMED.get(f"server.{key}", key) for key in Server.__annotations__}
    earlier = {"pa_gpu_mem", "pa_gpu_mem_usage", "pa_ctxt_len", "pa_blk_size", "no_paged_attn"}
    assert names - said == {*earlier, "cpu"}  # which is "device": "cpu"


@pytest.mark.parametrize("said", ["secret", " secret\n"])
def test_the_environment_has_the_key(serve: Any, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("PAGED_SDK_API_KEY", said)
    assert serve(None)[1]["api_keys"] == ("secret",)
    assert serve(WHOLE)[1]["api_keys"] == ("secret",)
    assert serve(WHOLE, "--api-key", "a", "--api-key", "b")[1]["api_keys"] == ("a", "b")


@pytest.mark.parametrize("said", ["correct horse battery", " "])
@pytest.mark.parametrize("content", [None, WHOLE])
def test_no_word_of_a_key_is_a_key(serve: Any, monkeypatch: pytest.MonkeyPatch, said: str, content: Any) -> None:
    monkeypatch.setenv("PAGED_SDK_API_KEY", said)
    refused = serve(content, code=2)
    assert "PAGED_SDK_API_KEY: expected a key of printable ASCII without spaces" in refused
    assert "horse" not in refused


def test_models_have_their_own_numbers_of_replicas(serve: Any) -> None:
    said = {"models": [{"model": "a/b", "replicas": 2}, {"model": "c/d"}], "replicas": 3}
    models, _ = serve(said)
    assert [each.replicas for each in models] == [2, 3]
    models, _ = serve(said, "--replicas", "1")
    assert [each.replicas for each in models] == [1, 1]
    assert "replicas" in serve({"replicas": 0}, code=2)


def test_replicas_under_ray_serve(serve: Any) -> None:
    said = {"models": [{"model": "a/b", "ray": True, "max_replicas": 4}, {"model": "c/d"}], "replicas": 2}
    models, _ = serve(said)
    assert [(each.ray, each.replicas, each.max_replicas) for each in models] == [(True, 2, 4), (False, 2, None)]
    models, _ = serve({"models": [{"model": "a/b"}, {"model": "c/d"}]}, "--ray", "--replicas", "3")
    assert [(each.ray, each.replicas, each.max_replicas) for each in models] == [(True, 3, None)] * 2
    assert "give --ray" in serve({"max_replicas": 2}, code=2)
    assert "at least 3" in serve({"ray": True, "replicas": 3, "max_replicas": 2}, code=2)


def test_a_number_without_a_fraction_is_an_integer(serve: Any) -> None:
    """JSON schemas have it so."""
    builder, settings = serve('{"max_seqs": 8.0, "server": {"port": 9.0, "timeout": 60.0}}')
    assert (builder.settings.max_num_seqs, settings["port"], settings["timeout"]) == (8, 9, 60)
    assert "expected an integer" in serve('{"max_seqs": 8.5}', code=2)


@pytest.mark.parametrize(
    ("content", "arguments", "found"),
    [
        (None, [], None),
        (None, ["--ranking-tokens", "yes,no"], ("yes", "no")),
        (None, ["--ranking-tokens", "yes"], ("yes", None)),
        (None, ["--ranking-tokens", " yes, no,"], (" yes", " no,")),
        ({"ranking_tokens": ["yes", "no"]}, [], ("yes", "no")),
        ({"ranking_tokens": [","]}, [], (",", None)),
        ({"ranking_tokens": ["yes", "no"]}, ["--ranking-tokens", "1,0"], ("1", "0")),
        ({"ranking_tokens": ["yes", "no"], "draft_model": "small"}, [], ("yes", "no")),
    ],
)
def test_the_answers_of_a_model_that_ranks(serve: Any, content: object, arguments: list[str], found: object) -> None:
    builder, _ = serve(content, "-m", "a", *arguments)
    assert getattr(builder, "target_builder", builder).settings.ranking_tokens == found


def test_an_empty_file_is_as_no_options(serve: Any) -> None:
    builder, settings = serve({})
    assert builder.source.location.endswith(".gguf")
    assert (settings["host"], settings["port"], settings["page"]) == ("127.0.0.1", 8000, True)


def test_the_command_line_counts_before_the_file(serve: Any) -> None:
    builder, settings = serve(WHOLE, "--isq", "Q8_0", "--port", "9")
    assert builder.settings.isq is IsqType.Q8_0
    assert (settings["port"], settings["page"], settings["name"]) == (9, False, "ours")


@pytest.mark.parametrize(
    ("content", "arguments", "field", "value"),
    [
        ({"paged": {"memory_mb": 4}}, ["--pa-context-len", "64"], "gpu_memory", MemoryGpuConfig.ContextSize(64)),
        ({"paged": {"context_len": 4}}, ["--pa-gpu-mem", "64"], "gpu_memory", MemoryGpuConfig.MB(64)),
        ({"paged": {"block_size": 8}}, ["--pa-blk-size", "16"], "block_size", 16),
        ({"paged": {"mode": "on"}}, ["--no-paged-attn"], None, None),
        ({"device": "cuda"}, ["--cpu"], None, None),
    ],
)
def test_the_command_line_counts_before_what_a_file_says_in_other_words(
    serve: Any, content: object, arguments: list[str], field: str | None, value: object
) -> None:
    builder, _ = serve(content, *arguments)
    assert field is None or getattr(builder.settings.paged_meta, field) == value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"modle": "a"}, "modle"),
        ({"paged": {"blocks": 4}}, "paged.blocks"),
        ({"server": {"prot": 4}}, "server.prot"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 1}}, "sampling.max_tokens"),
        ({"server": {"port": "80"}}, "server.port"),
        ({"paged": {"mode": "perhaps"}}, "paged.mode"),
        ({"topology": {"0-8": {"bits": "4"}}}, 'topology["0-8"].bits'),
        ({"topology": {"8-0": {"isq": "Q4K"}}}, "topology: '8-0'"),
        ({"isq": "Q9"}, "config.json: isq: 'Q9' is not allowed"),
        ({"paged": {"memory_mb": 4, "context_len": 4}}, "exclude"),
        ("[1]", "a JSON object"),
        ("{", "not JSON"),
        ('{"isq": "Q4K", "isq": "Q8_0"}', "isq is given twice"),
        ('{"paged": {"block_size": 8, "block_size": 16}}', "block_size is given twice"),
        ({"server": {"adapter_folder": ""}}, "server.adapter_folder: expected the name of a directory"),
        ({"isq_cache": ""}, "isq_cache: '' is not allowed: expected a path"),
        ({"mmproj": "", "model": "a/b:Q4_K_M"}, "mmproj: '' is not allowed: expected a path"),
        ({"imatrix": ""}, "imatrix: '' is not allowed: expected a path"),
        ({"calibration_file": ""}, "calibration_file: '' is not allowed: expected a path"),
        ({"topology": ""}, "topology: '' is not allowed: expected a path"),
        ({"name": ""}, ": name: expected a name"),
        ({"ranking_tokens": []}, "ranking_tokens"),
        ({"ranking_tokens": ["yes", "no", "perhaps"]}, "ranking_tokens"),
        ({"ranking_tokens": ["yes", "yes"]}, "ranking_tokens: 'yes' is not allowed"),
        ({"models": [{"model": "a"}, {"model": "b", "name": ""}]}, "models[1].name: expected a name"),
    ],
)
def test_what_a_file_cannot_say_is_named(serve: Any, content: object, said: str) -> None:
    shown = serve(content, code=2)
    assert said in shown


@pytest.mark.parametrize("option", ["--isq-cache", "--imatrix", "--served-model-name"])
def test_an_empty_name_is_none(serve: Any, option: str) -> None:
    assert f"Invalid value for {option}: " in serve(None, option, "", code=2)


def test_paths_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"model_id": "org/model", "mmproj": "mmproj.gguf", "isq_cache": "kept", "imatrix": "~/imatrix.gguf"}
    write_service_file(tmp_path / "tuned.json", options)
    said = json.loads((tmp_path / "tuned.json").read_text())
    assert (said["model"], said["mmproj"]) == ("org/model", "mmproj.gguf")  # names within a repository
    assert (said["isq_cache"], said["imatrix"]) == (str(tmp_path / "kept"), str(Path.home() / "imatrix.gguf"))


def test_several_models(serve: Any) -> None:
    """What stands beside ``models`` holds for those that say nothing."""
    said = {
        "isq": "4",
        "paged": {"memory_mb": 512},
        "models": [
            {"model": "a", "name": "first"},
            {"model": "b", "isq": "8", "paged": {"block_size": 16}, "arch": "x"},
        ],
        "server": {"port": 0},
    }
    models, settings = serve(said)
    assert [(each.builder.source.location, each.name, each.arch) for each in models] == [
        ("a", "first", None),
        ("b", None, "x"),
    ]
    assert [each.builder.settings.isq for each in models] == [IsqType.Q4K, IsqType.Q8_0]
    metas = [each.builder.settings.paged_meta for each in models]
    assert [(meta.block_size, meta.gpu_memory is None) for meta in metas] == [(32, False), (16, True)]
    assert settings["port"] == 0
    overruled, settings = serve(said, "--isq", "Q6K", "--served-model-name", "x", "--served-model-name", "y")
    assert [each.builder.settings.isq for each in overruled] == [IsqType.Q6K] * 2
    assert [each.name for each in overruled] == ["x", "y"]


def test_several_models_of_a_command_line(serve: Any) -> None:
    models, _ = serve(None, "-m", "a", "-m", "b", "--isq", "4", "--served-model-name", "x", "--served-model-name", "y")
    assert [(each.builder.source.location, each.name) for each in models] == [("a", "x"), ("b", "y")]
    assert [each.builder.settings.isq for each in models] == [IsqType.Q4K] * 2
    models, settings = serve({"isq": "8", "server": {"port": 9}}, "-m", "a", "-m", "b")
    assert [each.builder.settings.isq for each in models] == [IsqType.Q8_0] * 2
    assert settings["port"] == 9


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ({"models": [{}, {}], "name": "x"}, [], "they cannot share name"),
        ({"models": []}, [], "models"),
        ({"models": [{"server": {}}]}, [], "models[0].server"),
        ({"models": [{}, {}]}, ["-m", "a"], "--model-id and several models in --config exclude each other"),
        ({"models": [{}, {}]}, ["-t", "a"], "several models and --tok-model-id exclude each other"),
        ({"models": [{}, {}], "ranking_tokens": ["a"]}, [], "they cannot share ranking_tokens"),
        (None, ["-m", "a", "-m", "b", "--ranking-tokens", "c"], "several models and --ranking-tokens exclude"),
        (None, ["-m", "a", "-m", "b", "--adapter", "c"], "several models and --adapter exclude each other"),
        (None, ["-m", "a", "-m", "b", "--served-model-name", "c"], "expected a name for each of 2 models"),
        (None, ["--served-model-name", "c", "--served-model-name", "d"], "expected a name for each of 1 models"),
    ],
)
def test_what_several_models_cannot_share(serve: Any, content: object, arguments: list[str], said: str) -> None:
    assert said in serve(content, *arguments, code=2)


def test_a_file_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(app, ["serve", "--config", "no/such.json"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "No such file" in result.stderr


def test_the_published_schema_is_the_one_that_is_held_to() -> None:
    shown = CliRunner().invoke(app, ["serve", "--config-schema"]).stdout
    assert json.loads(shown) == json.loads(PUBLISHED.read_text()) == service_file_schema()
    Draft202012Validator.check_schema(service_file_schema())
    judge = Draft202012Validator(service_file_schema())
    judge.validate(WHOLE)
    judge.validate({})
    for wrong in ({"modle": "a"}, {"paged": {"blocks": 4}}, {"server": {"port": "80"}}):
        with pytest.raises(ValidationError):
            judge.validate(wrong)
