from __future__ import annotations

import os

import pytest

from paged_sdk import ConfigError, HangLimits, IsqType, MemoryGpuConfig, PagedAttentionMeta, PagedCacheType
from paged_sdk.config.env import (
    Environment,
    device_variables,
    nccl_leaves_the_process,
    read_environment,
    read_launch,
    read_variable,
)
from paged_sdk.config.launch import Launch


def test_nothing_set_says_nothing() -> None:
    assert read_environment({}) == Environment()
    assert read_environment({"MISTRALRS_PAGED_ATTN": "  ", "OTHER": "1"}) == Environment()


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("ON", True), ("false", False), ("0", False), ("Off", False)]
)
def test_paged_attn_switch(text: str, value: bool) -> None:
    assert read_environment({"MISTRALRS_PAGED_ATTN": text}).paged_attn is value


@pytest.mark.parametrize(
    ("variables", "meta"),
    [
        ({"BLOCK_SIZE": "64"}, PagedAttentionMeta(block_size=64)),
        ({"CACHE_TYPE": "F8E4M3"}, PagedAttentionMeta(cache_type=PagedCacheType.F8E4M3)),
        ({"CACHE_TYPE": "auto"}, PagedAttentionMeta()),
        ({"GPU_MEM": "512"}, PagedAttentionMeta(gpu_memory=MemoryGpuConfig.MB(512))),
        ({"GPU_MEM_USAGE": "0.5"}, PagedAttentionMeta(gpu_memory=MemoryGpuConfig.Fraction(0.5))),
        (
            {"CONTEXT_LEN": "1000", "BLOCK_SIZE": "16"},
            PagedAttentionMeta(block_size=16, gpu_memory=MemoryGpuConfig.ContextSize(1000)),
        ),
    ],
)
def test_paged_meta(variables: dict[str, str], meta: PagedAttentionMeta) -> None:
    given = {f"MISTRALRS_PAGED_ATTN_{name}": value for name, value in variables.items()}
    assert read_environment(given).paged_meta == meta


@pytest.mark.parametrize(("text", "n"), [("0", 0), ("false", 0), ("None", 0), ("16", 16), ("3", 3)])
def test_prefix_cache_n(text: str, n: int) -> None:
    assert read_environment({"MISTRALRS_PREFIX_CACHE_N": text}).prefix_cache_n == n


@pytest.mark.parametrize(("text", "mtp"), [("on", True), ("1", True), ("off", False)])
def test_speculative_mtp(text: str, *, mtp: bool) -> None:
    assert read_environment({"MISTRALRS_SPECULATIVE_MTP": text}).mtp == mtp


@pytest.mark.parametrize("gamma", [1, 16, 1024])
def test_speculative_gamma(gamma: int) -> None:
    assert read_environment({"MISTRALRS_SPECULATIVE_GAMMA": str(gamma)}).gamma == gamma


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MISTRALRS_PAGED_ATTN", "yes please"),
        ("MISTRALRS_PAGED_ATTN_BLOCK_SIZE", "0"),
        ("MISTRALRS_PAGED_ATTN_BLOCK_SIZE", "4096"),
        ("MISTRALRS_PAGED_ATTN_BLOCK_SIZE", "32.5"),
        ("MISTRALRS_PAGED_ATTN_BLOCK_SIZE", "٣٢"),
        ("MISTRALRS_PAGED_ATTN_CACHE_TYPE", "fp8"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM", "-1"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM", "4GB"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM_USAGE", "1.5"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM_USAGE", "nan"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM_USAGE", "half"),
        ("MISTRALRS_PAGED_ATTN_CONTEXT_LEN", "0"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM", "9" * 5000),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM", str(2**53 + 1)),
        ("MISTRALRS_PAGED_ATTN_CONTEXT_LEN", "9" * 18),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM_USAGE", "0_1"),
        ("MISTRALRS_PAGED_ATTN_GPU_MEM_USAGE", "٠.٥"),
        ("MISTRALRS_PREFIX_CACHE_N", "-3"),
        ("MISTRALRS_PREFIX_CACHE_N", "many"),
        ("MISTRALRS_ISQ", "Q4Z"),
        ("MISTRALRS_ISQ", "7"),
        ("MISTRALRS_SPECULATIVE_GAMMA", "0"),
        ("MISTRALRS_SPECULATIVE_GAMMA", "1025"),
        ("MISTRALRS_SPECULATIVE_GAMMA", "on"),
        ("MISTRALRS_SPECULATIVE_MTP", "2"),
    ],
)
def test_a_value_that_cannot_be_read_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment({name: value})
    assert caught.value.setting == name
    assert caught.value.value == value
    assert name in str(caught.value)
    assert value[:50] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_two_memory_settings_at_once_are_an_error_that_names_both() -> None:
    given = {"MISTRALRS_PAGED_ATTN_GPU_MEM": "512", "MISTRALRS_PAGED_ATTN_CONTEXT_LEN": "4096"}
    with pytest.raises(ConfigError, match=r"GPU_MEM and MISTRALRS_PAGED_ATTN_CONTEXT_LEN"):
        read_environment(given)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISTRALRS_PREFIX_CACHE_N", "5")
    monkeypatch.setenv("SOME_TOKEN", "abc")
    assert read_environment().prefix_cache_n == 5
    assert read_variable("SOME_TOKEN") == "abc"
    assert read_variable("NO_SUCH_TOKEN") is None


@pytest.mark.parametrize(
    ("text", "isq"),
    [("Q4K", IsqType.Q4K), ("q8_0", IsqType.Q8_0), ("4", IsqType.Q4K), ("false", None), ("None", None)],
)
def test_isq(text: str, isq: IsqType | None) -> None:
    assert read_environment({"MISTRALRS_ISQ": text}).isq is isq


@pytest.mark.parametrize("off", ["off", "0", "false"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPU_MEM", "512"),
        ("GPU_MEM_USAGE", "0.5"),
        ("CONTEXT_LEN", "4096"),
        ("BLOCK_SIZE", "16"),
        ("CACHE_TYPE", "auto"),
    ],
)
def test_settings_of_a_pool_that_is_switched_off_are_an_error_that_names_both(off: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"MISTRALRS_PAGED_ATTN = {off} and MISTRALRS_PAGED_ATTN_{name} = '{value}'"):
        read_environment({"MISTRALRS_PAGED_ATTN": off, f"MISTRALRS_PAGED_ATTN_{name}": value})


LAUNCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "first.example", "MASTER_PORT": "29500"}


def test_a_launch() -> None:
    assert read_launch({}) is None
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert read_launch({"MASTER_ADDR": "left.over", "MASTER_PORT": "no"}) is None
    assert read_launch(LAUNCH) == Launch(rank=1, size=4, address="first.example", port=29500)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    found = read_launch(LAUNCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | agent)
    expected = Launch(
        rank=1, size=4, local_rank=1, local_size=2, address="first.example", port=29500, has_agent=True, attempt=3
    )
    assert found == expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "", "RANK is not set: .* beside WORLD_SIZE"),
        ("WORLD_SIZE", "", "WORLD_SIZE is not set: .* beside RANK"),
        ("RANK", "4", "RANK = '4' .* below WORLD_SIZE, 4"),
        ("RANK", "-1", "RANK = '-1'"),
        ("WORLD_SIZE", "0", "WORLD_SIZE = '0'"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set: .* beside WORLD_SIZE"),
        ("MASTER_PORT", "", "MASTER_PORT is not set: .* beside WORLD_SIZE"),
        ("MASTER_PORT", "65536", "MASTER_PORT = '65536' .* a port from 1 to 65535"),
        ("LOCAL_RANK", "1", "LOCAL_RANK = '1' .* below LOCAL_WORLD_SIZE, 1"),
        ("TORCHELASTIC_USE_AGENT_STORE", "maybe", "TORCHELASTIC_USE_AGENT_STORE = 'maybe'"),
    ],
)
def test_a_launch_that_cannot_be_read(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_launch(LAUNCH | {name: value})


def test_what_ranks_on_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_TOKEN", "abc")
    told = device_variables()
    assert (told["CUDA_VISIBLE_DEVICES"], told["NCCL_DEBUG"]) == ("2,3", "INFO")
    assert "SOME_TOKEN" not in told


def test_nccl_is_told_to_leave_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handling, monitoring = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"
    monkeypatch.setenv(handling, "1")
    monkeypatch.delenv(monitoring, raising=False)
    with nccl_leaves_the_process():
        assert (os.environ[handling], os.environ[monitoring]) == ("0", "0")
    assert os.environ[handling] == "1"
    assert monitoring not in os.environ


def test_when_replicas_have_hung() -> None:
    assert read_environment({}).hang_limits == HangLimits()
    given = {"PAGED_SDK_SILENT_SECONDS": " 2.5 ", "PAGED_SDK_STEP_SECONDS": "None"}
    assert read_environment(given).hang_limits == HangLimits(silent_seconds=2.5, step_seconds=None)
    assert read_environment({"PAGED_SDK_SILENT_SECONDS": "false"}).hang_limits.silent_seconds is None


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1_0", "١", "a minute"])
@pytest.mark.parametrize("name", ["PAGED_SDK_SILENT_SECONDS", "PAGED_SDK_STEP_SECONDS"])
def test_a_limit_that_cannot_be_read_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_environment({name: value})
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MISTRALRS_PAGED_ATN", "MISTRALRS_PAGED_ATTN"),
        ("MISTRALRS_PAGED_ATTENTION", "MISTRALRS_PAGED_ATTN"),
        ("MISTRALRS_PREFIX_CACHE", "MISTRALRS_PREFIX_CACHE_N"),
        ("PAGED_SDK_STEP_SECOND", "PAGED_SDK_STEP_SECONDS"),
        ("MISTRALRS_DEBUG", None),
        ("PAGED_SDK_API_KEY", None),
        ("ISQ", None),
    ],
)
def test_a_misspelt_variable_is_warned_about(name: str, meant: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert read_environment({name: "1", "MISTRALRS_ISQ": "Q4K"}) == Environment(isq=IsqType.Q4K)
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if meant is None else [f"The environment variable '{name}' has no effect. Is {meant} meant?"])
