"""Hold programs as people write them for mistral.rs, with the import changed: what each of its examples shows, in words
of our own. Names in capitals stand for models and files, which whoever runs a program gives it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EXAMPLES", "PROGRAMS"]

PROGRAMS: Final = {
    "plain": """
from paged_sdk.mistralrs import Architecture, ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MISTRAL, arch=Architecture.Mistral))
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "Why do lighthouses turn?"}],
        max_tokens=16,
        presence_penalty=1.0,
        top_p=0.1,
        temperature=0.1,
    )
)
print(answer.choices[0].message.content)
print(answer.usage)
""",
    "gguf": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.GGUF(quantized_model_id=DIRECTORY, quantized_filename=FILE))
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(model="default", messages=[{"role": "user", "content": "Hello!"}], max_tokens=16)
)
print(answer.choices[0].message.content)
""",
    "token source": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(
    which=Which.GGUF(tok_model_id=DIRECTORY, quantized_model_id=DIRECTORY, quantized_filename=FILE),
    token_source="literal:secret",
)
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(model="default", messages=[{"role": "user", "content": "Hello!"}], max_tokens=16)
)
print(answer.choices[0].message.content)
""",
    "quantized while loading": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL), in_situ_quant="Q4K")
request = ChatCompletionRequest(model="default", messages="Name a river.", max_tokens=16, temperature=0.1)
print(runner.send_chat_completion_request(request).choices[0].message.content)
runner.send_re_isq("Q8_0")
print(runner.send_chat_completion_request(request).choices[0].message.content)
""",
    "experts quantized": """
from paged_sdk.mistralrs import Architecture, ChatCompletionRequest, IsqOrganization, Runner, Which

runner = Runner(
    which=Which.Plain(model_id=MIXTURE, arch=Architecture.Mixtral, organization=IsqOrganization.MoQE),
    in_situ_quant="Q4K",
)
request = ChatCompletionRequest(model="default", messages="Name a river.", max_tokens=16, temperature=0.1)
print(runner.send_chat_completion_request(request).choices[0].message.content)
""",
    "topology": """
from paged_sdk.mistralrs import Architecture, ChatCompletionRequest, Runner, Which

runner = Runner(
    which=Which.Plain(model_id=MISTRAL, arch=Architecture.Mistral, topology=TOPOLOGY),
    in_situ_quant="Q4K",
)
request = ChatCompletionRequest(model="default", messages="Name a river.", max_tokens=16)
print(runner.send_chat_completion_request(request).choices[0].message.content)
""",
    "calibrated": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL, calibration_file=CALIBRATION), in_situ_quant="Q4K")
request = ChatCompletionRequest(model="default", messages="Name a river.", max_tokens=16)
print(runner.send_chat_completion_request(request).choices[0].message.content)
""",
    "paged attention": """
from paged_sdk.mistralrs import ChatCompletionRequest, PagedCacheType, Runner, Which

runner = Runner(
    which=Which.Plain(model_id=MODEL), pa_gpu_mem=64, pa_blk_size=32, pa_cache_type=PagedCacheType.Auto
)
request = ChatCompletionRequest(model="default", messages="Name a river.", max_tokens=16)
print(runner.send_chat_completion_request(request).choices[0].message.content)
""",
    "streamed": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(
    which=Which.GGUF(tok_model_id=DIRECTORY, quantized_model_id=DIRECTORY, quantized_filename=FILE)
)
pieces = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "Tell me of the sea."}],
        max_tokens=16,
        temperature=0.1,
        stream=True,
    )
)
for piece in pieces:
    print(piece.choices[0].delta.content, end="", flush=True)
print()
""",
    "regex": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL))
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "When did Rome fall?"}],
        max_tokens=30,
        temperature=0.1,
        grammar_type="regex",
        grammar="in [0-9]{3}",
    )
)
text = answer.choices[0].message.content
assert text.startswith("in ") and int(text[3:]) < 1000
print(text)
""",
    "lark": '''
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL), seed=1)
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "Are dogs mammals?"}],
        max_tokens=1000,
        temperature=1.0,
        grammar_type="lark",
        grammar="""
start: "So: " verdict
verdict: %json {
    "type": "object", "properties": {"it": {"enum": ["yes", "no"]}}, "required": ["it"], "additionalProperties": false
}
""",
    )
)
print(answer.choices[0].message.content)
assert answer.choices[0].message.content.startswith("So: {")
''',
    "JSON schema": """
import json

from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

schema = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 4},
        "state": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "zip": {"type": "integer", "minimum": 10000, "maximum": 99999},
    },
    "required": ["street", "state", "zip"],
    "additionalProperties": False,
}
runner = Runner(which=Which.Plain(model_id=MODEL), seed=1)
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "Make an address up."}],
        max_tokens=1000,
        temperature=1.0,
        grammar_type="json_schema",
        grammar=json.dumps(schema),
    )
)
address = json.loads(answer.choices[0].message.content)
assert 10000 <= address["zip"] <= 99999
print(address)
""",
    "schema of a class": """
import json
from typing import Literal

import pydantic

from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which


class Ship(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cutter", "sloop"]
    masts: Literal[1, 2]


class Fleet(pydantic.BaseModel, extra="forbid"):
    ships: list[Ship] = pydantic.Field(min_length=1, max_length=2)


runner = Runner(which=Which.Plain(model_id=MODEL), seed=1)
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "Describe a fleet."}],
        max_tokens=1000,
        temperature=1.0,
        grammar_type="json_schema",
        grammar=json.dumps(Fleet.model_json_schema()),
    )
)
print(Fleet.model_validate_json(answer.choices[0].message.content))
""",
    "llguidance": """
import json

from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

grammars = [
    {"lark_grammar": 'start: "So: " @verdict'},
    {"name": "verdict", "json_schema": {"enum": ["yes", "no"]}},
]
runner = Runner(which=Which.Plain(model_id=MODEL))
answer = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": "Are dogs mammals?"}],
        max_tokens=30,
        grammar_type="llguidance",
        grammar=json.dumps({"grammars": grammars}),
    )
)
assert answer.choices[0].message.content in ('So: "yes"', 'So: "no"')
print(answer.choices[0].message.content)
""",
    "a call that the program does": """
import json

from paged_sdk.mistralrs import ChatCompletionRequest, Runner, ToolChoice, Which

tools = [
    json.dumps(
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tell the weather of a city.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
                "strict": True,
            },
        }
    )
]
messages = [{"role": "user", "content": "Is it warm in Paris?"}]
runner = Runner(which=Which.Plain(model_id=THAT_CALLS))


def ask():
    request = ChatCompletionRequest(
        model="default", messages=messages, max_tokens=256, tool_schemas=tools, tool_choice=ToolChoice.Auto
    )
    return runner.send_chat_completion_request(request).choices[0].message


call = ask().tool_calls[0].function
arguments = json.loads(call.arguments)
assert (call.name, arguments) == ("weather", {"city": "Paris"})
messages.append({"role": "assistant", "content": json.dumps({"name": call.name, "parameters": arguments})})
messages.append({"role": "tool", "content": "20 degrees"})
print(ask().content)
""",
    "calls that callbacks do": """
import json

from paged_sdk.mistralrs import ChatCompletionRequest, Runner, ToolChoice, Which


def weather(name: str, arguments: dict) -> str:
    return json.dumps({"city": arguments["city"], "degrees": 20})


schema = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
runner = Runner(which=Which.Plain(model_id=THAT_CALLS), tool_callbacks={"weather": weather})
for stream in (False, True):
    answer = runner.send_chat_completion_request(
        ChatCompletionRequest(
            model="default",
            messages=[{"role": "user", "content": "Is it warm in Paris?"}],
            max_tokens=64,
            tool_schemas=[json.dumps(schema)],
            tool_choice=ToolChoice.Auto,
            max_tool_rounds=3,
            stream=stream,
        )
    )
    if stream:
        print("".join(piece.choices[0].delta.content for piece in answer))
    else:
        print(answer.choices[0].message.content, answer.agentic_tool_calls)
""",
    "thoughts": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL), in_situ_quant="Q4K")
messages = []
for question, effort in (("How many rs has strawberry?", "high"), ("And blueberry?", "off")):
    messages.append({"role": "user", "content": question})
    answer = runner.send_chat_completion_request(
        ChatCompletionRequest(
            model="default", messages=messages, max_tokens=16, frequency_penalty=1.0, reasoning_effort=effort
        )
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    print(answer.choices[0].message.content)
""",
    "adapters": """
from paged_sdk.mistralrs import ChatCompletionRequest, LoraAdapterError, Runner, Which

runner = Runner(which=Which.Lora(model_id=MODEL))


def say(adapter=None):
    return runner.send_chat_completion_request(
        ChatCompletionRequest(messages="Hello!", model="default", max_tokens=16, temperature=0.0, adapter=adapter)
    )


first = runner.load_lora_adapter("production", ADAPTER)
status = runner.lora_adapter_status()
assert [each.generation for each in status.adapters] == [first.generation]
assert status.resident_bytes > 0
assert say().adapter_generation is None
assert say("production").adapter_generation == first.generation == say(first.exact()).adapter_generation
second = runner.load_lora_adapter(
    "production", REPLACEMENT, load_inplace=True, expected_generation=first.generation
)
assert say("production").adapter_generation == second.generation != first.generation
try:
    runner.load_lora_adapter("production", ADAPTER, load_inplace=True, expected_generation=first.generation)
except LoraAdapterError as error:
    print(error.code)
assert runner.unload_lora_adapter("production", expected_generation=second.generation).generation == second.generation
assert runner.list_lora_adapters() == []
""",
    "vectors": """
from paged_sdk.mistralrs import EmbeddingArchitecture, EmbeddingRequest, Runner, Which

for model, arch in (
    (THAT_EMBEDS, EmbeddingArchitecture.Qwen3Embedding),
    (GEMMA_THAT_EMBEDS, EmbeddingArchitecture.EmbeddingGemma),
):
    runner = Runner(which=Which.Embedding(model_id=model, arch=arch))
    vectors = runner.send_embedding_request(
        EmbeddingRequest(input=["How does graphene conduct?", "Superconductors"], truncate_sequence=True)
    )
    for vector in vectors:
        print(len(vector), "numbers")
    runner.close()
""",
    "images": """
import base64

from paged_sdk.mistralrs import ChatCompletionRequest, MultimodalArchitecture, Runner, Which

runner = Runner(which=Which.MultimodalPlain(model_id=THAT_SEES, arch=MultimodalArchitecture.LLaVA))
with open(PICTURE, "rb") as file:
    encoded = base64.b64encode(file.read()).decode()
answers = set()
for url in (PICTURE, f"data:image/png;base64,{encoded}"):
    answer = runner.send_chat_completion_request(
        ChatCompletionRequest(
            model="default",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "What is this?"},
                    ],
                }
            ],
            max_tokens=16,
            temperature=0.0,
        )
    )
    answers.add(answer.choices[0].message.content)
print(*answers)
assert len(answers) == 1
""",
    "models": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL), in_situ_quant="Q4K")
model = runner.get_default_model_id()
assert runner.list_models() == [model]
request = ChatCompletionRequest(messages="Hello!", model="default", max_tokens=8)
print(runner.send_chat_completion_request(request=request, model_id=model).choices[0].message.content)
print(runner.list_models_with_status())
runner.unload_model(model)
assert not runner.is_model_loaded(model)
runner.reload_model(model)
assert runner.get_model_status(model) == "loaded"
try:
    runner.remove_model(model)
except ValueError as error:
    print(error)
""",
    "plain text": """
from paged_sdk.mistralrs import CompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL), seed=1)
answer = runner.send_completion_request(
    CompletionRequest(prompt="Once upon a time", model="default", max_tokens=16, echo_prompt=True, top_k=5)
)
assert answer.choices[0].text.startswith("Once upon a time")
print(answer.choices[0].text)
tokens = runner.tokenize_text("Once upon a time", False, None)
assert runner.detokenize_text(tokens, True) == "Once upon a time"
""",
    "guesses of a smaller model": """
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

runner = Runner(which=Which.Plain(model_id=MODEL), which_draft=Which.Plain(model_id=MODEL), speculative_gamma=4)
request = ChatCompletionRequest(messages="Hello!", model="default", max_tokens=24)
print(runner.send_chat_completion_request(request).choices[0].message.content)
""",
}
"""What a program shows -> its text."""

EXAMPLES: Final = {
    "agentic_tools": "calls that callbacks do",
    "anymoe": None,
    "anymoe_inference": None,
    "anymoe_lora": None,
    "code_execution": None,
    "code_execution_approval": None,
    "custom_search": None,
    "custom_tool_call": "calls that callbacks do",
    "deepseekr1": "plain",
    "deepseekv2": "plain",
    "dia": None,
    "diffusion_gemma": None,
    "embedding_gemma": "vectors",
    "file_inputs": None,
    "flux": None,
    "gemma3": "images",
    "gemma3n": "images",
    "gemma4": "images",
    "gguf": "gguf",
    "glm4_moe_lite": "plain",
    "gpt_oss": "plain",
    "granite": "plain",
    "idefics2": "images",
    "idefics3": "images",
    "imatrix": "calibrated",
    "isq": "quantized while loading",
    "json_schema": "JSON schema",
    "lark": "lark",
    "lark_llg": "lark",
    "lfm2": "plain",
    "lfm2_moe": "plain",
    "lfm2_vl": "images",
    "llama4": "images",
    "llama_vision": "images",
    "llava_next": "images",
    "llguidance": "llguidance",
    "lora": "adapters",
    "mcp_client": None,
    "minicpmo_2_6": None,
    "mistral3": "images",
    "mixture_of_quant_experts": "experts quantized",
    "multi_model_example": "models",
    "multimodal_auto_device_map": None,
    "online_calibration": None,
    "paged_attention": "paged attention",
    "phi3v": "images",
    "phi3v_base64": "images",
    "phi3v_local_img": "images",
    "phi4mm": None,
    "phi4mm_audio": None,
    "plain": "plain",
    "pydantic_schema": "schema of a class",
    "qwen2vl": "images",
    "qwen3": "thoughts",
    "qwen3_5": "images",
    "qwen3_embedding": "vectors",
    "qwen3_next": "plain",
    "qwen3_vl": "images",
    "regex": "regex",
    "shell": None,
    "shell_skills": None,
    "smollm3": "plain",
    "smolvlm": "images",
    "streaming": "streamed",
    "test_multi_model": "models",
    "text_auto_device_map": None,
    "token_source": "token source",
    "tool_call": "a call that the program does",
    "topology": "topology",
    "web_search": None,
    "xlora_gemma": None,
    "xlora_zephyr": None,
}
"""Example of mistral.rs's, by its file -> the program that shows the same, of whatever family its model is. None: the
engine has not what it shows.
"""
