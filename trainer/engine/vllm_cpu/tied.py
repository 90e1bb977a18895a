"""An output layer that is tied to the embedding, on the CPU, that takes new weights.

vLLM packs such a layer's weight for the CPU's kernel a second time behind the first load. New weights arrive under the embedding's name and
are packed there only, so the layer would go on computing with the old ones.
"""

from __future__ import annotations

from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found]
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)


class TiedHead(ParallelLMHead):
    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> VocabParallelEmbedding:
        """The layer that the model takes for its output: the embedding itself, whose packed weight is always the present one."""
        if isinstance(embed_tokens.quant_method, UnquantizedEmbeddingMethod):
            return embed_tokens
        return super().tie_weights(embed_tokens)


def register() -> None:
    """vLLM makes a `TiedHead` wherever it makes a `ParallelLMHead`."""
    ParallelLMHead.register_oot(TiedHead)
