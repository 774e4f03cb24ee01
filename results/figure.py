"""Draws results/figures/*.png and prints the tables of README.md and docs/ from the runs in results/<script>/.

python results/figure.py
"""

import csv
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent
NAMES = {"trudi_continuous": "TruDi", "reppo_continuous": "REPPO", "ppo_continuous": "PPO", "spo": "SPO"}
COLOURS = {"TruDi": "tab:blue", "REPPO": "tab:orange", "PPO": "tab:green", "SPO": "tab:red"}


def curve(folder, key="eval/return"):
    """-> steps, seconds, values"""
    rows = csv.DictReader((folder / "metrics.csv").open())
    return np.array([(float(r["global_step"]), float(r["time/elapsed"]), float(r[key])) for r in rows if r[key]]).T


def load():
    """(env id, algorithm) -> folders; a folder without eval.json is a run that did not end, and counts as one"""
    runs = {}
    for path in sorted(HERE.glob("*_continuous/*/args.json")):
        args = json.loads(path.read_text())
        name = NAMES["spo" if args.get("objective") == "spo" else path.parts[-3]]
        runs.setdefault((args["env_id"], name), []).append(path.parent)
        first = json.loads((runs[args["env_id"], name][0] / "args.json").read_text())
        changed = {k for k in args if args[k] != first.get(k)} - {"seed", "run_dir", "git", "resume"}
        assert not changed, f"{path.parent} has other settings than the runs beside it: {changed}"
    return {k: runs[k] for k in sorted(runs, key=lambda k: (k[0], list(COLOURS).index(k[1])))}


def row(env_id, name, folders):
    tables = [json.loads((f / "eval.json").read_text()) for f in folders if (f / "eval.json").exists()]
    if not tables:
        return f"| {env_id} | {name} | - | 0 of {len(folders)} | - | - | - | - |"
    first, *others = ([t[sampler]["mean"] for t in tables] for sampler in tables[0])
    each = ", ".join(f"{x:.0f}" for x in first)
    other = ", ".join(f"{s} {np.mean(x):.0f}" for s, x in zip(list(tables[0])[1:], others, strict=True))
    minutes = np.mean([curve(f, "charts/sps")[1, -1] for f in folders]) / 60
    steps, ended = int(curve(folders[0])[0, -1]), f"{len(tables)} of {len(folders)}"
    return f"| {env_id} | {name} | {steps:,} | {ended} | {each} | **{np.mean(first):.0f}** | {other} | {minutes:.0f} |"


def main():
    runs = load()
    print("| env | algorithm | steps | seeds that ended | each seed | mean | other samplers | minutes per run |")
    print("|---|---|---|---|---|---|---|---|")
    for (env_id, name), folders in runs.items():
        print(row(env_id, name, folders))
    (HERE / "figures").mkdir(exist_ok=True)
    for env_id in {env_id for env_id, _ in runs}:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axis = figure.subplots()
        for name in (n for e, n in runs if e == env_id):
            curves = [curve(f) for f in runs[env_id, name]]
            for steps, _, values in curves:
                axis.plot(steps, values, color=COLOURS[name], lw=0.8, alpha=0.5)
            grid = curves[0][0]
            mean = np.mean([np.interp(grid, steps, values) for steps, _, values in curves], 0)
            axis.plot(grid, mean, "o-", ms=3, color=COLOURS[name], label=f"{name}, {len(curves)} seed(s)")
        axis.set(title=f"{env_id}, CPU settings", xlabel="env steps", ylabel="evaluation return")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
        figure.savefig(HERE / "figures" / f"{env_id}.png", dpi=110)


if __name__ == "__main__":
    main()
