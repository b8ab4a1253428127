"""The command line: what each command prints, and the exit code of every kind of refusal."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybserve import __version__
from hybserve.cli import cli
from hybserve.core.errors import EXIT_USAGE
from hybserve.plan.facts import probe_gpu

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hybserve", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_help_names_every_command():
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for name in ("serve", "plan", "config", "demo", "version"):
        assert f"  {name} " in result.output


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments):
    assert CliRunner().invoke(cli, arguments).output == f"hybserve {__version__}\n"


def test_config_show_tells_origins(tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text("engine:\n  max_running: 3\n")
    result = CliRunner().invoke(cli, ["config", "show", str(file), "--set", "server.port=1", "--origin"])
    assert result.exit_code == 0, result.output
    assert f"{file}:2" in result.output
    assert "--set" in result.output


def test_config_schema_is_json():
    assert json.loads(CliRunner().invoke(cli, ["config", "schema"]).output)["type"] == "object"


def test_config_explain():
    assert "at once" in CliRunner().invoke(cli, ["config", "explain", "engine.max_running"]).output


def test_plan_of_a_config_alone(model):
    result = command("plan", "--json", "--set", f"model.path={model / 'config.json'}")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["fits"]
    assert plan["model"] == {"layers": 4, "recurrent_layers": 3, "attention_layers": 1}
    assert "state_slots" in command("plan", "--set", f"model.path={model}").stdout.replace("state slots", "state_slots")


def test_a_plan_that_does_not_fit_is_exit_3_with_edits(model):
    result = command("plan", "--set", f"model.path={model}", "--set", "memory.device=1MiB")
    assert result.returncode == 3
    assert "need" in result.stdout
    assert "would make it fit" in result.stdout or "no single edit" in result.stdout


def test_F77_what_does_not_fit_is_not_served(model):
    result = command("serve", "--set", f"model.path={model}", "--set", "memory.device=1MiB", "--set", "server.port=0")
    assert result.returncode == 3
    assert "need" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["serve", "--set", "engine.max_runing=3"], 2, "did you mean engine.max_running"),
        (["serve", "--set", "engine.tensor_parallel=2"], 2, "engine.tensor_parallel"),
        (["serve", "/no/such/file.yaml"], 2, "does not exist"),
        (["serve", "--no-such-option"], 2, "No such option"),
        (["serve", "--set", "model.path=/no/such/model"], 4, "/no/such/model"),
        (["plan", "--set", "model.path=/no/such/model"], 4, "/no/such/model"),
        (["config", "explain", "engine.nothing"], 2, "engine.nothing"),
        (["nonsense"], 2, "No such command"),
    ],
    ids=["typo", "later", "file", "option", "model", "plan", "key", "command"],
)
def test_F77_a_mistake_is_one_clear_line_and_a_code(arguments, code, text):
    result = command(*arguments)
    assert result.returncode == code, result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_F77_a_taken_port_is_one_clear_line(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command("serve", "--set", f"model.path={model}", "--set", f"server.port={port}")
    assert result.returncode == 2
    assert str(port) in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_module_runs_from_anywhere(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)}
    output = subprocess.check_output([sys.executable, "-m", "hybserve", "version"], cwd=tmp_path, text=True, env=env)
    assert output == f"hybserve {__version__}\n"


@pytest.mark.skipif(probe_gpu() > 0, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts():
    ran = command("serve", "--set", "engine.backend=cuda", "--set", "memory.device=10GiB")
    assert ran.returncode == EXIT_USAGE
    assert "engine.backend: there is no GPU" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_closed_standard_streams_are_opened_onto_nothing():
    program = (
        "import os, sys\n"
        "for descriptor in (0, 1, 2): os.close(descriptor)\n"
        "from hybserve.cli import _open_standard_streams\n"
        "_open_standard_streams()\n"
        "assert os.open(os.devnull, os.O_RDONLY) == 3 and not sys.stdout.isatty()\n"
        "assert sys.stdin.read() == ''\n"
        "print('into nothing', flush=True)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
