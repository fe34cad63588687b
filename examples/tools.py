"""Functions that a model may call, and that are run until it answers.

python examples/tools.py [MODEL]

The embedded model was not trained for tools: it gets a chat template that knows them, and its first answer has to be a
call. For a model that was, such as Qwen3-4B, leave out both: its own template knows tools, and it calls them by itself.
"""

from __future__ import annotations

import sys
from typing import Literal

import anyio

from paged_sdk import RequestBuilder, SamplingParams, TextMessageRole, TextModelBuilder, embedded_model_path

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nAnswer by calling a function:\\n' }}
{%- for tool in tools %}{{ tool.function | tojson + '\\n' }}{% endfor %}
{{- '<tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


async def get_temperature(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> float:
    """Tell the current temperature.

    :param city: the city, with its country
    """
    return 20.0 if unit == "celsius" else 68.0


async def main(model_path: str | None = None) -> None:
    builder = TextModelBuilder(model_path or embedded_model_path()).with_chat_template(TEMPLATE)
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, "How warm is it in Paris?")
        .with_sampling(SamplingParams(temperature=0.0, max_len=96))
        .with_tools([get_temperature], "get_temperature")
    )
    async with builder.build() as model:
        run = await model.send_chat_with_tools(request, max_rounds=3)
        for message in run.messages:
            calls = "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
            print(f"{message.role.value}: {message.content}{calls}")
        print(f"{len(run.responses)} answers of the model")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
