"""Make a model whose engine runs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import evolve, frozen

from paged_sdk.calls.preparation import RequestPreparer
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.engine import EngineConfig
from paged_sdk.model import Model
from paged_sdk.model_insides import ModelInsides
from paged_sdk.remote.adapters import RemoteAdapters
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.host import adapters_of
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.packing import pack, pack_preparer, unpack, unpack_preparer
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.stats import ModelStats

__all__ = ["Face", "RemoteModel", "pack_face", "traits_of", "unpack_face"]

PROBE: Final = "The 3 quick brown foxes, naïve as ever:\n\tdef jump(over=['lazy', 'dogs']): ...  # 日本語"


@frozen(kw_only=True)
class Face:
    """Holds the data of a model that is needed where requests are made: all but the engine.

    :ivar config: the engine's settings; ``max_sequence_tokens`` follows from them
    :ivar adapters: the current adapters, by name
    :ivar stats: the engine's current statistics
    :ivar traits: see :func:`traits_of`
    """

    name: str
    model_type: str
    architecture: str
    recipe: EmbeddingRecipe
    hidden_size: int
    config: EngineConfig
    max_sequence_tokens: int
    adapters: Mapping[str, AdapterUse]
    stats: ModelStats
    traits: Mapping[str, object]


def traits_of(insides: ModelInsides) -> Mapping[str, object]:
    """Return the properties by which to compare models: if they are equal, a request prepared for one model suits the
    other."""
    preparer = insides.preparer
    return {
        "architecture": insides.architecture,
        "vocabulary size": preparer.vocab_size,
        "hidden size": insides.hidden_size,
        "tokens of a text": tuple(preparer.text.tokenizer.encode(PROBE, add_special_tokens=False)),
        "max_model_len": preparer.config.max_model_len,
        "block size": preparer.config.block_size,
        "images": preparer.images is not None,
    }


def pack_face(insides: ModelInsides, *, with_preparer: bool = True) -> Parcel:
    """Serialize a model's face as a parcel.

    :param with_preparer: whether to include what prepares requests; not needed if the receiver has an equal model
    """
    face = Face(
        name=insides.name,
        model_type=insides.model_type,
        architecture=insides.architecture,
        recipe=insides.recipe,
        hidden_size=insides.hidden_size,
        config=insides.preparer.config,
        max_sequence_tokens=insides.preparer.max_sequence_tokens,
        adapters=adapters_of(insides),
        stats=insides.worker.stats,
        traits=traits_of(insides),
    )
    return [*pack(face), *(pack_preparer(insides.preparer) if with_preparer else ())]


def unpack_face(parcel: Parcel) -> tuple[Face, RequestPreparer | None]:
    """Deserialize a model's face, and what prepares its requests if it was sent. That compiles no constraints: they are
    compiled where the engine runs."""
    face: Face = unpack(parcel)
    return face, evolve(unpack_preparer(parcel[1:]), compiles=False) if parcel[1:] else None


class RemoteModel(Model):
    """Serves a model whose engine runs elsewhere: this process has its tokenizer and chat template, but no weights.

    :param preparer: prepares requests for this model or an equal one
    :param is_near: whether the engine runs on this machine
    :ivar traits: see :func:`traits_of`
    """

    def __init__(self, face: Face, preparer: RequestPreparer, engine: RemoteEngine, *, is_near: bool = False) -> None:
        self.traits: Mapping[str, object] = face.traits
        self._set_up(
            ModelInsides(
                name=face.name,
                model_type=face.model_type,
                architecture=face.architecture,
                preparer=evolve(preparer, config=face.config, max_sequence_tokens=face.max_sequence_tokens),
                worker=engine,
                adapters=RemoteAdapters(engine, is_near),
                recipe=face.recipe,
                hidden_size=face.hidden_size,
                check_isq=None,  # checked where the engine runs
            )
        )
