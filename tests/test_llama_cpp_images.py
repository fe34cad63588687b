"""llama.cpp sees in images what this package sees, by the same two files (model and mmproj)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import PIL.Image
import pytest

from llamacpp import LlamaCpp
from paged_sdk import GgufModelBuilder, RequestBuilder, SamplingParams, VisionMessages, write_gguf, write_mmproj
from tiny_vision import VISION_FAMILIES, make_vision_checkpoint, picture

pytest.importorskip("xllamacpp", reason="it has wheels for Linux on x86-64 alone")
pytestmark = pytest.mark.anyio

NUM_TOKENS: Final = 12
#: By how much logprobs may differ: llama.cpp looks GELU up in a table of float16. It was 0.015 at most.
CLOSE: Final = 0.04
# Images of such sizes are not scaled, which llama.cpp does by filters of its own. Of LLaVA and InternVL it has the
# token for the whole image at another place than these models, and Idefics wants two line breaks that are one token.
SIZES: Final = {
    "gemma3": 28,
    "mistral3": 56,
    "qwen2_vl": 84,
    "qwen2_5_vl": 154,
    "qwen3_vl": 84,
    "qwen3_vl_moe": 84,
    "qwen3_5": 84,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("name", SIZES)
async def test_it_sees_the_same(name: str, tmp_path: Path) -> None:
    family = VISION_FAMILIES[name].config
    sections: dict[str, Any] = {
        # With as few layers as get vectors of images it fails; qwen3_5's says of each layer what it is.
        "text_config": dict(family["text_config"]) | ({} if name == "qwen3_5" else {"num_hidden_layers": 4}),
        "vision_config": dict(family["vision_config"]) | ({"window_size": 112} if name == "qwen2_5_vl" else {}),
    }
    if name == "qwen3_vl_moe":  # all layers have experts
        sections["text_config"]["mlp_only_layers"] = []
    make_vision_checkpoint(name, tmp_path / "checkpoint", **sections)
    model = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", type="F32")
    mmproj = write_mmproj(tmp_path / "checkpoint", tmp_path / "mmproj.gguf", type="F32")
    pixels, file = picture(SIZES[name], SIZES[name]), io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")

    around = "\n\n" if name == "gemma3" else ""
    before, after = f"<|im_start|>user\n{around}", f"{around}What is this?<|im_end|>\n<|im_start|>assistant\n"
    num_tokens, theirs = LlamaCpp(model, mmproj).look(before, file.getvalue(), after, NUM_TOKENS)

    messages = VisionMessages().add_image_message("user", "What is this?", pixels)
    sampling = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True, top_n_logprobs=8)
    async with GgufModelBuilder(model).with_mmproj(mmproj).with_dtype("float32").with_force_cpu().build() as ours:
        response = await ours.send_chat_request(RequestBuilder.from_messages(messages).with_sampling(sampling))
    assert response.usage.prompt_tokens == num_tokens
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    for place, (own, other) in enumerate(zip(logprobs.content, theirs.tokens, strict=True)):
        likely = {each.token_id: each.logprob for each in own.top_logprobs}
        if place == 0:
            assert len(likely.keys() & theirs.logprobs) > 4
            assert all(abs(likely[id] - theirs.logprobs[id]) < CLOSE for id in likely.keys() & theirs.logprobs)
        if own.token_id != other:  # one that it finds as likely
            assert own.logprob - likely[other] < CLOSE
            break
