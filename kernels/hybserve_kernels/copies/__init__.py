"""Copies of whole pages and slots inside a pool, and whether a slot's state is finite. Host functions only."""

from hybserve_kernels.copies.gpu import SlotCells, copy_runs, runs_finite

__all__ = ["SlotCells", "copy_runs", "runs_finite"]
