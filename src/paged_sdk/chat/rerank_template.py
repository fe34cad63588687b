"""Turn llama.cpp's form of a template for reranking into a chat template."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["chat_template_of"]

_ROLES: Final = ("query", "document")
_PLACEHOLDER: Final = re.compile("{(" + "|".join(_ROLES) + ")}")


def chat_template_of(rerank: str) -> str:
    """Return a Jinja template that writes messages of the roles "query" and "document".

    :param rerank: the value of ``tokenizer.chat_template.rerank`` in a GGUF file: a text with ``{query}`` and
        ``{document}`` in it, which llama.cpp replaces as they are
    """
    parts = _PLACEHOLDER.split(rerank)  # texts at even indices, names of roles between them
    return "".join(_message(part) if index % 2 else _literal(part) for index, part in enumerate(parts))


def _message(role: str) -> str:
    return f"{{% for message in messages if message.role == '{role}' %}}{{{{ message.content }}}}{{% endfor %}}"


def _literal(text: str) -> str:
    # Within an expression, since outside of one braces would be read, and line breaks after a block dropped.
    return f"{{{{ {text!a} }}}}" if text else ""
