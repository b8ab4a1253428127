"""Frames over real socketpairs: nothing lost, nothing reordered, nobody blocked, garbage cut off."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time

import pytest

from hybserve.core.errors import ErrorBody
from hybserve.core.messages import (
    Cancel,
    Drain,
    Failed,
    FromScheduler,
    Heartbeat,
    Loading,
    StopAt,
    Tokens,
    ToLaunch,
    ToScheduler,
)
from hybserve.wire.channel import MAX_FRAME, AsyncChannel, Channel, ChannelClosed
from hybserve.wire.codec import Codec

ERROR = ErrorBody("no", "server_error", "engine_error", None, 500)
UP, DOWN = Codec(FromScheduler), Codec(ToScheduler)


def channels() -> tuple[Channel, Channel]:
    """(text's end, engine's end)."""
    left, right = socket.socketpair()
    return Channel(left, UP, DOWN), Channel(right, DOWN, UP)


def raw_and_channel() -> tuple[socket.socket, Channel]:
    left, right = socket.socketpair()
    return left, Channel(right, DOWN, UP)


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def test_messages_arrive_in_order_and_all_at_once():
    text, engine = channels()
    text.send([Cancel(1), StopAt(2, 0, 7)])
    text.send([Drain()])
    assert engine.receive(1) == [Cancel(1), StopAt(2, 0, 7), Drain()]
    assert engine.receive(0) == []


def test_an_empty_frame_delivers_nothing():
    text, engine = channels()
    text.send([])
    assert engine.receive(0.01) == []


def test_receive_waits_for_the_first_message():
    text, engine = channels()
    threading.Timer(0.05, text.send, [[Cancel(3)]]).start()
    assert engine.receive(None) == [Cancel(3)]


def test_receive_gives_up_after_its_timeout():
    _text, engine = channels()
    before = time.monotonic()
    assert engine.receive(0.05) == []
    assert time.monotonic() - before >= 0.05


def test_bytes_may_come_in_any_pieces():
    sock, engine = raw_and_channel()
    stream = frame(DOWN.encode([Cancel(1)])) + frame(DOWN.encode([Cancel(2), Drain()]))
    received = []
    for byte in stream:
        sock.send(bytes([byte]))
        received += engine.receive(0)
    assert received == [Cancel(1), Cancel(2), Drain()]


def test_a_lost_peer_is_reported_after_its_last_messages():
    text, engine = channels()
    text.send([Cancel(1)])
    text.close()
    assert engine.receive(1) == [Cancel(1)]
    with pytest.raises(ChannelClosed, match="closed"):
        engine.receive(1)
    assert engine.fileno() == -1


def test_sending_to_a_lost_peer_does_not_hide_what_it_said_last():
    text, engine = channels()
    engine.send([Failed(1, ERROR)])
    engine.close()
    text.send([Cancel(1)])
    text.send([Cancel(2)])
    assert text.receive(1) == [Failed(1, ERROR)]
    with pytest.raises(ChannelClosed):
        text.receive(1)


def test_half_a_frame_before_the_end_is_no_message():
    sock, engine = raw_and_channel()
    sock.send(frame(DOWN.encode([Cancel(1)]))[:-1])
    sock.close()
    with pytest.raises(ChannelClosed):
        engine.receive(1)


def test_close_hands_over_what_is_buffered():
    text, engine = channels()
    big = Tokens([1] * 400_000, [0] * 400_000, [5] * 400_000, [0] * 400_000, [])
    engine.send([big])
    received = []
    reader = threading.Thread(target=lambda: received.extend(text.receive(10)))
    reader.start()
    engine.close()
    reader.join()
    assert received == [big]
    engine.close()


def test_a_frame_larger_than_every_buffer_passes():
    text, engine = channels()
    big = Tokens(list(range(2_000_000)), [0], [5], [0], [])
    engine.send([big])
    threading.Timer(0.05, engine.receive, [5]).start()  # the sender goes on writing while it receives
    assert text.receive(10) == [big]
    text.send([Drain()])


def test_two_peers_that_flood_each_other_do_not_deadlock():
    text, engine = channels()
    for index in range(200):
        text.send([StopAt(index, 0, number) for number in range(2000)])
        engine.send([Tokens([index] * 2000, [0] * 2000, [1] * 2000, [0] * 2000, [])])
    down: list = []
    up: list = []
    for _ in range(10_000):
        down += engine.receive(0)
        up += text.receive(0)
        if len(down) == 400_000 and len(up) == 200:
            break
    assert [message.uids[0] for message in up] == list(range(200))
    assert [message.uid for message in down[::2000]] == list(range(200))


def test_oversized_frames_are_refused_on_both_sides():
    sock, engine = raw_and_channel()
    sock.send(struct.pack("<I", MAX_FRAME + 1))
    with pytest.raises(ChannelClosed, match="claims"):
        engine.receive(1)


def test_F75_a_thousand_random_frames_close_the_peer_and_nothing_else():
    rng = random.Random(75)
    valid = DOWN.encode([Cancel(1), StopAt(1, 0, 3)])
    for trial in range(1000):
        if trial % 2:
            payload = rng.randbytes(rng.randrange(64))
        else:  # a valid frame with a few bytes changed
            changed = bytearray(valid)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            payload = bytes(changed)
        sock, engine = raw_and_channel()
        sock.send(frame(payload))
        sock.close()
        try:
            while True:
                assert all(isinstance(message, Cancel | StopAt | Drain) for message in engine.receive(1))
        except ChannelClosed:
            assert engine.fileno() == -1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        Codec(ToLaunch).encode([Loading("weights", 0.5)]),  # a message of another direction
        DOWN.encode([Cancel(1)])[:-1],
        b"\x80\x04\x95cposix\nsystem\n",  # pickle
    ],
    ids=["empty", "reserved", "foreign", "short", "pickle"],
)
def test_F75_garbage_after_good_frames_costs_only_the_garbage(payload):
    sock, engine = raw_and_channel()
    sock.send(frame(DOWN.encode([Cancel(1)])) + frame(payload) + frame(DOWN.encode([Cancel(2)])))
    assert engine.receive(1) == [Cancel(1)]
    with pytest.raises(ChannelClosed, match="garbage"):
        engine.receive(1)
    assert sock.recv(1) == b""


def test_async_both_ways():
    async def talk():
        left, right = socket.socketpair()
        api, text = AsyncChannel(left, UP, DOWN), AsyncChannel(right, DOWN, UP)
        api.send([Cancel(1)])
        assert await text.receive() == [Cancel(1)]
        waiting = asyncio.create_task(api.receive())
        await asyncio.sleep(0.01)
        text.send([Heartbeat("text", 1, False)])
        assert await waiting == [Heartbeat("text", 1, False)]
        text.close()
        with pytest.raises(ChannelClosed):
            await api.receive()
        api.close()

    asyncio.run(talk())


def test_async_flood_both_ways():
    async def pump(channel, message):
        for _ in range(300):
            channel.send([message] * 1000)
        received = []
        while len(received) < 300_000:
            received += await channel.receive()
        return len(received)

    async def talk():
        left, right = socket.socketpair()
        api, text = AsyncChannel(left, UP, DOWN), AsyncChannel(right, DOWN, UP)
        return await asyncio.gather(pump(api, StopAt(1, 0, 1)), pump(text, Heartbeat("text", 1, False)))

    assert asyncio.run(talk()) == [300_000, 300_000]


def test_async_receive_can_be_cancelled_without_loss():
    async def talk():
        left, right = socket.socketpair()
        api, text = AsyncChannel(left, UP, DOWN), AsyncChannel(right, DOWN, UP)
        received = []
        for index in range(200):
            waiting = asyncio.create_task(text.receive())
            if index % 2:
                await asyncio.sleep(0)
            api.send([Cancel(index)])
            if index % 3:
                await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                received += await waiting
        while len(received) < 200:
            received += await text.receive()
        return received

    assert asyncio.run(talk()) == [Cancel(index) for index in range(200)]


def test_async_close_wakes_the_waiting_task_and_leaves_no_watcher():
    async def talk():
        left, right = socket.socketpair()
        api, text = AsyncChannel(left, UP, DOWN), AsyncChannel(right, DOWN, UP)
        waiting = asyncio.create_task(text.receive())
        await asyncio.sleep(0.01)
        text.close()
        with pytest.raises(ChannelClosed, match="this side"):
            await waiting
        api.close()
        left, right = socket.socketpair()  # the same descriptors again
        api, text = AsyncChannel(left, UP, DOWN), AsyncChannel(right, DOWN, UP)
        api.send([Drain()])
        assert await text.receive() == [Drain()]

    asyncio.run(talk())


def test_async_and_blocking_ends_understand_each_other():
    left, right = socket.socketpair()
    engine = Channel(right, DOWN, UP)

    def serve():
        while True:
            try:
                engine.send([Tokens([message.uid], [0], [1], [0], []) for message in engine.receive(None)])
            except ChannelClosed:
                return

    server = threading.Thread(target=serve)
    server.start()

    async def talk():
        text = AsyncChannel(left, UP, DOWN)
        uids = []
        for uid in range(100):
            text.send([Cancel(uid)])
        while len(uids) < 100:
            uids += [message.uids[0] for message in await text.receive()]
        text.close()
        return uids

    assert asyncio.run(talk()) == list(range(100))
    server.join(10)
    assert not server.is_alive()
