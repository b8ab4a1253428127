"""Sampling on the device: the parameters of the running sequences, and rows that want more than the plain argmax."""

import numpy as np
import torch
from hybserve_kernels.sampling import SamplingTable, sample_rows

from hybserve.core.types import TokenLogprobs
from hybserve.runner.sampler import clamped
from hybserve.runner.sequences import Sequence


class DeviceSampler:
    """The sampling table of one rank. A sequence enters it in the first step that has to know how it samples."""

    def __init__(self, max_running: int, vocab: int, device: torch.device) -> None:
        self._table = SamplingTable(max_running, vocab, device)
        self._known: dict[int, Sequence] = {}

    def sample(
        self,
        logits_RC: torch.Tensor,
        indices: list[int],
        rows: list[Sequence],
        seqs_R: torch.Tensor,
        outputs_R: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R] and whether the logits of each row are finite [R]. ``seqs_R`` and ``outputs_R``, int32 on the
        device: the sequences (``indices``) and the 0-based numbers of their outputs."""
        for seq, sequence in zip(indices, rows, strict=True):
            if self._known.get(seq) is not sequence:
                self._learn(seq, sequence)
        return sample_rows(logits_RC, seqs_R, outputs_R, self._table)

    def rehearse(self, logits_RC: torch.Tensor) -> None:
        """Go through a draw of rows that are all padding, to compile what it needs."""
        seqs_R = torch.full((len(logits_RC),), -1, dtype=torch.int32, device=logits_RC.device)
        sample_rows(logits_RC, seqs_R, seqs_R, self._table)

    def _learn(self, seq: int, sequence: Sequence) -> None:
        prompt: list[int] = []
        output: list[int] = []
        if sequence.counts is not None:
            prompt = sequence.counts.ids.tolist()
            output = np.repeat(sequence.counts.ids, sequence.counts.counts).tolist()
        self._table.set(seq, sequence.sampling, sequence.stream, prompt, output)
        self._known[seq] = sequence


def to_logprobs(scores: tuple[torch.Tensor, ...], tops: list[int]) -> list[TokenLogprobs]:
    """What ``logprob_rows`` gave, as it is reported; row r has ``tops[r]`` alternatives. Waits for the device."""
    own_R, values_RM, ids_RM = scores
    own, values, ids = clamped(own_R).tolist(), clamped(values_RM).tolist(), ids_RM.tolist()
    return [TokenLogprobs(own[row], tuple(ids[row][:top]), tuple(values[row][:top])) for row, top in enumerate(tops)]
