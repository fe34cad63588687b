"""A type for each quarter of the layers: coarse weights where they matter least, fine ones at the end.

python examples/topology.py [MODEL LAYERS]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import (
    IsqType,
    LayerTopology,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
    Topology,
    embedded_model_path,
)

TYPES = (IsqType.Q3K, IsqType.Q4K, IsqType.Q6K, IsqType.Q8_0)


def by_quarters(num_layers: int) -> Topology:
    """Return what each quarter of the layers is quantized to; of 32 these are 0-8, 8-16, 16-24 and 24-32."""
    topology = Topology.empty()
    for quarter, isq in enumerate(TYPES):
        layers = range(num_layers * quarter // len(TYPES), num_layers * (quarter + 1) // len(TYPES))
        if layers:
            topology = topology.with_range(layers, LayerTopology(isq=isq))
    return topology


async def main(model_path: str | None = None, num_layers: int = 30) -> None:
    topology = by_quarters(num_layers)  # the embedded model has 30
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, "Name three rivers.")
        .with_sampling(SamplingParams(temperature=0.0, max_len=32))
    )
    builder = TextModelBuilder(model_path or embedded_model_path()).with_topology(topology)
    async with builder.build() as model:
        response = await model.send_chat_request(request)
    print(response.choices[0].message.content)
    for selector in topology.selectors:
        print(f"layers {selector}: {selector.layer.isq}")


if __name__ == "__main__":
    model, layers = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else (None, 30)
    anyio.run(main, model, layers)
