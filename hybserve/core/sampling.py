"""What the sampler must know of a request: one struct, the same on the wire and on the device side."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """Sampling of one request. Validated at the edge (api), so everything here is in range.

    temperature 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. ``seed`` is always concrete: the text role draws one
    when the client gave none. The token drawn is a function of (seed, choice, output position) and the logits only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    #: Until this many tokens exist, ``stop_ids`` are masked out of the logits.
    min_tokens: int = 0
    #: End-of-sequence and client stop token ids; empty when the client sent ``ignore_eos`` and no stop ids.
    stop_ids: tuple[int, ...] = ()
    #: Number of top alternatives wanted beside the sampled token; -1 = no logprobs at all.
    logprobs: int = -1
    #: Number of top alternatives wanted for every prompt token; -1 = none. Computes the whole prompt.
    prompt_logprobs: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the runner must know the tokens before: penalties count them, prompt log-probabilities score them
        (the last token of a chunk is scored against a token of the next one)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.prompt_logprobs >= 0
        )
