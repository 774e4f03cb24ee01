"""Draws results/figures/*.png and prints the README's tables from the runs in results/.

python results/figure.py
"""

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent


def curve(folder, key="eval/return"):
    rows = csv.DictReader((folder / "metrics.csv").open())
    return np.array([(float(r["global_step"]), float(r["time/elapsed"]), float(r[key])) for r in rows if r[key]]).T


def main():
    runs = defaultdict(list)
    for path in sorted(HERE.glob("trudi_continuous/*/args.json")):
        runs[json.loads(path.read_text())["env_id"]].append(path.parent)
    print("| env | steps | seeds | ODE, each seed | ODE | SDE | best of 10 | minutes per run |")
    print("|---|---|---|---|---|---|---|---|")
    for env_id, folders in runs.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axis = figure.subplots()
        for folder in folders:
            steps, _, returns = curve(folder)
            axis.plot(
                steps, returns, "o-", ms=3, label=f"seed {json.loads((folder / 'args.json').read_text())['seed']}"
            )
        axis.set(title=f"TruDi on {env_id}, CPU settings", xlabel="env steps", ylabel="evaluation return (ODE)")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
        figure.savefig(HERE / "figures" / f"{env_id}.png", dpi=110)
        tables = [json.loads((f / "eval.json").read_text()) for f in folders if (f / "eval.json").exists()]
        means = {k: [t[k]["mean"] for t in tables] for k in ("ode", "sde", "best-of-k")}
        minutes = np.mean([curve(f, "policy/kl")[1, -1] for f in folders]) / 60
        each = ", ".join(f"{x:.0f}" for x in means["ode"])
        columns = " | ".join(f"{np.mean(v):.0f}" for v in means.values())
        print(f"| {env_id} | {int(curve(folders[0])[0, -1]):,} | {len(tables)} | {each} | {columns} | {minutes:.0f} |")


if __name__ == "__main__":
    main()
