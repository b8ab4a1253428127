"""Of the last layer only what is read: the last token of every row gets what it gets when all are computed, and the
pools get the same."""

import msgspec
import pytest
import torch
from hybserve_kernels.rows import DeviceStep

from hybserve.core.messages import SequenceStart, StepPlan
from hybserve.core.sampling import SamplingParams
from hybserve.layers.step_context import StepContext
from hybserve.models.load import dummy_weights
from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.sequences import Sequences
from hybserve.runner.staging import Shape, Staging, make_step
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.split import split_ranks
from tests.checkpoints import make_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 4
LIMITS = EngineLimits(64, 12, 6, 5, 256, 256, 128, "float32", "float32", "float32")
#: Rows of this step: a decode row at 70, a prompt's chunk of 70 tokens, a prompt of 3.
PLAN = StepPlan(
    step=1, epoch=1, seqs=[1, 2, 3], starts=[70, 0, 0], counts=[1, 70, 3], slots=[1, 2, 3], tokens=list(range(74)),
    page_rows=[0, 0, 1, 1, 2], page_ids=[1, 2, 3, 4, 5], sample_rows=[0, 2], sample_seqs=[1, 3], sample_outputs=[1, 0],
    state_copies=[], page_copies=[], fork_seqs=[], fork_pages=[], freed=[], gap_rows=[], gap_ends=[], export_rows=[],
    export_positions=[], export_slots=[],
)  # fmt: skip


def staged(shape_of) -> tuple[Staging, torch.Tensor, DeviceStep]:
    sequences = Sequences("cpu", WIDTH)
    starts = [SequenceStart(seq, 1, 0, SamplingParams(), [], 10, 0) for seq in PLAN.seqs]
    step = make_step(PLAN, *sequences.begin(PLAN, starts))
    staging = Staging(LIMITS, torch.device(DEVICE))
    shape = shape_of(step.shape(LIMITS, scored=False))
    lists = staging.send(step, shape, sequences)
    tables = torch.zeros(LIMITS.max_running, WIDTH, dtype=torch.int32, device=DEVICE)
    tables.view(-1)[lists.table_places.long()] = lists.table_pages
    tokens, _, rows = staging.views(shape, tables)
    return staging, tokens, rows


@pytest.mark.parametrize(("checkpoint", "first", "layers"), [("dense", 2, 2), ("moe", 3, 1), ("tied", 0, 1)])
def test_the_last_tokens_are_as_if_all_were_computed(tmp_path, checkpoint: str, first: int, layers: int) -> None:
    """The last layer is attention with a dense and a routed mlp, and (tied) a recurrent one."""
    spec = read_model_spec(make_checkpoint(tmp_path, checkpoint))
    spec = msgspec.structs.replace(spec, layers=spec.layers[first : first + layers])
    share = split_ranks(spec)[0]
    model = build_model(spec, share, torch.float32, DEVICE, triton=True)
    dummy_weights(model.params, 1)
    found = []
    with torch.inference_mode():
        for shape_of in (
            lambda need: need._replace(last=0),
            lambda need: need,
            lambda need: Shape(128, 3, 3, 6, WIDTH, 5),  # a graph's room: padded everywhere
        ):
            pools = DevicePools(spec, share, LIMITS, DEVICE, poisoned=True)
            draw = torch.Generator().manual_seed(2)
            for pool in (*(kv[1:3] for kv in pools.kv_layers), *(m[1:2] for m in pools.matrices + pools.windows)):
                pool.copy_(torch.randn(pool.shape, generator=draw))  # what the decode row reads
            staging, tokens, rows = staged(shape_of)
            context = StepContext.of_step(rows, 64, pools.kv_layers, pools.matrices, pools.windows)
            hidden = model.forward(tokens.long(), context)
            found.append((hidden.index_select(0, staging.sample_at[:2]), pools))
            assert pools.padding_intact()
    (expected, whole), *others = found
    assert expected.isfinite().all()
    for sampled, pools in others:
        torch.testing.assert_close(sampled, expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in (
            *zip(pools.kv_layers, whole.kv_layers, strict=True),
            *zip(pools.matrices, whole.matrices, strict=True),
            *zip(pools.windows, whole.windows, strict=True),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
