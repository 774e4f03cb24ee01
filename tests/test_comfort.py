"""Bench, tracking, a script that was copied alone, and the functions of tools/extras.py."""

import csv
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from run_helpers import (
    BATCH,
    CLOCK,
    MORE,
    ROOT,
    SAMPLERS,
    TESTS,
    TINY,
    every_script,
    every_script_slowly,
    one_script_and_more,
    rows,
    run,
    start,
    steps,
    train,
    trudi,
    wait_for,
)

from tools import extras

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


# --- bench ---


@every_script
def test_bench(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run(*TINY, *CLOCK, "--bench", 1, script=script).out
    assert re.search(r"^\d+ steps/s$", out, re.M)
    shares = {}
    for phase, share in re.findall(r"^ +(\w+) +[\d.]+ ms +([\d.]+)%$", out, re.M):
        shares[phase] = float(share)
    assert list(shares) == ["rollout", "targets", "update"]
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert list(tmp_path.iterdir()) == [], "a bench must write nothing"


# --- Weights & Biases ---


@one_script_and_more
def test_without_track_wandb_is_not_imported(script, tmp_path):
    flags = [*MORE[script], *TINY, *CLOCK, "--run-dir", str(tmp_path / "run")]
    code = f"import sys, {script.SCRIPT} as script; script.main({flags})"
    code += "; print('wandb' in sys.modules)"
    paths = os.pathsep.join([str(ROOT), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_track_offline(tmp_path):
    folder = tmp_path / "run"
    environment = dict(OFFLINE)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        environment[name] = str(tmp_path)
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 10**6 * BATCH, "--track"]
    process = start(*flags, **environment)
    wait_for(lambda: len(steps(folder)) > 1, process)
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err, err
    flags = ["--resume", folder, "--total-timesteps", steps(folder)[-1] + BATCH, "--track"]
    process = start(*flags, **environment)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    logs = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1, "a resumed run stays one run"


# --- a script without tools/ ---


@one_script_and_more
def test_a_script_copied_alone(script, tmp_path):
    """It trains, resumes and evaluates in an empty folder."""
    shutil.copy(script.__file__, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*flags):
        done = subprocess.run(
            [sys.executable, f"{script.SCRIPT}.py", *map(str, flags)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    flags = [*MORE[script], *TINY, "--env-id", "Pendulum-v1", "--run-dir", "run"]
    call(*flags, "--total-timesteps", 2 * BATCH)
    call("--resume", "run", "--total-timesteps", 3 * BATCH)
    out = call("--evaluate", "run/best.pt")
    folder = tmp_path / "run"
    assert steps(folder) == [BATCH, 2 * BATCH, 3 * BATCH]
    assert all(re.search(rf"^{sampler}\s+-?\d", out, re.M) for sampler in SAMPLERS[script])
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "args.json",
        "metrics.csv",
        "checkpoint.pt",
        "best.pt",
        "policy.pt",
        "eval.json",
        "eval_best.json",
    }


@every_script_slowly
def test_without_extras_a_run_is_the_same(script, monkeypatch, tmp_path):
    train(tmp_path / "with", script=script)
    monkeypatch.setattr(script, "extras", None)
    out = train(tmp_path / "without", script=script).out
    assert (tmp_path / "with/eval.json").read_text() == (tmp_path / "without/eval.json").read_text()
    assert re.search(r"^128 steps  eval -?\d+\.\d  \S", out, re.M)
    assert not (tmp_path / "without/curve.png").exists()


@every_script
def test_comfort_that_is_missing_is_refused(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "extras", None)
    for flags in (["--track"], ["--bench", 1]):
        err = run(*TINY, *CLOCK, "--run-dir", tmp_path / "run", *flags, code=2, script=script).err
        assert err.count("\n") == 1 and "tools/extras.py" in err
    assert not (tmp_path / "run").exists()


# --- tools/extras.py ---


def write_table(path, table):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def test_progress_line():
    row = {"global_step": 2_000, "charts/sps": 100.0}
    newest = {"charts/episode_return": "-", "eval/return": "12.5"}
    line = extras.progress_line(row, newest, "KL 0.1", 14_000)
    expected = "2,000/14,000  return -  eval 12.5  KL 0.1  100 steps/s  2.0 min left"
    assert line == expected


def test_lines_on_a_terminal(capsys, monkeypatch):
    """There a line renews itself; elsewhere only the lines that stay are printed."""
    extras.print_line("passing", stays=False)
    extras.print_line("staying", stays=True)
    assert capsys.readouterr().out == "staying\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "5")
    extras.print_line("passing", stays=False)
    extras.print_line("staying", stays=True)
    assert capsys.readouterr().out == "\rpass\033[K\rstaying\033[K\n"


def display(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    progress = {"step": 0, "nonfinite": 0}
    return extras.Display(tmp_path, trudi.Args(seed=7), progress, 1_000)


def test_display_shows_rows_and_keeps_the_newest_values(tmp_path, monkeypatch, capsys):
    shown = display(tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert "seed 7" in out and "env_id" not in out
    row = {"global_step": 100, "charts/sps": 10.0, "charts/nonfinite": 0}
    row |= {"charts/episode_return": 1.5, "eval/return": math.nan}
    shown.show(row, "KL 1")
    assert capsys.readouterr().out == "" and not (tmp_path / "curve.png").exists()
    row = row | {"charts/episode_return": math.nan, "eval/return": 2.5}
    write_table(tmp_path / "metrics.csv", [row | {"charts/episode_return": ""}])
    shown.show(row, "KL 2")
    assert "return 1.5  eval 2.5  KL 2" in capsys.readouterr().out
    shown.after_checkpoint(evaluated=True, stopping=False)
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_fails_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    shown = display(tmp_path, monkeypatch)
    shown.after_checkpoint(evaluated=True, stopping=False)  # there is no metrics.csv
    out = capsys.readouterr().out
    assert "warning: curve.png could not be drawn" in out


def test_display_warns_about_nonfinite_steps(tmp_path, monkeypatch, capsys):
    """When more than one percent of the steps since the last row were."""
    shown = display(tmp_path, monkeypatch)
    batch_size = shown.args.num_envs * shown.args.num_steps
    row = {"global_step": 100, "charts/sps": 10.0, "eval/return": math.nan}
    shown.show(row | {"charts/nonfinite": batch_size // 100}, "")
    shown.show(row | {"charts/nonfinite": 2 * (batch_size // 100)}, "")
    assert "warning" not in capsys.readouterr().out
    shown.show(row | {"charts/nonfinite": 3 * (batch_size // 100) + batch_size // 2}, "")
    assert "51% of this iteration's steps were non-finite" in capsys.readouterr().out


def test_display_warns_about_clipped_targets(tmp_path, monkeypatch, capsys):
    shown = display(tmp_path, monkeypatch)
    row = {"global_step": 100, "charts/sps": 10.0, "charts/episode_return": 0.0, "eval/return": 1.0}
    row["charts/nonfinite"] = 0
    shown.show(row | {"losses/clipped_targets": 0.05}, "")
    assert "warning" not in capsys.readouterr().out
    shown.show(row | {"losses/clipped_targets": 0.2}, "")
    assert "20% of the targets are clipped to [-20, 150]" in capsys.readouterr().out


def test_display_stops_with_the_signals_code(tmp_path, monkeypatch, capsys):
    shown = display(tmp_path, monkeypatch)
    assert not shown.stop_signal
    shown.receive(signal.SIGTERM, None)
    with pytest.raises(SystemExit) as stopped:
        shown.stop()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert f"stopped by SIGTERM; go on with --resume {tmp_path}" in capsys.readouterr().out


def test_changed_settings():
    assert extras.changed_settings(trudi.Args()) == "none"
    assert extras.changed_settings(trudi.Args(seed=2, gamma=0.9)) == "seed 2, gamma 0.9"


def test_curve_without_any_episode(tmp_path):
    row = {"global_step": 1, "charts/episode_return": "", "eval/return": ""}
    write_table(tmp_path / "metrics.csv", [row])
    extras.draw_curve(tmp_path / "metrics.csv", "title")
    assert (tmp_path / "curve.png").exists()


def test_describe_machine(monkeypatch):
    about = extras.describe_machine(trudi.Args())
    assert about["torch"] == torch.__version__ and about["python"] == sys.version.split()[0]
    assert about["git"] is None or re.fullmatch("[0-9a-f]{40}", about["git"])
    json.dumps(about)
    monkeypatch.setenv("PATH", "")
    assert extras.describe_machine(trudi.Args())["git"] is None, "a machine without git"


def test_close_ids(monkeypatch):
    pytest.importorskip("envpool")
    assert "CheetahRun-v1" in extras.close_ids("CheetahRum-v1")
    assert "Pendulum-v1" in extras.close_ids("Pendulum-v0")
    assert extras.close_ids("zzzzzz").endswith("the closest known ids: none")
    assert "MyTask" in extras.close_ids("MyTusk", known=["MyTask"])
    monkeypatch.setitem(sys.modules, "envpool", None)
    assert "pip install envpool" in extras.close_ids("CheetahRum-v1")


def test_rows_go_to_wandb_without_gaps(tmp_path, monkeypatch):
    """Empty values are left out."""
    logged = []

    class Wandb:
        def log(self, values, step):
            logged.append((step, values))

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(extras, "start_tracking", lambda *_: Wandb())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    train(tmp_path / "run", "--track", iterations=1)
    assert len(logged) == 1 and logged[0][0] == BATCH
    row = rows(tmp_path / "run")[0]
    assert logged[0][1].keys() == {name for name in row if row[name]}


def test_a_gpu_that_torch_cannot_use(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    extras.warn_about_gpu(tmp_path / "no driver")
    assert capsys.readouterr().err == ""
    extras.warn_about_gpu(tmp_path)
    warning = capsys.readouterr().err
    assert "NVIDIA GPU" in warning and "training on the CPU" in warning
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    extras.warn_about_gpu(tmp_path)
    assert capsys.readouterr().err == ""
