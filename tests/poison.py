"""Uninitialised memory that holds NaN: whoever reads what was never written shows it."""

import pytest
import torch


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` and ``torch.empty_like`` of float tensors return NaN until the test ends."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)

        def poisoned(*args: object, _plain: object = plain, **kwargs: object) -> torch.Tensor:
            tensor: torch.Tensor = _plain(*args, **kwargs)  # type: ignore[operator]
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)
