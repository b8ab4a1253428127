"""Everything that is known and checked before a process starts: model directory, spec, plan, facts. No torch here."""

import time
from pathlib import Path

import msgspec

from hybserve import __version__
from hybserve.config.deployment import Deployment
from hybserve.core.errors import ConfigError, ModelError
from hybserve.core.types import ServingFacts
from hybserve.plan.facts import probe_gpu
from hybserve.plan.planner import find_facts, plan_deployment
from hybserve.plan.report import require_fit, require_memory
from hybserve.plan.result import Plan
from hybserve.spec.from_hf import read_bos_id, read_eos_ids, read_generation_defaults, read_model_spec
from hybserve.spec.model_spec import ModelSpec

#: Name under which the embedded model is served unless model.served_name says otherwise.
EMBEDDED_NAME = "embedded"
#: The trained model that comes with the package; its README.md is the model card.
EMBEDDED_DIR = Path(__file__).parents[1] / "embedded"


class Prepared(msgspec.Struct, frozen=True):
    deployment: Deployment
    spec: ModelSpec
    plan: Plan
    facts: ServingFacts
    backend: str
    dtype: str  # of the weights on the device


def prepare(deployment: Deployment, directory: Path) -> Prepared:
    """Check that the model in ``directory`` can be served and plan it. Raises ConfigError, ModelError or PlanError."""
    if not directory.is_dir():
        raise ModelError(f"model.path: {directory} is not a model directory")
    spec = read_model_spec(directory)
    memory = find_facts(deployment)
    if memory.backend == "cuda" and not probe_gpu():
        raise ConfigError(
            "engine.backend: there is no GPU that this process may use; here it can be planned, not served"
        )
    plan = plan_deployment(deployment, memory, directory)
    require_fit(plan)
    require_memory(plan, memory)
    dtype = spec.dtype if deployment.model.dtype == "auto" else deployment.model.dtype
    return Prepared(deployment, spec, plan, _facts(deployment, directory, spec, plan), memory.backend, dtype)


def model_directory(deployment: Deployment) -> Path:
    """The directory or file that ``model.path`` names; the embedded model's if it names none."""
    return EMBEDDED_DIR if deployment.model.path is None else Path(deployment.model.path)


def _facts(deployment: Deployment, directory: Path, spec: ModelSpec, plan: Plan) -> ServingFacts:
    limits = plan.engine
    assert limits is not None
    defaults, source = read_generation_defaults(directory)
    fallback = EMBEDDED_NAME if deployment.model.path is None else directory.resolve().name
    return ServingFacts(
        served_names=deployment.model.served_name or (fallback,),
        model_dir=str(directory.resolve()),
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_seq_len=limits.max_seq_len,
        max_running=limits.max_running,
        page_size=limits.page_size,
        capacity_tokens=(limits.kv_pages - 1) * limits.page_size if spec.attention_layers else limits.max_seq_len,
        eos_ids=read_eos_ids(directory, spec.vocab_size),
        bos_id=read_bos_id(directory, spec.vocab_size),
        sampling_defaults=defaults,
        sampling_source=source,
        created=int(time.time()),
        version=__version__,
    )
