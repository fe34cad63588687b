"""The same model without async: calls that wait, from one thread or from many.

python examples/blocking.py [MODEL]
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from paged_sdk import (
    BlockingModel,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
    embedded_model_path,
)


def question(text: str) -> RequestBuilder:
    return (
        RequestBuilder()
        .add_message(TextMessageRole.USER, text)
        .with_sampling(SamplingParams(temperature=0.0, max_len=32))
    )


def main(model_path: str | None = None) -> None:
    with BlockingModel(TextModelBuilder(model_path or embedded_model_path()).build()) as model:
        response = model.send_chat_request(question("Name the capital of France."))
        print(response.choices[0].message.content)

        with model.stream_chat_request(question("Name four colours.")) as stream:
            for chunk in stream:
                print("".join(choice.delta.content for choice in chunk.choices), end="", flush=True)
        print()

        # Threads share the model; their requests are batched.
        questions = [question(f"What is {n} plus {n}?") for n in range(1, 5)]
        with ThreadPoolExecutor() as threads:
            for response in threads.map(model.send_chat_request, questions):
                print(response.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
