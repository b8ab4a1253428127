"""Routing, grouping and experts in Triton against the reference.

Legend: T tokens, D model dim, E experts, F expert width, X = top_k.
"""

from typing import NamedTuple

import pytest
import torch
from hybserve_kernels.moe import SharedExpert, moe_rows, reference
from hybserve_kernels.moe.gpu.blocks import Blocks
from hybserve_kernels.moe.gpu.groups import Groups, Tile
from hybserve_kernels.moe.gpu.pairs import Pairs
from hybserve_kernels.moe.gpu.route import route_blocks, route_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = Pairs(32, 32, 4, 64, 16, 4)
GROUPS = Groups(16, Tile(32, 16, 4, 2), Tile(32, 16, 4, 2))
BLOCKS = Blocks(16, 8, 8, Tile(16, 32, 4, 2), Tile(32, 16, 4, 2))
FORMS = pytest.mark.parametrize("form", [PAIRS, GROUPS, BLOCKS], ids=["pairs", "groups", "blocks"])
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.usefixtures("poisoned_empty")


class Case(NamedTuple):
    x_TD: torch.Tensor
    scores_TE: torch.Tensor
    gate_up_E2FD: torch.Tensor
    down_EDF: torch.Tensor
    shared_TD: torch.Tensor
    gate_T1: torch.Tensor

    def want(self, top_k: int, normalise: bool, shared: bool) -> torch.Tensor:
        weights, chosen = reference.route(self.scores_TE, top_k, normalise)
        wide = (self.x_TD.float(), weights.float(), chosen, self.gate_up_E2FD.float(), self.down_EDF.float())
        out = reference.experts(*wide)
        return out + self.shared_TD.float() * torch.sigmoid(self.gate_T1.float()) if shared else out


def _case(tokens: int, count: int, dim: int, width: int, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(tokens + count)
    shapes = [(tokens, dim), (tokens, count), (count, 2 * width, dim), (count, dim, width), (tokens, dim), (tokens, 1)]
    case = [torch.randn(shape, device=DEVICE) for shape in shapes]
    case[2] /= dim**0.5
    case[3] /= width**0.5
    return Case(*(tensor.to(dtype) for tensor in case))


def _tokens(count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32, device=DEVICE)


def _run(
    case: Case, top_k: int, normalise: bool, tokens: int, shared: bool, form: Pairs | Groups | Blocks | None
) -> torch.Tensor:
    both = (case.shared_TD, case.gate_T1) if shared else (None, None)
    return moe_rows(*case[:2], top_k, normalise, *case[2:4], _tokens(tokens), *both, form=form)


def _skip_unaligned(form: Pairs | Groups | Blocks, dtype: torch.dtype, *sizes: int) -> None:
    if isinstance(form, Blocks) and any(size * dtype.itemsize % 16 for size in sizes):
        pytest.skip("boxes are cut at multiples of 16 bytes")


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "dim", "width"),
    [(1, 4, 2, 32, 16), (7, 8, 2, 64, 48), (35, 5, 3, 40, 24), (9, 6, 6, 36, 20)],
)
def test_rows_are_the_reference(
    tokens: int, count: int, top_k: int, dim: int, width: int, dtype: torch.dtype, form: Pairs | Groups | Blocks
) -> None:
    _skip_unaligned(form, dtype, dim, width)
    case = _case(tokens, count, dim, width, dtype)
    normalise = tokens % 2 == 1
    got = _run(case, top_k, normalise, tokens, True, form)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), case.want(top_k, normalise, True), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("tokens", [2, 200])
def test_the_chosen_form_without_a_shared_expert(tokens: int) -> None:
    case = _case(tokens, 8, 64, 16)
    got = _run(case, 2, True, tokens, False, None)
    torch.testing.assert_close(got, case.want(2, True, False), rtol=1e-4, atol=1e-4)


@FORMS
@pytest.mark.parametrize("real", [0, 1, 16, 20])
def test_padded_tokens_are_neither_read_nor_written(real: int, form: Pairs | Groups | Blocks) -> None:
    case = _case(25, 6, 32, 24)
    want = case.want(2, True, True)
    for tensor in (case.x_TD, case.scores_TE, case.shared_TD, case.gate_T1):
        tensor[real:] = float("nan")
    out = torch.full_like(case.x_TD, 7.0)
    got = moe_rows(*case[:2], 2, True, *case[2:4], _tokens(real), case.shared_TD, case.gate_T1, out, form)
    assert got is out
    torch.testing.assert_close(out[:real], want[:real], rtol=1e-4, atol=1e-4)
    assert bool((out[real:] == 7.0).all())


@FORMS
@pytest.mark.parametrize("shared", [True, False])
def test_the_result_is_added_as_by_an_op_of_its_own(shared: bool, form: Pairs | Groups | Blocks) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter does not round as torch does
    case = _case(11, 6, 32, 24, dtype)
    both = (case.shared_TD, case.gate_T1) if shared else (None, None)
    hidden = torch.randn(11, 70, device=DEVICE).to(dtype)[:, :32]
    want = hidden.clone()
    want[:9] += _run(case, 2, True, 9, shared, form)[:9]
    got = moe_rows(*case[:2], 2, True, *case[2:4], _tokens(9), *both, out=hidden, form=form, add=True)
    assert got is hidden
    assert torch.equal(got, want)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "real", "shared_width"), [(1, 1, 24), (4, 3, 24), (2, 0, 24), (3, 3, 40), (9, 7, 24)]
)
def test_a_shared_expert_of_weights(
    tokens: int, real: int, shared_width: int, dtype: torch.dtype, form: Pairs | Groups | Blocks
) -> None:
    _skip_unaligned(form, dtype, 36)
    case = _case(tokens, 6, 36, 24, dtype)
    gate_up = (torch.randn(2 * shared_width, 36, device=DEVICE) / 6).to(dtype)
    down = (torch.randn(36, shared_width, device=DEVICE) / shared_width**0.5).to(dtype)
    gate, up = (case.x_TD.float() @ gate_up.float().T).chunk(2, dim=1)
    shared = (torch.nn.functional.silu(gate) * up) @ down.float().T
    want = case._replace(shared_TD=shared).want(3, True, True)
    for tensor in (case.x_TD, case.scores_TE, case.gate_T1):
        tensor[real:] = float("nan")
    out = torch.full_like(case.x_TD, 7.0)
    expert = SharedExpert(gate_up, down)
    moe_rows(*case[:2], 3, True, *case[2:4], _tokens(real), expert, case.gate_T1, out, form)
    torch.testing.assert_close(out[:real].float(), want[:real], rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert bool((out[real:] == 7.0).all())


@FORMS
def test_all_tokens_may_choose_the_same_experts(form: Pairs | Groups | Blocks) -> None:
    case = _case(40, 8, 32, 16)
    case.scores_TE[:, 3] += 50
    case.scores_TE[:, 6] += 40
    case.gate_up_E2FD[[0, 1, 2, 4, 5, 7]] = float("nan")
    torch.testing.assert_close(_run(case, 2, True, 40, True, form), case.want(2, True, True), rtol=1e-4, atol=1e-4)


@FORMS
def test_rows_of_wider_tensors(form: Pairs | Groups | Blocks) -> None:
    case = _case(9, 6, 32, 16)
    want = case.want(2, False, True)
    strided = [torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]] for tensor in case]
    case = Case(strided[0], strided[1], case.gate_up_E2FD, case.down_EDF, strided[4], strided[5])
    torch.testing.assert_close(_run(case, 2, False, 9, True, form), want, rtol=1e-4, atol=1e-4)


@FORMS
def test_a_row_that_is_not_finite_spoils_no_other(form: Pairs | Groups | Blocks) -> None:
    case = _case(9, 6, 32, 16)
    want = _run(case, 2, True, 9, True, form)
    case.x_TD[3] = float("nan")
    case.scores_TE[3] = float("nan")
    case.scores_TE[5] = float("inf")
    got = _run(case, 2, True, 9, True, form)
    assert bool(got[3].isnan().all())
    assert bool(got[5].isnan().all())
    got[[3, 5]] = want[[3, 5]]
    assert torch.equal(got, want)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (5, 5), (70, 8)])
def test_routing_is_the_reference(count: int, top_k: int, normalise: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(17, count, device=DEVICE)
    weights, experts = reference.route(scores, top_k, normalise)
    for routes in (
        route_pairs(scores, top_k, normalise, _tokens(17)),
        route_blocks(scores, top_k, normalise, _tokens(17), 16)[0],
    ):
        assert torch.equal(routes.experts_TX.long(), experts)
        torch.testing.assert_close(routes.weights_TX, weights)


def test_equal_scores_choose_the_lower_ids() -> None:
    scores = torch.zeros(3, 6, device=DEVICE)
    scores[1, 4:] = 1.0
    routes = route_pairs(scores, 3, True, _tokens(3))
    assert routes.experts_TX.tolist() == [[0, 1, 2], [4, 5, 0], [0, 1, 2]]


@pytest.mark.parametrize("more", [0, 8])
@pytest.mark.parametrize(
    ("tokens", "real"), [(1, 1), (32, 32), (20, 3), (20, 0), (40, 40), (40, 3), (40, 0), (1100, 1077)]
)
def test_blocks_hold_each_pair_once_in_order_of_the_experts(tokens: int, real: int, more: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(tokens, 7, device=DEVICE)
    scores[:, 2] = -50.0
    routes, work = route_blocks(scores, 3, True, _tokens(real), 16, more)
    order = work.pairs[: real * 3].long()
    assert order.sort().values.tolist() == list(range(real * 3))
    chosen = routes.experts_TX.flatten()
    seen, blocks = 0, [0] * 7
    for expert, first, rows in work.blocks_3B.T.tolist():
        if rows:
            assert first == seen
            assert rows <= 16 + more
            blocks[expert] += 1
            assert set(chosen[order[first : first + rows]].tolist()) == {expert}
            seen += rows
    assert seen == real * 3
    experts = chosen[order].tolist()
    assert experts == sorted(experts)
    for expert, own in enumerate(blocks):
        rows = experts.count(expert)
        assert own == max(-(-(rows - more) // 16), rows > 0)


@FORMS
def test_bits_do_not_depend_on_the_other_tokens(form: Pairs | Groups | Blocks) -> None:
    case, others = _case(11, 6, 32, 16), _case(11, 6, 32, 16)
    want = _run(case, 2, True, 11, True, form)
    torch.manual_seed(1)
    for mine, other in ((case.x_TD, others.x_TD), (case.scores_TE, others.scores_TE)):
        other[:10] = torch.randn_like(other[:10])
        other[10] = mine[10]
    assert torch.equal(_run(others, 2, True, 11, True, form)[10], want[10])


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = _case(3, 6, 32, 16)
    with pytest.raises(ValueError, match="top_k 7"):
        _run(case, 7, True, 3, False, None)
    with pytest.raises(ValueError, match="down"):
        moe_rows(*case[:2], 2, True, case.gate_up_E2FD, case.down_EDF.mT.contiguous(), _tokens(3))
    with pytest.raises(ValueError, match="dtype"):
        moe_rows(case.x_TD.half(), case.scores_TE, 2, True, *case[2:4], _tokens(3))
