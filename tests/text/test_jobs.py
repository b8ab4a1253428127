import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from hybserve.core.errors import HybserveError, ModelError
from hybserve.core.messages import ChatPrompt, TextPrompt
from hybserve.core.types import ServingFacts
from hybserve.text import jobs
from hybserve.text.jobs import Decode, Decoded, Encode, Encoded, Outcome, Refused, Worker, WorkerSettings
from hybserve.text.tokenize import Tokenizer

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ ('x' * 99999999 * 9999) | length }}"


def chat(job: int, template: str | None = None) -> Encode:
    return Encode(job, ChatPrompt(json.dumps([{"role": "user", "content": "hi"}]).encode(), template=template), False)


def with_worker(
    facts: ServingFacts, test: Callable[[Worker, list[Outcome]], Awaitable[None]], **changes: Any
) -> list[Outcome]:
    settings = WorkerSettings(facts.model_dir, facts.vocab_size, facts.eos_ids, facts.max_seq_len, **changes)
    outcomes: list[Outcome] = []

    async def scenario() -> None:
        worker = Worker(settings, outcomes.append)
        running = asyncio.create_task(worker.run())
        try:
            await asyncio.wait_for(worker.ready.wait(), 60)
            await asyncio.wait_for(test(worker, outcomes), 60)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert worker.pid is not None
        pids.append(worker.pid)

    pids: list[int] = []
    asyncio.run(scenario())  # a worker that was just being reaped is reaped when this returns
    assert not psutil.pid_exists(pids[0])
    return outcomes


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_jobs_come_back_in_order(make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer]) -> None:
    text = "The quick brown fox 🙂 " * 20

    async def test(worker: Worker, outcomes: list[Outcome]) -> None:
        worker.submit(chat(1))
        worker.submit(Encode(2, TextPrompt(text)))
        worker.submit(Decode(3, tokenizers["byte-level"].encode(text, False)))
        worker.submit(chat(4, "{{ raise_exception('no') }}"))
        worker.submit(Encode(5, TextPrompt("x" * 100_000)))
        await until(lambda: len(outcomes) == 5)

    done = with_worker(make_facts(), test)
    assert [outcome.job for outcome in done] == [1, 2, 3, 4, 5]
    assert done[1] == Encoded(2, tokenizers["byte-level"].encode(text, True))
    assert done[2] == Decoded(3, text)
    assert isinstance(done[0], Encoded)
    assert isinstance(done[3], Refused)
    assert isinstance(done[4], Refused)
    assert done[4].error.code == "context_length_exceeded"


def test_F19_F34_an_endless_template_is_killed_and_the_loop_never_waits(
    make_facts: Callable[..., ServingFacts],
) -> None:
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before - 0.01)

    async def test(worker: Worker, outcomes: list[Outcome]) -> None:
        watcher = asyncio.create_task(watch())
        first = worker.pid
        worker.submit(chat(1, FOREVER))
        worker.submit(chat(2))
        await until(lambda: len(outcomes) == 2)
        watcher.cancel()
        assert worker.restarts == 1
        assert worker.pid != first

    done = with_worker(make_facts(), test, deadline=0.5)
    assert isinstance(done[0], Refused)
    assert (done[0].error.status, done[0].error.code, done[0].error.param) == (400, "invalid_value", "chat_template")
    assert isinstance(done[1], Encoded)
    assert max(lags) < 2.0  # ten times what would be noticed


def test_F34_memory_is_bounded(make_facts: Callable[..., ServingFacts]) -> None:
    async def test(worker: Worker, outcomes: list[Outcome]) -> None:
        worker.submit(chat(1, HUGE))
        worker.submit(chat(2))
        await until(lambda: len(outcomes) == 2)

    done = with_worker(make_facts(), test, memory=256 << 20, deadline=30.0)
    assert isinstance(done[0], Refused)
    assert done[0].error.status == 400
    assert isinstance(done[1], Encoded)


def test_a_killed_worker_is_replaced_and_its_job_done(make_facts: Callable[..., ServingFacts]) -> None:
    async def test(worker: Worker, outcomes: list[Outcome]) -> None:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.submit(chat(1))
        await until(lambda: len(outcomes) == 1)

    assert isinstance(with_worker(make_facts(), test)[0], Encoded)


def test_a_job_that_kills_two_workers_fails(make_facts: Callable[..., ServingFacts]) -> None:
    async def test(worker: Worker, outcomes: list[Outcome]) -> None:
        killed: list[int | None] = []
        worker.submit(chat(1, FOREVER))
        for _ in range(2):
            await until(lambda: worker.waiting == 0 and worker.pid not in killed)
            killed.append(worker.pid)
            os.kill(worker.pid or 0, signal.SIGKILL)
        await until(lambda: len(outcomes) == 1)

    done = with_worker(make_facts(), test, deadline=30.0)
    assert isinstance(done[0], Refused)
    assert done[0].error.code == "engine_error"


def test_a_forgotten_job_is_not_done(make_facts: Callable[..., ServingFacts]) -> None:
    async def test(worker: Worker, outcomes: list[Outcome]) -> None:
        for number in (1, 2, 3):
            worker.submit(chat(number))
        worker.forget(2)
        assert worker.waiting == 2
        await until(lambda: len(outcomes) == 2)

    assert [outcome.job for outcome in with_worker(make_facts(), test)] == [1, 3]


def test_F84_what_the_worker_refuses_at_start_is_a_model_error(
    make_facts: Callable[..., ServingFacts], tmp_path: Path
) -> None:
    facts = make_facts()
    for path in Path(facts.model_dir).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    settings = WorkerSettings(str(tmp_path), facts.vocab_size, facts.eos_ids, facts.max_seq_len)
    with pytest.raises(ModelError, match="does not compile"):
        asyncio.run(Worker(settings, print).run())


def test_a_worker_that_never_starts_is_given_up(
    make_facts: Callable[..., ServingFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = make_facts()

    def spawn(settings: WorkerSettings, sock: Any) -> Any:
        return subprocess.Popen([sys.executable, "-c", ""], pass_fds=[sock.fileno()])

    monkeypatch.setattr(jobs, "_spawn", spawn)
    settings = WorkerSettings(facts.model_dir, facts.vocab_size, facts.eos_ids, facts.max_seq_len)
    with pytest.raises(HybserveError, match="does not start"):
        asyncio.run(Worker(settings, print).run())


def test_F71_the_worker_dies_with_its_parent(make_facts: Callable[..., ServingFacts]) -> None:
    """Killed in the middle of a template that never ends, so that only the kernel can end it."""
    facts = make_facts()
    settings = WorkerSettings(facts.model_dir, facts.vocab_size, facts.eos_ids, facts.max_seq_len, deadline=600.0)
    script = (
        "import asyncio, sys, msgspec\n"
        "from hybserve.core.messages import ChatPrompt\n"
        "from hybserve.text.jobs import Encode, Worker, WorkerSettings\n"
        "async def main():\n"
        "    worker = Worker(msgspec.json.decode(sys.argv[1], type=WorkerSettings), print)\n"
        "    task = asyncio.create_task(worker.run())\n"
        "    await worker.ready.wait()\n"
        '    prompt = ChatPrompt(b\'[{"role":"user","content":"x"}]\', template=sys.argv[2])\n'
        "    worker.submit(Encode(1, prompt))\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(worker.pid, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, msgspec.json.encode(settings).decode(), FOREVER]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        worker.wait(20)
