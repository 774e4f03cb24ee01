"""Code that several scripts have in common stands in marked blocks, and the copies are equal."""

from collections import defaultdict

import pytest

from tools import sync_blocks

SCRIPTS = sync_blocks.scripts()
IN_EVERY_SCRIPT = ("class VecEnv", "class Normalizer", "def save_checkpoint(", "def log_row(")
IN_EVERY_SCRIPT += ("def evaluate(", "def td_lambda_targets")
WITH_A_Q_FUNCTION = ("class Critic", "def hl_gauss", "def critic_loss")
WRITTEN_OUT = ("\ndef main(", "\ndef parse_args(", "\ndef rollout(", "\ndef update(")


def copies(texts):
    """block's name -> {text: [scripts that hold it]}"""
    found = defaultdict(lambda: defaultdict(list))
    for script, text in texts.items():
        for name, block in sync_blocks.blocks(text).items():
            found[name][block].append(script)
    return found


def faults(texts):
    sentences = []
    for name, versions in copies(texts).items():
        holders = list(versions.values())
        if len(holders) > 1:
            sentences.append(f"{name} differs between {holders}")
        if sum(map(len, holders)) < 2:
            sentences.append(f"{name} is in {holders[0]} alone")
    return sentences


def test_blocks_are_equal():
    assert not faults({path.name: path.read_text() for path in SCRIPTS})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_leaf_code_is_shared_and_drivers_are_written_out(path):
    shared = "\n".join(sync_blocks.blocks(path.read_text()).values())
    names = IN_EVERY_SCRIPT
    if path.name.startswith(("trudi", "reppo")):
        names += WITH_A_Q_FUNCTION
    assert not [name for name in names if name not in shared]
    assert not [name for name in WRITTEN_OUT if name in shared]
    assert not [name for name in WRITTEN_OUT if name not in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_plain_lines(path):
    assert not [line for line in path.read_text().splitlines() if len(line) > 100]


def test_faults_are_found():
    """Drift, a block in one script alone, and broken markers do not pass."""
    block = "# --- shared: {} ---\nx = {}\n# --- end shared ---\n"
    one = block.format("x", 1)
    assert not faults({"a": one, "b": one})
    assert "differs" in faults({"a": one, "b": block.format("x", 2)})[0]
    assert "alone" in faults({"a": one, "b": one + block.format("y", 1)})[0]
    for broken in ("# --- shared: x ---\nx = 1\n", "x = 1\n# --- end shared ---\n", 2 * one):
        with pytest.raises(ValueError):
            sync_blocks.blocks(broken)


def test_blocks_are_copied_by_name():
    source = sync_blocks.blocks("# --- shared: x ---\nx = 1\n# --- end shared ---\n")
    text = "before\n# --- shared: x ---\nx = 2\n# --- end shared ---\nafter\n"
    assert sync_blocks.with_blocks(text, source) == text.replace("x = 2", "x = 1")
