"""One op in a process of its own: a kernel that breaks the device breaks nothing else."""

import importlib
import json
import sys


def main(what: str, op: str) -> None:
    module = importlib.import_module(f"bench.kernels.{op}")
    if what == "check":
        module.check()
    else:
        print(json.dumps([list(row) for row in module.measure()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
