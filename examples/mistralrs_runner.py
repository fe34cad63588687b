"""A Python program for mistral.rs, with the import and the model's path changed: FP8 KV cache, whole and streamed.

python examples/mistralrs_runner.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from paged_sdk import embedded_model_path
from paged_sdk.mistralrs import ChatCompletionRequest, ChatCompletionResponse, PagedCacheType, Runner, Which


def which(model_path: str | None) -> Which:
    path = Path(model_path or embedded_model_path())
    if path.is_file():
        return Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    return Which.Plain(model_id=str(path))


def main(model_path: str | None = None) -> None:
    runner = Runner(
        which=which(model_path),
        pa_gpu_mem=256,
        pa_blk_size=32,
        pa_cache_type=PagedCacheType.F8E4M3,
    )

    res = runner.send_chat_completion_request(
        ChatCompletionRequest(
            model="default",
            messages=[{"role": "user", "content": "Tell me a story about the Rust type system."}],
            max_tokens=64,
            presence_penalty=1.0,
            top_p=0.1,
            temperature=0.1,
        )
    )
    assert isinstance(res, ChatCompletionResponse)  # for type checkers: with stream=True it is an iterator
    print(res.choices[0].message.content)
    print(res.usage)

    stream = runner.send_chat_completion_request(
        ChatCompletionRequest(
            model="default",
            messages=[{"role": "user", "content": "And one about its borrow checker."}],
            max_tokens=64,
            stream=True,
        )
    )
    assert not isinstance(stream, ChatCompletionResponse)
    for chunk in stream:
        print(chunk.choices[0].delta.content, end="", flush=True)
    print()
    runner.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
