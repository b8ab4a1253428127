import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from hybserve.config.deployment import Deployment
from hybserve.core.errors import ModelError
from hybserve.core.messages import (
    Accepted,
    Cancel,
    ChatPrompt,
    Delta,
    Detokenize,
    Detokenized,
    Done,
    Drain,
    Failed,
    Finished,
    FromLaunch,
    FromScheduler,
    Generate,
    Heartbeat,
    Loading,
    MetricsSnapshot,
    Ready,
    Stop,
    Submit,
    TextPrompt,
    ToApi,
    Tokenize,
    Tokenized,
    Tokens,
    ToLaunch,
    ToScheduler,
    ToText,
)
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth, Ended, ServingFacts, Timing
from hybserve.text.main import TextRole
from hybserve.text.tokenize import Tokenizer
from hybserve.wire.channel import AsyncChannel, ChannelClosed
from hybserve.wire.codec import Codec

UPSTREAM = (Loading, Ready, Heartbeat, MetricsSnapshot)


@dataclass
class Ends:
    """The far ends of the role's links."""

    apis: list[AsyncChannel[Any, Any]]
    engine: AsyncChannel[Any, Any]
    control: AsyncChannel[Any, Any]

    async def hear(self, channel: AsyncChannel[Any, Any], kind: type[Any], skip: tuple[Any, ...] = UPSTREAM) -> Any:
        """The next message of ``kind``; only ``skip`` may come before it."""
        held = self._held.setdefault(id(channel), [])
        while True:
            while held:
                message = held.pop(0)
                if isinstance(message, kind):
                    return message
                assert isinstance(message, skip), message
            held += await channel.receive()

    def __post_init__(self) -> None:
        self._held: dict[int, list[Any]] = {}


def pair(down: Any, up: Any) -> tuple[AsyncChannel[Any, Any], AsyncChannel[Any, Any]]:
    """(the role's end, the far end) of a link: the role receives ``down`` and sends ``up``."""
    ours, theirs = socket.socketpair()
    return AsyncChannel(ours, Codec(down), Codec(up)), AsyncChannel(theirs, Codec(up), Codec(down))


def play(facts: ServingFacts, story: Callable[[Ends], Awaitable[None]], apis: int = 1, ready: bool = True) -> None:
    async def scenario() -> None:
        links = [pair(ToText, ToApi) for _ in range(apis)]
        engine, engine_end = pair(FromScheduler, ToScheduler)
        control, control_end = pair(FromLaunch, ToLaunch)
        ends = Ends([end for _, end in links], engine_end, control_end)
        role = TextRole(Deployment(), facts, [link for link, _ in links], engine, control)
        serving = asyncio.create_task(role.serve())
        if ready:
            await asyncio.wait_for(ends.hear(control_end, Ready), 60)
        telling = asyncio.ensure_future(story(ends))
        await asyncio.wait({serving, telling}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and serving.exception() is not None:
            telling.cancel()
            serving.result()
        await asyncio.wait_for(telling, 60)
        control_end.send([Stop()])
        await asyncio.wait_for(serving, 30)

    asyncio.run(scenario())


async def closed(channel: AsyncChannel[Any, Any]) -> None:
    """Returns when the role has closed its end."""
    with contextlib.suppress(ChannelClosed):
        while True:
            await channel.receive()


def submit(uid: int, prompt: Any, **fields: Any) -> Submit:
    return Submit(uid, prompt, SamplingParams(max_tokens=8), **fields)


def chat(text: str = "hi") -> ChatPrompt:
    return ChatPrompt(json.dumps([{"role": "user", "content": text}]).encode())


def test_a_conversation_from_end_to_end(
    make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers["byte-level"]

    async def story(ends: Ends) -> None:
        (api,) = ends.apis
        api.send([submit(1, chat(), add_special_tokens=False)])
        generate = await ends.hear(ends.engine, Generate)
        assert tokenizer.backend.decode(generate.prompt, skip_special_tokens=False) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
        )
        ends.engine.send([Accepted(1)])
        assert (await ends.hear(api, Accepted)).prompt_tokens == len(generate.prompt)
        text = ""
        for token in tokenizer.encode("สวัสดี 🙂", False):
            ends.engine.send([Tokens([1], [0], [token], [Ended.NO], [])])
            text += (await ends.hear(api, Delta)).text
        assert text == "สวัสดี 🙂"
        eos = tokenizer.vocab["<|im_end|>"]
        ends.engine.send([Tokens([1], [0], [eos], [Ended.STOP], []), Finished(1, CacheTruth(), Timing())])
        assert (await ends.hear(api, Delta)).finish_reason == "stop"
        assert isinstance(await ends.hear(api, Done), Done)

    play(make_facts(), story)


def test_long_prompts_tokenize_detokenize(
    make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer]
) -> None:
    text = "The quick brown fox 🙂 " * 300
    ids = tokenizers["byte-level"].encode(text, True)

    async def story(ends: Ends) -> None:
        (api,) = ends.apis
        api.send([Tokenize(1, TextPrompt(text)), Detokenize(2, ids * 9)])
        assert (await ends.hear(api, Tokenized)).ids == ids
        assert (await ends.hear(api, Detokenized)).text == text * 9
        api.send([submit(3, TextPrompt(text))])
        assert (await ends.hear(ends.engine, Generate)).prompt == ids

    play(make_facts(max_seq_len=len(ids) + 8), story)


def test_upstream_messages_drain_and_heartbeats(make_facts: Callable[..., ServingFacts]) -> None:
    async def story(ends: Ends) -> None:
        first, second = ends.apis
        ends.engine.send([Loading("weights", 0.25), Heartbeat("engine", 7, True)])
        for api in (first, second):
            seen: list[Any] = []
            while Heartbeat("engine", 7, True) not in seen:
                seen += await api.receive()
            names = [(type(message), message.role) for message in seen if not isinstance(message, Loading)]
            assert (Ready, "text") in names
            assert (Heartbeat, "text") in names
            assert (MetricsSnapshot, "text") in names
            assert Loading("weights", 0.25) in seen
        assert isinstance(await ends.hear(ends.control, Heartbeat), Heartbeat)
        first.send([Drain()])
        assert await ends.hear(ends.engine, Drain) == Drain()

    play(make_facts(), story, apis=2)


def test_F11_a_lost_api_cancels_its_requests_and_the_other_goes_on(make_facts: Callable[..., ServingFacts]) -> None:
    async def story(ends: Ends) -> None:
        first, second = ends.apis
        first.send([submit(1, TextPrompt("a"))])
        await ends.hear(ends.engine, Generate)
        first.close()
        assert await ends.hear(ends.engine, Cancel) == Cancel(1)
        second.send([submit(2, TextPrompt("a"))])
        assert (await ends.hear(ends.engine, Generate)).uid == 2

    play(make_facts(), story, apis=2)


def test_F70_a_lost_engine_fails_what_runs_and_the_role_stays(make_facts: Callable[..., ServingFacts]) -> None:
    async def story(ends: Ends) -> None:
        (api,) = ends.apis
        api.send([submit(1, TextPrompt("a")), submit(2, TextPrompt("b"))])
        await ends.hear(ends.engine, Generate)
        ends.engine.close()
        for _ in (1, 2):
            assert (await ends.hear(api, Failed)).error.code == "engine_error"
        api.send([submit(3, TextPrompt("a")), Tokenize(4, TextPrompt("a"))])
        assert (await ends.hear(api, Failed)).error.code == "engine_unhealthy"
        assert isinstance(await ends.hear(api, Tokenized), Tokenized)
        assert isinstance(await ends.hear(ends.control, Heartbeat), Heartbeat)

    play(make_facts(), story)


def test_stop_ends_what_is_open_with_one_event(make_facts: Callable[..., ServingFacts]) -> None:
    async def story(ends: Ends) -> None:
        (api,) = ends.apis
        api.send([submit(1, TextPrompt("a"))])
        await ends.hear(ends.engine, Generate)
        ends.control.send([Stop()])
        assert (await ends.hear(api, Failed)).error.code == "draining"
        await closed(api)

    play(make_facts(), story)


def test_a_lost_parent_ends_the_role(make_facts: Callable[..., ServingFacts]) -> None:
    async def story(ends: Ends) -> None:
        ends.control.close()
        await closed(ends.engine)

    play(make_facts(), story)


def test_F84_a_refused_tokenizer_ends_the_role(make_facts: Callable[..., ServingFacts]) -> None:
    async def story(ends: Ends) -> None:
        await asyncio.sleep(60)

    with pytest.raises(ModelError):
        play(msgspec.structs.replace(make_facts(), vocab_size=10), story, ready=False)


def test_no_torch_and_no_transformers_at_run_time() -> None:
    check = (
        "import sys, hybserve.text.main, hybserve.text.worker;"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", check], env=environ, check=False).returncode == 0


def test_F19_the_loop_keeps_turning_under_long_prompts(make_facts: Callable[..., ServingFacts]) -> None:
    """Running streams get their tokens while megabytes of prompts are being encoded."""
    long = "The quick brown fox. " * 20_000

    async def story(ends: Ends) -> None:
        (api,) = ends.apis
        api.send([submit(1, TextPrompt("a"))])
        await ends.hear(ends.engine, Generate)
        api.send([submit(uid, TextPrompt(long)) for uid in range(2, 6)])
        worst = 0.0
        for _ in range(100):
            before = time.monotonic()
            ends.engine.send([Tokens([1], [0], [5], [Ended.NO], [])])
            await ends.hear(api, Delta)
            worst = max(worst, time.monotonic() - before)
        assert worst < 2.0  # ten times what may be noticed

    play(make_facts(max_seq_len=1 << 20), story)
