"""tools/record.py: films of the probe environments, whose pictures show the time."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from run_helpers import ROOT, TESTS, every_script_slowly, load, train, trudi

from tools import record

Image = pytest.importorskip("PIL.Image")


def pictures(path):
    """The shade of each picture, and the milliseconds that it stays"""
    shades = []
    with Image.open(path) as video:
        assert video.format == "GIF"
        for i in range(video.n_frames):
            video.seek(i)
            pixels = np.array(video.convert("RGB"))
            assert pixels.shape == (16, 16, 3) and len(np.unique(pixels)) == 1
            shades.append(int(pixels[0, 0, 0]))
        return shades, video.info["duration"]


def refused(*flags, names, code, capsys):
    with pytest.raises(SystemExit) as stopped:
        record.main([*map(str, flags)])
    err = capsys.readouterr().err
    assert stopped.value.code == code, err
    assert err.count("\n") == 1 and err.startswith("error: ")
    for name in names:
        assert name in err, err


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clock") / "run"
    train(folder)
    return folder


@every_script_slowly
def test_film_of_one_episode(script, tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder, script=script)
    before = {path.name for path in folder.iterdir()}
    record.main([str(folder)])
    shades, duration = pictures(folder / "video.gif")
    assert shades == [10 * t for t in range(16)] and duration == 50
    assert {path.name for path in folder.iterdir()} == before | {"video.gif"}
    assert "in 16 steps" in capsys.readouterr().out


def test_checkpoint_episodes_and_out(clock, tmp_path):
    out = tmp_path / "film.gif"
    flags = ["--checkpoint", "policy.pt", "--episodes", "2", "--out", str(out)]
    record.main([str(clock), *flags])
    shades, _ = pictures(out)
    assert shades == 2 * [10 * t for t in range(16)]
    assert not (clock / "video.gif").exists()


def test_the_runs_own_sampler_acts(clock, tmp_path, monkeypatch):
    """On the first environment of the final evaluation."""
    checkpoint = load(clock / "best.pt")
    checkpoint["args"]["eval_sampler"] = "best-of-k"
    torch.save(checkpoint, tmp_path / "best.pt")
    seen = []
    act = trudi.act

    def watched(agent, obs, sampler, args, generator):
        seen.append((sampler, len(obs)))
        return act(agent, obs, sampler, args, generator)

    monkeypatch.setattr(trudi, "act", watched)
    record.main([str(tmp_path)])
    assert seen == [("best-of-k", 1)] * 16
    args = trudi.Args(**checkpoint["args"])
    filmed = record.make_env(trudi, args).reset()
    evaluated = trudi.make_envs(args, 2, 10_007 + 5_000).reset()
    assert torch.equal(filmed[0], evaluated[0])


def test_a_long_episode_is_thinned_evenly(tmp_path):
    reel = record.Film()
    for t in range(1_001):
        frame = np.full((4, 4, 3), t % 256, np.uint8)
        reel.add(lambda frame=frame: frame)
        assert len(reel.frames) <= record.MAX_FRAMES
    assert len(reel.frames) == 126 and reel.stride == 8
    assert [int(frame[0, 0, 0]) for frame in reel.frames] == [t % 256 for t in range(0, 1_001, 8)]
    reel.save(tmp_path / "video.gif")
    with Image.open(tmp_path / "video.gif") as video:
        assert video.n_frames == 126


def test_what_cannot_be_filmed(clock, tmp_path, capsys):
    refused(tmp_path, names=[str(tmp_path / "best.pt")], code=2, capsys=capsys)
    refused(clock, "--episodes", 0, names=["--episodes"], code=2, capsys=capsys)
    (tmp_path / "best.pt").write_bytes(b"no checkpoint")
    refused(tmp_path, names=["damaged"], code=2, capsys=capsys)
    checkpoint = load(clock / "best.pt")

    def change(**changes):
        args = checkpoint["args"] | changes.pop("args", {})
        torch.save(checkpoint | changes | {"args": args}, tmp_path / "best.pt")

    change(script="json")
    refused(tmp_path, names=["json.py"], code=2, capsys=capsys)
    change(args={"a_new_setting": 1})
    refused(tmp_path, names=["another version"], code=2, capsys=capsys)
    change(args={"env_id": "CheetahRun", "backend": "playground"})
    refused(tmp_path, names=["Playground", "yet"], code=2, capsys=capsys)
    change(args={"env_id": "Pendulum-v1"})
    refused(tmp_path, names=["cannot film Pendulum-v1"], code=1, capsys=capsys)
    assert not (tmp_path / "video.gif").exists()


@pytest.mark.slow
def test_command_line(clock, tmp_path):
    """From another folder, whose own module has the task."""
    out = tmp_path / "video.gif"
    command = [sys.executable, str(ROOT / "tools" / "record.py"), str(clock), "--out", str(out)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"saved {out}: 16 pictures\n")


@pytest.mark.slow
def test_mujoco_is_filmed_or_refused(tmp_path):
    """By EnvPool. Where OpenGL is missing there is one sentence."""
    folder = tmp_path / "run"
    train(folder, env=["--env-id", "Reacher-v5"])
    assert json.loads((folder / "args.json").read_text())["backend"] == "envpool"
    command = [sys.executable, str(ROOT / "tools" / "record.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        with Image.open(folder / "video.gif") as video:
            assert video.n_frames == 50
    else:
        assert done.returncode == 1
        sentence = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert "Reacher-v5" in sentence and "Traceback" not in done.stderr.split("Exception ign")[0]


PICTURE_OF_THE_CONTROL_SUITE = """
import os
os.environ["MUJOCO_GL"] = "egl"
import trudi_continuous as trudi
from tools import record
args = trudi.Args(env_id="CheetahRun-v1", backend="envpool", device="cpu")
print(record.picture(record.make_env(trudi, args)).shape)
"""


@pytest.mark.slow
def test_the_control_suite_can_be_drawn():
    """In a process of its own: without OpenGL MuJoCo ends the process."""
    command = [sys.executable, "-c", PICTURE_OF_THE_CONTROL_SUITE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("no OpenGL here")
    assert done.stdout.splitlines()[-1] == "(480, 480, 3)"
