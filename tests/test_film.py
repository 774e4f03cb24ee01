"""tools/film.py: a probe environment before and after training; the control suite in motion."""

import subprocess
import sys

import numpy as np
import pytest
from run_helpers import ROOT, train

from tools import film

Image = pytest.importorskip("PIL.Image")
FRONT_PAGE = ROOT / "docs/figures/before_after.gif"


def test_a_film_with_two_rows(tmp_path, capsys):
    run = tmp_path / "run"
    train(run)
    out = tmp_path / "film.gif"
    film.main([str(run), str(run), "--out", str(out)])
    with Image.open(out) as video:
        assert video.format == "GIF" and video.n_frames == 4  # 16 steps, every fifth is shown
        assert video.size == (2 * film.SIZE, 2 * (film.SIZE + film.CAPTION))
        assert video.info["duration"] == film.MILLISECONDS
    printed = capsys.readouterr().out
    assert printed.count("Clock-v0 untrained: ") == 2 and printed.count("Clock-v0 trained: ") == 2


def test_an_episode_that_ended_early_stays(tmp_path):
    long = [np.full((8, 8, 3), shade, np.uint8) for shade in (0, 100, 200)]
    pictures = film.compose([[("a", long), ("b", long[:1])]])
    shades = [(int(picture[-1, 0, 0]), int(picture[-1, -1, 0])) for picture in pictures]
    assert shades == [(0, 0), (100, 0), (200, 0)]


def test_a_missing_policy_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        film.main([str(tmp_path)])
    assert stopped.value.code == 2 and "policy.pt is missing" in capsys.readouterr().err


def test_the_film_of_the_front_page_is_small():
    if not FRONT_PAGE.exists():
        pytest.skip("no film has been made of policies in results/ yet")
    assert FRONT_PAGE.stat().st_size < 1_000_000


MOVING_PICTURES = """
import os
os.environ["MUJOCO_GL"] = "egl"
import torch
import trudi_continuous as trudi
from tools import record
for env_id in ("CheetahRun-v1", "WalkerWalk-v1"):
    args = trudi.Args(env_id=env_id, backend="envpool", device="cpu")
    envs = record.make_env(trudi, args)
    envs.reset()
    assert type(envs.env).__name__.startswith("Dmc")
    first = record.picture(envs).astype(float)
    for _ in range(20):
        envs.step(torch.ones(1, envs.action_dim))
    print(abs(record.picture(envs) - first).mean() > 1)
"""


@pytest.mark.slow
def test_pictures_of_the_control_suite_move():
    """EnvPool draws the state that it simulates. In a process of its own, as in test_record.py."""
    command = [sys.executable, "-c", MOVING_PICTURES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("no OpenGL here")
    assert done.stdout.split() == ["True", "True"]
