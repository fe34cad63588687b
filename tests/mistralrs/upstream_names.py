"""List what the Python package of mistral.rs 0.9.2 offers: names alone, in its order."""

from __future__ import annotations

from typing import Final

__all__ = ["ATTRIBUTES", "MAKES", "MEMBERS", "METHODS", "NEWER", "OLDER"]

MEMBERS: Final = {
    "AgentPermission": "Auto Ask Deny",
    "AgentToolApprovalDecisionKind": "Approve Deny",
    "AgentToolKind": "CodeExecution WebSearch Shell File Custom External",
    "AgentToolSource": "BuiltIn User Mcp External",
    "Architecture": (
        "Mistral Gemma Mixtral Llama Phi2 Phi3 Qwen2 Gemma2 Starcoder2 Phi3_5MoE DeepseekV2 DeepseekV3 Qwen3 "
        "GLM4 GLM4Moe GLM4MoeLite Qwen3Moe SmolLm3 GraniteMoeHybrid GptOss Qwen3Next Lfm2 Lfm2Moe "
        "HunYuanDenseV1 HunYuanMoEV1"
    ),
    "CodeExecutionPermission": "Auto Ask Deny",
    "DiffusionArchitecture": "Flux FluxOffloaded",
    "EmbeddingArchitecture": "EmbeddingGemma Qwen3Embedding",
    "ImageGenerationResponseFormat": "Url B64Json",
    "IsqOrganization": "Default MoQE",
    "ModelDType": "Auto BF16 F16 F32",
    "MultimodalArchitecture": (
        "Phi3V Idefics2 LLaVANext LLaVA Lfm2Vl VLlama Qwen2VL Idefics3 MiniCpmO Phi4MM Qwen2_5VL Gemma3 "
        "Mistral3 Llama4 Gemma3n Qwen3VL Qwen3VLMoE Qwen3_5 Qwen3_5Moe Voxtral Gemma4 MuseGlimmer "
        "DiffusionGemma"
    ),
    "NetworkMode": "NoNetwork Loopback Full",
    "PagedCacheType": "Auto F8E4M3",
    "SearchContextSize": "Low Medium High",
    "SpeechLoaderType": "Dia",
    "ToolCallType": "Function",
    "ToolChoice": "NoTools Auto",
}
"""Enumeration -> its members."""

MAKES: Final = {
    "AgentToolApprovalDecision": "decision remember_for_session message",
    "AnyMoeConfig": (
        "hidden_size dataset_json prefix mlp model_ids expert_type layers lr epochs batch_size gate_model_id "
        "training loss_csv_path"
    ),
    "AnyMoeExpertType.FineTuned": "",
    "AnyMoeExpertType.LoraAdapter": "rank alpha target_modules",
    "ApproximateUserLocation": "city country region timezone",
    "ChatCompletionRequest": (
        "messages model logprobs n_choices logit_bias top_logprobs max_tokens presence_penalty "
        "frequency_penalty repetition_penalty stop_seqs temperature top_p top_k stream grammar grammar_type "
        "min_p tool_schemas tool_choice dry_multiplier dry_base dry_allowed_length dry_sequence_breakers "
        "web_search_options enable_thinking truncate_sequence reasoning_effort max_tool_rounds "
        "tool_dispatch_url enable_code_execution enable_shell shell_skills agent_permission "
        "agent_approval_callback code_execution_permission session_id files input_files ignore_eos adapter"
    ),
    "CodeExecutionConfig": "python_path timeout_secs working_directory sandbox_policy permission approval_callback",
    "CompletionRequest": (
        "prompt model best_of echo_prompt presence_penalty frequency_penalty repetition_penalty logit_bias "
        "max_tokens n_choices stop_seqs temperature top_p suffix top_k grammar grammar_type min_p "
        "tool_schemas tool_choice dry_multiplier dry_base dry_allowed_length dry_sequence_breakers "
        "truncate_sequence ignore_eos adapter"
    ),
    "EmbeddingRequest": "input truncate_sequence",
    "InputFile": "name data mime_type",
    "LoraAdapter": "alias source revision",
    "LoraAdapterGeneration": "generation",
    "McpClientConfigPy": "servers auto_register_tools tool_timeout_secs max_concurrent_calls",
    "McpServerConfigPy": "id name source enabled tool_prefix resources bearer_token",
    "MultimodalAutoMapParams": "max_seq_len max_batch_size max_num_images max_image_length",
    "RequestedFile": "name format description",
    "Runner": (
        "which max_seqs no_kv_cache prefix_cache_n token_source mtp_model mtp_n_predict chat_template "
        "jinja_explicit num_device_layers in_situ_quant anymoe_config pa_gpu_mem pa_gpu_mem_usage pa_ctxt_len "
        "pa_blk_size pa_cache_type no_paged_attn paged_attn seed enable_search search_embedding_model "
        "search_callback tool_callbacks mcp_client_config code_execution_config shell_config"
    ),
    "SandboxPolicy": (
        "max_memory_mb max_cpu_secs max_procs max_open_fds max_file_sz_mb network extra_fs_read "
        "extra_fs_write extra_env strict"
    ),
    "ShellConfig": "shell_path timeout_secs working_directory sandbox_policy permission",
    "ShellSkillMount": "name description source_path",
    "TextAutoMapParams": "max_seq_len max_batch_size",
    "WebSearchOptions": "search_context_size user_location search_description extract_description",
    "Which.DiffusionPlain": "model_id arch dtype",
    "Which.Embedding": (
        "model_id arch tokenizer_json topology write_uqff from_uqff dtype hf_cache_path imatrix calibration_file"
    ),
    "Which.GGML": (
        "quantized_model_id quantized_filename tok_model_id tokenizer_json gqa topology dtype auto_map_params"
    ),
    "Which.GGUF": (
        "quantized_model_id quantized_filename tok_model_id topology dtype auto_map_params tokenizer_json "
        "mmproj_filename organization write_uqff imatrix calibration_file max_edge multimodal_auto_map_params "
        "adapters max_adapters max_rank max_bytes hf_cache_path matformer_config_path matformer_slice_name"
    ),
    "Which.Lora": (
        "model_id adapters arch tokenizer_json topology write_uqff from_uqff dtype auto_map_params "
        "hf_cache_path max_adapters max_rank max_bytes"
    ),
    "Which.LoraGGML": (
        "quantized_model_id quantized_filename adapters_model_id order tok_model_id tokenizer_json gqa "
        "topology dtype auto_map_params"
    ),
    "Which.LoraGGUF": (
        "quantized_model_id quantized_filename adapters_model_id order tok_model_id topology dtype auto_map_params"
    ),
    "Which.MultimodalPlain": (
        "model_id arch tokenizer_json topology write_uqff from_uqff dtype max_edge calibration_file imatrix "
        "auto_map_params hf_cache_path matformer_config_path matformer_slice_name organization"
    ),
    "Which.Plain": (
        "model_id arch tokenizer_json topology organization write_uqff from_uqff dtype imatrix "
        "calibration_file auto_map_params hf_cache_path matformer_config_path matformer_slice_name"
    ),
    "Which.Speech": "model_id arch dac_model_id dtype",
    "Which.XLora": (
        "xlora_model_id order arch model_id tokenizer_json tgt_non_granular_index topology write_uqff "
        "from_uqff dtype auto_map_params hf_cache_path"
    ),
    "Which.XLoraGGML": (
        "quantized_model_id quantized_filename xlora_model_id order tok_model_id tokenizer_json "
        "tgt_non_granular_index gqa topology dtype auto_map_params"
    ),
    "Which.XLoraGGUF": (
        "quantized_model_id quantized_filename xlora_model_id order tok_model_id tgt_non_granular_index "
        "topology dtype auto_map_params"
    ),
}
"""Class that programs make -> the parameters it takes."""

ATTRIBUTES: Final = {
    "AgentToolApproval": "approval_id session_id round tool arguments_json code",
    "AgentToolMetadata": "source kind label",
    "AgenticToolCallRecord": "round name arguments result_content result_images_base64 file_ids",
    "AnyMoeExpertType": "",
    "CalibrationStatus": "collecting layers layers_tracking total_rows min_rows max_rows",
    "CalledFunction": "name arguments",
    "ChatCompletionChunkResponse": (
        "id choices created model system_fingerprint object usage adapter_generation session_id"
    ),
    "ChatCompletionResponse": (
        "id choices created model system_fingerprint object usage adapter_generation agentic_tool_calls files "
        "session_id"
    ),
    "Choice": "finish_reason index message logprobs",
    "ChunkChoice": "finish_reason index delta logprobs",
    "CompletionChoice": "finish_reason index text logprobs",
    "CompletionResponse": "id choices created model system_fingerprint object usage adapter_generation",
    "Delta": "content role tool_calls reasoning_content",
    "File": "id name format mime_type bytes source text data_base64 preview",
    "FileSource": "tool round turn",
    "ImageChoice": "url b64_json",
    "ImageGenerationResponse": "data created",
    "Logprobs": "content",
    "LoraAdapterError": "code",
    "LoraAdapterInfo": "alias source revision generation rank bytes",
    "LoraResidentGenerationInfo": "generation aliases rank bytes retired active_leases",
    "LoraRuntimeStatus": (
        "adapters generations resident_generations retired_generations resident_bytes max_adapters max_rank max_bytes"
    ),
    "McpServerSourcePy": "",
    "ResponseLogprob": "token logprob bytes top_logprobs",
    "ResponseMessage": "content role tool_calls reasoning_content",
    "SpeechGenerationResponse": "pcm rate channels",
    "ToolCallResponse": "index id tp function",
    "TopLogprob": "token logprob bytes",
    "Usage": (
        "completion_tokens prompt_tokens total_tokens avg_tok_per_sec avg_prompt_tok_per_sec "
        "avg_compl_tok_per_sec total_time_sec total_prompt_time_sec total_completion_time_sec"
    ),
    "WebSearchUserLocation": "",
    "Which": "",
}
"""Other class -> its attributes."""

METHODS: Final = {
    "send_chat_completion_request": "request model_id",
    "send_completion_request": "request model_id",
    "send_embedding_request": "request model_id",
    "generate_image": "prompt response_format height width model_id save_file",
    "generate_audio": "prompt model_id",
    "send_re_isq": "dtype model_id",
    "begin_calibration": "model_id",
    "calibration_status": "model_id",
    "apply_calibration": "save_cimatrix model_id",
    "tokenize_text": "text add_special_tokens enable_thinking model_id",
    "detokenize_text": "tokens skip_special_tokens model_id",
    "max_sequence_length": "model_id",
    "list_models": "",
    "get_default_model_id": "",
    "set_default_model_id": "model_id",
    "is_model_loaded": "model_id",
    "unload_model": "model_id",
    "reload_model": "model_id",
    "load_lora_adapter": "alias adapter_dir model_id load_inplace expected_generation",
    "unload_lora_adapter": "alias model_id expected_generation",
    "list_lora_adapters": "model_id",
    "lora_adapter_status": "model_id",
    "list_models_with_status": "",
    "list_unloaded_models": "",
    "get_model_status": "model_id",
    "remove_model": "model_id",
    "send_chat_completion_request_to_model": "request model_id",
    "send_completion_request_to_model": "request model_id",
    "export_session": "session_id model_id",
    "import_session": "session_id session_json model_id",
    "delete_session": "session_id model_id",
    "list_session_ids": "model_id",
    "find_file": "file_id",
}
"""Method of ``Runner`` -> the parameters it takes."""

OLDER: Final = {
    "classes": "VisionArchitecture VisionAutoMapParams",
    "which": "VisionPlain",
    "runner": "which_draft speculative_gamma",
}
"""Names of versions before 0.9 that its programs may still use."""

NEWER: Final = {
    "Runner": "memory_goal",
    "Which.GGUF": "encoder_cache_memory_bytes",
    "Which.MultimodalPlain": "encoder_cache_memory_bytes",
    "MultimodalArchitecture": "Qwen4Exp",
    "Choice": "stop_sequence",
    "ChunkChoice": "stop_sequence",
    "Usage": "prompt_tokens_details",
}
"""Class -> what 0.9.5 has beside. It has no ``pa_gpu_mem``, ``pa_gpu_mem_usage`` and ``pa_ctxt_len`` any more, and no
parameters that map a model to devices.
"""
