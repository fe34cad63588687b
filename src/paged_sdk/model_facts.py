"""Says what a loaded model is and can do."""

from __future__ import annotations

from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.model_insides import ModelInsides
from paged_sdk.system.owner import OfOneProcess
from paged_sdk.types.adapter import AdapterInfo

__all__ = ["ModelFacts"]


class ModelFacts(OfOneProcess):
    """Says what a loaded model is and can do: the properties of a :class:`~paged_sdk.Model`."""

    _insides: ModelInsides

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        """Return the model's name, as in responses."""
        return self._insides.name

    @property
    def model_type(self) -> str:
        """Return the checkpoint's family, in the words of Hugging Face's ``model_type``. With an image encoder it
        differs from :attr:`architecture`: "llava", "gemma3".
        """
        return self._insides.model_type

    @property
    def architecture(self) -> str:
        """Return the decoder's family, in the words of Hugging Face's ``model_type``: "llama", "qwen2", "gemma3_text"
        ...
        """
        return self._insides.architecture

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Return the defaults of the checkpoint's generation_config.json, which sampled requests use for unset
        parameters.
        """
        return self._insides.preparer.text.defaults

    @property
    def config(self) -> EngineConfig:
        """Return the engine's settings, defaults filled in."""
        return self._insides.preparer.config

    @property
    def max_sequence_length(self) -> int:
        """Return the maximum number of tokens in a sequence, prompt and output together."""
        return self._insides.preparer.config.max_model_len

    @property
    def takes_images(self) -> bool:
        """Tell whether messages may contain images."""
        return self._insides.preparer.images is not None

    @property
    def generates_text(self) -> bool:
        """Tell whether it generates text. Embedding models and rerankers do not."""
        return self._insides.preparer.why_no_text is None

    @property
    def ranks_texts(self) -> bool:
        """Tell whether it is a reranker: see :meth:`rank`."""
        ranking = self._insides.recipe.ranking
        return ranking is not None and ranking.why_not is None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return self._insides.adapters.names

    @property
    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """Return the loaded adapters' names, content digests, ranks and sizes."""
        return self._insides.adapters.infos
