"""The parent's hold on its roles, with small fake roles: every way to be lost is noticed, nothing is left behind."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybserve.core.messages import Drain, Stop
from hybserve.launch import group as group_module
from hybserve.launch.group import RoleFailed, RoleGroup

FAKE = str(Path(__file__).with_name("fake_role.py"))


def begin(group, name, *steps):
    def arguments(sockets):
        return json.dumps({"role": name, "parent": os.getpid(), "sockets": sockets, "steps": steps}).encode()

    role = group.start(name, {}, [sys.executable, FAKE])
    role.tell(arguments)
    return role


def poll_until(group, condition, seconds=20):
    end = time.monotonic() + seconds
    heard = []
    while not condition():
        assert time.monotonic() < end, "timed out"
        heard += group.poll()
    return heard


@pytest.fixture
def group():
    before = set(psutil.Process().children(recursive=True))
    with RoleGroup(silence=30) as group:
        yield group
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, "processes are left behind"


def test_roles_report_progress_and_become_ready(group):
    begin(group, "api", ["ready"], ["obey"])
    begin(group, "text", ["ready"], ["obey"])
    heard = poll_until(group, lambda: group.ready)
    assert [message.stage for message in heard] == ["weights", "weights"]


def test_an_orderly_end_is_no_failure(group):
    for name in ("api", "text"):
        begin(group, name, ["ready"], ["obey"])
    poll_until(group, lambda: group.ready)
    group.expect_end(["api"])
    group.send(["api"], Drain())
    poll_until(group, lambda: "api" not in group.roles)
    group.expect_end(["text"])
    group.send(["text"], Stop())
    poll_until(group, lambda: not group.roles)


def test_F70_a_killed_role_is_noticed_within_a_second(group):
    role = begin(group, "engine", ["ready"], ["obey"])
    poll_until(group, lambda: group.ready)
    os.kill(role.process.pid, signal.SIGKILL)
    before = time.monotonic()
    with pytest.raises(RoleFailed, match="killed by SIGKILL") as caught:
        poll_until(group, lambda: False)
    assert time.monotonic() - before < 10
    assert caught.value.role == "engine"
    assert caught.value.exit_code == 1


def test_F70_a_role_killed_while_loading_is_noticed(group):
    role = begin(group, "engine", ["deaf", 60])
    os.kill(role.process.pid, signal.SIGKILL)
    with pytest.raises(RoleFailed, match="SIGKILL"):
        poll_until(group, lambda: False)


def test_F78_what_a_role_started_itself_ends_with_it_and_no_zombie_stays(group):
    role = begin(group, "text", ["child"], ["ready"], ["obey"])
    poll_until(group, lambda: group.ready)
    (helper,) = psutil.Process(role.process.pid).children()
    os.kill(role.process.pid, signal.SIGKILL)
    with pytest.raises(RoleFailed):
        poll_until(group, lambda: False)
    _gone, alive = psutil.wait_procs([helper], timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE] == []


def test_F72_a_stopped_role_is_noticed_and_its_stacks_are_written(group, capfd):
    with RoleGroup(silence=1) as group:
        role = begin(group, "engine", ["ready"], ["obey"])
        poll_until(group, lambda: group.ready)
        os.kill(role.process.pid, signal.SIGSTOP)
        with pytest.raises(RoleFailed, match="no sign of life"):
            poll_until(group, lambda: False)
    assert "most recent call first" in capfd.readouterr().err


def test_F72_a_stopped_role_is_lost_long_before_a_long_step_would_be(monkeypatch):
    monkeypatch.setattr(group_module, "_STUCK", 2)
    with RoleGroup(silence=600) as group:
        role = begin(group, "engine", ["ready"], ["obey"])
        poll_until(group, lambda: group.ready)
        os.kill(role.process.pid, signal.SIGSTOP)
        with pytest.raises(RoleFailed, match="no sign of life"):
            poll_until(group, lambda: False)


def test_a_long_step_that_works_is_not_taken_for_a_stopped_role(monkeypatch):
    monkeypatch.setattr(group_module, "_STUCK", 2)
    with RoleGroup(silence=600) as group:
        begin(group, "engine", ["ready"], ["work", 5], ["beat", 60])
        end = time.monotonic() + 7
        poll_until(group, lambda: time.monotonic() > end)


def test_F72_a_loop_that_turns_without_progress_counts_as_silent():
    with RoleGroup(silence=1) as group:
        begin(group, "engine", ["ready"], ["beat_stuck", 60])
        with pytest.raises(RoleFailed, match="no sign of life"):
            poll_until(group, lambda: False)


def test_a_slow_start_is_not_held_against_the_engine():
    with RoleGroup(silence=3) as group:
        begin(group, "engine", ["deaf", 4], ["ready"], ["beat", 60])
        poll_until(group, lambda: group.ready)
        end = time.monotonic() + 1
        poll_until(group, lambda: time.monotonic() > end)


def test_a_busy_loop_with_progress_and_an_idle_one_are_healthy():
    with RoleGroup(silence=3) as group:
        begin(group, "engine", ["ready"], ["beat", 60])
        begin(group, "text", ["ready"], ["obey"])
        end = time.monotonic() + 4
        poll_until(group, lambda: time.monotonic() > end)


@pytest.mark.parametrize(
    ("steps", "code", "text"),
    [
        ([["fatal", "no room", 4], ["deaf", 60]], 4, "no room"),
        ([["refuse", "tensor x is missing"]], 4, "tensor x is missing"),
        ([["raise", "boom"]], 1, "RuntimeError: boom"),
        ([["exit", 0]], 1, "exit code 0"),
        ([["exit", 7]], 1, "exit code 7"),
    ],
    ids=["fatal", "refused", "crash", "quits", "code"],
)
def test_F77_the_cause_and_exit_code_of_a_failed_start(group, steps, code, text):
    begin(group, "engine", *steps)
    with pytest.raises(RoleFailed, match=text) as caught:
        poll_until(group, lambda: False)
    assert caught.value.exit_code == code


def test_F53_the_others_get_a_moment_to_deliver_errors(group):
    engine = begin(group, "engine", ["ready"], ["obey"])
    begin(group, "api", ["ready"], ["beat", 1], ["obey"])  # busy for a second, then idle
    poll_until(group, lambda: group.ready)
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises(RoleFailed):
        poll_until(group, lambda: False)
    before = time.monotonic()
    group.listen(20, until_idle="api")
    assert 0.5 < time.monotonic() - before < 15
    assert not group.roles["api"].busy


def test_F71_children_end_when_the_parent_is_killed():
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from hybserve.launch.group import RoleGroup\n"
        "import json, os\n"
        "group = RoleGroup(30)\n"
        "for name in ('api', 'engine'):\n"
        "    make = lambda sockets: json.dumps({'role': name, 'parent': os.getpid(), 'sockets': sockets,\n"
        "        'steps': [['ready'], ['deaf', 600]]}).encode()\n"
        "    group.start(name, {}, [sys.executable, sys.argv[2]]).tell(make)\n"
        "while not group.ready: group.poll()\n"
        "print('up', flush=True); time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[2])
    parent = psutil.Popen([sys.executable, "-c", script, root, FAKE], stdout=-1, text=True)
    assert parent.stdout.readline() == "up\n"
    children = parent.children(recursive=True)
    assert len(children) == 2
    parent.kill()
    parent.wait()
    _gone, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
