"""List edits of this project's code, for which a model has to write the whole new code."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from attrs import frozen

import paged_sdk

__all__ = ["EDITS", "Edit"]

_SOURCE: Final = Path(paged_sdk.__file__).parent


@frozen
class Edit:
    """Describes an edit of one function or class.

    :ivar path: the file, relative to the package
    :ivar name: the function or class
    :ivar instruction: the instruction for the model
    """

    path: str
    name: str
    instruction: str

    @property
    def code(self) -> str:
        """Return the current code.

        :raises LookupError: there is no function or class of that name
        """
        source = (_SOURCE / self.path).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == self.name:
                found = ast.get_source_segment(source, node)
                assert found is not None
                return found
        raise LookupError(f"{self.path} has no {self.name}")

    @property
    def question(self) -> str:
        """Return the prompt."""
        return (
            f"{self.instruction} Change nothing else. Answer with the whole new code in one block, and with nothing "
            f"but that.\n\n{self.prediction}"
        )

    @property
    def prediction(self) -> str:
        """Return the predicted answer: the old code, in a code block."""
        return f"```python\n{self.code}\n```"


def _rename(path: str, name: str, old: str, new: str) -> Edit:
    return Edit(path, name, f"Rename `{old}` to `{new}` everywhere in this code.")


EDITS: Final = (
    _rename("engine/metrics.py", "Metrics", "steps", "num_steps"),
    Edit("kv/block_pool.py", "FreeList", "Add a method `clear` that takes everything out of the list."),
    _rename("kv/block_hash.py", "block_hashes", "parts", "pieces"),
    Edit("layers/norm.py", "RMSNorm", "Add a method `__repr__` that shows `eps`."),
    _rename("layers/rotary.py", "_yarn", "config", "rope"),
    Edit("kernels/norm.py", "rms_norm", "Write a new docstring of one sentence."),
    _rename("kernels/rotary.py", "Rotation", "cosines", "cos"),
    Edit("kernels/key_offsets.py", "check_key_offsets", "Add a keyword-only parameter `strict: bool = True`."),
    _rename("kv/pool_size.py", "blocks_for", "block_size", "tokens_per_block"),
    Edit("chat/generation_config.py", "read_generation_defaults", "Write the docstring in two sentences."),
    _rename("chat/template.py", "choose_template", "name", "title"),
    Edit("cli/groups.py", "grouped", "Write the docstring in two sentences."),
    _rename("cli/loading.py", "builder_of", "paged", "pages"),
    Edit("config/paged.py", "PagedAttentionMetaBuilder", "Add a docstring to every method that has none."),
    _rename("config/checks.py", "NumberBetween", "low_open", "excludes_low"),
    Edit("engine/events.py", "RequestEvent", "Add a field `created_at: float = 0.0` at the end and document it."),
    _rename("engine/events.py", "Outbox", "listeners", "readers"),
    Edit("system/files.py", "open_file", "Replace every double-quoted error text by one that ends with a full stop."),
    _rename("kernels/fp8.py", "quantize_f8e4m3", "scale", "factor"),
    Edit("kernels/fused_moe.py", "route", "Add a comment before each statement that says what it does."),
    _rename("kernels/attention.py", "decode_attention", "query", "queries"),
    Edit("models/family.py", "find_family", "Add a parameter `default: str | None = None` and document it."),
    _rename("models/qwen3_moe.py", "_read", "fields", "given"),
    Edit(
        "build/sizing.py", "resolve_engine_config", "Write a docstring of three sentences instead of the present one."
    ),
)
"""Answers have 250 to 480 tokens, most of them unchanged from the old code."""
