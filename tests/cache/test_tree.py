"""The prefix tree alone, on real pools: what matches, what splits, what is evicted first, what balances."""

import random

import pytest

from hybserve.cache.integrity import check_pool, check_tree, page_owners, slot_owners
from hybserve.cache.pool import Pool
from hybserve.cache.tree import Lease, PrefixTree

PAGE = 4
KEY = ("tenant", "")


class World:
    """Tree and pools with the bookkeeping of a sequence that publishes a prompt."""

    def __init__(self, pages: int = 64, slots: int = 16, stateful: bool = True, slot_price: float = 4.0) -> None:
        self.pages, self.slots = Pool("page", pages), Pool("slot", slots)
        self.tree = PrefixTree(PAGE, self.pages, self.slots, stateful=stateful, slot_price=slot_price)

    def put(self, tokens: list[int], *checkpoints: int, key: tuple[str, str] = KEY, keep: bool = False) -> Lease:
        """Publish all whole pages of ``tokens`` with states at the given positions."""
        end = len(tokens) // PAGE * PAGE
        lease = self.tree.lease(key, self.tree.match(key, tokens))
        hit = lease.node.end
        own = self.pages.take((end - hit) // PAGE)
        moved = self.tree.publish(lease, tokens[hit:end], own)
        self.pages.free(set(own) - set(moved), 0)
        for position in checkpoints:
            slot = self.slots.take(1)
            if not self.tree.attach(lease, position, slot[0]):
                self.slots.free(slot, 0)
        if not keep:
            self.tree.release(lease, 0)
        self.check()
        return lease

    def check(self, live_pages: dict[str, list[int]] | None = None) -> None:
        check_tree(self.tree)
        check_pool(self.pages, [*page_owners(self.tree), *(live_pages or {}).items()])
        check_pool(self.slots, slot_owners(self.tree))


def run(*pages: int, tail: int = 0) -> list[int]:
    """Tokens of whole pages named by numbers, and ``tail`` tokens more."""
    return [1000 * page + offset for page in pages for offset in range(PAGE)] + [9] * tail


def test_hit_needs_kv_and_a_state_exactly_there() -> None:
    world = World()
    world.put(run(1, 2, 3, 4), 8)
    match = world.tree.match(KEY, run(1, 2, 3, 4, tail=1))
    assert (match.kv_hit, match.state_hit, match.hit, match.reason, match.at) == (16, 8, 8, "no_checkpoint", 8)


def test_at_least_one_token_is_left_to_compute() -> None:
    world = World()
    world.put(run(1, 2), 4, 8)
    match = world.tree.match(KEY, run(1, 2))
    assert (match.kv_hit, match.hit, match.reason) == (8, 4, "full")
    match = world.tree.match(KEY, run(1, 2, tail=1))
    assert (match.kv_hit, match.hit, match.reason) == (8, 8, "full")


def test_stateless_model_hits_on_kv_alone() -> None:
    world = World(stateful=False)
    world.put(run(1, 2, 3))
    match = world.tree.match(KEY, run(1, 2, 7))
    assert (match.hit, match.reason, match.source) == (8, "full", None)


def test_divergence_names_the_first_differing_token() -> None:
    world = World()
    world.put(run(1, 2, 3), 12)
    prompt = run(1, 2, 3, tail=4)
    prompt[6] = 77
    match = world.tree.match(KEY, prompt)
    assert (match.kv_hit, match.reason) == (4, "no_checkpoint")
    stateless = World(stateful=False)
    stateless.put(run(1, 2, 3))
    match = stateless.tree.match(KEY, prompt)
    assert (match.hit, match.reason, match.at) == (4, "divergent", 6)


def test_split_keeps_checkpoint_below_and_lease_above() -> None:
    world = World()
    held = world.put(run(1, 2, 3, 4), 16, keep=True)
    world.put(run(1, 2, 8, 9), 16)
    assert held.node.start == 8
    assert held.node.checkpoint is not None
    assert held.node.parent is not None
    assert held.node.parent.leases == 1
    world.tree.release(held, 0)
    world.check()


def test_a_prompt_of_less_than_a_page_is_too_short_to_hit() -> None:
    world = World()
    world.put(run(1, 2), 8)
    assert world.tree.match(KEY, [77]).reason == "short"


def test_tenants_and_salts_never_meet() -> None:
    world = World()
    world.put(run(1, 2), 8)
    for key in (("other", ""), ("tenant", "salt"), ("", "tenant")):
        match = world.tree.match(key, run(1, 2, tail=1))
        assert (match.kv_hit, match.hit, match.reason) == (0, 0, "cold")


def test_duplicate_publish_keeps_the_tree_page() -> None:
    world = World()
    first = world.tree.lease(KEY, world.tree.match(KEY, run(1, 2)))
    second = world.tree.lease(KEY, world.tree.match(KEY, run(1, 2)))
    mine, yours = world.pages.take(2), world.pages.take(2)
    assert world.tree.publish(first, run(1, 2), mine) == mine
    longer = yours + world.pages.take(1)
    assert world.tree.publish(second, run(1, 2, 3), longer) == []
    assert second.end == 0
    world.check({"second": longer})
    assert world.tree.publish(second, run(1, 2, 3), longer, last=True) == longer[2:]
    assert world.tree.pages_of(second) == [*mine, longer[2]]
    world.check({"second": yours})


def test_evicted_state_leaves_a_tombstone_with_its_reason() -> None:
    world = World()
    world.put(run(1, 2, 3, 4, 5), 8, 20)
    assert world.tree.evict_states(1, 0) == 1
    world.check()
    match = world.tree.match(KEY, run(1, 2, 7))
    assert match.kv_hit == 8
    assert (match.hit, match.reason) == (0, "evicted_state")


def test_evicted_leaf_is_told_from_never_seen() -> None:
    world = World()
    world.put(run(1, 2), 8)
    world.put(run(1, 2, 3), 12)
    world.tree.evict_pages(1, 0)
    assert world.tree.match(KEY, run(1, 2, 3, tail=1)).reason == "evicted_kv"
    assert world.tree.match(KEY, run(1, 2, 5, tail=1)).reason == "new"


def test_leased_pages_and_pinned_states_stay() -> None:
    world = World(pages=5, slots=3)
    lease = world.put(run(1, 2, 3, 4), 8, 16, keep=True)
    assert world.tree.evict_pages(1, 0) == 0
    node = world.tree.node_at(lease, 8)
    world.tree.pin(node)
    assert world.tree.evict_states(2, 0) == 1
    world.tree.unpin(node, 0)
    assert world.tree.evict_states(2, 0) == 1
    world.tree.release(lease, 0)
    assert world.tree.evict_pages(4, 0) == 4
    world.check()
    assert world.pages.available == 4
    assert world.slots.available == 2


def test_held_states_match_nothing_and_the_oldest_gives_way_first() -> None:
    world = World(slots=4)
    lease = world.put(run(1, 2, 3), 4, keep=True)
    first, second = (world.tree.hold(world.slots.take(1)[0], position) for position in (8, 12))
    world.check()
    assert world.tree.match(KEY, run(1, 2, 3, tail=1)).hit == 4
    assert world.tree.evictable_states == world.tree.checkpoints == 3
    assert world.tree.evict_held(7)
    assert (first.slot, world.tree.evicted_states) == (0, 1)
    assert world.tree.let_go(first) == 0
    world.check()
    slot = world.tree.let_go(second)
    assert not world.tree.evict_held(7)
    assert world.tree.attach(lease, 12, slot)
    world.check()
    assert world.tree.match(KEY, run(1, 2, 3, tail=1)).hit == 12
    world.tree.release(lease, 0)


def test_publishing_never_evicts_its_betters() -> None:
    world = World(slots=3)
    world.put(run(1, 2, 3, 4), 16)
    assert world.tree.evict_states(1, 0, below=world.tree.worth_of_new(4)) == 0
    assert world.tree.evict_states(1, 0, below=world.tree.worth_of_new(64)) == 1


def test_used_states_outlive_unused_ones_of_equal_price() -> None:
    world = World(slots=8)
    for name in (1, 2, 3):
        world.put(run(name, name + 10), 8)
    match = world.tree.match(KEY, run(2, 12, tail=1))
    lease = world.tree.lease(KEY, match)
    world.tree.touch(lease, match.source)
    world.tree.release(lease, 0)
    world.tree.evict_states(2, 0)
    assert world.tree.match(KEY, run(2, 12, tail=1)).hit == 8


def test_flush_forgets_everything_and_frees_what_is_held_later() -> None:
    world = World()
    lease = world.put(run(1, 2, 3), 12, keep=True)
    world.put(run(4, 5), 8)
    world.tree.flush(0)
    world.check()
    assert world.tree.match(KEY, run(1, 2, 3, tail=1)).reason == "cold"
    assert world.tree.match(KEY, run(4, 5, tail=1)).hit == 0
    assert world.pages.held == 3
    world.put(run(1, 2), 8)
    world.tree.release(lease, 0)
    world.check()
    assert world.pages.held == 2
    assert world.tree.match(KEY, run(1, 2, 3, tail=1)).reason == "new"  # flushed, not evicted
    assert (world.tree.evicted_pages, world.tree.evicted_states) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_balances_and_empties(seed: int) -> None:
    rng = random.Random(seed)
    world = World(pages=40, slots=12)
    held: list[Lease] = []
    for _ in range(300):
        tokens = run(*[rng.randrange(3) for _ in range(rng.randrange(1, 7))], tail=rng.randrange(PAGE))
        need = len(tokens) // PAGE
        if world.pages.available < need:
            world.tree.evict_pages(need - world.pages.available, 0)
        spots = [PAGE * rng.randrange(1, need + 1) for _ in range(2)]
        if world.slots.available < 3:
            world.tree.evict_states(3 - world.slots.available, 0)
        if world.pages.available < need or world.slots.available < 3:
            for lease in held:
                world.tree.release(lease, 0)
            held.clear()
            continue
        lease = world.put(tokens, *spots, keep=rng.random() < 0.3)
        if lease in world.tree.leases:
            held.append(lease)
        if rng.random() < 0.02:
            world.tree.flush(0)
        world.check()
    for lease in held:
        world.tree.release(lease, 0)
    world.tree.evict_pages(1000, 0)
    world.check()
    assert world.pages.held == 0
    assert world.slots.held == 0
    assert world.tree.all_roots() == []
