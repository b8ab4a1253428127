from hybserve.config.keys import KEYS, SECTIONS, is_text


def test_the_set_of_keys_is_frozen():
    assert list(KEYS) == [
        "model.path", "model.served_name", "model.dtype", "model.load", "model.seed",
        "server.host", "server.port", "server.api_key_env", "server.admin_api_key_env", "server.max_queue",
        "server.max_queue_tokens", "server.drain_timeout", "server.request_timeout", "server.sse_ping",
        "server.max_body", "server.insecure",
        "engine.backend", "engine.max_seq_len", "engine.max_running", "engine.step_tokens", "engine.prefill_chunk",
        "engine.tensor_parallel", "engine.pipeline_parallel", "engine.graphs", "engine.deterministic", "engine.seed",
        "memory.device", "memory.reserve", "memory.kv_dtype", "memory.state_dtype", "memory.conv_dtype",
        "cache.prefix", "cache.page_size", "cache.checkpoint_every", "cache.host", "cache.file.path",
        "cache.file.size",
        "text.allow_request_template",
        "metrics.compat",
        "log.level", "log.format", "log.trace",
    ]  # fmt: skip


def test_sections():
    assert {"model", "server", "engine", "memory", "cache", "cache.file", "text", "metrics", "log"} == SECTIONS


def test_every_key_says_what_it_means():
    for key, field in KEYS.items():
        assert field.description, key
        assert field.description.endswith("."), key


def test_keys_that_take_any_text():
    assert {key for key in KEYS if is_text(key)} == {
        "model.path", "server.host", "server.api_key_env", "server.admin_api_key_env", "cache.file.path",
    }  # fmt: skip
