import pytest
import torch
from hybserve_kernels.rotary import inverse_frequencies, reference, rotary_, rotary_tables


@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 16), (20, 10), (32, 8), (12, 2)])
@pytest.mark.parametrize("tokens", [1, 5, 65])
def test_rotary_is_the_reference_and_leaves_the_rest(dim: int, rotary_dim: int, tokens: int) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(tokens, 3, dim), torch.randint(0, 4000, (tokens,))
    tables = rotary_tables(positions, inverse_frequencies(rotary_dim, 1e4, x.device))
    want = reference.rotary(x, positions, rotary_dim, 1e4)
    given = x.clone()
    got = rotary_(given, tables)
    assert got is given
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_position_zero_turns_nothing() -> None:
    x = torch.randn(1, 2, 8)
    tables = rotary_tables(torch.zeros(1, dtype=torch.int64), inverse_frequencies(8, 1e4, x.device))
    assert torch.equal(rotary_(x.clone(), tables), x)


def test_only_fp32_turns_in_place() -> None:
    tables = rotary_tables(torch.zeros(1, dtype=torch.int64), inverse_frequencies(8, 1e4, torch.device("cpu")))
    with pytest.raises(TypeError, match="fp32"):
        rotary_(torch.zeros(1, 1, 8, dtype=torch.bfloat16), tables)
