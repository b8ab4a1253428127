import json

import pytest

from hybserve.core.errors import EXIT_PLAN, PlanError
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.report import format_plan, plan_json, require_fit, require_memory

TOO_MUCH = {"engine.max_running": 500, "engine.max_seq_len": 4096}


def test_json_has_the_agreed_shape(golden_spec, plan_of):
    stated = {"engine.backend": "cuda", "engine.pipeline_parallel": 3, "engine.tensor_parallel": 2}
    data = json.loads(plan_json(plan_of(golden_spec, "40GiB", **stated)))
    assert data["fits"] is True
    assert data["model"] == {"layers": 64, "recurrent_layers": 48, "attention_layers": 16}
    assert set(data["bytes"]) == {"state_slot", "state_slot_per_layer", "kv_per_token"}
    assert set(data["floors"]) == {"state_slots", "kv_pages"}
    assert set(data["pools"]) == {"state_slots", "kv_pages", "retention_slots"}
    assert len(data["stages"]) == 6
    wanted = {
        "stage", "rank", "layers", "recurrent_layers", "attention_layers", "state_slot_bytes", "kv_page_bytes",
        "weight_bytes", "pool_bytes", "host_bytes",
    }  # fmt: skip
    assert all(wanted <= set(stage) for stage in data["stages"])
    assert data["shortfalls"] == []


def test_json_of_what_does_not_fit(make_spec, plan_of):
    data = json.loads(plan_json(plan_of(make_spec(), "4MiB", **TOO_MUCH)))
    assert data["fits"] is False
    assert data["engine"] is None
    (short,) = data["shortfalls"]
    assert set(short) == {"what", "need", "have", "edits"}
    assert short["need"] > short["have"] == 4 << 20
    assert 1 <= len(short["edits"]) <= 3


def test_people_read_at_most_forty_lines(golden_spec, plan_of):
    stated = {"engine.backend": "cuda", "engine.pipeline_parallel": 8, "engine.tensor_parallel": 8}
    text = format_plan(plan_of(golden_spec, "24GiB", **stated))
    assert len(text.splitlines()) <= 40
    assert "and 52 more ranks" in text
    assert len(format_plan(plan_of(golden_spec, "1GiB", **stated)).splitlines()) <= 40


def test_what_the_budget_buys(make_spec, plan_of):
    stated = {"engine.max_running": 64, "engine.max_seq_len": "64K"}
    text = format_plan(plan_of(make_spec(max_seq_len=65536), "1GiB", **stated))
    assert "buys" in text
    assert "64 running x " in text
    assert " x 64K" in text
    assert "no KV" in format_plan(plan_of(make_spec("ddd"), "64MiB"))
    assert "cache.prefix is false" in format_plan(plan_of(make_spec(), "64MiB", **{"cache.prefix": False}))


def test_zero_retention_is_said(golden_spec, plan_of):
    stated = {"engine.backend": "cuda", "engine.max_running": 64, "engine.max_seq_len": "42K"}
    need = plan_of(golden_spec, "60GiB", **stated).shortfalls[0].edits[-1].partition("=")[2]
    assert "retention budget zero" in format_plan(plan_of(golden_spec, need, **stated))


def test_a_fitting_plan_passes(make_spec, plan_of):
    require_fit(plan_of(make_spec(), "1GiB"))


def test_need_have_and_edits_are_in_the_refusal(make_spec, plan_of):
    with pytest.raises(PlanError) as caught:
        require_fit(plan_of(make_spec(), "4MiB", **TOO_MUCH))
    assert caught.value.exit_code == EXIT_PLAN
    text = str(caught.value)
    assert "need " in text
    assert "have 4 MiB (4 194 304 B)" in text
    assert "memory.device=" in text


def test_F54_F66_more_than_this_machine_has_is_refused_with_the_sum(make_spec, plan_of):
    got = plan_of(make_spec(), "1GiB")
    require_memory(got, MemoryFacts("cpu", 2 << 30))
    require_memory(got, MemoryFacts("cuda", 0))
    with pytest.raises(PlanError, match=r"100 MiB \(104 857 600 B\) of memory free"):
        require_memory(got, MemoryFacts("cpu", 100 << 20))


def test_a_length_beyond_the_models_own_is_remarked(make_spec, plan_of):
    text = format_plan(plan_of(make_spec(max_seq_len=1024), "1GiB", **{"engine.max_seq_len": 2048}))
    assert "beyond the model's own 1K" in text
