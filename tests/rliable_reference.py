"""Writes tests/rliable_reference.json: numbers of rliable, for tests/test_plot.py.

rliable 1.2.0 (archived in October 2025) does not import with pandas 3, so this runs in a virtual
environment of its own:

    python -m venv ../rliable && ../rliable/bin/pip install rliable==1.2.0 \\
        arch==6.3.0 numpy==1.26.4 pandas==2.1.4 scipy==1.12.0
    ../rliable/bin/python tests/rliable_reference.py    # minutes

The scores are the final returns / 1000 of 72 runs of four algorithms on six tasks, three seeds, and
scores made up here with five and with four runs and with ties.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
from rliable import library, metrics

REPS = 2_000
TESTS = Path(__file__).parent
PACKAGES = ["rliable", "arch", "numpy", "pandas", "scipy"]


def first_grid_scores():
    """algorithm -> (runs, tasks), from results/first-grid"""
    folder = TESTS.parent / "results/first-grid"
    scores = {}
    for label in ("trudi", "reppo", "ppo", "dime"):
        envs = sorted({path.name.rpartition("_")[0] for path in (folder / label).iterdir()})
        rows = []
        for seed in (1, 2, 3):
            row = []
            for env in envs:
                run = folder / label / f"{env}_{seed}"
                results = json.loads((run / "eval.json").read_text())
                sampler = json.loads((run / "args.json").read_text()).get("eval_sampler")
                row.append(round(results[sampler or next(iter(results))]["mean"] / 1000, 6))
            rows.append(row)
        scores[label] = rows
    return scores


def made_up_scores():
    rng = np.random.default_rng(0)
    base = rng.uniform(size=8)
    five = np.clip(base + rng.normal(scale=0.1, size=(5, 8)), 0, 1)
    four = np.clip(base - 0.05 + rng.normal(scale=0.2, size=(4, 8)), 0, 1)
    return {"five": five.round(2).tolist(), "four": four.round(2).tolist()}


def estimates(scores, function):
    """key -> [point, low, high]; the seeds of rliable's bootstrap are fixed"""
    state = np.random.RandomState(0)
    points, intervals = library.get_interval_estimates(
        scores, function, reps=REPS, random_state=state
    )
    found = {}
    for key, point in points.items():
        low, high = np.ravel(intervals[key])
        found[key] = [float(np.ravel(point)[0]), float(low), float(high)]
    return found


def iqm(scores):
    return np.array([metrics.aggregate_iqm(scores)])


def improvement(scores, other_scores):
    return np.array([metrics.probability_of_improvement(scores, other_scores)])


def main():
    sets = []
    for source, scores in (
        ("results/first-grid", first_grid_scores()),
        ("made up", made_up_scores()),
    ):
        arrays = {name: np.array(rows) for name, rows in scores.items()}
        first, *others = arrays
        pairs = {f"{first},{other}": (arrays[first], arrays[other]) for other in others}
        sets.append(
            {
                "source": source,
                "scores": scores,
                "iqm": estimates(arrays, iqm),
                "probability_of_improvement": estimates(pairs, improvement),
            }
        )
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    versions["python"] = sys.version.split()[0]
    content = {"made_by": "tests/rliable_reference.py", "versions": versions, "reps": REPS}
    text = json.dumps(content | {"sets": sets}, indent=1)
    (TESTS / "rliable_reference.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
