"""The engine role whose forward raises as soon as the file named by EVIL_FILE exists."""

import os
import sys
from pathlib import Path

import hybserve.runner.main as runner
from hybserve.launch.__main__ import main

_run_step = runner.run_step


def run_step(plan, rank):
    if Path(os.environ["EVIL_FILE"]).exists():
        raise RuntimeError("the device is lost")
    return _run_step(plan, rank)


if __name__ == "__main__":
    runner.run_step = run_step
    sys.exit(main())
