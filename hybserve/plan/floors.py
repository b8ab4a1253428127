"""The minimum of pages and slots that lets every admitted request finish. The only place where they are counted."""

from hybserve.plan.result import Floors

#: States that speculation needs beside the active one, per running sequence.
SPECULATIVE_SLOTS = 0


def pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def copies_in_flight(prefix: bool) -> int:
    """Slots through which states pass between tree and tiers when the retention budget is zero: one if there is a
    prefix cache (checkpoints are exported, copied and published one at a time then), none without."""
    return 1 if prefix else 0


def count_floors(max_running: int, max_seq_len: int, step_tokens: int, page_size: int, prefix: bool) -> Floors:
    """Slots: every running sequence its active one, the padding slot, copies in flight. Pages: one longest sequence
    (the first in the total order is never parked), what one step writes, and the padding page."""
    return Floors(
        state_slots=max_running * (1 + SPECULATIVE_SLOTS) + 1 + copies_in_flight(prefix),
        kv_pages=pages_of(max_seq_len, page_size) + pages_of(step_tokens, page_size) + 1,
    )
