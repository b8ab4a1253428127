"""The rotary turn of a step's positions: computed once per forward, applied by every attention layer."""

import torch
from hybserve_kernels.rotary import RotaryTables, inverse_frequencies, rotary_tables

from hybserve.layers.step_context import StepContext
from hybserve.spec.model_spec import AttentionSpec


class Rotary:
    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(spec.rotary_dim, spec.rope_theta, device)

    def __call__(self, context: StepContext) -> RotaryTables:
        return rotary_tables(context.positions_T, self.frequencies)
