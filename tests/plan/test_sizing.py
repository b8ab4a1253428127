import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybserve.config.deployment import Deployment
from hybserve.core.errors import ConfigError
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.planner import make_plan
from hybserve.plan.sizing import largest, make_frame, retention_slots, size
from hybserve.spec.inventory import weight_bytes
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec
from hybserve.spec.split import split_ranks

PLENTY = MemoryFacts("cpu", 1 << 45)


@st.composite
def specs(draw):
    mixers = draw(st.lists(st.sampled_from(["gated_delta", "attention"]), min_size=1, max_size=9))
    heads = draw(st.integers(1, 4))
    keys = draw(st.integers(1, 5))
    attention = AttentionSpec(heads * draw(st.integers(1, 3)), heads, draw(st.sampled_from([4, 6, 16])), 2, 1e4)
    delta = GatedDeltaSpec(keys, keys * draw(st.integers(1, 3)), draw(st.sampled_from([4, 7, 16])), 8, 4)
    return ModelSpec(
        family="qwen3_5",
        vocab_size=draw(st.sampled_from([97, 512])),
        hidden=32,
        ffn=64,
        layers=tuple(LayerSpec(mixer, "dense") for mixer in mixers),
        attention=attention if "attention" in mixers else None,
        gated_delta=delta if "gated_delta" in mixers else None,
        moe=None,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        max_seq_len=draw(st.sampled_from([64, 1000, 5000])),
    )


def possible(spec, ranks):
    try:
        split_ranks(spec, ranks)
    except ValueError:
        return False
    return True


@st.composite
def cases(draw, least=200_000, most=40_000_000, prefixes=(True, False)):
    """A model and a deployment of it on ranks that it can be split over; ``least`` and ``most`` bound the device."""
    spec = draw(specs())
    engine = {
        "max_running": draw(st.none() | st.integers(1, 40)),
        "max_seq_len": draw(st.none() | st.integers(2, 3000)),
        "step_tokens": draw(st.none() | st.integers(64, 600)),
        "tensor_parallel": draw(st.sampled_from([ranks for ranks in (1, 2, 3) if possible(spec, ranks)])),
        "pipeline_parallel": draw(st.integers(1, min(3, len(spec.layers)))),
    }
    cache = {"page_size": draw(st.sampled_from([1, 4, 48, 64])), "prefix": draw(st.sampled_from(prefixes))}
    memory = {"device": draw(st.integers(least, most)), "reserve": draw(st.sampled_from([0, 1000]))}
    stated = {name: value for name, value in engine.items() if value is not None}
    return spec, Deployment.build({"engine": stated, "cache": cache, "memory": memory})


@settings(max_examples=80, deadline=None)
@given(cases())
def test_no_rank_is_asked_for_more_than_it_has_and_floors_are_kept(case):
    spec, deployment = case
    got = make_plan(spec, deployment, PLENTY)
    engine = deployment.engine
    if not got.fits:
        assert got.engine is None
        assert got.shortfalls
        assert all(short.need > short.have == deployment.memory.device for short in got.shortfalls)
        return
    limits = got.engine
    for stage in got.stages:
        used = stage.weight_bytes + stage.pool_bytes + stage.transient_bytes + stage.reserve_bytes
        assert used + stage.headroom_bytes == stage.device_bytes == deployment.memory.device
        pools = stage.state_slot_bytes * got.pools.state_slots + stage.kv_page_bytes * got.pools.kv_pages
        assert stage.pool_bytes == pools  # the same counts on every rank
    assert got.pools.kv_pages >= got.floors.kv_pages
    assert got.pools.state_slots == got.floors.state_slots + got.pools.retention_slots
    assert got.floors.state_slots == limits.max_running + 1 + deployment.cache.prefix
    assert (limits.kv_pages, limits.state_slots) == (got.pools.kv_pages, got.pools.state_slots)
    assert limits.max_running == (engine.max_running or limits.max_running)
    assert (
        limits.max_seq_len
        == (engine.max_seq_len or limits.max_seq_len)
        <= max(spec.max_seq_len, engine.max_seq_len or 0)
    )
    assert limits.step_tokens == (engine.step_tokens or limits.step_tokens)
    assert limits.prefill_chunk % limits.page_size == 0
    assert limits.page_size <= limits.prefill_chunk <= limits.step_tokens
    assert sum(stage.layers for stage in got.stages if stage.rank == 0) == len(spec.layers)
    if not deployment.cache.prefix or spec.recurrent_layers == 0:
        assert got.pools.retention_slots == 0


@settings(max_examples=25, deadline=None)
@given(cases(most=2_000_000))
def test_every_suggested_edit_makes_it_fit(case):
    spec, deployment = case
    got = make_plan(spec, deployment, PLENTY)
    assume(not got.fits)
    edits = got.shortfalls[0].edits
    assert 1 <= len(edits) <= 3
    for edit in edits:
        values = deployment.model_dump(mode="json", exclude_unset=True)
        for part in edit.split(" "):
            key, value = part.split("=")
            section, name = key.split(".")
            values.setdefault(section, {})[name] = value
        assert make_plan(spec, Deployment.build(values), PLENTY).fits, edit


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 10_000_000))
def test_more_memory_never_buys_less(case, more):
    spec, deployment = case
    engine = {"max_running": 4, "max_seq_len": 300, "step_tokens": 128} | deployment.engine.model_dump(
        exclude_unset=True
    )
    values = {"engine": engine, "cache": deployment.cache.model_dump(exclude_unset=True)}
    small = make_plan(spec, Deployment.build({**values, "memory": {"device": deployment.memory.device}}), PLENTY)
    large = make_plan(spec, Deployment.build({**values, "memory": {"device": deployment.memory.device + more}}), PLENTY)
    assert large.fits >= small.fits
    if small.fits:
        assert large.pools.kv_pages >= small.pools.kv_pages
        assert large.pools.state_slots >= small.pools.state_slots


@settings(max_examples=30, deadline=None)
@given(cases(least=20_000_000, prefixes=(True,)))
def test_retention_takes_all_that_is_left(case):
    spec, deployment = case
    frame = make_frame(spec, deployment, PLENTY, weight_bytes)
    got = size(frame, deployment)
    assume(got.fits and spec.attention is not None)
    extra = got.pages - got.floors.kv_pages + 1
    assert not frame.holds(
        got.shape, got.floors.kv_pages + extra, got.floors.state_slots + retention_slots(frame, extra)
    )


@given(st.integers(0, 100), st.integers(0, 100), st.integers(-10, 120))
def test_largest(low, span, edge):
    high = low + span
    expected = None if edge < low else min(edge, high)
    assert largest(low, high, lambda value: value <= edge) == expected


def test_counts_are_inside_every_ranks_budget_not_of_one_binding_rank(make_spec, plan_of):
    """Stage 0 is all recurrent, stage 1 all attention: slots bind on the one, pages on the other."""
    spec = make_spec("dddaaa")
    got = plan_of(spec, "60MiB", **{"engine.pipeline_parallel": 2, "engine.max_running": 8, "engine.max_seq_len": 512})
    assert got.fits
    first, last = got.stages
    assert (first.kv_page_bytes, last.state_slot_bytes) == (0, 0)
    assert first.headroom_bytes >= 0
    assert last.headroom_bytes >= 0
    assert min(first.headroom_bytes / first.state_slot_bytes, last.headroom_bytes / last.kv_page_bytes) < 3


def test_peer62_bytes_are_charged_per_stage(golden_spec, plan_of):
    """24 slots on three stages: each stage pays for its own layers only."""
    stated = {
        "engine.backend": "cuda", "engine.pipeline_parallel": 3, "engine.max_running": 22,
        "memory.conv_dtype": "fp32", "memory.kv_dtype": "fp8", "engine.max_seq_len": "64K",
    }  # fmt: skip
    got = plan_of(golden_spec, "32GiB", **stated)
    assert got.floors.state_slots == 24
    assert [round(24 * stage.state_slot_bytes / 2**20) for stage in got.stages] == [1272, 1197, 1122]
    assert [(s.layers, s.recurrent_layers, s.attention_layers) for s in got.stages] == [
        (22, 17, 5), (21, 16, 5), (21, 15, 6),
    ]  # fmt: skip


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 3), (8, 2), (16, 1)])
def test_peer69_uneven_ranks_plan(golden_spec, plan_of, tensor, pipeline):
    stated = {
        "engine.backend": "cuda",
        "engine.tensor_parallel": tensor,
        "engine.pipeline_parallel": pipeline,
        "engine.max_running": 32,
        "engine.max_seq_len": "32K",
    }
    got = plan_of(golden_spec, "24GiB", **stated)
    assert got.fits
    assert [(stage.stage, stage.rank) for stage in got.stages] == [
        (stage, rank) for stage in range(pipeline) for rank in range(tensor)
    ]
    if tensor == 3:
        slots = [stage.state_slot_bytes for stage in got.stages if stage.stage == 0]
        assert slots[0] * 5 == slots[1] * 6  # key heads 6/5/5


def test_peer59_defaulted_numbers_are_lowered_and_said(golden_spec, plan_of):
    got = plan_of(golden_spec, "56GiB", **{"engine.backend": "cuda"})
    assert got.fits
    why = {key: reason for key, _, reason in got.chosen}
    assert why["engine.max_running"].startswith("lowered from 256")
    assert got.engine.max_running < 256


def test_stated_numbers_are_never_lowered(golden_spec, plan_of):
    got = plan_of(golden_spec, "56GiB", **{"engine.backend": "cuda", "engine.max_running": 256})
    assert not got.fits
    assert any(edit.startswith("engine.max_running=") for edit in got.shortfalls[0].edits)


def test_without_a_prefix_cache_nothing_is_retained_and_pages_end_at_demand(make_spec, plan_of):
    stated = {"cache.prefix": False, "engine.max_running": 4, "engine.max_seq_len": 512}
    got = plan_of(make_spec(), "1GiB", **stated)
    assert got.pools.kv_pages == 4 * 512 // 64 + 512 // 64 + 1
    assert got.pools.retention_slots == 0
    assert got.stages[0].headroom_bytes > 0


def test_an_unstated_budget_is_not_filled_for_its_own_sake(make_spec, plan_of):
    got = plan_of(make_spec(), **{"engine.max_running": 4, "engine.max_seq_len": 512})
    assert got.stages[0].device_bytes == 4 << 30
    assert got.pools.kv_pages == 2 * (4 * 512 // 64 + 512 // 64 + 1)


def test_checkpoints_follow_the_retention_spacing(make_spec, plan_of):
    stated = {"engine.max_running": 2, "engine.max_seq_len": 512, "cache.checkpoint_every": 256}
    dense = plan_of(make_spec(), "20MiB", **stated)
    sparse = plan_of(make_spec(), "20MiB", **{**stated, "cache.checkpoint_every": 1024})
    for got, every in ((dense, 256), (sparse, 1024)):
        retained = (got.pools.kv_pages - got.floors.kv_pages) * 64
        assert got.pools.retention_slots == -(-retained // every)
    assert sparse.pools.kv_pages > dense.pools.kv_pages
    assert sparse.pools.retention_slots < dense.pools.retention_slots


def test_automatic_spacing_is_not_below_what_a_checkpoint_costs(golden_spec):
    deployment = Deployment.build({"memory": {"device": "139GiB"}, "engine": {"backend": "cuda"}})
    frame = make_frame(golden_spec, deployment, MemoryFacts("cuda", 0), weight_bytes)
    assert frame.checkpoint_every % 64 == 0
    kv = 4 * 256 * 2 * 2 * 16
    state = 48 * (786_432 * 4 + 30_720 * 2)
    assert (frame.checkpoint_every - 64) * kv < state <= frame.checkpoint_every * kv


@pytest.mark.parametrize("mixers", ["ddd", "aaa"])
def test_models_with_one_kind_of_layer(make_spec, plan_of, mixers):
    got = plan_of(make_spec(mixers), "64MiB", **{"engine.max_running": 4, "engine.max_seq_len": 512})
    assert got.fits
    assert got.pools.state_slots >= 4 + 1
    assert got.pools.kv_pages >= 512 // 64 + 1
    assert (got.bytes.kv_per_token == 0) == (mixers == "ddd")
    assert (got.bytes.state_slot == 0) == (mixers == "aaa")


def test_a_gpu_that_is_not_here_must_be_stated(make_spec, plan_of):
    with pytest.raises(ConfigError, match=r"memory\.device"):
        plan_of(make_spec(), free=0, **{"engine.backend": "cuda"})


@pytest.mark.parametrize(("key", "value"), [("engine.pipeline_parallel", 13), ("engine.tensor_parallel", 3)])
def test_layouts_that_the_model_cannot_have(make_spec, plan_of, key, value):
    with pytest.raises(ConfigError, match=key.partition(".")[2]):
        plan_of(make_spec(), "1GiB", **{key: value})


def test_automatic_numbers(make_spec, plan_of):
    got = plan_of(make_spec(dtype="bfloat16")).engine
    assert (got.max_running, got.max_seq_len, got.step_tokens, got.prefill_chunk) == (16, 4096, 512, 256)
    assert (got.kv_dtype, got.state_dtype, got.conv_dtype) == ("bfloat16", "float32", "bfloat16")
    got = plan_of(make_spec(dtype="bfloat16"), **{"model.dtype": "fp32", "memory.kv_dtype": "fp16"}).engine
    assert (got.kv_dtype, got.conv_dtype) == ("float16", "float32")
    got = plan_of(make_spec(), **{"engine.max_running": 1000, "cache.page_size": 1}).engine
    assert got.step_tokens == 1001  # every running row and one page of prefill
    got = plan_of(make_spec(), "8GiB", **{"engine.backend": "cuda"}).engine
    assert (got.max_running, got.step_tokens, got.prefill_chunk) == (256, 8192, 8192)
