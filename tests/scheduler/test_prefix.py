"""The scheduler's use of the prefix tree, one situation at a time, against the tattletale runner."""

import pytest

from hybserve.core.messages import Cancel, Flush, Flushed, Probe, Probed, StepFailed, StepPlan
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth
from hybserve.scheduler.request import Sequence
from tests.fakes import TattletaleRunner, expected_tokens, limits
from tests.scheduler.rig import Rig

PAGE = 4


def rig(**changes: object) -> Rig:
    values = {"prefix": True, "slot_price": 3.0, "state_slots": 24, "kv_pages": 80, "prefill_chunk": 32}
    return Rig(limits(**(values | changes)))


def run(one: Rig, uid: int, prompt: list[int], **asked: object) -> CacheTruth:
    """Ask, finish, check the tokens; what it hit."""
    one.ask(uid, prompt, **asked)  # type: ignore[arg-type]
    one.drain()
    one.right([uid])
    return one.finished[uid].cache


def ids(length: int, seed: int = 1) -> list[int]:
    return [(seed * 13 + k * 7) % 61 for k in range(length)]


def test_cold_then_identical_prompt_hits_all_but_the_last_page() -> None:
    one = rig()
    assert run(one, 1, ids(18)).reason == "cold"
    again = run(one, 2, ids(18))
    assert (again.hit, again.reason) == (16, "full")


def test_prompt_of_whole_pages_leaves_a_token_and_still_hits() -> None:
    one = rig()
    run(one, 1, ids(16))
    assert run(one, 2, ids(16)).hit == 12


def test_next_turn_hits_to_the_last_page_passed_in_decode_peer24() -> None:
    one, conversation = rig(max_seq_len=400, kv_pages=300), ids(11)
    for turn in range(10):
        expected = len(conversation) // PAGE * PAGE if turn else 0
        before = (len(conversation) - 3) // PAGE * PAGE
        cache = run(one, turn + 1, conversation, max_tokens=9)
        if turn:
            assert cache.hit >= before - PAGE, f"turn {turn}: {cache}"
            assert cache.hit <= expected
        conversation = conversation + one.tokens[turn + 1, 0] + ids(3, turn)


def test_shared_system_prompt_hits_from_the_second_request_peer43_peer44_peer56() -> None:
    """The anchor at the start of the user's turn is a checkpoint although the whole prompt is one chunk."""
    one, system = rig(), ids(21)
    run(one, 1, system + ids(6, 5), anchors=[21])
    cache = run(one, 2, system + ids(6, 9), anchors=[21])
    assert (cache.hit, cache.kv_hit) == (20, 20)


def test_without_an_anchor_the_junction_serves_the_third_peer43() -> None:
    one, system = rig(), ids(20)
    run(one, 1, system + ids(7, 5))
    second = run(one, 2, system + ids(7, 9))
    assert (second.kv_hit, second.hit, second.reason) == (20, 0, "no_checkpoint")
    assert run(one, 3, system + ids(7, 11)).hit == 20


def test_short_prompts_hit_peer42() -> None:
    one = rig()
    run(one, 1, ids(PAGE + 1))
    assert run(one, 2, ids(PAGE + 1)).hit == PAGE


def test_gap_reads_the_pages_of_the_tree_and_computes_the_state_F61_peer61() -> None:
    one, trunk = rig(), ids(24)
    run(one, 1, trunk + ids(7, 5))
    one.ask(2, trunk + ids(3, 9))
    plan = one.plan()
    assert plan is not None
    assert (plan.starts, plan.gap_rows, plan.gap_ends) == ([0], [0], [24])
    one.drain()
    one.right([2])


@pytest.mark.parametrize("stateful", [True, False])
def test_two_equal_prompts_at_once_compute_it_once_F57(stateful: bool) -> None:
    one = rig(prefill_chunk=8, stateful=stateful)
    one.ask(1, ids(30))
    one.ask(2, ids(30))
    one.ask(3, ids(30, 2))
    one.drain()
    one.right([1, 2, 3])
    assert one.finished[1].cache.hit == 0
    assert one.finished[2].cache.hit == 28
    assert one.finished[3].cache.hit == 0


def test_a_waiter_goes_on_alone_when_the_other_dies() -> None:
    one = rig(prefill_chunk=8, step_tokens=8)
    one.ask(1, ids(30))
    one.ask(2, ids(30))
    one.turn()
    one.turn()
    one.tell(Cancel(1))
    one.drain()
    one.right([2])


def test_no_room_for_a_checkpoint_is_skipped_and_counted_peer30_peer31() -> None:
    """At the floor every slot is active or in flight: publishing is given up, answers are right."""
    one = rig(state_slots=4, max_running=2, kv_pages=40)
    for uid in range(1, 9):
        one.ask(uid, ids(19, uid), max_tokens=9)
    one.drain()
    one.right(range(1, 9))
    assert one.scheduler.running.prefix.checkpoints["skipped"] > 0


def test_siblings_of_a_fork_keep_what_their_lead_published() -> None:
    one = rig(kv_pages=30, prefill_chunk=8)
    one.ask(1, ids(17), max_tokens=20, n=3, stop_ids=tuple(range(0, 64, 9)))
    for uid in range(2, 12):
        one.ask(uid, ids(13, uid), max_tokens=3)
    one.drain()
    one.right(range(1, 12))


def test_parked_requests_resume_from_their_last_checkpoint_peer18_peer23() -> None:
    one = rig(kv_pages=16, state_slots=20, max_seq_len=48)
    for uid in (1, 2, 3):
        one.ask(uid, ids(14, uid), max_tokens=20)
    starts = []
    while True:
        running = {sequence.index: sequence for sequence in one.scheduler.running.sequences}
        before = one.scheduler.running.parks
        if not one.turn():
            break
        for plan in one.runner.plans[-1:]:
            starts += [s for s, c in zip(plan.starts, plan.counts, strict=True) if c > 1 and s]
        assert running is not None
        assert before <= one.scheduler.running.parks
    one.right([1, 2, 3])
    assert one.scheduler.running.parks > 0
    assert any(start >= 12 for start in starts), "nobody resumed from a checkpoint"


def test_cancel_with_exports_in_flight_frees_their_slots_peer34_peer37() -> None:
    one = rig()
    one.ask(1, ids(30))
    one.plan()
    one.launch()
    one.tell(Cancel(1))
    one.collect()
    one.settle()
    one.drain()
    assert one.empty()


def test_state_that_is_not_finite_is_not_published_and_fails_its_request_F51() -> None:
    one = Rig(limits(prefix=True, state_slots=24, kv_pages=80, prefill_chunk=32), bad_states=[(1, 12)])
    one.ask(1, ids(14))
    one.drain()
    assert one.failed[1].error.code == "numerical_error"
    assert run(one, 2, ids(14)).hit == 0


def test_a_row_that_is_not_finite_publishes_nothing_of_its_step_F50() -> None:
    one = Rig(limits(prefix=True, state_slots=24, kv_pages=80, prefill_chunk=32), bad=[(1, 0, 0)])
    one.ask(1, ids(14))
    one.drain()
    assert one.failed[1].error.code == "numerical_error"
    assert run(one, 2, ids(14)).kv_hit == 0


def test_salts_do_not_share_F41() -> None:
    one = rig()
    run(one, 1, ids(18), salt="a")
    assert run(one, 2, ids(18), salt="b").reason == "cold"
    assert run(one, 3, ids(18), salt="a").hit == 16


def test_prompt_logprobs_read_nothing() -> None:
    one = rig()
    run(one, 1, ids(18))
    cache = run(one, 2, ids(18), prompt_logprobs=0)
    assert (cache.hit, cache.reason) == (0, "prompt_logprobs")
    assert len(one.scored[2]) == 17


def test_probe_changes_nothing_and_flush_forgets() -> None:
    one = rig()
    run(one, 1, ids(18))
    tree = one.scheduler.running.prefix.tree
    before = (tree.nodes, tree.checkpoints, [node.uses for node in tree.all_nodes()])
    one.tell(Probe(7, ids(10) + ids(10, 3), "", ""))
    probed = one.events[-1]
    assert isinstance(probed, Probed)
    assert (probed.cache.kv_hit, probed.cache.hit) == (8, 0)
    assert (tree.nodes, tree.checkpoints, [node.uses for node in tree.all_nodes()]) == before
    one.tell(Flush(8))
    flushed = one.events[-1]
    assert isinstance(flushed, Flushed)
    assert flushed.pages > 0
    assert flushed.states > 0
    assert run(one, 2, ids(18)).reason == "cold"


def test_flush_under_way_frees_what_runs_when_it_ends() -> None:
    one = rig()
    one.ask(1, ids(18), max_tokens=12)
    for _ in range(6):
        one.turn()
    one.tell(Flush(2))
    assert run(one, 3, ids(18)).hit in (0, 16)
    one.drain()
    one.right([1, 3])
    assert one.empty()


def decoding(one: Rig, uid: int, prompt: int, tokens: int) -> Sequence:
    """Request ``uid`` when so many of its tokens have been told."""
    one.ask(uid, ids(prompt, uid), max_tokens=60)
    while len(one.tokens.get((uid, 0), [])) < tokens:
        one.turn()
    return one.scheduler.requests[uid].sequences[0]


def test_the_last_boundary_passed_is_held_and_placed_when_the_sequence_leaves() -> None:
    one = rig()
    sequence, tree = decoding(one, 1, 10, 15), one.scheduler.running.prefix.tree
    assert sequence.boundary is not None
    assert (sequence.boundary.position, sequence.lease_held.end) == (24, 8)
    assert list(tree.held) == [sequence.boundary]
    one.tell(Cancel(1))
    known = ids(10, 1) + one.tokens[1, 0]
    one.drain()
    assert run(one, 2, known + ids(3)).hit == 24
    assert one.scheduler.running.prefix.checkpoints["superseded"] == 3


def test_boundaries_on_the_grid_are_matchable_at_once_and_stay() -> None:
    one = rig(checkpoint_every=2 * PAGE)
    sequence = decoding(one, 1, 10, 20)
    known = ids(10, 1) + one.tokens[1, 0]
    assert sequence.boundary is not None
    assert sequence.boundary.position == 28
    assert run(one, 2, known[:27]).hit == 24
    assert run(one, 3, known[:18]).hit == 16
    one.drain()
    one.right([1])


def test_a_held_state_gives_way_to_admission_and_to_the_checkpoint_of_a_prompt() -> None:
    one = rig(state_slots=4, max_running=3)
    first = decoding(one, 1, 6, 8)
    assert first.boundary is not None
    held = first.boundary
    assert held.slot
    before = one.scheduler.running.prefix.tree.evicted_states
    one.ask(2, ids(14, 2), max_tokens=2)
    one.turn()
    assert held.slot == 0
    assert one.scheduler.running.prefix.tree.evicted_states > before
    one.drain()
    one.right([1, 2])


def test_without_a_free_slot_a_sequence_writes_over_what_it_held() -> None:
    """The next boundary needs no second slot: law 2, the floor is one slot a sequence."""
    one = rig(state_slots=4, max_running=2, kv_pages=40)
    one.ask(1, ids(3, 1), max_tokens=60)
    one.ask(2, ids(3, 2), max_tokens=60)
    positions = set()
    while one.turn():
        for sequence in one.scheduler.running.sequences:
            if sequence.boundary is not None and sequence.boundary.slot:
                positions.add((sequence.uid, sequence.boundary.position))
    one.right([1, 2])
    known = {uid: ids(3, uid) + one.tokens[uid, 0] for uid in (1, 2)}
    assert max(run(one, 2 + uid, known[uid] + ids(4), max_tokens=1).hit for uid in (1, 2)) == 60
    assert len(positions) > 10


def ending_on_a_boundary(one: Rig, uid: int) -> int:
    """Ask for what ends with a stop token that fills its page; the length of prompt and output."""
    for length in range(6, 40):
        prompt = ids(length, uid)
        (output,) = expected_tokens(prompt, SamplingParams(seed=uid, max_tokens=14), 1, PAGE)
        for at, token in enumerate(output):
            if at > 2 * PAGE and output.index(token) == at and (length + at + 1) % PAGE == 0:
                one.ask(uid, prompt, max_tokens=14, stop_ids=(token,))
                return length + at + 1
    raise AssertionError("no prompt ends like that")


@pytest.mark.parametrize("slots", [24, 3])
def test_the_overshoot_of_a_stop_token_at_a_boundary_is_what_the_next_turn_hits(slots: int) -> None:
    """The step after the stop token has computed it: KV and state of the whole length are right."""
    one = rig(state_slots=slots, max_running=2)
    whole = ending_on_a_boundary(one, 1)
    one.drain()
    one.right([1])
    known = one.asked[1].prompt + one.tokens[1, 0]
    assert len(known) == whole
    assert run(one, 2, known + ids(5)).hit == whole
    assert one.empty()


def test_the_request_is_told_finished_before_its_overshoot_comes_back() -> None:
    one = rig()
    ending_on_a_boundary(one, 1)
    while 1 not in one.finished:
        one.turn()
    (sequence,) = one.scheduler.running.sequences
    assert sequence.parting
    assert not one.scheduler.requests
    one.drain()
    assert one.empty()


@pytest.mark.parametrize("what", ["state", "row", "step"])
def test_an_overshoot_that_went_wrong_publishes_nothing_of_it(what: str) -> None:
    def fail(plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        late = wrong and plan.export_positions == [whole]
        return StepFailed(plan.step, plan.epoch, list(plan.seqs), "evil") if late else None

    one = Rig(limits(prefix=True, slot_price=3.0, state_slots=24, kv_pages=80, prefill_chunk=32), evil=fail)
    whole = ending_on_a_boundary(one, 1)
    prompt = len(one.asked[1].prompt)
    wrong = what == "step"
    if what == "state":
        one.runner.bad_states.add((1, whole))
    if what == "row":
        one.runner.bad.add((1, 0, whole - prompt))
    one.drain()
    one.right([1])
    cache = run(one, 2, one.asked[1].prompt + one.tokens[1, 0] + ids(5))
    assert cache.hit == whole - PAGE
    assert cache.kv_hit == whole - PAGE
    assert one.empty()


def test_who_parts_gives_way_when_pages_run_out() -> None:
    one = rig()
    ending_on_a_boundary(one, 1)
    while 1 not in one.finished:
        one.turn()
    (sequence,) = one.scheduler.running.sequences
    one.scheduler.running.park(sequence)
    one.hear()
    assert not one.scheduler.waiting.parked
    one.drain()
    assert one.empty()


def test_a_request_that_fails_leaves_no_held_state() -> None:
    one = Rig(limits(prefix=True, state_slots=24, kv_pages=80, prefill_chunk=32), bad=[(1, 0, 9)])
    one.ask(1, ids(10), max_tokens=20)
    one.drain()
    assert one.failed[1].error.code == "numerical_error"
    assert one.scheduler.running.prefix.checkpoints["lost"] > 0
    assert run(one, 2, ids(10) + one.tokens[1, 0] + [1]).hit == 8


def test_a_long_conversation_hits_near_its_end_with_few_slots_peer47_peer48() -> None:
    one, conversation = rig(max_seq_len=2000, kv_pages=600, state_slots=12, step_tokens=64, prefill_chunk=64), ids(9)
    for turn in range(100):
        cache = run(one, turn + 1, conversation, max_tokens=5)
        if turn:
            assert cache.hit >= len(conversation) - 5 - 2 * PAGE, f"turn {turn}"
        conversation = conversation + one.tokens[turn + 1, 0] + ids(3, turn)


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("length", range(1, 27))
def test_every_prompt_length_hits_up_to_its_last_page_F63(length: int, stateful: bool) -> None:
    one = rig(stateful=stateful, prefill_chunk=8)
    run(one, 1, ids(length))
    cache = run(one, 2, ids(length))
    assert cache.hit == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize("prompts", [60, 240])
def test_eviction_looks_at_few_nodes_however_many_there_are_peer38(prompts: int) -> None:
    one = rig(max_seq_len=64, kv_pages=2000, state_slots=900)
    for uid in range(prompts):
        run(one, uid, [uid % 61, uid // 61, *ids(7)], max_tokens=1)
    tree = one.scheduler.running.prefix.tree
    freed = tree.evict_pages(40, one.scheduler.running.step)
    assert freed >= 40
    assert tree.visited <= 8 * freed


def test_what_was_once_useful_makes_room_for_what_is_useful_now_peer45() -> None:
    one, uid = rig(state_slots=6, max_running=2, kv_pages=200), 0
    for old in range(4):
        for _ in range(6):
            uid += 1
            run(one, uid, ids(40, old + 1), max_tokens=2)
    hits = []
    for _ in range(40):
        uid += 1
        hits.append(run(one, uid, ids(30, 9), max_tokens=2).hit)
    assert hits[-1] == 28, hits


def test_a_crowd_with_one_prompt_is_matched_once_and_waits_for_free() -> None:
    one = rig(prefill_chunk=4, step_tokens=8, max_running=4, kv_pages=200)
    looks = 0
    real = one.scheduler.running.prefix.look

    def look(sequence: object) -> object:
        nonlocal looks
        looks += 1
        return real(sequence)  # type: ignore[arg-type]

    one.scheduler.running.prefix.look = look  # type: ignore[assignment, method-assign]
    for uid in range(60):
        one.ask(uid, ids(41), max_tokens=1)
    for _ in range(8):
        one.turn()
    assert looks <= 61
    one.drain()
    one.right(range(60))
    assert sum(one.finished[uid].cache.hit == 40 for uid in range(60)) == 59


def test_a_step_that_fails_in_a_gap_leaves_the_tree_s_pages_right() -> None:
    """The row reads the tree's pages and writes none of them, so what is cached there stays good."""
    trunk = ids(24)

    def fail(plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        seeds = [runner.seqs[seq].start.sampling.seed for seq in plan.seqs]
        return StepFailed(plan.step, plan.epoch, [plan.seqs[0]], "evil") if seeds == [2] else None

    one = Rig(limits(prefix=True, slot_price=3.0, state_slots=24, kv_pages=80, prefill_chunk=32), evil=fail)
    run(one, 1, trunk + ids(7, 5))
    one.ask(2, trunk + ids(3, 9))
    one.drain()
    assert one.failed[2].error.code == "engine_error"
    cache = run(one, 3, trunk + ids(5, 11))
    assert cache.kv_hit == 24
