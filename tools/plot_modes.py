"""Draws the ways that policies take through a plane, in one color per mode.

    python tools/plot_modes.py runs/TRUDI runs/REPPO --out doors.png

Each run gets a panel. The environment shows its position in the first two columns of the
observation and names the way that was taken in info["mode"], such as two_doors:TwoDoors-v0.
Policies act as in evaluation. Nothing is drawn but what they did.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
COLORS = ["tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red"]
NO_MODE = "lightgray"
MAX_STEPS = 10_000


def load_run(folder):
    """-> settings of a run, its policy"""
    import torch

    settings = json.loads((folder / "args.json").read_text())
    checkpoint = folder / "policy.pt"
    if not checkpoint.exists():
        checkpoint = folder / "checkpoint.pt"
    name = torch.load(checkpoint, map_location="cpu", weights_only=True)["script"]
    script = importlib.import_module(name)
    settings["script"] = name
    return settings, script.load_policy(checkpoint)


def follow(env_id, policy, num_episodes):
    """-> positions (steps + 1, episodes, 2), the last mode of each episode (episodes,)"""
    envs = gym.make_vec(env_id, num_episodes, "sync", dict(autoreset_mode="Disabled"))
    obs, _ = envs.reset(seed=0)
    positions = [obs[:, :2]]
    modes = np.full(num_episodes, -1)
    ended = np.zeros(num_episodes, bool)
    for _ in range(MAX_STEPS):
        obs, _, terminated, truncated, info = envs.step(policy(obs))
        positions.append(np.where(ended[:, None], positions[-1], obs[:, :2]))
        modes = np.where(ended, modes, info["mode"])
        ended |= terminated | truncated
        if ended.all():
            break
    return np.stack(positions), modes


def draw(axes, positions, modes):
    alpha = max(0.05, min(1.0, 20 / len(modes)))
    for i, mode in enumerate(modes):
        color = COLORS[mode % len(COLORS)] if mode >= 0 else NO_MODE
        axes.plot(positions[:, i, 0], positions[:, i, 1], color=color, alpha=alpha, linewidth=1)
    axes.plot(*positions[0].mean(axis=0), "ko", markersize=5)
    axes.set_xlabel("first coordinate")


def mode_table(folder):
    """Which ways the runs of a grid take in their last evaluation, as a table in Markdown.

    folder/ALGORITHM/RUN has args.json and eval.json of a run; the sampler is the run's own.
    """
    from tools.plot import display_name

    lines = [
        "| algorithm | runs | return | successes of each way, run by run | entropy | mean |",
        "|---|---|---|---|---|---|",
    ]
    for algorithm in sorted(path for path in folder.iterdir() if path.is_dir()):
        results = []
        for path in sorted(algorithm.glob("*/eval.json")):
            settings = json.loads((path.parent / "args.json").read_text())
            results.append(json.loads(path.read_text())[settings["eval_sampler"]])
        if not results:
            continue
        name = display_name(algorithm.name, settings)
        returns = np.mean([result["mean"] for result in results])
        behaviors = [result["behavior"] for result in results]
        counts = [" : ".join(map(str, ways["successes_by_mode"])) for ways in behaviors]
        entropies = [ways["entropy"] for ways in behaviors]
        shown = ["-" if entropy is None else f"{entropy:.2f}" for entropy in entropies]
        mean = "-" if None in entropies else f"{np.mean(entropies):.2f}"
        cells = [name, len(results), f"{returns:.1f}", ", ".join(counts), ", ".join(shown), mean]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    parser.add_argument("--episodes", type=int, default=200, help="episodes of each policy")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT), "."]  # the scripts, and environments of the user
    from tools.plot import display_name

    figure = Figure(figsize=(4 * len(args.runs), 3.2), layout="constrained")
    panels = figure.subplots(1, len(args.runs), squeeze=False, sharex=True, sharey=True)[0]
    for folder, axes in zip(args.runs, panels, strict=True):
        settings, policy = load_run(folder)
        positions, modes = follow(settings["env_id"], policy, args.episodes)
        draw(axes, positions, modes)
        counts = [f"{(modes == mode).sum()}" for mode in range(max(2, modes.max() + 1))]
        name = display_name(settings["script"], settings)
        axes.set_title(f"{name}: {' and '.join(counts)} episodes")
        print(f"{folder}: {name} takes each way in {', '.join(counts)} of {args.episodes} episodes")
    panels[0].set_ylabel("second coordinate")
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
