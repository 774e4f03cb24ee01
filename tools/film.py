"""Films policies before and after training, side by side, as a small GIF.

    python tools/film.py results/laptop/trudi/CheetahRun-v1_1 results/laptop/trudi/WalkerWalk-v1_1

A row for each run: on the left its policy as it was before the first update, on the right its
policy.pt, both from the first state of the final evaluation, with the run's own sampler. The
caption has the return of the whole episode; the film shows the beginning of it: CheetahRun-v1 in
real time, WalkerWalk-v1 2.5 times as fast. EnvPool simulates and draws, as in tools/record.py, so
what is seen is what the policy was trained on. Without a display this needs EGL: on Debian
`apt install libegl1 libgl1-mesa-dri`.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import record  # noqa: E402

OUT = ROOT / "docs/figures/before_after.gif"
NUM_FRAMES = 60
STEPS_PER_FRAME = 5  # a step of cheetah is 0.01 s, one of walker 0.025 s
MILLISECONDS = 50  # of each frame
SIZE = 180  # pixels of a picture, both ways
CAPTION = 16  # pixels above it
COLORS = 48


@torch.no_grad()
def episode(script, agent, envs, args):
    """-> pictures of its beginning, its return"""
    frames = []
    finished = []
    generator = torch.Generator().manual_seed(args.seed)
    obs = envs.reset()
    step = 0
    while not finished:
        if step % STEPS_PER_FRAME == 0 and len(frames) < NUM_FRAMES:
            frames.append(record.picture(envs))
        normalized = agent.policy.normalizer(obs)
        obs, *_ = envs.step(script.act(agent, normalized, args.eval_sampler, args, generator))
        finished = envs.pop_finished()
        step += 1
    return frames, finished[0]["return"]


def before_and_after(run, checkpoint_name):
    """[(caption, pictures), (caption, pictures)] of a run"""
    script, checkpoint = record.load(run / checkpoint_name)
    args = script.Args(**checkpoint["args"])
    args.device = "cpu"
    shots = []
    for trained in (False, True):
        envs = record.make_env(script, args)
        torch.manual_seed(args.seed)
        agent = script.Agent(envs, args)
        if trained:
            agent.load_state_dict(checkpoint["agent"])
        frames, total = episode(script, agent, envs, args)
        when = "trained" if trained else "untrained"
        shots.append((f"{args.env_id} {when}: {total:.0f}", frames))
    return shots


def small_picture(frame, caption):
    """A picture with its caption, (height, width, 3)"""
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (SIZE, SIZE + CAPTION), "white")
    canvas.paste(
        Image.fromarray(frame).resize((SIZE, SIZE), Image.Resampling.LANCZOS), (0, CAPTION)
    )
    ImageDraw.Draw(canvas).text((4, 2), caption, fill="black")
    return np.asarray(canvas)


def compose(rows):
    """Frames of the film. An episode that ended early stays at its last picture."""
    length = max(len(frames) for shots in rows for _, frames in shots)
    film = []
    for i in range(length):
        lines = []
        for shots in rows:
            pictures = []
            for caption, frames in shots:
                pictures.append(small_picture(frames[min(i, len(frames) - 1)], caption))
            lines.append(np.hstack(pictures))
        film.append(np.vstack(lines))
    return film


def save(film, path):
    """All frames with the colors of the first, so that what stands still costs nothing."""
    from PIL import Image

    palette = Image.fromarray(film[0]).quantize(COLORS, dither=Image.Dither.NONE)
    frames = []
    for frame in film:
        frames.append(Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE))
    first, *others = frames
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(
        path, save_all=True, append_images=others, duration=MILLISECONDS, loop=0, optimize=True
    )


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, a row each")
    parser.add_argument("--checkpoint", default="policy.pt", help="file in these folders")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_args(argv)
    if "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
    torch.set_num_threads(1)
    try:
        rows = [before_and_after(run, options.checkpoint) for run in options.runs]
    except Exception as error:  # no OpenGL, or a task that cannot be drawn
        reason = " ".join(str(error).split()).rstrip(".")
        record.stop(f"no film: {reason}; tools/record.py says what filming needs", code=1)
    film = compose(rows)
    save(film, options.out)
    for shots in rows:
        for caption, _ in shots:
            print(caption)
    kilobytes = options.out.stat().st_size / 1000
    print(f"saved {options.out}: {len(film)} pictures, {kilobytes:.0f} kB")


if __name__ == "__main__":
    main()
