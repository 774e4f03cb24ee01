"""Stands in for the scripts in the tests of the grids.

It notes in calls.txt what it was called with, waits a moment and leaves the files of a finished
run. The file wishes/<algorithm>_<env>_<seed> makes a run behave otherwise: fail, vanish (killed
without a word), meet (it does not end before three runs have started), pause or long.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROUNDS = {"pause": 30, "long": 600}  # of 0.05 seconds


def flag(name):
    """The value of a flag, or "" without it."""
    if name not in sys.argv:
        return ""
    return sys.argv[sys.argv.index(name) + 1]


def note(kind, *words):
    with (HERE / "calls.txt").open("a") as file:
        file.write(json.dumps([time.time(), kind, *words]) + "\n")


def read_wish(folder):
    path = HERE / "wishes" / f"{folder.parent.name}_{folder.name}"
    return path.read_text() if path.exists() else ""


def main():
    folder = Path(flag("--run-dir") or flag("--resume") or Path(flag("--evaluate")).parent)
    signals = []

    def receive(number, frame):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once

    signal.signal(signal.SIGTERM, receive)
    note("start", Path(__file__).name, *sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pid").write_text(str(os.getpid()))
    wish = read_wish(folder)
    if wish == "fail":
        print("some output")
        sys.exit("error: the simulator is on fire")
    if wish == "vanish":
        os.kill(os.getpid(), signal.SIGKILL)
    while wish == "meet" and (HERE / "calls.txt").read_text().count('"start"') < 3:
        time.sleep(0.05)
    result = "eval.json"
    if flag("--evaluate"):
        checkpoint = Path(flag("--evaluate"))
        assert checkpoint.read_text() == "weights"
        result = f"eval_{checkpoint.stem}.json"
    else:
        (folder / "checkpoint.pt").write_text("weights")
    for _ in range(ROUNDS.get(wish, 3)):
        time.sleep(0.05)
        if signals:
            time.sleep(0.3)
            (folder / "saved").write_text("")
            print("stopped by SIGTERM")
            sys.exit(143)
    (folder / result).write_text(json.dumps({"ode": {"mean": 1.0}, "sde": {"mean": 2.0}}))
    note("end", str(folder))


if __name__ == "__main__":
    main()
