from hybserve.config.deployment import Deployment
from hybserve.plan.edits import edited


def edits_of(got):
    assert not got.fits
    return dict(part.split("=") for edit in got.shortfalls[0].edits for part in edit.split(" "))


def test_the_largest_number_that_fits_is_suggested(golden_spec, plan_of):
    stated = {"engine.backend": "cuda", "engine.max_running": 64, "engine.max_seq_len": "64K"}
    running = int(edits_of(plan_of(golden_spec, "64GiB", **stated))["engine.max_running"])
    assert plan_of(golden_spec, "64GiB", **{**stated, "engine.max_running": running}).fits
    assert not plan_of(golden_spec, "64GiB", **{**stated, "engine.max_running": running + 1}).fits


def test_the_least_memory_that_fits_is_suggested(golden_spec, plan_of):
    stated = {"engine.backend": "cuda", "engine.max_running": 64, "engine.max_seq_len": "64K"}
    device = edits_of(plan_of(golden_spec, "64GiB", **stated))["memory.device"]
    assert plan_of(golden_spec, device, **stated).fits
    assert not plan_of(golden_spec, f"{int(device.removesuffix('MiB')) - 1}MiB", **stated).fits


def test_a_cheaper_state_is_suggested_where_it_helps(golden_spec, plan_of):
    stated = {"engine.backend": "cuda", "engine.max_running": 100, "engine.max_seq_len": "16K"}
    assert edits_of(plan_of(golden_spec, "62GiB", **stated))["memory.state_dtype"] == "bfloat16"


def test_both_numbers_together_where_neither_is_enough(make_spec, plan_of):
    got = plan_of(make_spec(), "4MiB", **{"engine.max_running": 600, "engine.max_seq_len": "64K"})
    together = [edit for edit in got.shortfalls[0].edits if " " in edit]
    assert together
    assert "engine.max_seq_len" in together[0]
    assert "engine.max_running" in together[0]


def test_more_ranks_are_suggested_on_gpus_only(golden_spec, plan_of):
    cpu = edits_of(plan_of(golden_spec, "8GiB", **{"engine.backend": "cpu"}))
    cuda = edits_of(plan_of(golden_spec, "40GiB", **{"engine.backend": "cuda"}))
    assert set(cpu) == {"memory.device"}
    assert cuda["engine.tensor_parallel"] == "2"
    assert plan_of(golden_spec, "40GiB", **{"engine.backend": "cuda", "engine.tensor_parallel": 2}).fits


def test_an_edit_that_contradicts_another_stated_key_is_none():
    deployment = Deployment.build({"engine": {"prefill_chunk": 256, "step_tokens": 512}})
    assert edited(deployment, {"engine.step_tokens": 128}) is None
    changed = edited(deployment, {"engine.step_tokens": 256, "memory.device": "8GiB"})
    assert changed.engine.step_tokens == 256
    assert changed.stated("memory.device")
