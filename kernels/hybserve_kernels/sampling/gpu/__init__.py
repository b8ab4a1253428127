"""Sampling in Triton: nothing of it waits for the device, and all of it may stand in a captured graph."""

from hybserve_kernels.sampling.gpu.greedy import greedy_rows
from hybserve_kernels.sampling.gpu.logprobs import logprob_rows
from hybserve_kernels.sampling.gpu.sample import sample_rows
from hybserve_kernels.sampling.gpu.table import SamplingTable
from hybserve_kernels.sampling.gpu.tokens import gather_tokens, remember

__all__ = ["SamplingTable", "gather_tokens", "greedy_rows", "logprob_rows", "remember", "sample_rows"]
