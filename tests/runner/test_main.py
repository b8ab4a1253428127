"""The runner obeys plans: rows, copies, forks, freed ids, epochs, faults."""

import logging

import pytest
import torch

from bench.plan_driver import Driver, Live, StepError
from hybserve.core.messages import FromRunner, SequenceStart, StepDone, StepFailed, StepPlan, Stop, ToRunner
from hybserve.core.sampling import SamplingParams
from hybserve.wire.codec import Codec, FrameError

GREEDY = SamplingParams(temperature=0.0)
ENCODE = Codec(ToRunner).encode
DECODE = Codec(FromRunner).decode


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(driver: Driver, live: Live, count: int) -> list[int]:
    while len(live.output) < count:
        driver.step([(live, 64)])
    return live.output


def alone(make_bench, tokens: list[int], count: int, sampling: SamplingParams = GREEDY, choice: int = 0) -> list[int]:
    bench = make_bench()
    return generate(bench.driver, bench.driver.add(tokens, sampling, choice), count)


def empty_plan(step: int, epoch: int = 1) -> StepPlan:
    return StepPlan(step, epoch, *([] for _ in range(15)))


def test_mixed_rows_equal_single_sequences(bench, make_bench):
    driver = bench.driver
    prompts = [prompt(length, length) for length in (3, 9, 17)]
    first = driver.add(prompts[0], GREEDY)
    driver.step([(first, 64)])
    second, third = driver.add(prompts[1], GREEDY), driver.add(prompts[2], GREEDY)
    for _ in range(6):  # decode beside prefill in chunks of a page
        driver.step([(third, 4), (first, 1), (second, 4)])
    for live, tokens in zip((first, second, third), prompts, strict=True):
        assert live.output == alone(make_bench, tokens, len(live.output))
    assert bench.runner.pools.padding_intact()


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=11, temperature=1.5)])
def test_fork_equals_separate_sequences(bench, make_bench, length, sampling):
    driver = bench.driver
    live = driver.add(prompt(length), sampling, n=3)
    choices = [live, *live.siblings]
    driver.step([(live, 3)])
    driver.step([(live, 64)])
    for _ in range(6):
        driver.step([(choice, 1) for choice in reversed(choices)])
    for index, choice in enumerate(choices):
        assert choice.output == alone(make_bench, prompt(length), 7, sampling, index)
    if sampling is not GREEDY:
        assert len({tuple(choice.output) for choice in choices}) == 3
    assert bench.runner.pools.padding_intact()


def test_fork_survives_the_end_of_its_source(bench, make_bench):
    driver = bench.driver
    live = driver.add(prompt(6), GREEDY, n=2)
    other = live.siblings[0]
    driver.step([(live, 64)])
    driver.release(live, shared=set(other.table))
    assert generate(driver, other, 5) == alone(make_bench, prompt(6), 5)


def test_freed_pages_and_slots_are_reused(bench, make_bench):
    """peer16, peer17: a reused slot starts from zero, whatever it held; freed bytes are NaN here."""
    driver = bench.driver
    for seed in range(6):
        live = driver.add(prompt(13, seed), GREEDY)
        assert generate(driver, live, 3) == alone(make_bench, prompt(13, seed), 3)
        driver.release(live)
    assert bench.runner.pools.padding_intact()
    assert driver.pages.held == driver.slots.held == 0


def test_poison_spares_what_others_still_read(bench):
    driver = bench.driver
    keep, drop = driver.add(prompt(7), GREEDY), driver.add(prompt(9), GREEDY)
    driver.step([(keep, 64), (drop, 64)])
    page, slot = drop.table[0], drop.slot
    driver.release(drop)
    driver.step([(keep, 1)])
    pools = bench.runner.pools
    assert torch.isnan(pools.kv_layers[0][page]).all()
    assert torch.isnan(pools.matrices[0][slot]).all()
    assert not torch.isnan(pools.kv_layers[0][keep.table[0]]).any()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=5, temperature=2.0, frequency_penalty=0.7)])
def test_resumed_sequence_goes_on_alike_peer18_peer23(bench, make_bench, sampling):
    driver = bench.driver
    expected = alone(make_bench, prompt(10), 8, sampling)
    for stop in range(1, 8):
        live = driver.add(prompt(10), sampling)
        generate(driver, live, stop)
        driver.release(live)
        driver.resume(live)
        while len(live.output) < 8:
            driver.step([(live, 5)])
        assert live.output == expected
        driver.release(live)


def test_same_seed_same_text_other_seed_other_text(bench, make_bench):
    def text(seed: int) -> list[int]:
        live = bench.driver.add(prompt(4), SamplingParams(seed=seed))
        generate(bench.driver, live, 12)
        bench.driver.release(live)
        return live.output

    assert text(1) == text(1) != text(2)


def test_nan_row_is_flagged_and_others_unaffected_F50(bench, make_bench):
    driver, marker = bench.driver, 39
    bench.model.hurt = {marker: float("nan")}
    good = [driver.add([token % 39 for token in prompt(6, seed)], GREEDY) for seed in range(2)]
    bad = driver.add([1, 2, marker], SamplingParams(temperature=0.5, logprobs=2))
    done = driver.step([(good[0], 64), (bad, 64), (good[1], 64)])
    assert done.bad == [1]
    assert 0 <= done.tokens[1] < 40
    assert done.logprobs[0] is None
    expected = [alone(make_bench, live.prompt, 1) for live in good]
    assert [live.output for live in good] == expected


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_all_rows_bad_F50(bench, value):
    bench.model.hurt = dict.fromkeys(range(40), value)
    live = bench.driver.add(prompt(3), SamplingParams(seed=1, top_p=0.5, logprobs=1))
    assert bench.driver.step([(live, 64)]).bad == [0]


def test_failed_forward_names_no_path_and_no_address_F53(bench, caplog):
    live = bench.driver.add(prompt(3), GREEDY)
    bench.model.fail = True
    with caplog.at_level(logging.ERROR), pytest.raises(StepError) as failure:
        bench.driver.step([(live, 64)])
    assert "secret" in caplog.text
    for word in ("secret", "0x", "RuntimeError", "/"):
        assert word not in str(failure.value)


def test_stale_epoch_is_refused_and_changes_nothing(bench, make_bench):
    runner = bench.runner
    start = SequenceStart(0, 2, 0, GREEDY, [], 3, 0)
    for messages in ([empty_plan(1, epoch=2)], [start, empty_plan(2)]):
        runner.submit(ENCODE(messages))
        (answer,) = DECODE(runner.collect())
        assert isinstance(answer, StepFailed)
        assert "epoch 2" in answer.reason
    assert len(runner.sequences) == 0
    live = bench.driver.add(prompt(5), GREEDY)
    assert generate(bench.driver, live, 2) == alone(make_bench, prompt(5), 2)


def test_plans_run_in_order_when_collected(bench):
    runner = bench.runner
    for step in (1, 2):
        runner.submit(ENCODE([empty_plan(step)]))
    assert runner.pending == 2
    assert [DECODE(runner.collect())[0].step for _ in range(2)] == [1, 2]
    runner.submit(ENCODE([empty_plan(2)]))
    assert isinstance(DECODE(runner.collect())[0], StepFailed)


def test_index_freed_and_started_in_one_frame(bench, make_bench):
    driver = bench.driver
    old = driver.add(prompt(6, 1), GREEDY)
    generate(driver, old, 2)
    seq = old.seq
    driver.release(old)
    new = driver.add(prompt(6, 2), GREEDY)
    assert new.seq == seq
    assert generate(driver, new, 3) == alone(make_bench, prompt(6, 2), 3)


def test_plan_ahead_uses_the_token_pool(bench, make_bench):
    """Plan n + 1 is submitted before n is collected: its token is the one that n samples."""
    driver, runner, tokens = bench.driver, bench.runner, prompt(5)
    start = SequenceStart(7, 1, 0, GREEDY, [], 5, 0)
    first = StepPlan(1, 1, [7], [0], [5], [1], tokens, [0, 0], [3, 9], [0], [7], [0], [], [], [], [], [])
    second = StepPlan(2, 1, [7], [5], [1], [1], [-1], [], [], [0], [7], [1], [], [], [], [], [])
    runner.submit(ENCODE([start, first]))
    runner.submit(ENCODE([second]))
    sampled = [DECODE(runner.collect())[0].tokens[0] for _ in range(2)]
    assert sampled == alone(make_bench, tokens, 2)
    assert driver.step_number == 0


def test_stop_drops_everything(bench):
    bench.driver.add(prompt(5), GREEDY)
    bench.runner.submit(ENCODE([empty_plan(1)]))
    bench.runner.submit(ENCODE([Stop()]))
    assert bench.runner.stopped
    assert bench.runner.pending == 0


def test_garbage_frame_is_a_frame_error_F75(bench):
    for garbage in (b"", b"\xc1", ENCODE([empty_plan(1)])[:-1], b"\x91\x91\xa4Evil"):
        with pytest.raises(FrameError):
            bench.runner.submit(garbage)


def test_logprobs_of_the_raw_distribution(bench):
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias=((7, 100.0),), repetition_penalty=1.3)
    live = bench.driver.add(prompt(6), params)
    done = bench.driver.step([(live, 64)])
    assert done.tokens == [7]
    entry = done.logprobs[0]
    assert entry.top_logprobs == tuple(sorted(entry.top_logprobs, reverse=True))
    assert entry.logprob < entry.top_logprobs[0]


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_prompt_logprobs_over_any_chunks(bench, make_bench, chunk):
    tokens = prompt(11)
    live = bench.driver.add(tokens, SamplingParams(temperature=0.0, prompt_logprobs=2))
    while not live.output:
        bench.driver.step([(live, chunk)])
    entries = bench.driver.prompt_logprobs[id(live)]
    assert len(entries) == 10
    whole = make_bench()
    for end, entry in enumerate(entries, 1):  # the score of a token is what sampling it would have reported
        one = whole.driver.add(tokens[:end], SamplingParams(temperature=0.0, logprobs=40))
        done = whole.driver.step([(one, 64)])
        table = dict(zip(done.logprobs[0].top_ids, done.logprobs[0].top_logprobs, strict=True))
        assert entry.logprob == pytest.approx(table[tokens[end]], abs=1e-5)
        assert entry.top_ids == done.logprobs[0].top_ids[:2]
        whole.driver.release(one)


def test_prompt_scored_once(bench):
    """A resumed sequence with output has had its prompt scored."""
    live = bench.driver.add(prompt(5), SamplingParams(temperature=0.0, prompt_logprobs=0))
    generate(bench.driver, live, 2)
    bench.driver.release(live)
    bench.driver.resume(live)
    assert bench.driver.step([(live, 64)]).prompt_logprobs == []


def test_min_tokens_masks_stop_ids(bench):
    free = bench.driver.add(prompt(5), GREEDY)
    generate(bench.driver, free, 4)
    stop = free.output[0]
    held = bench.driver.add(prompt(5), SamplingParams(temperature=0.0, min_tokens=2, stop_ids=(stop,)))
    generate(bench.driver, held, 4)
    assert stop not in held.output[:2]


def test_step_without_rows(bench):
    runner = bench.runner
    runner.submit(ENCODE([empty_plan(1)]))
    answer = DECODE(runner.collect())[0]
    assert isinstance(answer, StepDone)
    assert answer.tokens == []
