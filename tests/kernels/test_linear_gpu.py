import pytest
import torch
from hybserve_kernels import linear as maps
from hybserve_kernels.linear import reference
from hybserve_kernels.linear.gpu.gemv import Gemv, gemv
from hybserve_kernels.linear.gpu.table import Choice, choose, chosen
from hybserve_kernels.linear.gpu.tiles import Tiles, tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def rows_of(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random; rows lie further apart than they are long, between NaN."""
    wide = torch.full((rows, width + 16), float("nan"), device=DEVICE, dtype=dtype)
    wide[:, 8:-8] = torch.randn(rows, width, device=DEVICE)
    return wide[:, 8:-8]


def weight_of(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


GEMVS = [
    pytest.param(Gemv(1, 64, 1), 64, 5, id="one output, one block"),
    pytest.param(Gemv(2, 32, 2), 96, 7, id="odd outputs, three blocks"),
    pytest.param(Gemv(4, 64, 4), 104, 9, id="ragged inputs"),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("config", "inputs", "outputs"), GEMVS)
@pytest.mark.parametrize("biased", [False, True])
def test_one_row_stored_and_added(config: Gemv, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = rows_of(1, inputs, dtype), weight_of(outputs, inputs, dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if biased else None
    out, hidden = torch.empty(1, outputs, device=DEVICE, dtype=dtype), rows_of(1, outputs, dtype)
    expected = reference.linear_add(hidden, x, weight, bias)
    gemv(config, x, weight, out, bias)
    gemv(config, x, weight, hidden, bias, add=True)
    close(out, reference.linear(x, weight, bias))
    close(hidden, expected)
    assert bool(hidden._base[:, :8].isnan().all() and hidden._base[:, -8:].isnan().all())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("config", "inputs", "outputs"), [(Gemv(2, 64, 2), 64, 7), (Gemv(4, 128, 4), 104, 5)])
def test_one_row_with_activation(config: Gemv, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = rows_of(1, inputs, dtype), weight_of(2 * outputs, inputs, dtype)
    out = torch.empty(1, outputs, device=DEVICE, dtype=dtype)
    gemv(config, x, weight, out, swiglu=True)
    close(out, reference.linear_swiglu(x, weight))


TILES = [
    pytest.param(Tiles(16, 16, 32, 1, 2), 5, 40, 96, id="narrow"),
    pytest.param(Tiles(64, 16, 32, 4, 3), 16, 128, 64, id="even"),
    pytest.param(Tiles(32, 16, 32, 2, 3, splits=3), 33, 72, 160, id="split unevenly"),
    pytest.param(Tiles(32, 32, 32, 4, 3, splits=4), 65, 40, 128, id="split, three tiles of rows"),
    pytest.param(Tiles(64, 16, 32, 4, 2, more=16, late=1), 7, 152, 64, id="tiles in two parts"),
    pytest.param(Tiles(32, 16, 32, 4, 2, splits=2, more=16), 20, 92, 96, id="split tiles in two parts"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "rows", "outputs", "inputs"), TILES)
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_stored_and_added(
    config: Tiles, rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    x, weight = rows_of(rows, inputs, dtype), weight_of(outputs, inputs, dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if biased else None
    out, hidden = torch.empty(rows, outputs, device=DEVICE, dtype=dtype), rows_of(rows, outputs, dtype)
    expected = reference.linear_add(hidden, x, weight, bias)
    tiles(config, x, weight, out, bias)
    tiles(config, x, weight, hidden, bias, add=True)
    close(out, reference.linear(x, weight, bias))
    close(hidden, expected)
    assert bool(hidden._base[:, :8].isnan().all() and hidden._base[:, -8:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "rows", "outputs", "inputs"), TILES)
def test_tiles_with_activation(config: Tiles, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = rows_of(rows, inputs, dtype), weight_of(2 * outputs, inputs, dtype)
    out = torch.empty(rows, outputs, device=DEVICE, dtype=dtype)
    tiles(config, x, weight, out, swiglu=True)
    close(out, reference.linear_swiglu(x, weight))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("rows", [1, 6])
def test_all_functions_by_our_kernels_and_by_the_library(
    rows: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(kind: str, x_MK: torch.Tensor, outputs: int) -> Choice | None:
        return chosen(kind, rows, outputs, x_MK.shape[1]) if ours else None

    monkeypatch.setattr(maps, "choose", pick)
    torch.manual_seed(4)
    x, scale = rows_of(rows, 64, torch.bfloat16), 1 + 0.3 * torch.randn(64, device=DEVICE)
    weight, bias = weight_of(48, 64, torch.bfloat16), torch.randn(48, device=DEVICE).bfloat16()
    hidden, out = rows_of(rows, 48, torch.bfloat16), torch.empty(rows, 48, device=DEVICE, dtype=torch.bfloat16)
    close(maps.linear(x, weight, bias), reference.linear(x, weight, bias))
    close(maps.norm_linear(x, scale, 1e-6, weight, bias), reference.norm_linear(x, scale, 1e-6, weight, bias))
    close(maps.linear_swiglu(x, weight), reference.linear_swiglu(x, weight))
    close(maps.norm_linear_swiglu(x, scale, 1e-6, weight), reference.norm_linear_swiglu(x, scale, 1e-6, weight))
    for given in (None, bias):
        assert maps.linear(x, weight, given, out) is out
        close(out, reference.linear(x, weight, given))
    expected = reference.linear_add(hidden, x, weight, bias)
    assert maps.linear_add_(hidden, x, weight, bias) is hidden
    close(hidden, expected)


def test_which_shapes_have_kernels_of_our_own() -> None:
    assert choose("plain", torch.empty(1, 4096, dtype=torch.bfloat16), 4096) is None
    assert isinstance(chosen("plain", 1, 4000, 4096), Gemv)
    assert isinstance(chosen("swiglu", 9, 4000, 4096), Tiles)
    assert chosen("plain", 9, 4000, 4100) is None
    assert chosen("plain", 5000, 4096, 4096) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs processors that finish in any order")
def test_split_products_have_the_same_bits_every_time() -> None:
    torch.manual_seed(5)
    x, weight = rows_of(32, 4096, torch.bfloat16), weight_of(4096, 4096, torch.bfloat16)
    outs = []
    for _ in range(50):
        out = torch.empty(32, 4096, device=DEVICE, dtype=torch.bfloat16)
        tiles(Tiles(64, 32, 128, 4, 4, splits=4), x, weight, out)
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)
