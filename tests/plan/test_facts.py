from types import SimpleNamespace

import pynvml
import pytest

from hybserve.plan.facts import CPU_DEVICE_MOST, MemoryFacts, probe_gpu, probe_memory


def test_the_cpu_takes_no_more_than_half_of_what_is_free():
    assert MemoryFacts("cpu", 1 << 30).auto_device == 1 << 29
    assert MemoryFacts("cpu", 1 << 40).auto_device == CPU_DEVICE_MOST == 4 << 30
    assert MemoryFacts("cuda", 1 << 40).auto_device == 1 << 40


def test_this_machine_has_memory(tmp_path):
    facts = probe_memory()
    assert facts.backend == "cpu"
    assert facts.free > 0
    assert probe_memory(tmp_path).free >= 0


def test_F66_the_limit_of_the_container_counts(tmp_path):
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("40000\n")
    assert probe_memory(tmp_path).free == 60000
    (tmp_path / "memory.current").write_text("140000\n")
    assert probe_memory(tmp_path).free == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert probe_memory(tmp_path).free > 1 << 20


def test_F66_the_older_form_of_container_limits(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("5000")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1000")
    assert probe_memory(tmp_path).free == 4000


@pytest.mark.parametrize(("visible", "free"), [(None, 10), ("1", 11), ("GPU-x,0", 12), ("", 0), ("-1", 0), ("7", 0)])
def test_the_first_gpu_that_the_process_may_use(monkeypatch, visible, free):
    def handle(place):
        if place == 7:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return {0: 10, 1: 11, "GPU-x": 12}[place]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda found: SimpleNamespace(free=found))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probe_gpu() == free
