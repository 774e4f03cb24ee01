"""tools/thin_results.py keeps what tables and figures need, and a second call changes nothing."""

import csv
import json

import pytest
import torch
from run_helpers import train

import trudi_continuous as trudi
from tools import thin_results

BATCH_SIZE = 4 * 8
EVALUATIONS = {7: "12.3456789", 20: "-0.000123456789", 33: "1234567.89"}  # iteration: return


@pytest.fixture
def run_dir(tmp_path):
    """A finished run of 34 iterations."""
    folder = tmp_path / "trudi" / "CheetahRun-v1_1"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"num_envs": 4, "num_steps": 8}))
    (folder / "eval.json").write_text("{}")
    (folder / "curve.png").write_bytes(b"picture")
    lines = ["global_step,time/elapsed,charts/episode_return,eval/return,policy/kl"]
    for iteration in range(1, 35):
        elapsed = iteration / 3
        evaluation = EVALUATIONS.get(iteration, "")
        lines.append(f"{iteration * BATCH_SIZE},{elapsed},,{evaluation},nan")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def read(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows(run_dir, tmp_path):
    """Evaluations, every tenth iteration and the last row stay, in order."""
    thin_results.main([str(tmp_path)])
    steps = [int(row["global_step"]) for row in read(run_dir)]
    assert steps == [iteration * BATCH_SIZE for iteration in (7, 10, 20, 30, 33, 34)]


def test_numbers(run_dir, tmp_path):
    """Six significant digits; empty cells, nan and whole numbers stay."""
    thin_results.main([str(tmp_path)])
    by_step = {int(row["global_step"]) // BATCH_SIZE: row for row in read(run_dir)}
    assert by_step[7]["eval/return"] == "12.3457"
    assert by_step[20]["eval/return"] == "-0.000123457"
    assert by_step[33]["eval/return"] == "1.23457e+06"
    assert by_step[10]["time/elapsed"] == "3.33333"
    assert by_step[10]["eval/return"] == ""
    assert by_step[10]["policy/kl"] == "nan"
    assert thin_results.shorten("1499136") == "1499136"
    assert thin_results.shorten("-1499136") == "-1499136"


def test_second_call_changes_nothing(run_dir, tmp_path):
    thin_results.main([str(tmp_path)])
    once = (run_dir / "metrics.csv").read_bytes()
    thin_results.main([str(tmp_path)])
    assert (run_dir / "metrics.csv").read_bytes() == once


def test_other_files_stay(run_dir, tmp_path):
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    thin_results.main([str(tmp_path)])
    after = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] != after[name]] == ["metrics.csv"]


def test_unfinished_run_is_left_alone(run_dir, tmp_path, capsys):
    (run_dir / "eval.json").unlink()
    before = (run_dir / "metrics.csv").read_bytes()
    thin_results.main([str(tmp_path)])
    assert (run_dir / "metrics.csv").read_bytes() == before
    assert "not finished" in capsys.readouterr().out


def test_missing_folder(tmp_path, capsys):
    with pytest.raises(SystemExit):
        thin_results.main([str(tmp_path / "nowhere")])
    assert "is not a folder" in capsys.readouterr().err


def test_a_policy_in_half_precision(tmp_path):
    """It is smaller, acts as before but for rounding, and keeps its moments to the bit."""
    run = tmp_path / "run"
    train(run)
    path = run / "policy.pt"
    size = path.stat().st_size
    whole = torch.load(path, weights_only=True)["agent"]
    policy = trudi.load_policy(path, seed=3)
    obs = torch.randn(64, whole["policy.normalizer.mean"].shape[0])
    action = policy(obs)

    thin_results.main([str(tmp_path)])
    assert path.stat().st_size < 0.7 * size
    halved = torch.load(path, weights_only=True)["agent"]
    assert torch.equal(halved["policy.normalizer.var"], whole["policy.normalizer.var"])
    assert halved["policy.obs_layer.weight"].dtype == torch.float16
    rounded = trudi.load_policy(path, seed=3)(obs)
    assert not torch.equal(rounded, action)
    torch.testing.assert_close(rounded, action, rtol=0, atol=0.01)

    once = path.read_bytes()
    thin_results.main([str(tmp_path)])
    again = torch.load(path, weights_only=True)["agent"]
    assert len(once) == path.stat().st_size
    assert all(torch.equal(again[name], tensor) for name, tensor in halved.items())
