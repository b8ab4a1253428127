"""The bytes of a rank: one buffer of KV pages and one of state slots, and the typed views the kernels read.

Legend: P pages, J kv heads, G tokens per page, d head dim, S slots, U value heads, K key dim, V value dim,
W conv width.

Both buffers are id-major (plan/layout.py): a page, and a slot, is one contiguous run of bytes, so copies move runs and
know no layers. Page 0 and slot 0 are padding and hold the canary: bytes of all ones, which every float type reads as
NaN. Whoever writes there changes the canary, whoever reads there and does not mask spreads NaN.
"""

from collections.abc import Iterable

import torch

from hybserve.plan.layout import page_layout, slot_layout
from hybserve.plan.result import EngineLimits
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare

CANARY = 0xFF


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class DevicePools:
    """Allocates what the plan says and nothing else. ``poisoned``: every byte starts as the canary (tests)."""

    def __init__(
        self,
        spec: ModelSpec,
        share: RankShare,
        limits: EngineLimits,
        device: str = "cpu",
        poisoned: bool = False,
    ) -> None:
        self.page_layout = page_layout(spec, share, limits.page_size, limits.kv_dtype)
        self.slot_layout = slot_layout(spec, share, limits.state_dtype, limits.conv_dtype)
        self.pages = _runs(limits.kv_pages, self.page_layout.page_bytes, device)
        self.slots = _runs(limits.state_slots, self.slot_layout.slot_bytes, device)
        for runs in (self.pages, self.slots):
            (runs if poisoned else runs[:1]).fill_(CANARY)
        self.kv_layers = self._kv_views()
        self.matrices, self.windows = self._state_views()

    def _kv_views(self) -> list[torch.Tensor]:
        """Per attention layer [P, 2, J, G, d]."""
        layout = self.page_layout
        if layout.layers == 0:
            return []
        typed = self.pages.view(-1).view(torch_dtype(layout.dtype))
        unit = typed.element_size()
        heads, tokens, dim = layout.kv_heads, layout.page_size, layout.head_dim
        size = (self.pages.shape[0], 2, heads, tokens, dim)
        stride = (layout.page_bytes // unit, heads * tokens * dim, tokens * dim, dim, 1)
        return [typed.as_strided(size, stride, layer * layout.layer_bytes // unit) for layer in range(layout.layers)]

    def _state_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per recurrent layer [S, U, K, V] and [S, channels, W - 1]."""
        layout = self.slot_layout
        if layout.layers == 0:
            return [], []
        matrix = self.slots.view(-1).view(torch_dtype(layout.state_dtype))
        window = self.slots.view(-1).view(torch_dtype(layout.conv_dtype))
        unit, window_unit = matrix.element_size(), window.element_size()
        count, cell = self.slots.shape[0], layout.key_dim * layout.value_dim
        matrices = [
            matrix.as_strided(
                (count, layout.value_heads, layout.key_dim, layout.value_dim),
                (layout.slot_bytes // unit, cell, layout.value_dim, 1),
                layer * layout.layer_bytes // unit,
            )
            for layer in range(layout.layers)
        ]
        windows = [
            window.as_strided(
                (count, layout.channels, layout.window),
                (layout.slot_bytes // window_unit, layout.window, 1),
                (layer * layout.layer_bytes + layout.window_offset) // window_unit,
            )
            for layer in range(layout.layers)
        ]
        return matrices, windows

    @property
    def page_pool_bytes(self) -> int:
        return self.pages.numel()

    @property
    def slot_pool_bytes(self) -> int:
        return self.slots.numel()

    def poison_pages(self, ids: Iterable[int]) -> None:
        """Overwrite freed pages with NaN, so that a stale read shows in the tokens (tests)."""
        self.pages[list(ids)] = CANARY

    def poison_slots(self, ids: Iterable[int]) -> None:
        self.slots[list(ids)] = CANARY

    def slot_finite(self, slot: int) -> bool:
        """Whether all of a slot's state is finite."""
        return all(bool(torch.isfinite(layer[slot]).all()) for layer in (*self.matrices, *self.windows))

    def padding_intact(self) -> bool:
        """Whether nobody ever wrote to page 0 or slot 0."""
        return all(bool((runs[:1] == CANARY).all()) for runs in (self.pages, self.slots))


def _runs(count: int, run_bytes: int, device: str) -> torch.Tensor:
    """Uint8 [count, run_bytes], not initialised: nothing may read what was never written, and on the host memory is
    touched (and counted by the system) only when it is written."""
    return torch.empty(count, run_bytes, dtype=torch.uint8, device=device)
