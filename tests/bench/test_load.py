"""The bench of the loader: what it writes is a checkpoint, and all ways of reading it are timed."""

import torch

from bench import load
from bench.dummy import MODELS
from hybserve.models.load import load_weights
from hybserve.spec.safetensors import read_headers, weight_files
from hybserve.spec.split import split_ranks


def test_a_checkpoint_of_the_asked_size_in_shards(tmp_path):
    spec = load.write_checkpoint(tmp_path, "tiny", shard=100_000)
    files = weight_files(tmp_path)
    assert len(files) > 1
    assert len(spec.layers) == MODELS["tiny"]["num_hidden_layers"]
    params = load.allocated(spec)
    load_weights(tmp_path, spec, split_ranks(spec)[0], params)
    assert all(float((param != 0).float().mean()) > 0.3 for param in params.values())
    load.check(tmp_path, params)
    size = sum(file.stat().st_size for file in files)
    (tmp_path / "less").mkdir()
    less = load.write_checkpoint(tmp_path / "less", "tiny", most=size * 0.9)
    assert 0 < len(less.layers) < len(spec.layers)
    read_headers(tmp_path / "less")


def test_every_way_is_timed(tmp_path, capsys):
    spec = load.write_checkpoint(tmp_path, "tiny", shard=100_000)
    figures = load.measure(tmp_path, spec, sweep=True)
    for of in (figures["cold"], figures["warm"], *figures["sweep"]):
        assert all(value > 0 for value in of.values())
    assert len(figures["sweep"]) == len(load.SWEEP)
    assert "warm: plain" in capsys.readouterr().out
    assert torch.device(figures["device"]).type in ("cpu", "cuda")
