"""The scheduler's promises, recounted from scratch: after every step in tests and debug, when idle in production."""

from collections.abc import Iterable, Iterator, Mapping

from hybserve.cache.integrity import IntegrityError, check_pool, check_tree, page_owners, slot_owners
from hybserve.scheduler.books import Books
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.request import Request, Sequence, State
from hybserve.scheduler.running import Running
from hybserve.scheduler.step import Flight


def check(
    running: Running, waiting: Waiting, requests: Mapping[int, Request], books: Books, flights: Iterable[Flight]
) -> None:
    """Raises IntegrityError: ids lost or owned twice, a sequence without what it needs, requests that do not add up."""
    tree = running.prefix.tree
    check_tree(tree)
    check_pool(running.pages, [*_page_owners(running, requests.values()), *page_owners(tree)])
    active = [(_name(sequence), [sequence.slot]) for sequence in running.sequences]
    pending = [(f"exports of step {flight.plan.step}", [e.slot for e in flight.exports]) for flight in flights]
    check_pool(running.slots, [*active, *pending, *slot_owners(tree)])
    leases = [id(sequence.lease) for sequence in running.sequences if sequence.lease is not None]
    _demand({id(lease) for lease in tree.leases} == set(leases), "a lease is held by nobody, or not by the tree")
    boundaries = [sequence.boundary for sequence in running.sequences if sequence.boundary is not None]
    held = {id(boundary) for boundary in boundaries if boundary.slot}
    _demand({id(boundary) for boundary in tree.held} == held, "a state is held for nobody, or not by the tree")
    _check_indices(running)
    for sequence in running.sequences:
        _check_running(running, sequence)
    _check_places(running, waiting, requests.values())
    ended = sum(books.ends.values())
    _demand(
        books.accepted == ended + len(requests),
        f"{books.accepted} requests accepted, {ended} ended and {len(requests)} alive",
    )


def _page_owners(running: Running, requests: Iterable[Request]) -> Iterator[tuple[str, list[int]]]:
    for sequence in running.sequences:
        yield _name(sequence), sorted(sequence.owned)
    for request in requests:
        yield f"request {request.uid}", sorted(request.shared)


def _check_indices(running: Running) -> None:
    used = [sequence.index for sequence in running.sequences if sequence.started]
    every = sorted(used + running.free_indices)
    _demand(every == list(range(running.limits.max_running)), f"indices in use {used}, free {running.free_indices}")


def _check_running(running: Running, sequence: Sequence) -> None:
    name, covered = _name(sequence), running.covers(sequence)
    _demand(sequence.on_device, f"{name} is among the running but {sequence.state.value}")
    _demand(covered == sequence.capacity, f"{name} has pages for {covered} tokens and counts {sequence.capacity}")
    _demand(sequence.planned <= covered, f"{name} has {sequence.planned} tokens planned and pages for {covered}")
    _demand(sequence.sampled <= sequence.max_tokens, f"{name} samples beyond max_tokens")


def _check_places(running: Running, waiting: Waiting, requests: Iterable[Request]) -> None:
    """Every living sequence is in exactly one place, in order, and holds something only on the device."""
    for ordered in (running.sequences, list(waiting)):
        keys = [sequence.key for sequence in ordered]
        _demand(keys == sorted(keys), f"out of order: {keys}")
    on_device = {id(sequence) for sequence in running.sequences}
    off_device = {id(sequence) for lead in waiting for sequence in lead.group}
    for request in requests:
        sharers = 0
        for sequence in request.sequences:
            name = _name(sequence)
            _demand(sequence.on_device == (id(sequence) in on_device), f"{name}: running and {sequence.state.value}")
            held = bool(sequence.table) or sequence.slot != 0 or sequence.started
            held |= sequence.lease is not None or sequence.boundary is not None
            _demand(sequence.on_device or not held, f"{name} is {sequence.state.value} and still holds something")
            waits = sequence.state in (State.QUEUED, State.PARKED)
            _demand(waits == (id(sequence) in off_device), f"{name} is {sequence.state.value}, waiting is not")
            sharers += sequence.shares
        _demand(sharers == request.sharers, f"request {request.uid}: {sharers} share, {request.sharers} are counted")
    _demand(waiting.requests >= 0 and waiting.tokens >= 0, "the queue counts below zero")


def _name(sequence: Sequence) -> str:
    return f"request {sequence.uid} choice {sequence.choice} ({sequence.state.value})"


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)
