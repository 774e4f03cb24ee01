"""Copies the shared blocks of one script to all others that have them.

    python tools/sync_blocks.py trudi_continuous.py

Code that several scripts have in common stands between `# --- shared: NAME ---` and
`# --- end shared ---`. Each script is self-contained, so the copies are deliberate;
tests/test_shared_blocks.py checks that they are equal.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^# --- shared: ([^\n]+) ---\n(.*?)^# --- end shared ---\n", re.M | re.S)


def scripts():
    """The algorithms: files at the top level that define Args."""
    found = []
    for path in sorted(ROOT.glob("*.py")):
        if re.search(r"^class Args\b", path.read_text(), re.M):
            found.append(path)
    return found


def blocks(text):
    """name -> the block's text; complains about markers without a partner and repeated names."""
    found = BLOCK.findall(text)
    num_starts = len(re.findall(r"^\s*# --- shared", text, re.M))
    num_ends = text.count("# --- end shared ---")
    if not len(found) == num_starts == num_ends:
        raise ValueError("a marker of a shared block has no partner")
    if len(dict(found)) != len(found):
        raise ValueError("the name of a shared block comes twice")
    return dict(found)


def with_blocks(text, source):
    """text, with the blocks that source has under the same names."""

    def replacement(match):
        name = match[1]
        body = source.get(name, match[2])
        return f"# --- shared: {name} ---\n{body}# --- end shared ---\n"

    return BLOCK.sub(replacement, text)


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    source = blocks(Path(sys.argv[1]).read_text())
    for path in scripts():
        before = path.read_text()
        after = with_blocks(before, source)
        if after != before:
            path.write_text(after)
            print(f"updated {path.name}")


if __name__ == "__main__":
    main()
