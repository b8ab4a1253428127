"""Does every id of a pool have exactly one place? Checked as sets, from scratch, never from counters.

A sum can balance while an id is lost and another owned twice; sets cannot. On a violation the error names the ids and
who claims them, which is what one needs to find the guilty line.
"""

from collections.abc import Iterable

from hybserve.cache.pool import Pool


class IntegrityError(AssertionError):
    """The books are wrong: ids lost, or owned twice, or a promise about them broken."""


def check_pool(pool: Pool, owners: Iterable[tuple[str, Iterable[int]]]) -> None:
    """free ⊎ owned = all allocatable ids of ``pool``. ``owners`` yields (name, ids). Raises IntegrityError."""
    free = pool.free_ids()
    owner_of: dict[int, str] = dict.fromkeys(free, "the free list")
    faults = []
    if len(free) != pool.available:
        faults.append("the free list holds an id twice")
    for name, ids in owners:
        for index in ids:
            if not 0 < index < pool.size:
                faults.append(f"{index} is not allocatable but owned by {name}")
            elif index in owner_of:
                faults.append(f"{index} belongs to {owner_of[index]} and to {name}")
            owner_of[index] = name
    lost = set(range(1, pool.size)) - owner_of.keys()
    if lost:
        faults.append(f"{sorted(lost)} belong to nobody")
    if pool.held_ids() & free:
        faults.append(f"{sorted(pool.held_ids() & free)} are free and marked as held")
    if faults:
        raise IntegrityError(f"{pool.name}: " + "; ".join(faults))
