"""A deployment: what the operator asked for, frozen. What the planner decides stands in ``plan.result``, never here.

One section per concern, one field per key; ``None`` means ``auto`` or "not set", as the field's description says. A
deployment knows which keys were stated, because only stated numbers are demand: defaulted ones are lowered to fit.
"""

import ipaddress
import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hybserve.config.quantity import BYTES, COUNT, INTEGER, SECONDS, Quantity
from hybserve.core.units import GIB, KIB

#: A page on a GPU holds whole tiles of the recurrent scan.
GPU_SCAN_TILE = 64

_DTYPE_NAMES = {
    "fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
}  # fmt: skip


def _dtype(value: object) -> object:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _names(value: object) -> object:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if isinstance(names, tuple) and any(not isinstance(name, str) or not name for name in names):
        raise ValueError("expected a name or a list of names, none of them empty")
    return names


_NAMES_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _dtype_schema(*names: str) -> WithJsonSchema:
    return WithJsonSchema({"enum": [*names, *(short for short, name in _DTYPE_NAMES.items() if name in names)]})


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class ModelSection(Section):
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Model directory in Hugging Face layout, from the working directory; the embedded model if unset.",
    )
    served_name: Annotated[tuple[str, ...], BeforeValidator(_names), WithJsonSchema(_NAMES_SCHEMA)] = Field(
        default=(),
        description="Names clients may use in `model`, the first one canonical; the directory's name if empty.",
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(_dtype),
        _dtype_schema("auto", "float32", "bfloat16", "float16"),
    ] = Field(default="auto", description="Type of the weights and of the computation; auto = the checkpoint's.")
    load: Literal["weights", "dummy"] = Field(
        default="weights", description="`dummy` fills random weights and reads config.json and tokenizer files only."
    )
    seed: Annotated[int, Quantity(INTEGER, 0, 2**63 - 1)] = Field(default=0, description="Seed of dummy weights.")


#: So that a key pasted by mistake is refused instead of printed as a variable that is not set.
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


class ServerSection(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: Annotated[int, Quantity(INTEGER, 0, 65535)] = Field(
        default=8000, description="TCP port; 0 lets the system choose."
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=_ENV_NAME,
        description="Name of the environment variable that holds the API key clients must send.",
    )
    admin_api_key_env: str | None = Field(
        default=None,
        pattern=_ENV_NAME,
        description="Name of the environment variable that holds the key of admin routes.",
    )
    max_queue: Annotated[int, Quantity(COUNT, 1, 1 << 20)] = Field(
        default=256, description="Requests that may wait; above it new ones are refused with 503."
    )
    max_queue_tokens: Annotated[int | None, Quantity(COUNT, 1, auto=True)] = Field(
        default=None, description="Prompt tokens that may wait in all; auto = no bound beside max_queue."
    )
    drain_timeout: Annotated[float, Quantity(SECONDS, 0, 86400)] = Field(
        default=30.0, description="How long running requests may go on after SIGTERM."
    )
    request_timeout: Annotated[float | None, Quantity(SECONDS, 0.001, auto=True)] = Field(
        default=None, description="Longest life of a request from its arrival; auto = no deadline."
    )
    sse_ping: Annotated[float, Quantity(SECONDS, 0.1, 3600)] = Field(
        default=10.0, description="Pause after which a silent stream gets a comment line that keeps it open."
    )
    max_body: Annotated[int, Quantity(BYTES, KIB, GIB)] = Field(
        default=64 * 1024 * KIB, description="Largest HTTP body; above it 413."
    )
    insecure: StrictBool = Field(
        default=False, description="Allow an address other hosts can reach without an API key."
    )


class EngineSection(Section):
    backend: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs.")
    max_seq_len: Annotated[int | None, Quantity(COUNT, 2, auto=True)] = Field(
        default=None,
        description="Longest sequence, prompt and output together; auto = the model's, lowered to what fits.",
    )
    max_running: Annotated[int | None, Quantity(COUNT, 1, 1 << 16, auto=True)] = Field(
        default=None, description="Sequences that run at once; auto = 16 on CPU, 256 on a GPU, lowered to what fits."
    )
    step_tokens: Annotated[int | None, Quantity(COUNT, 1, 1 << 20, auto=True)] = Field(
        default=None, description="Most tokens in one step over all rows."
    )
    prefill_chunk: Annotated[int | None, Quantity(COUNT, 1, 1 << 20, auto=True)] = Field(
        default=None, description="Most tokens of one row in one step; a multiple of cache.page_size."
    )
    tensor_parallel: Annotated[int, Quantity(INTEGER, 1, 1024)] = Field(
        default=1, description="Ranks that share every layer."
    )
    pipeline_parallel: Annotated[int, Quantity(INTEGER, 1, 1024)] = Field(
        default=1, description="Stages that hold a run of layers each."
    )
    graphs: Literal["auto", "on", "off"] = Field(default="auto", description="Run steps from captured CUDA graphs.")
    deterministic: StrictBool = Field(
        default=False, description="Same bits whatever the batching; slower. Needs fp32 state and one rank."
    )
    seed: Annotated[int, Quantity(INTEGER, 0, 2**63 - 1)] = Field(
        default=0, description="Root of the seeds drawn for requests that bring none."
    )


class MemorySection(Section):
    device: Annotated[int | None, Quantity(BYTES, 1, auto=True)] = Field(
        default=None,
        description="Memory of one rank, weights included; auto = all of a GPU, on CPU the smaller of 4GiB and half of "
        "what is free.",
    )
    reserve: Annotated[int | None, Quantity(BYTES, 0, auto=True)] = Field(
        default=None, description="Left unassigned on purpose; auto = 1GiB on a GPU, nothing on CPU."
    )
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"],
        BeforeValidator(_dtype),
        _dtype_schema("auto", "float32", "bfloat16", "float16", "float8_e4m3fn"),
    ] = Field(default="auto", description="Type of keys and values in the cache; auto = the model's.")
    state_dtype: Annotated[
        Literal["float32", "bfloat16"], BeforeValidator(_dtype), _dtype_schema("float32", "bfloat16")
    ] = Field(default="float32", description="Type of the matrix part of recurrent states.")
    conv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(_dtype),
        _dtype_schema("auto", "float32", "bfloat16", "float16"),
    ] = Field(
        default="auto",
        description="Type of the convolution window of recurrent states; auto = the model's, which loses nothing.",
    )


class FileTier(Section):
    path: str | None = Field(default=None, min_length=1, description="Directory of the file tier; not available yet.")
    size: Annotated[int, Quantity(BYTES, 0)] = Field(
        default=0, description="Bytes the file tier may use; not available yet."
    )


class CacheSection(Section):
    prefix: StrictBool = Field(default=True, description="Reuse the prefixes of earlier requests.")
    page_size: Annotated[int, Quantity(COUNT, 1, 4096)] = Field(
        default=64, description=f"Tokens per KV page; a multiple of {GPU_SCAN_TILE} on a GPU, any size on CPU."
    )
    checkpoint_every: Annotated[int | None, Quantity(COUNT, 1, auto=True)] = Field(
        default=None,
        description="Spacing of retained checkpoints in tokens; auto = not below what a checkpoint costs in KV tokens.",
    )
    host: Annotated[int, Quantity(BYTES, 0)] = Field(
        default=0, description="Bytes of the host tier; not available yet."
    )
    file: FileTier = FileTier()


class TextSection(Section):
    allow_request_template: StrictBool = Field(default=False, description="Let requests bring their own chat template.")


class MetricsSection(Section):
    compat: Literal["none", "vllm"] = Field(
        default="none", description="Mirror metrics under the names of another server."
    )


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe lines that are logged."
    )
    format: Literal["auto", "pretty", "json"] = Field(
        default="auto", description="auto = pretty on a terminal, JSON otherwise."
    )
    trace: Literal["off", "on"] = Field(default="off", description="Record a timeline of steps; not available yet.")


#: Keys whose feature is not there yet, with the only value they accept.
NOT_YET: dict[str, object] = {
    "cache.host": 0,
    "cache.file.path": None,
    "cache.file.size": 0,
    "metrics.compat": "none",
    "log.trace": "off",
}


#: Seconds without a heartbeat, by backend, after which a role counts as lost: one step of a large model on CPU is long.
SILENCE = {"cpu": 300.0, "cuda": 60.0}


class Deployment(Section):
    """The root. ``stated(key)`` and ``origin(key)`` take dotted keys such as ``engine.max_running``."""

    SECTIONS: ClassVar[tuple[str, ...]] = (
        "model", "server", "engine", "memory", "cache", "text", "metrics", "log",
    )  # fmt: skip

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    engine: EngineSection = EngineSection()
    memory: MemorySection = MemorySection()
    cache: CacheSection = CacheSection()
    text: TextSection = TextSection()
    metrics: MetricsSection = MetricsSection()
    log: LogSection = LogSection()
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def build(cls, values: dict[str, Any], origins: dict[str, str] | None = None) -> Self:
        """From nested plain values. ``origins``: dotted key -> where it was stated. Raises pydantic.ValidationError."""
        deployment = cls.model_validate(values)
        deployment._origins.update(origins or {})
        return deployment

    def value(self, key: str) -> Any:
        """The value of a dotted key. Raises KeyError."""
        at: Any = self
        for part in key.split("."):
            if not isinstance(at, Section) or part not in type(at).model_fields:
                raise KeyError(key)
            at = getattr(at, part)
        return at

    def stated(self, key: str) -> bool:
        """Whether the operator wrote the key (then it is demand), as opposed to a default."""
        at: Any = self
        for part in key.split("."):
            if part not in at.model_fields_set:
                return False
            at = getattr(at, part)
        return True

    def origin(self, key: str) -> str:
        """Where the value comes from: ``file:line``, the environment variable, ``--set`` or ``default``."""
        return self._origins.get(key, "stated") if self.stated(key) else "default"

    def to_json(self) -> str:
        return json.dumps({"values": self.model_dump(mode="json", exclude_unset=True), "origins": self._origins})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of ``to_json``: equal values, the same keys stated, the same origins."""
        data = json.loads(text)
        return cls.build(data["values"], data["origins"])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [*_not_yet(self), *_conflicts(self)]
        if problems:
            text = "; ".join(f"{key}: {what}" for key, what in problems)
            raise PydanticCustomError("conflict", "{text}", {"text": text, "problems": problems})
        return self


def _not_yet(deployment: Deployment) -> list[tuple[str, str]]:
    return [
        (key, f"not available yet; leave it at its default ({'unset' if only is None else only})")
        for key, only in NOT_YET.items()
        if deployment.value(key) != only
    ]


def is_loopback(host: str) -> bool:
    """Whether only this host can reach what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _conflicts(deployment: Deployment) -> list[tuple[str, str]]:
    """What is wrong between keys, as (key, what to do)."""
    server, engine, memory, cache = deployment.server, deployment.engine, deployment.memory, deployment.cache
    problems = []
    if not is_loopback(server.host) and server.api_key_env is None and not server.insecure:
        problems.append((
            "server.host",
            f"{server.host} can be reached from other hosts and no API key is set; set server.api_key_env to the name "
            "of an environment variable that holds a key, or say server.insecure: true",
        ))  # fmt: skip
    if engine.deterministic and memory.state_dtype != "float32":
        problems.append(("engine.deterministic", "needs memory.state_dtype: float32"))
    if engine.deterministic and (engine.tensor_parallel, engine.pipeline_parallel) != (1, 1):
        problems.append(("engine.deterministic", "needs one rank: tensor_parallel and pipeline_parallel 1"))
    if engine.deterministic and engine.backend == "cuda":
        problems.append(("engine.deterministic", "not available on a GPU yet; use engine.backend: cpu"))
    if engine.backend == "cuda" and cache.page_size % GPU_SCAN_TILE:
        problems.append(("cache.page_size", f"must be a multiple of {GPU_SCAN_TILE} on a GPU, got {cache.page_size}"))
    if engine.step_tokens is not None and engine.step_tokens < cache.page_size:
        problems.append(("engine.step_tokens", f"must hold at least one page ({cache.page_size} tokens)"))
    if engine.prefill_chunk is not None:
        if engine.prefill_chunk % cache.page_size:
            problems.append(("engine.prefill_chunk", f"must be a multiple of cache.page_size {cache.page_size}"))
        if engine.step_tokens is not None and engine.prefill_chunk > engine.step_tokens:
            problems.append(("engine.prefill_chunk", f"must not exceed engine.step_tokens {engine.step_tokens}"))
    if cache.checkpoint_every is not None and cache.checkpoint_every % cache.page_size:
        problems.append(("cache.checkpoint_every", f"must be a multiple of cache.page_size {cache.page_size}"))
    return problems
