"""Films a trained policy: one evaluation episode, with the run's own sampler, as video.gif.

    python tools/record.py runs/FOLDER                          # runs/FOLDER/best.pt
    python tools/record.py runs/FOLDER --checkpoint policy.pt --episodes 3 --out video.gif

A task is simulated and drawn by what trained it: EnvPool, Gymnasium, mjlab or Isaac Lab, and one of
ManiSkill by its simulator of one environment. Playground's tasks cannot be filmed yet.
MuJoCo needs OpenGL: without a display it draws by EGL, or by what MUJOCO_GL names (egl, osmesa).
ManiSkill needs Vulkan.
A long episode is shown in fast motion: the film has at most 250 pictures, 20 a second.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import sync_blocks  # noqa: E402

MAX_FRAMES = 250
MILLISECONDS = 50  # of each picture


class Film:
    """Keeps every frame at first, and every second one of them whenever there are too many."""

    def __init__(self):
        self.frames = []
        self.num_seen = 0
        self.stride = 1

    def add(self, draw):
        """draw makes the picture; it is called for those that are kept."""
        if self.num_seen % self.stride == 0:
            self.frames.append(draw())
        self.num_seen += 1
        if len(self.frames) > MAX_FRAMES:
            self.frames = self.frames[::2]
            self.stride *= 2

    def save(self, path):
        from PIL import Image

        first, *others = [Image.fromarray(frame) for frame in self.frames]
        first.save(
            path,
            format="GIF",
            save_all=True,
            append_images=others,
            duration=MILLISECONDS,
            loop=0,
        )


def stop(sentence, code):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def load(path):
    """The checkpoint and the script that wrote it, which refuses what it cannot read."""
    try:
        name = torch.load(path, map_location="cpu", weights_only=True)["script"]
    except Exception as error:
        kind = type(error).__name__
        stop(f"{path} is missing, damaged or not a checkpoint of ours ({kind})", code=2)
    if name not in [script.stem for script in sync_blocks.scripts()]:
        stop(f"{path} was written by {name}.py, which is not here", code=2)
    script = importlib.import_module(name)
    return script, script.load_checkpoint(script.Args(evaluate=str(path)))


def make_env(script, args):
    """One environment that draws itself."""
    if hasattr(script, "import_tasks"):  # ManiSkill
        script.import_tasks(args.env_module)
        args.backend = "physx_cpu"
    elif args.backend == "envpool":
        import mujoco

        mujoco.GLContext(480, 480).make_current()  # EnvPool draws into this context
    seed = 10_007 * args.seed + 5_000  # of the first environment of the final evaluation
    if args.backend in ("isaaclab", "mjlab"):
        from simulators import isaaclab_env

        args.num_envs = 1  # not those of the training
        return isaaclab_env.VecEnv(args, 1, seed, render_mode="rgb_array")
    return script.VecEnv(args, 1, seed, render_mode="rgb_array")


def picture(envs):
    """What the environment looks like now, (height, width, 3)"""
    is_control_suite = type(envs.env).__name__.startswith("Dmc")  # EnvPool's
    camera = {"camera_id": 0} if is_control_suite else {}  # it moves with a robot
    frame = np.array(envs.env.render(**camera), dtype=np.uint8)
    # EnvPool draws its first environment, Gymnasium all, Isaac Lab and mjlab one picture
    return frame[0] if frame.ndim == 4 else frame


@torch.no_grad()
def film(script, agent, envs, args, num_episodes):
    """-> the film, its episodes"""
    reel = Film()
    episodes = []
    generator = torch.Generator().manual_seed(args.seed)
    obs = envs.reset()
    while len(episodes) < num_episodes:
        reel.add(lambda: picture(envs))
        normalized = agent.policy.normalizer(obs)
        action = script.act(agent, normalized, args.eval_sampler, args, generator)
        obs, *_ = envs.step(action)
        episodes += envs.pop_finished()
    return reel, episodes


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--checkpoint", default="best.pt", help="file in that folder")
    parser.add_argument("--episodes", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--out", type=Path, help="file to write; otherwise video.gif in the folder")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_args(argv)
    if options.episodes < 1:
        stop("--episodes must be at least 1", code=2)
    if "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
    script, checkpoint = load(options.run / options.checkpoint)
    args = script.Args(**checkpoint["args"])
    args.device = "cpu"
    out = options.out or options.run / "video.gif"
    hint = f"; MUJOCO_GL is {os.environ.get('MUJOCO_GL')}"
    hint += ": on Debian `apt install libegl1 libgl1-mesa-dri` brings EGL"
    if args.backend == "playground":
        stop(f"{args.env_id} was trained by Playground, which cannot be filmed yet", code=2)
    elif args.backend.startswith("physx"):
        hint = "; ManiSkill draws with a Vulkan driver, see docs/maniskill.md"
    try:
        envs = make_env(script, args)
        agent = script.Agent(envs, args)
        agent.load_state_dict(checkpoint["agent"])
        reel, episodes = film(script, agent, envs, args, options.episodes)
        reel.save(out)
    except Exception as error:  # no OpenGL, no Vulkan, or a task that only another backend has
        reason = " ".join(str(error).split()).rstrip(".")
        stop(f"{args.backend} cannot film {args.env_id}: {reason}{hint}", code=1)
    for episode in episodes:
        print(f"return {episode['return']:.1f} in {episode['length']} steps")
    print(f"saved {out}: {len(reel.frames)} pictures")


if __name__ == "__main__":
    main()
