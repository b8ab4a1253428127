"""``python -m bench NAME [arguments]``: green tests first, then figures. ``python -m bench`` lists the names."""

import importlib
import subprocess
import sys
from typing import NamedTuple

from bench import ROOT


class Bench(NamedTuple):
    """``module`` has ``main(arguments) -> exit code``; ``tests`` must pass before it may report anything."""

    module: str
    tests: tuple[str, ...]
    what: str


BENCHES = {
    "engine": Bench(
        "bench.engine",
        ("tests/scheduler", "tests/cache", "tests/wire"),
        "host time of a step: scheduler, codec and settling at 256 decoding rows",
    ),
    "serve": Bench(
        "bench.serve",
        ("tests/api", "tests/text"),
        "load generator over HTTP: TTFT, ITL and throughput",
    ),
    "multi_turn": Bench(
        "bench.multi_turn",
        ("tests/e2e/test_prefix.py", "tests/bench/test_multi_turn.py"),
        "chats over HTTP for minutes: answers against cold runs, hits by turn, memory",
    ),
    "vs_transformers": Bench(
        "bench.vs_transformers",
        ("tests/models", "tests/runner"),
        "one model, the same prompts, against transformers' generate",
    ),
    "embedded": Bench(
        "bench.demo.serving",
        ("tests/e2e/test_embedded_model.py",),
        "the embedded model on CPUs: time to ready, first token, tokens a second",
    ),
    "parity": Bench(
        "bench.parity",
        ("tests/e2e/test_parity.py",),
        "the whole parity product against transformers",
    ),
    "cache_parity": Bench(
        "bench.cache_parity",
        ("tests/e2e/test_cache_parity.py",),
        "the parity product through the prefix tree: every situation of the cache",
    ),
    "hits": Bench(
        "bench.hits",
        ("tests/cache", "tests/scheduler/test_prefix.py", "tests/bench/test_hits.py"),
        "tokens reused of traces whose right answer is known",
    ),
    "tree": Bench(
        "bench.tree",
        ("tests/cache", "tests/bench/test_tree.py"),
        "host cost of the prefix tree: match and lease of 32k tokens among 100 000 nodes, eviction",
    ),
    "warm": Bench(
        "bench.warm",
        ("tests/e2e/test_prefix.py", "tests/bench/test_warm.py"),
        "time to first token after a shared prefix of 4k tokens, cold and warm",
    ),
    "gpu": Bench(
        "bench.gpu",
        ("tests/runner", "tests/e2e/test_triton_engine.py"),
        "the engine on a GPU without HTTP: decode, prefill, mixed traffic, reuse",
    ),
    "kernels": Bench(
        "bench.kernels",
        ("tests/kernels",),
        "every GPU kernel against its reference, then timed beside the limit of the card",
    ),
    "sustained": Bench(
        "bench.sustained",
        ("tests/kernels/test_linear_gpu.py",),
        "the matrix rate that a GPU holds at its power limit, which long prefills meet",
    ),
    "load": Bench(
        "bench.load",
        ("tests/models/test_load.py", "tests/spec/test_safetensors.py", "tests/bench/test_load.py"),
        "weights from disk to the device, cold and warm, beside plain reads of the same files",
    ),
    "state_quality": Bench(
        "bench.state_quality",
        ("tests/kernels/test_gated_delta_decode_gpu.py", "tests/bench/test_state_quality.py"),
        "what recurrent states in bf16 cost: the embedded model and the recurrence alone, beside fp32",
    ),
    "soak": Bench(
        "bench.soak",
        ("tests/cache", "tests/scheduler/test_prefix.py", "tests/bench/test_soak.py"),
        "random traffic through the prefix tree: 20 000 examples, a thousand workloads at the floor",
    ),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in BENCHES:
        for name, bench in BENCHES.items():
            print(f"{name:<16} {bench.what}")
        return 2
    bench = BENCHES[arguments[0]]
    print(f"tests of {arguments[0]} first: {' '.join(bench.tests)}", flush=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not multi_gpu and not full", *bench.tests]
    if subprocess.run(tests, cwd=ROOT).returncode != 0:
        print(f"the tests are red: {arguments[0]} reports nothing", file=sys.stderr)
        return 1
    return int(importlib.import_module(bench.module).main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
