"""Cost of the tree, counted: eviction looks at as few nodes in a large tree as in a small one."""

from bench.tree import AIM_VISITS, measure


def test_eviction_does_not_look_at_more_in_a_larger_tree_peer38() -> None:
    figures = measure(nodes=20_000, tokens=2048)
    for one in figures["evictions"]:
        assert one["visited_per_page"] <= AIM_VISITS
        assert one["visited_per_state"] <= AIM_VISITS
    assert figures["evictions"][-1]["nodes"] > 50 * figures["evictions"][0]["nodes"]
    assert 0 < figures["match_and_lease"]["median_ms"] <= figures["match_and_lease"]["max_ms"]
