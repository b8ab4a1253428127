"""The errors of a troubled server as openai-python's exception classes (all in one process of its own)."""

import json
import subprocess
import sys
import textwrap

from hybserve.core.errors import ErrorBody

SCRIPT = textwrap.dedent("""
    import json, sys, openai
    outcomes = []
    for url in sys.argv[1:]:
        client = openai.OpenAI(base_url=url + "/v1", api_key="sesame", max_retries=0, timeout=30)
        for stream in (True, False):
            try:
                answer = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x"}], stream=stream
                )
                text = [c.choices[0].delta.content for c in answer] if stream else answer.choices[0].message.content
                outcomes.append(text)
            except openai.APIError as error:
                outcomes.append([type(error).__name__, error.code])
    print(json.dumps(outcomes))
""")


def test_exception_classes(serve):
    healthy, broken, full, guarded = serve(), serve(), serve(), serve(key_digests=(b"x" * 32,))
    broken.text.fail_after = (2, ErrorBody("bad numbers", "server_error", "numerical_error", None, 500))
    full.text.refusal = ErrorBody("full", "server_error", "queue_full", None, 503, 1)
    command = [sys.executable, "-c", SCRIPT, *(live.url for live in (healthy, broken, full, guarded))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["Hello", " wor", "ld", "!"],
        "Hello world!",
        ["APIError", "numerical_error"],  # an event after the first chunk
        ["InternalServerError", "numerical_error"],
        ["InternalServerError", "queue_full"],
        ["InternalServerError", "queue_full"],
        ["AuthenticationError", "invalid_api_key"],
        ["AuthenticationError", "invalid_api_key"],
    ]
