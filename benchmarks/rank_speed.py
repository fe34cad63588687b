"""Measure how many documents a decoder ranks per second, with and without the blocks that they share.

python -m benchmarks.rank_speed --query-tokens 60

All documents of a call begin with the same prompt and query, whose blocks the prefix cache computes once. The query is
another one in each round.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.prompts import PromptMaker, tokenizer_of
from paged_sdk import BlockingModel, GgufModelBuilder
from paged_sdk.system.processors import usable_processors
from paged_sdk.weights.embedded import embedded_model_path

__all__: list[str] = []

_TEMPLATE: Final = """<|im_start|>user
Does the document answer the query? Say 1 if it does, else 0.
Query: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
Document: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
"""


def main(
    model: Annotated[Path | None, typer.Option(help="a GGUF file; default: the embedded SmolLM2")] = None,
    query_tokens: Annotated[int, typer.Option(min=1)] = 30,
    document_tokens: Annotated[int, typer.Option(min=1)] = 150,
    documents: Annotated[int, typer.Option(min=1)] = 50,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Rank the same documents by both, in turns."""
    path = model or embedded_model_path()
    num_threads = threads or usable_processors()
    maker = PromptMaker(tokenizer_of(path))
    texts = [maker.make(document_tokens, f"document {index}").text for index in range(documents)]
    plain = GgufModelBuilder(path.parent, [path.name]).with_force_cpu().with_num_threads(num_threads)
    plain = plain.with_chat_template(_TEMPLATE).with_ranking_tokens("1", "0")
    builders = {"shared blocks": plain, "no prefix cache": plain.with_prefix_cache_n(None)}
    seconds: dict[str, list[float]] = {name: [] for name in builders}
    computed = dict.fromkeys(builders, 0)
    with ExitStack() as in_use:
        models = {name: in_use.enter_context(BlockingModel(each.build())) for name, each in builders.items()}
        for index in track(range(-1, rounds), "Rounds"):
            query = maker.make(query_tokens, f"query {index}").text
            for name, each in models.items():
                each.reset_prefix_cache()  # of the documents, which are the same in all rounds
                begin = time.perf_counter()
                usage = each.rank(query, texts).usage
                if index >= 0:  # the round before warms up
                    seconds[name].append(time.perf_counter() - begin)
                    computed[name] = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    title = f"{path.name}: {documents} documents of {document_tokens} tokens, a query of {query_tokens}"
    table = Table("", "documents per second", "computed tokens", title=f"{title}, {num_threads} threads")
    for name, taken in seconds.items():
        table.add_row(name, f"{documents / statistics.median(taken):.1f}", f"{computed[name]:,}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
