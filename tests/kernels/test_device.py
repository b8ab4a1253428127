import pytest
import torch
from hybserve_kernels.device import require_cpu
from hybserve_kernels.rms_norm import rms_norm


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"scan: no form for device meta"):
        require_cpu("scan", torch.zeros(1), torch.zeros(1, device="meta"))


def test_an_op_refuses_a_device_before_it_computes() -> None:
    with pytest.raises(NotImplementedError, match="rms_norm"):
        rms_norm(torch.zeros(1, 4, device="meta"), torch.zeros(4, device="meta"), 1e-6)
