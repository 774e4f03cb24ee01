"""Code that several scripts have in common stands in marked blocks, and the copies are equal.

After a change `python tests/test_shared_blocks.py trudi_continuous.py` copies that script's blocks to the others.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(p for p in ROOT.glob("*.py") if re.search(r"^class Args\b", p.read_text(), re.M))
BLOCK = re.compile(r"^# --- shared: ([^\n]+) ---\n(.*?)^# --- end shared ---\n", re.M | re.S)


def blocks(text):
    """name -> the block's text; complains about markers without a partner and names that come twice"""
    found = BLOCK.findall(text)
    assert len(found) == len(re.findall(r"^\s*# --- shared", text, re.M)) == text.count("# --- end shared ---")
    assert len(dict(found)) == len(found), "a name comes twice"
    return dict(found)


def copies(texts):
    """block's name -> {text: [scripts that hold it]}"""
    found = defaultdict(lambda: defaultdict(list))
    for script, text in texts.items():
        for name, block in blocks(text).items():
            found[name][block].append(script)
    return found


def faults(texts):
    found = copies(texts)
    drift = [f"{n} differs between {list(v.values())}" for n, v in found.items() if len(v) > 1]
    return drift + [f"{n} is in {list(v.values())[0]} alone" for n, v in found.items() if sum(map(len, v.values())) < 2]


def test_blocks_are_equal():
    assert not faults({p.name: p.read_text() for p in SCRIPTS})


@pytest.mark.parametrize("script", [p.name for p in SCRIPTS])
def test_every_script_shares(script):
    """env adapters, normaliser, checkpoint, logging, evaluation; with a Q function also critic, TD(lambda), HL-Gauss"""
    found = blocks((ROOT / script).read_text())
    inside = "\n".join(found.values())
    names = ["class VecEnv", "class Normaliser", "def save(", "class RunLog", "def evaluate(", "def main("]
    names += ["def td_lambda_targets", "def rollout(", "def update(", "def act("]  # the algorithm, with its sibling
    names += [] if script.startswith("ppo") else ["class Critic", "def hl_gauss"]
    assert not [n for n in names if n not in inside]


def test_faults_are_found():
    """Drift, a block in one script alone, and broken markers do not pass."""
    block = "# --- shared: {} ---\nx = {}\n# --- end shared ---\n"
    assert not faults({"a": block.format("x", 1), "b": block.format("x", 1)})
    assert "differs" in faults({"a": block.format("x", 1), "b": block.format("x", 2)})[0]
    assert "alone" in faults({"a": block.format("x", 1), "b": block.format("x", 1) + block.format("y", 1)})[0]
    for broken in ("# --- shared: x ---\nx = 1\n", "x = 1\n# --- end shared ---\n", 2 * block.format("x", 1)):
        with pytest.raises(AssertionError):
            blocks(broken)


if __name__ == "__main__":
    source = blocks(Path(sys.argv[1]).read_text())
    for path in SCRIPTS:
        before = path.read_text()
        after = BLOCK.sub(lambda m: m[0].replace(m[2], source[m[1]]) if m[1] in source else m[0], before)
        if after != before:
            path.write_text(after)
            print("updated", path.name)
