"""A role that does what its start arguments say; started by the tests as a program of its own.

Steps, in order: ["ready"], ["beat", seconds], ["beat_stuck", seconds], ["fatal", reason, code], ["raise", text],
["refuse", text], ["exit", code], ["child"] (a helper process in the same group), ["deaf", seconds] (no word, no
reading), ["work", seconds] (the same, on the processor all the while), ["obey"] (beat until Stop or Drain; after Drain
beat "busy" for a moment more).
"""

import json
import subprocess
import sys
import time

from hybserve.core.errors import ModelError
from hybserve.core.messages import Drain, Fatal, FromLaunch, Heartbeat, Loading, Ready, Stop, ToLaunch
from hybserve.launch.role import enter
from hybserve.wire.channel import Channel, ChannelClosed
from hybserve.wire.codec import Codec


class FakeStart:
    def __init__(self, values):
        self.role, self.parent, self.sockets = values["role"], values["parent"], values["sockets"]
        self.log_level, self.log_format = "info", "json"
        self.steps = values["steps"]


def run(start):
    import socket

    sock = socket.socket(fileno=start.sockets["control"])
    control = Channel(sock, Codec(FromLaunch), Codec(ToLaunch))
    role = start.role
    for step, *values in start.steps:
        if step == "ready":
            control.send([Loading("weights", 0.5)])
            control.send([Ready(role)])
        elif step in ("beat", "beat_stuck"):
            end = time.monotonic() + values[0]
            count = 0
            while time.monotonic() < end:
                count += step == "beat"
                control.send([Heartbeat(role, count, True)])
                control.receive(0.05)
        elif step == "fatal":
            control.send([Fatal(role, *values)])
        elif step == "raise":
            raise RuntimeError(values[0])
        elif step == "refuse":
            raise ModelError(values[0])
        elif step == "exit":
            sys.exit(values[0])
        elif step == "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        elif step == "deaf":
            time.sleep(values[0])
        elif step == "work":
            end = time.monotonic() + values[0]
            while time.monotonic() < end:
                pass
        elif step == "obey":
            obey(control, role)


def obey(control, role):
    while True:
        control.send([Heartbeat(role, 0, False)])
        try:
            for message in control.receive(0.05):
                if isinstance(message, Drain):
                    time.sleep(0.2)
                    return
                if isinstance(message, Stop):
                    return
        except ChannelClosed:
            return


if __name__ == "__main__":
    sys.exit(enter(FakeStart(json.load(sys.stdin)), run))
