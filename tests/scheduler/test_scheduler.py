"""One request at a time through every turn of its life; the crowd is the state machine's."""

import gc
import tracemalloc

import pytest

from hybserve.cache.integrity import IntegrityError
from hybserve.core.messages import (
    Cancel,
    Drain,
    Flush,
    Flushed,
    Generate,
    Probe,
    Probed,
    StepFailed,
    StepPlan,
    StopAt,
    Tokens,
)
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import SAMPLED, CacheTruth, Ended
from hybserve.scheduler.request import State
from hybserve.scheduler.scheduler import EngineLost, Scheduler
from tests.fakes import TattletaleRunner, limits
from tests.scheduler.rig import Rig

PAGE = 4


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("prompt", range(1, 3 * PAGE + 2))
def test_every_prompt_length_gives_the_tokens_of_a_lone_run(prompt: int, ahead: bool) -> None:
    rig = Rig(prefill_chunk=PAGE)
    rig.ask(1, prompt, max_tokens=6)
    if ahead:
        rig.drain()
    else:
        while rig.step() is not None:
            pass
    rig.right([1])
    assert rig.ended[1, 0] == Ended.LENGTH
    assert rig.empty()


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("prompt", range(1, 2 * PAGE + 2))
def test_n_choices_fork_from_one_prefill_and_differ(prompt: int, ahead: bool) -> None:
    rig = Rig()
    rig.ask(1, prompt, max_tokens=7, n=3)
    if ahead:
        rig.drain()
    else:
        while rig.step() is not None:
            pass
    rig.right([1])
    assert len({tuple(rig.tokens[1, choice]) for choice in range(3)}) == 3
    prefills = [count for plan in rig.runner.plans for count in plan.counts if count > 1]
    assert sum(prefills) == (prompt if prompt > 1 else 0), "the prompt was computed more than once"
    assert rig.empty()


def test_full_prompt_pages_are_shared_by_the_choices_and_the_partial_one_is_copied() -> None:
    rig = Rig()
    rig.ask(1, 2 * PAGE + 1, max_tokens=5, n=3)
    rig.step()
    plan = rig.step()
    assert plan is not None
    assert len(plan.state_copies) == len(plan.page_copies) == 4
    tables = [
        [page for seq, page in zip(plan.fork_seqs, plan.fork_pages, strict=True) if seq == index]
        for index in sorted(set(plan.fork_seqs))
    ]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 2
    assert tables[0][2] != tables[1][2]


def test_prefill_beside_decodes_is_bounded_and_alone_it_is_not() -> None:
    rig = Rig(step_tokens=32, prefill_chunk=32, prefill_beside=8, max_seq_len=64, kv_pages=60)
    rig.ask(1, 30, max_tokens=12)
    rig.turn()
    rig.ask(2, 30, max_tokens=1)
    rig.ask(3, 20, max_tokens=1)
    rig.drain()
    assert rig.runner.plans[0].counts == [30]
    beside = [sum(plan.counts[1:]) for plan in rig.runner.plans[1:] if len(plan.counts) > 1]
    assert beside[:3] == [8, 8, 8]
    assert max(beside) == 8
    rig.right([1, 2, 3])


def test_a_long_queue_is_worth_more_than_the_pace_of_decodes() -> None:
    rig = Rig(step_tokens=32, prefill_chunk=32, prefill_beside=8, prefill_backlog=40, max_seq_len=64, kv_pages=60)
    rig.ask(1, 30, max_tokens=12)
    rig.turn()
    for uid in (2, 3, 4):
        rig.ask(uid, 30, max_tokens=1)
    rig.drain()
    beside = [sum(plan.counts[1:]) for plan in rig.runner.plans[1:] if len(plan.counts) > 1]
    assert beside[0] > 8
    assert beside[-1] <= 8
    rig.right([1, 2, 3, 4])


def test_prefill_and_decode_ride_in_one_step_under_step_tokens() -> None:
    rig = Rig(step_tokens=8, prefill_chunk=8)
    rig.ask(1, 3, max_tokens=20)
    rig.turn()
    rig.ask(2, 30, max_tokens=2)
    rig.drain()
    mixed = [plan for plan in rig.runner.plans if len(plan.seqs) == 2 and max(plan.counts) > 1]
    assert mixed
    for plan in mixed:
        assert plan.counts[0] == 1
        assert sum(plan.counts) <= 8
    rig.right([1, 2])


def test_a_plan_is_made_before_the_result_of_the_one_before() -> None:
    rig = Rig()
    rig.ask(1, 3, max_tokens=5)
    rig.plan()
    rig.launch()
    plan = rig.plan()
    assert plan is not None
    assert (plan.tokens, plan.starts, plan.sample_outputs) == ([SAMPLED], [3], [1])


def test_a_sequence_that_ends_by_length_is_not_planned_again() -> None:
    rig = Rig()
    rig.ask(1, 3, max_tokens=2)
    rig.drain()
    assert len(rig.runner.plans) == 2


def test_what_was_sampled_past_a_stop_token_is_told_to_nobody() -> None:
    rig = Rig()
    rig.ask(1, 5, max_tokens=20, temperature=0.0)
    third = rig.expected(1)[0][2]
    rig.ask(2, rig.asked[1].prompt, max_tokens=20, temperature=0.0, stop_ids=(third,))
    rig.drain()
    rig.right([1, 2])
    assert rig.ended[2, 0] == Ended.STOP
    steps_of_two = sum(plan.sample_seqs.count(1) for plan in rig.runner.plans)
    assert steps_of_two == len(rig.tokens[2, 0]) + 1, "the overshoot row was not there to be thrown away"
    assert rig.empty()


@pytest.mark.parametrize("late", range(4))
def test_stop_at_ends_one_choice_and_the_others_go_on(late: int) -> None:
    rig = Rig()
    rig.ask(1, 6, max_tokens=12, n=2)
    while len(rig.tokens.get((1, 1), [])) < 2 + late:
        rig.turn()
    rig.tell(StopAt(1, 1, 2))
    told = len(rig.tokens[1, 1])
    rig.drain()
    assert rig.tokens[1, 1] == rig.expected(1)[1][:told]
    assert rig.tokens[1, 0] == rig.expected(1)[0]
    assert 1 in rig.finished
    assert rig.empty()


def test_stop_at_for_what_has_ended_or_never_was_is_ignored() -> None:
    rig = Rig()
    rig.ask(1, 6, max_tokens=3)
    rig.tell(StopAt(1, 0, 1))  # nothing was told yet, so nothing can be stopped
    rig.tell(StopAt(1, 5, 1))
    rig.tell(StopAt(9, 0, 1))
    rig.drain()
    rig.tell(StopAt(1, 0, 1))
    rig.right([1])


@pytest.mark.parametrize("turns", range(7))
@pytest.mark.parametrize("n", [1, 3])
def test_F13_peer34_cancel_gives_everything_back_in_every_state(turns: int, n: int) -> None:
    rig = Rig(prefill_chunk=PAGE, kv_pages=12)
    rig.ask(1, 7, max_tokens=4)
    rig.ask(2, 11, max_tokens=6, n=n)
    for _ in range(turns):
        rig.turn()
    rig.tell(Cancel(2))
    told = dict(rig.tokens)
    rig.drain()
    rig.right([1])
    assert {key: value for key, value in rig.tokens.items() if key[0] == 2} == {
        key: value for key, value in told.items() if key[0] == 2
    }
    assert not {2} & {*rig.finished, *rig.failed}
    assert rig.empty()


def test_F13_a_storm_of_cancellations_leaves_nothing() -> None:
    rig = Rig(kv_pages=20)
    for uid in range(1, 501):
        if uid % 5 == 0:
            rig.turn()
        rig.tell(
            Generate(
                uid,
                [uid % 64] * (1 + uid % 9),
                SamplingParams(seed=uid, max_tokens=8),
                1 + uid % 3,
                "",
                "",
                0,
                rig.now,
                0.0,
            )
        )
        if uid > 20:
            rig.tell(Cancel(uid - 20))
    for uid in range(481, 501):
        rig.tell(Cancel(uid))
    rig.drain()
    assert rig.empty()
    rig.ask(1000, 9, max_tokens=9)
    rig.drain()
    rig.right([1000])


def test_F15_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    rig = Rig(max_queue=2)
    for uid in (1, 2, 3):
        rig.ask(uid)
    error = rig.failed[3].error
    assert (error.code, error.status, error.retry_after) == ("queue_full", 503, 1)
    rig.drain()
    rig.right([1, 2])


def test_F15_the_queue_is_bounded_in_tokens_too_but_takes_one_request_of_any_size() -> None:
    rig = Rig(max_queue_tokens=20)
    rig.ask(1, 30)
    rig.ask(2, 1)
    assert rig.failed[2].error.code == "queue_full"
    rig.drain()
    rig.ask(3, 10)
    rig.ask(4, 10)
    rig.ask(5, 1)
    assert set(rig.failed) == {2, 5}


def test_F15_a_deadline_in_the_queue_is_504_and_nothing_was_computed() -> None:
    rig = Rig(max_running=1, state_slots=2)
    rig.ask(1, 4, max_tokens=50)
    rig.turn()
    rig.ask(2, 4, timeout=2.0)
    rig.now += 1.9
    rig.turn()
    assert not rig.failed
    rig.now += 0.2
    rig.turn()
    error = rig.failed[2].error
    assert (error.status, error.code) == (504, "timeout")
    assert "in the queue" in error.message
    rig.drain()
    assert all(plan.starts[0] != 0 for plan in rig.runner.plans[1:]), "the second request was prefilled"


def test_F15_a_deadline_while_it_runs_frees_everything_at_once() -> None:
    rig = Rig()
    rig.ask(1, 9, max_tokens=60, n=2, timeout=5.0)
    rig.ask(2, 9, max_tokens=9)
    for _ in range(4):
        rig.turn()
    rig.now += 6
    rig.drain()
    assert rig.failed[1].error.status == 504
    rig.right([2])
    assert rig.empty()


def test_F67_only_the_given_monotonic_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.ask(1, 4, timeout=5.0)
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr("time.time", lambda jump=jump: 1e9 + jump)
        rig.turn()
    rig.drain()
    rig.right([1])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "param", "words"),
    [
        (50, 20, 1, "max_tokens", ("18 KV pages", "has 15")),
        (4, 4, 9, "n", ("n = 9", "at most 8")),
    ],
)
def test_F55_what_can_never_fit_is_refused_with_the_numbers(
    prompt: int, max_tokens: int, n: int, param: str, words: tuple[str, ...]
) -> None:
    rig = Rig(kv_pages=16)
    rig.ask(1, prompt, max_tokens, n)
    error = rig.failed[1].error
    assert (error.status, error.code, error.param) == (400, "exceeds_capacity", param)
    assert all(word in error.message for word in words)
    assert rig.empty()


def test_F55_what_just_fits_runs_alone() -> None:
    rig = Rig(kv_pages=16, max_seq_len=61)
    rig.ask(1, 41, max_tokens=20)
    rig.drain()
    rig.right([1])
    rig.ask(2, 41, max_tokens=21)
    assert rig.failed[2].error.code == "context_length_exceeded"


def test_F56_F68_when_pages_run_out_the_last_is_parked_and_resumes_where_it_was() -> None:
    rig = Rig(kv_pages=11, max_seq_len=40)
    for uid in (1, 2, 3):
        rig.ask(uid, 6, max_tokens=24)
    parked: set[int] = set()
    while rig.turn():
        parked |= {lead.uid for lead in rig.scheduler.waiting if lead.state is State.PARKED}
    assert parked
    assert 1 not in parked, "the first in the order was parked"
    rig.right([1, 2, 3])
    assert rig.empty()


def test_F68_park_resume_and_abort_in_turn_free_nothing_twice() -> None:
    for abort_at in range(2, 60, 3):
        rig = Rig(kv_pages=9, max_seq_len=32)
        for uid in (1, 2, 3):
            rig.ask(uid, 5, max_tokens=20, n=2 if uid == 2 else 1)
        for _ in range(abort_at):
            rig.turn()
        rig.tell(Cancel(2))
        rig.drain()
        rig.right([1, 3])
        assert rig.empty()


def test_parked_requests_resume_before_newer_ones_are_admitted() -> None:
    rig = Rig(kv_pages=11, max_seq_len=40)
    for uid in (1, 2, 3):
        rig.ask(uid, 6, max_tokens=24)
    while not rig.scheduler.waiting.parked:
        rig.turn()
    rig.ask(9, 1, max_tokens=1)
    parked = next(iter(rig.scheduler.waiting)).uid
    while 9 not in rig.finished:
        assert rig.turn()
        if any(sequence.uid == 9 for sequence in rig.scheduler.running.sequences):
            assert parked in rig.finished or not rig.scheduler.waiting.parked
    rig.drain()
    rig.right([1, 2, 3, 9])


def test_a_resumed_sequence_brings_its_history_if_penalties_need_it() -> None:
    rig = Rig(kv_pages=11, max_seq_len=40)
    starts = []
    begin = rig.runner.execute
    rig.runner.execute = lambda begun, plan: (starts.extend(begun), begin(begun, plan))[1]  # type: ignore[method-assign]
    for uid in (1, 2, 3):
        rig.ask(uid, 6, max_tokens=24, presence_penalty=0.5 if uid > 1 else 0.0)
    rig.drain()
    assert rig.scheduler.running.parks
    resumed = [start for start in starts if start.generated]
    assert resumed
    for start in starts:
        wanted = 6 + start.generated if start.sampling.needs_history else 0
        assert len(start.history) == wanted
        assert start.prompt_len == 6
    rig.right([1, 2, 3])


def test_lower_priority_numbers_come_first_and_arrival_breaks_ties() -> None:
    rig = Rig(max_running=1, state_slots=2)
    for uid, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        rig.ask(uid, 3, max_tokens=2, priority=priority)
    rig.drain()
    assert list(rig.finished) == [4, 2, 1, 3]


def test_drain_refuses_new_requests_and_finishes_the_rest() -> None:
    rig = Rig(max_running=1, state_slots=2)
    rig.ask(1, 5)
    rig.ask(2, 5)
    rig.turn()
    rig.tell(Drain())
    rig.ask(3, 5)
    assert (rig.failed[3].error.code, rig.failed[3].error.status) == ("draining", 503)
    rig.drain()
    rig.right([1, 2])


def test_without_a_prefix_cache_nothing_is_cached() -> None:
    rig = Rig()
    rig.tell(Probe(1, [1, 2, 3], "", ""))
    rig.tell(Flush(2))
    assert rig.events == [Probed(1, CacheTruth(reason="off")), Flushed(2, 0, 0)]


@pytest.mark.parametrize("n", [1, 2])
def test_F50_a_row_that_is_not_finite_fails_its_request_alone(n: int) -> None:
    rig = Rig(bad=[(2, n - 1, 3)])
    for uid in (1, 2, 3):
        rig.ask(uid, 5 + uid, max_tokens=8, n=n)
    rig.drain()
    assert (rig.failed[2].error.code, rig.failed[2].error.status) == ("numerical_error", 500)
    assert rig.tokens[2, n - 1] == rig.expected(2)[n - 1][:3], "the token of the broken row was told"
    rig.right([1, 3])
    assert rig.empty()


def test_F52_a_step_that_fails_by_one_request_fails_that_one_and_recomputes_the_rest() -> None:
    def evil(plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        culprits = [seq for seq in plan.seqs if runner.seqs[seq].start.sampling.seed == 2]
        return StepFailed(plan.step, plan.epoch, culprits, "evil") if culprits and plan.step >= 4 else None

    rig = Rig(evil=evil, prefill_chunk=PAGE)
    for uid in (1, 2, 3):
        rig.ask(uid, 9 * uid % 14, max_tokens=12, n=uid % 2 + 1)
    rig.drain()
    assert (rig.failed[2].error.code, rig.failed[2].error.status) == ("engine_error", 500)
    assert rig.scheduler.running.parks
    rig.right([1, 3])
    assert rig.empty()


@pytest.mark.parametrize("step", range(1, 9))
def test_F52_no_step_that_began_is_ever_run_again(step: int) -> None:
    """Fails at every step of the life of a request with choices, with a plan ahead: still the right tokens."""

    def evil(plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        return StepFailed(plan.step, plan.epoch, [plan.seqs[-1]], "evil") if plan.step == step else None

    rig = Rig(evil=evil, prefill_chunk=PAGE)
    for uid in (1, 2, 3):
        rig.ask(uid, 3 + 2 * uid, max_tokens=6, n=3)
    rig.drain()
    assert len(rig.failed) == 1
    rig.right({1, 2, 3} - set(rig.failed))
    assert rig.empty()


@pytest.mark.parametrize("culprits", [[], [7]])
def test_F53_a_step_that_fails_by_nobody_tells_everybody_once(culprits: list[int]) -> None:
    def evil(plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        return StepFailed(plan.step, plan.epoch, culprits, "device lost") if plan.step == 3 else None

    rig = Rig(evil=evil, max_running=2, state_slots=3, max_seq_len=64)
    for uid in (1, 2, 3):
        rig.ask(uid, 5, max_tokens=30)
    with pytest.raises(EngineLost, match="device lost"):
        rig.drain()
    rig.hear()
    assert {uid: failed.error.code for uid, failed in rig.failed.items()} == dict.fromkeys((1, 2, 3), "engine_error")
    assert not rig.scheduler.running.pages.held


def test_log_probabilities_stay_with_their_tokens() -> None:
    rig = Rig()
    rig.ask(1, 5, max_tokens=20, temperature=0.0)
    third = rig.expected(1)[0][2]
    rig.ask(2, rig.asked[1].prompt, max_tokens=20, temperature=0.0, stop_ids=(third,), logprobs=1)
    rig.ask(3, 5, max_tokens=9)
    rig.drain()
    rig.right([1, 2, 3])
    asked = [message for message in rig.events if isinstance(message, Tokens) and message.logprobs]
    assert asked
    for message in asked:
        for uid, token, entry in zip(message.uids, message.tokens, message.logprobs, strict=True):
            assert (entry is not None) == (uid == 2)
            assert entry is None or entry.top_ids == (token,)


@pytest.mark.parametrize("pages", [40, 9])
def test_prompt_log_probabilities_come_once_and_whole_even_if_recomputed(pages: int) -> None:
    rig = Rig(kv_pages=pages, prefill_chunk=PAGE, max_seq_len=32)
    for uid in (1, 2, 3):
        rig.ask(uid, 13, max_tokens=14, prompt_logprobs=0, n=2 if uid == 2 else 1)
    rig.drain()
    assert bool(rig.scheduler.running.parks) == (pages == 9)
    assert {uid: len(entries) for uid, entries in rig.scored.items()} == dict.fromkeys((1, 2, 3), 12)
    alone = Rig(prefill_chunk=2 * PAGE)
    alone.ask(3, 13, max_tokens=1, prompt_logprobs=0)
    alone.drain()
    assert rig.scored[3] == alone.scored[3]


def test_timing_is_in_milliseconds_and_adds_up() -> None:
    rig = Rig(max_running=1, state_slots=2)
    rig.ask(1, 5, max_tokens=1)
    rig.ask(2, 5, max_tokens=4)
    while rig.turn():
        rig.now += 0.5
    timing = rig.finished[2].timing
    assert timing.queue == 1000
    assert timing.ttft == timing.queue + timing.prefill
    assert timing.decode == 1500
    assert rig.finished[2].cache.reason == "off"


def test_peer30_peer31_peer32_peer40_the_floor_carries_max_running_sequences() -> None:
    """Slots: one each and padding. Pages: one longest sequence, one step and padding. All finish."""
    rig = Rig(max_running=4, state_slots=5, max_seq_len=24, kv_pages=6 + 3 + 1, step_tokens=12, prefill_chunk=8)
    most = 0
    for uid in range(1, 30):
        rig.ask(uid, 1 + uid % 12, max_tokens=24 - (1 + uid % 12), n=1 + uid % 3)
    while rig.turn():
        most = max(most, len(rig.scheduler.running.sequences))
    rig.right(range(1, 30))
    assert most == 4
    assert rig.empty()


def test_peer33_every_slot_is_used_at_the_cap() -> None:
    rig = Rig(max_running=8, state_slots=9)
    for uid in range(1, 9):
        rig.ask(uid, 4, max_tokens=9)
    rig.turn()
    assert rig.scheduler.running.slots.available == 0


def test_peer39_scheduling_leaves_no_memory_behind() -> None:
    rig = Rig()

    def burst(first: int) -> None:
        for uid in range(first, first + 15):
            rig.ask(uid, 6, max_tokens=3)
        rig.drain()
        for store in (rig.events, rig.runner.plans, rig.tokens, rig.finished, rig.asked, rig.accepted, rig.ended):
            store.clear()

    for round_ in range(3):
        burst(100 * round_)
    tracemalloc.start()
    burst(1000)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for round_ in range(11, 16):
        burst(100 * round_)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000


def test_limits_under_which_no_prompt_advances_are_refused() -> None:
    with pytest.raises(ValueError, match="hold a page"):
        Scheduler(limits(step_tokens=3), 1, None, lambda: 0.0)


def test_a_violation_names_ids_and_owners_and_the_pools_can_be_rebuilt_when_idle() -> None:
    rig = Rig()
    rig.ask(1, 5)
    rig.drain()
    rig.scheduler.running.pages.take(2)
    with pytest.raises(IntegrityError, match="belong to nobody"):
        rig.scheduler.check()
    rig.scheduler.rebuild()
    rig.scheduler.check()
    rig.ask(2, 9)
    rig.drain()
    rig.right([2])


def test_metrics_say_what_happened() -> None:
    rig = Rig(kv_pages=11, max_seq_len=40)
    for uid in (1, 2, 3):
        rig.ask(uid, 6, max_tokens=24)
    rig.tell(Cancel(3))
    rig.turn()
    snapshot = rig.scheduler.snapshot()
    assert snapshot.role == "engine"
    assert snapshot.gauges["hybserve_sequences_running"] == 2
    assert snapshot.gauges['hybserve_slots{state="active"}'] == 2
    rig.drain()
    snapshot = rig.scheduler.snapshot()
    assert snapshot.counters['hybserve_terminal_events_total{kind="finished"}'] == 2
    assert snapshot.counters['hybserve_terminal_events_total{kind="cancelled"}'] == 1
    assert snapshot.counters["hybserve_generation_tokens_total"] == 48
    assert snapshot.counters["hybserve_parks_total"] == rig.scheduler.running.parks > 0
    assert snapshot.histograms["hybserve_ttft_seconds"][1][-1] == 2
    assert snapshot.gauges['hybserve_pages{state="active"}'] == 0


def test_F68_a_parked_sequence_waits_for_the_tokens_it_has_in_flight() -> None:
    rig = Rig(max_running=2, state_slots=3, kv_pages=8)
    rig.ask(1, 6, max_tokens=12)
    rig.ask(2, 6, max_tokens=12)
    while not rig.scheduler.running.parks:
        rig.plan()
        rig.launch()
        if rig.scheduler.in_flight > 2:
            rig.collect()
            rig.settle()
    rig.tell(Cancel(1))
    assert rig.plan() is None, "it was let back in before its last token was known"
    while rig.runner.pending:
        rig.collect()
        rig.settle()
    rig.drain()
    rig.right([2])
