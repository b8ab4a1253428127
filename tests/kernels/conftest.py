import pytest
import torch

from tests.poison import poison_empty

torch.set_num_threads(1)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
