"""Write checkpoints of Gemma 4 and of assistants for it, and compute the assistants' drafts by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)

from tiny import COMMON, VOCAB_SIZE, make_other_checkpoint

__all__ = ["CLUSTERS", "TARGETS", "AssistantReference", "make_assistant", "make_target"]

_LAYERS: Final[dict[str, Any]] = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 16}
TARGETS: Final[dict[str, dict[str, Any]]] = {
    "shared keys": _LAYERS
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
    },
    "values that are keys": _LAYERS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
}
"""Fields of the targets' configs, like those of E2B and of 31B."""
_OWN: Final[dict[str, Any]] = {
    **{name: value for name, value in COMMON.items() if "head" not in name and name != "vocab_size"},
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
    "tie_word_embeddings": True,
}
CLUSTERS: Final[dict[str, Any]] = {
    "use_ordered_embeddings": True,
    "num_centroids": VOCAB_SIZE // 16,
    "centroid_intermediate_top_k": 3,
}
"""Fields of the configs of assistants whose tokens are clustered, like those of E2B's."""


def make_target(kind: str, directory: Path, **config: Any) -> Path:
    """Write a checkpoint of Gemma 4 with one of :data:`TARGETS`'s configs."""
    return make_other_checkpoint("gemma4_text", directory, **(TARGETS[kind] | config))


def make_assistant(target: Path, directory: Path, **config: Any) -> Path:
    """Write a checkpoint of an assistant of random weights for a model. It has no tokenizer.

    :param config: fields of its config, such as :data:`CLUSTERS`
    """
    there = AutoConfig.from_pretrained(target).get_text_config()
    windowed, full = (
        there.per_layer_config[there.layer_types.index(f"{kind}_attention")] for kind in ("sliding", "full")
    )
    make: Any = Gemma4TextConfig  # its annotations leave out what differs from layer to layer
    text = make(
        **_OWN,
        vocab_size=there.vocab_size,
        sliding_window=there.sliding_window,
        head_dim=windowed.head_dim,
        num_key_value_heads=windowed.num_key_value_heads,
        per_layer_config={3: {"head_dim": full.head_dim, "num_key_value_heads": full.num_key_value_heads}},
    )
    read = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=there.hidden_size, **config)
    with torch.random.fork_rng(devices=[]), _sharing_all_layers():
        torch.manual_seed(2)
        model: Any = Gemma4AssistantForCausalLM(read)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(there.vocab_size))
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.data += 0.3 * torch.randn_like(tensor)
    model.save_pretrained(directory)
    return directory


@contextmanager
def _sharing_all_layers() -> Iterator[None]:
    """Let transformers 5.23 build assistants: it refuses a decoder without a layer that has keys of its own."""
    modes: Any = Gemma4TextConfig.kv_sharing_modes

    def known(config: Any) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        found: list[str | None] = modes.fget(config)
        return found

    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(known)):
        yield


class AssistantReference:
    """Drafts like an assistant, computing everything anew for each draft."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        config = self.target.config
        own = config.num_hidden_layers - config.num_kv_shared_layers
        last_of = {kind: layer for layer, kind in enumerate(config.layer_types[:own])}
        for layer in last_of.values():  # if no layer shares keys, transformers 5.23 hands out none
            self.target.model.layers[layer].self_attn.store_full_length_kv = True
        self._seen: tuple[list[int], Any] = [], None  # the last text, and what the target makes of it
        with _sharing_all_layers():
            self._assistant: Any = Gemma4AssistantForCausalLM.from_pretrained(assistant, dtype=torch.float32)

    def likeliest(self, token_ids: list[int], drafts: list[int]) -> int:
        """Return the token that the assistant finds likeliest after a text and drafts after it."""
        return int(self._output(token_ids, drafts).logits[0, -1].argmax())

    def likeliest_of_all(self, token_ids: list[int], drafts: list[int]) -> int:
        """Return the likeliest token whatever clusters score best."""
        masked, self._assistant.config.use_ordered_embeddings = self._assistant.config.use_ordered_embeddings, False
        found = self.likeliest(token_ids, drafts)
        self._assistant.config.use_ordered_embeddings = masked
        return found

    @torch.inference_mode()
    def _output(self, token_ids: list[int], drafts: list[int]) -> Any:
        if self._seen[0] != token_ids:
            made = self.target(
                torch.tensor([token_ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
            )
            self._seen = list(token_ids), made
        made = self._seen[1]
        shared = dict(made.shared_kv_states)
        # Of layers with windows, the keys that the target's own layer sees at the token before the last one.
        window = self.target.config.sliding_window
        shared["sliding_attention"] = tuple(each[:, :, -window:] for each in shared["sliding_attention"])
        state, table = made.hidden_states[-1][:, -1:], self.target.get_input_embeddings()
        for token in (token_ids[-1], *drafts):
            output = self._assistant(
                inputs_embeds=torch.cat((table(torch.tensor([[token]])), state), -1),
                position_ids=torch.tensor([[len(token_ids) - 1]]),
                shared_kv_states=shared,
            )
            state = output.last_hidden_state
        return output
