"""Events of a stream: any cut of the same text says the same, and equals the whole answer."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from hybserve.api.render import Answer, Totals
from hybserve.api.schema import Schema
from hybserve.api.sse import ChunkEncoder
from hybserve.core.messages import Accepted, Delta, Done
from hybserve.core.types import CacheTruth, Timing
from tests.api.conftest import FACTS, parse_events

SCHEMA = Schema(FACTS)
CHAT = {"messages": [{"role": "user", "content": "x"}]}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
pieces = st.lists(texts, min_size=1, max_size=8)


def order_of(chat, **fields):
    return SCHEMA.chat({**CHAT, **fields}) if chat else SCHEMA.completion({"prompt": ["a", "b"], **fields})


@given(pieces, st.booleans(), st.sampled_from([{}, {"include_usage": True, "continuous_usage_stats": True}]))
@settings(max_examples=200, deadline=None)
def test_stream_and_whole_say_the_same(cut, chat, options):
    order = order_of(chat, stream=True, stream_options=options, return_token_ids=bool(options))
    encoder, answer = ChunkEncoder(order, "id", 1), Answer(order)
    prompt = len(order.prompts) - 1
    for sink in (encoder, answer):
        sink.accept(prompt, Accepted(1, 2, [1, 2]))
    data = b""
    for position, text in enumerate(cut):
        reason = "stop" if position == len(cut) - 1 else None
        delta = Delta(1, 0, text, 1, [position], None, reason)
        data += encoder.delta(prompt, delta)
        answer.add(prompt, delta)
    events = parse_events(data)
    assert len(events) == len(cut)  # nothing in a text can end an event early
    choices = [event["choices"][0] for event in events]
    said = "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices)
    whole = json.loads(answer.body("id", 1))["choices"][prompt]
    assert said == "".join(cut) == (whole["message"]["content"] if chat else whole["text"])
    assert {c["index"] for c in choices} == {prompt}
    assert [c["finish_reason"] for c in choices] == [None] * (len(cut) - 1) + ["stop"]
    if options:
        assert [i for c in choices for i in c["token_ids"]] == whole["token_ids"]
        assert not events[-1]["usage"]


def test_totals_of_several_prompts():
    totals = Totals(2)
    totals.add(Done(1, 3, 4, CacheTruth(hit=1, reason="a"), Timing(1, 0, 5, 2, 100)))
    totals.add(Done(2, 5, 6, CacheTruth(hit=2, reason="b"), Timing(2, 0, 1, 3, 50)))
    assert totals.usage()["total_tokens"] == 18
    assert totals.usage()["prompt_tokens_details"]["cached_tokens"] == 3
    block = totals.hybserve()
    assert block["cache"]["reason"] == "a"
    assert block["timing_ms"] == {"queue": 2, "restore": 0, "prefill": 5, "ttft": 3, "decode": 100}
    assert block["tok_per_s"] == 80.0
