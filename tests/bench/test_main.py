"""No figures on red tests."""

import subprocess
from types import SimpleNamespace

import pytest

import bench.__main__ as registry
from bench import percentile


@pytest.mark.parametrize("red", [True, False])
def test_a_bench_reports_nothing_unless_its_tests_are_green(red: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []
    module = SimpleNamespace(main=lambda arguments: (measured.append(arguments), 0)[1])
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=int(red)))
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)
    assert registry.main(["engine", "--rows", "2"]) == int(red)
    assert measured == ([] if red else [["--rows", "2"]])


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert registry.main([]) == registry.main(["nothing"]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in registry.BENCHES)


def test_percentile_is_the_smallest_value_that_the_share_does_not_exceed() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
