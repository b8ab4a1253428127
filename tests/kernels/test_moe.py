"""E experts, F width, D model dim."""

import pytest
import torch
from hybserve_kernels.moe import experts, experts_whole, reference, route

Weights = tuple[torch.Tensor, torch.Tensor]


def _weights(count: int, ffn: int, hidden: int) -> Weights:
    return torch.randn(count, 2 * ffn, hidden) * 0.3, torch.randn(count, hidden, ffn) * 0.3


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (5, 5), (3, 1)])
def test_routing_is_the_reference(count: int, top_k: int, normalise: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(17, count)
    got, want = route(scores, top_k, normalise), reference.route(scores, top_k, normalise)
    torch.testing.assert_close(got[0], want[0])
    assert torch.equal(got[1], want[1])
    if normalise:
        torch.testing.assert_close(got[0].sum(-1), torch.ones(17))


@pytest.mark.parametrize("form", [experts, experts_whole])
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 8, 2), (63, 8, 2), (65, 5, 5), (7, 3, 1)])
@pytest.mark.usefixtures("poisoned_empty")
def test_experts_are_the_reference(form: object, tokens: int, count: int, top_k: int) -> None:
    torch.manual_seed(0)
    x, (gate_up, down) = torch.randn(tokens, 20), _weights(count, 12, 20)
    weights, chosen = route(torch.randn(tokens, count), top_k, True)
    got = form(x, weights, chosen, gate_up, down)  # type: ignore[operator]
    torch.testing.assert_close(got, reference.experts(x, weights, chosen, gate_up, down), rtol=1e-4, atol=1e-5)


def test_a_token_has_the_same_bits_whatever_the_others_choose() -> None:
    torch.manual_seed(0)
    x, (gate_up, down) = torch.randn(8, 20), _weights(6, 12, 20)
    weights, chosen = route(torch.randn(8, 6), 2, True)
    want = experts_whole(x, weights, chosen, gate_up, down)
    for _ in range(4):
        others, other_chosen = route(torch.randn(8, 6), 2, True)
        others[3], other_chosen[3] = weights[3], chosen[3]
        noise = torch.randn(8, 20)
        noise[3] = x[3]
        assert torch.equal(experts_whole(noise, others, other_chosen, gate_up, down)[3], want[3])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    torch.manual_seed(0)
    x, (gate_up, down) = torch.randn(6, 20), _weights(4, 12, 20)
    x[2] = float("nan")
    weights, chosen = route(torch.randn(6, 4), 2, True)
    for form in (experts, experts_whole):
        finite = form(x, weights, chosen, gate_up, down).isfinite().all(-1)
        assert finite.tolist() == [True, True, False, True, True, True]
