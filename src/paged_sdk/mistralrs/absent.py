"""Lists names of mistral.rs that this engine does not support, with reasons. Using a name raises its reason;
docs/mistralrs.md lists them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from paged_sdk import ConfigError

__all__ = ["METHODS", "NAMES", "PARAMETERS", "AbsentMethodError", "AbsentNameError"]


class AbsentNameError(ConfigError, ImportError):
    """Raised on importing a name of mistral.rs whose feature this engine does not support."""


class AbsentMethodError(ConfigError, AttributeError):
    """Raised on access to a method of mistral.rs's ``Runner`` that this engine does not support."""


def _all(names: str, reason: str) -> Iterable[tuple[str, str]]:
    return ((name, reason) for name in names.split())


_AGENT: Final = "tools are functions of the program's own (tool_callbacks), which can ask before they act"
_CALIBRATION: Final = "weights are calibrated while loading: imatrix or calibration_file of Which.Plain and Which.GGUF"
_CODE: Final = "nothing is executed for a model: give it a tool (tool_callbacks) that runs code where you want it"
_FILES: Final = "there are no files beside a conversation: put their text into a message"
_IMAGES: Final = "no images are made"
_MAPPING: Final = "a model lies on one device, or where a topology file says"
_MATFORMER: Final = "no slices are taken of a model"
_MCP: Final = "there is no client of MCP servers: call them in a tool (tool_callbacks)"
_SEARCH: Final = "there is no web search: give the model a tool (tool_callbacks) that searches"
_SESSIONS: Final = "a conversation is the messages of a request: the program keeps them"
_SPEECH: Final = "no speech is made"
_TRAINING: Final = "nothing is trained here"
_UQFF: Final = "UQFF is mistral.rs's own format: quantize while loading (in_situ_quant), or use a GGUF file"

NAMES: Final = MappingProxyType(
    dict(
        [
            *_all("AnyMoeConfig AnyMoeExpertType", _TRAINING),
            *_all("AgentPermission AgentToolApproval AgentToolApprovalDecision AgentToolApprovalDecisionKind", _AGENT),
            *_all("AgentToolKind AgentToolMetadata AgentToolSource", _AGENT),
            *_all("ApproximateUserLocation SearchContextSize WebSearchOptions WebSearchUserLocation", _SEARCH),
            *_all("CalibrationStatus", _CALIBRATION),
            *_all("CodeExecutionConfig CodeExecutionPermission NetworkMode SandboxPolicy", _CODE),
            *_all("ShellConfig ShellSkillMount", _CODE),
            *_all("DiffusionArchitecture ImageChoice ImageGenerationResponse ImageGenerationResponseFormat", _IMAGES),
            *_all("File FileSource InputFile RequestedFile", _FILES),
            *_all("McpClientConfigPy McpServerConfigPy McpServerSourcePy", _MCP),
            *_all("MultimodalAutoMapParams TextAutoMapParams VisionAutoMapParams", _MAPPING),
            *_all("SpeechGenerationResponse SpeechLoaderType", _SPEECH),
        ]
    )
)
"""Maps classes of mistral.rs to the reason why importing them is an error."""

METHODS: Final = MappingProxyType(
    dict(
        [
            *_all("generate_image", _IMAGES),
            *_all("generate_audio", _SPEECH),
            *_all("begin_calibration calibration_status apply_calibration", _CALIBRATION),
            *_all("export_session import_session delete_session list_session_ids", _SESSIONS),
            *_all("find_file", _FILES),
        ]
    )
)
"""Maps methods of its ``Runner`` to the reason why they are missing."""

PARAMETERS: Final = MappingProxyType(
    dict(
        [
            *_all("agent_approval_callback agent_permission", _AGENT),
            *_all("anymoe_config", _TRAINING),
            *_all("auto_map_params multimodal_auto_map_params num_device_layers", _MAPPING),
            *_all("code_execution_config code_execution_permission enable_code_execution", _CODE),
            *_all("enable_search search_callback search_embedding_model web_search_options", _SEARCH),
            *_all("enable_shell shell_config shell_skills", _CODE),
            *_all("encoder_cache_memory_bytes", "what an encoder makes of an image is kept while requests need it"),
            *_all("files input_files", _FILES),
            *_all("from_uqff write_uqff", _UQFF),
            *_all("hf_cache_path", "the environment says where the hub's cache is: HF_HUB_CACHE or HF_HOME"),
            *_all("matformer_config_path matformer_slice_name", _MATFORMER),
            *_all("max_edge", "images are resized as the checkpoint says"),
            *_all("mcp_client_config", _MCP),
            *_all("no_kv_cache", "every text has its keys and values kept"),
            *_all("revision", "an adapter of the hub is its repository's main branch; a directory holds any other"),
            *_all("session_id", _SESSIONS),
            *_all("suffix", "texts are continued at their end only"),
            *_all("tool_dispatch_url", "tools are called in this process (tool_callbacks), and no address is"),
        ]
    )
)
"""Maps parameters to the reason why only their default is accepted."""
