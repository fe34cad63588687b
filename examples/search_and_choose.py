"""Find the text that is nearest to a question by their vectors, and choose the likeliest of several answers.

python examples/search_and_choose.py [MODEL]

A model that was made for vectors, such as Qwen/Qwen3-Embedding-0.6B, finds better; one that generates text chooses.
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import TextModelBuilder, embedded_model_path

NOTES = (
    "The kettle boils water for tea in three minutes.",
    "Trains to the coast leave every hour from platform two.",
    "The library lends books for four weeks.",
)
QUESTION = "When can I travel to the sea by rail?"
ANSWERS = (" Paris.", " Rome.", " Berlin.")


async def main(model_path: str | None = None) -> None:
    async with TextModelBuilder(model_path or embedded_model_path()).build() as model:
        # One call for all: the texts share batches. The last token of a decoder that was not made for vectors says
        # mostly what comes next, so the mean of all tokens is taken.
        response = await model.embed([QUESTION, *NOTES], pooling="mean")
        question, *notes = response.embeddings
        nearness = [float(note @ question) for note in notes]
        print(f"{NOTES[nearness.index(max(nearness))]!r} is nearest to {QUESTION!r}")

        scores = (await model.score(ANSWERS, prefix="The capital of France is")).scores
        for answer, score in sorted(zip(ANSWERS, scores, strict=True), key=lambda each: -each[1].logprob):
            print(f"{answer!r}: log-probability {score.logprob:.2f}" + (", greedy" if score.is_greedy else ""))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
