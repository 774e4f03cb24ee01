"""Shrink finished runs to what tables, figures and films need.

    python tools/thin_results.py results/laptop results/spo

A run is a folder with metrics.csv, args.json and eval.json, at any depth. Its metrics.csv keeps the
rows with an evaluation, every tenth iteration of training and the last row. Its numbers keep six
significant digits; whole numbers stay as they are. Its policy.pt, if it has one, keeps the weights
of its networks in half precision, which the scripts read like any other. No other file is touched.
A second call changes nothing. A folder without eval.json is a run that has not ended: it is named
and left alone.
"""

import argparse
import csv
import json
import os
from pathlib import Path

import torch

EVERY = 10  # of so many iterations of training one is kept
DIGITS = 6


def shorten(text):
    """A cell of metrics.csv with six significant digits. Empty cells and whole numbers stay."""
    if text == "" or text.lstrip("-").isdigit():
        return text
    return f"{float(text):.{DIGITS}g}"


def rows_to_keep(rows, batch_size):
    """The row's own step decides, not its position: thinned rows are kept by the next call, too."""
    kept = []
    for row in rows:
        iteration = int(float(row["global_step"])) // batch_size
        if row.get("eval/return") or iteration % EVERY == 0 or row is rows[-1]:
            kept.append(row)
    return kept


def thin(run_dir):
    """Rewrite metrics.csv of one run. Returns its number of rows before and after."""
    path = run_dir / "metrics.csv"
    settings = json.loads((run_dir / "args.json").read_text())
    batch_size = settings["num_envs"] * settings["num_steps"]
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames
        rows = list(reader)
    kept = rows_to_keep(rows, batch_size)

    # a reader sees the old file or the new one, never half of it
    temporary = path.with_name("metrics.csv.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in kept:
            writer.writerow([shorten(row[column]) for column in columns])
    os.replace(temporary, path)
    return len(rows), len(kept)


def is_weight(name, tensor):
    """Moments of observations and returns may be too large or too small for half precision."""
    return tensor.dim() > 0 and name.endswith((".weight", ".bias"))


def halve(path):
    """Rewrite a policy with weights of half precision. Returns its size before and after."""
    before = path.stat().st_size
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    agent = checkpoint["agent"]
    for name, tensor in agent.items():
        if is_weight(name, tensor):
            agent[name] = tensor.half()
    temporary = path.with_suffix(".tmp")
    torch.save(checkpoint, temporary)
    os.replace(temporary, path)
    return before, path.stat().st_size


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="folders that hold runs, at any depth")
    args = parser.parse_args(argv)
    for root in args.paths:
        if not root.is_dir():
            parser.error(f"{root} is not a folder")
        for path in sorted(root.rglob("metrics.csv")):
            run_dir = path.parent
            if not (run_dir / "eval.json").exists():
                print(f"{run_dir}: not finished, left alone")
                continue
            before, after = thin(run_dir)
            print(f"{run_dir}: {before} -> {after} rows")
            policy = run_dir / "policy.pt"
            if policy.exists():
                before, after = halve(policy)
                print(f"{policy}: {before // 1000} -> {after // 1000} kB")


if __name__ == "__main__":
    main()
