"""The bench of warm starts measures a hit: counted in tokens, not in time."""

from bench.warm import MODEL, PAGE, measure

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 128,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_key_value_heads": 1}  # fmt: skip


def test_warm_requests_reuse_the_prefix_and_cold_ones_nothing() -> None:
    figures = measure(MODEL | TINY, prefix=3 * PAGE, tail=5, repeats=2)
    assert figures["cold_hits"] == [0, 0]
    assert figures["warm_hits"] == [3 * PAGE, 3 * PAGE]
    assert figures["warm_ttft_ms"] > 0
