"""HumanoidBench's tasks with today's Gymnasium and NumPy; its own files stay as they are.

    python trudi_continuous.py --env-id h1hand-walk-v0
    python -m simulators.humanoidbench_env h1hand-walk-v0    # steps per second and memory here

HumanoidBench is not on PyPI, and was written for the libraries of 2024. docs/humanoidbench.md has
the commands that install it. `import_suite` imports it and repairs what fails, or what nobody
seeds. `make_vec` makes a batch with the interface of Gymnasium's vector environments, in this
process or shared among worker processes. Environment i does the same in both.

`info["success"]` tells whether the task's own success was seen in the episode so far. A task that
has none succeeds when the return reaches the suite's success_bar.

Shapes: E environments, O observation, A action.
"""

import contextlib
import functools
import importlib.util
import io
import math
import os
import re
import sys
import time
import types
import weakref
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from simulators.workers import SECONDS_TO_MAKE, SECONDS_TO_STEP, get_pool

SOURCE = "git+https://github.com/carlosferrazza/humanoid-bench@791405f#egg=humanoid_bench"
INSTALL = (
    "`pip install -r requirements-humanoidbench.txt`, "
    f'then `pip install --no-deps -e "{SOURCE}"`, in a new virtual environment'
)
KETTLE = "kitchen/adept_models/kitchen/assets/kettle_asset.xml"
KETTLE_DEFAULTS = re.compile("<default class=.kettle.>.*</default>", re.S)
MOVE_BODIES = ("bookshelf", "cube", "package")  # tasks that write their goals into the model


# === 1. The suite, repaired from outside ===
@functools.cache
def import_suite():
    """Import HumanoidBench, which registers its tasks in Gymnasium, and repair it."""
    try:
        with pretended_jax():
            from humanoid_bench.dmc_deps import dmc_sizes
            from humanoid_bench.env import HumanoidEnv
    except ImportError as error:
        print(f"error: HumanoidBench is not installed ({error}): {INSTALL}", file=sys.stderr)
        raise SystemExit(2) from None
    drop_unknown_arrays(dmc_sizes.array_sizes)
    seed_goals(HumanoidEnv)
    HumanoidEnv._initialize_simulation = make_simulation


@contextlib.contextmanager
def pretended_jax():
    """The suite imports jax.numpy for low-level policies, which no task uses.

    A pretended package that stays would confuse others that look for JAX.
    """
    if importlib.util.find_spec("jax"):
        yield
        return
    jax = types.ModuleType("jax")
    jax.numpy = types.ModuleType("jax.numpy")
    sys.modules["jax"] = jax
    sys.modules["jax.numpy"] = jax.numpy
    try:
        yield
    finally:
        del sys.modules["jax"]
        del sys.modules["jax.numpy"]


def drop_unknown_arrays(array_sizes):
    """Its copy of dm_control's tables names arrays that a newer MuJoCo does not have."""
    import mujoco

    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    structs = {"mjmodel": model, "mjdata": mujoco.MjData(model)}
    for table, struct in structs.items():
        sizes = array_sizes[table]
        array_sizes[table] = {name: sizes[name] for name in sizes if hasattr(struct, name)}


def seed_goals(env_class):
    """Goals come from NumPy's global generator: derive it from the environment's own one."""
    reset_model = env_class.reset_model

    def seeded_reset_model(self):
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(self.np_random.integers(2**32))  # noqa: NPY002
        try:
            return reset_model(self)
        finally:
            np.random.set_state(state)  # noqa: NPY002

    env_class.reset_model = seeded_reset_model


shared_models = weakref.WeakValueDictionary()  # path -> MuJoCo model


def make_simulation(self):
    """Instead of HumanoidEnv._initialize_simulation: environments of a process share a model.

    Simulation only reads it, and it is 66 to 75 MB of meshes and textures. maze writes colors,
    which no observation shows.
    """
    import mujoco

    path = self.fullpath
    model = shared_models.get(path)
    if model is None:
        model = load_model(path)
    if not any(task in Path(path).name for task in MOVE_BODIES):
        shared_models[path] = model
    visual = model.vis.global_
    visual.offwidth = max(visual.offwidth, self.width)
    visual.offheight = max(visual.offheight, self.height)
    return model, mujoco.MjData(model)


def load_model(path):
    """The kitchen's kettle names a default class at the top, an error since MuJoCo 3.2."""
    import mujoco

    kettle = Path(path).parents[1] / KETTLE
    if "kitchen" not in Path(path).name:
        return mujoco.MjModel.from_xml_path(path)
    text = KETTLE_DEFAULTS.sub(r"<default>\g<0></default>", kettle.read_text())
    return mujoco.MjModel.from_xml_path(path, {f"../{KETTLE}": text.encode()})


# === 2. Environments in this process ===
class Success(gym.Wrapper):
    """Tells in `info` whether the episode is a success so far, and nothing else."""

    def __init__(self, env):
        super().__init__(env)
        self.success_bar = getattr(env.unwrapped.task, "success_bar", math.inf)

    def reset(self, **kwargs):
        self.episode_return = 0.0
        self.is_success = False
        obs, _ = self.env.reset(**kwargs)
        return obs, {}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.episode_return += reward
        reaches_bar = self.episode_return >= self.success_bar
        self.is_success = self.is_success or bool(info.get("success", reaches_bar))
        return obs, reward, terminated, truncated, {"success": float(self.is_success)}


def name_of(env_id):
    return env_id.split(":")[-1]  # humanoid_bench:h1hand-walk-v0 is the same


def make(env_id, render_mode=None, **kwargs):
    """One environment. The suite's own default render mode needs OpenGL."""
    import_suite()
    with contextlib.redirect_stdout(io.StringIO()):  # some tasks print a line each
        kwargs = dict(render_mode=render_mode, disable_env_checker=True) | kwargs
        env = gym.make(name_of(env_id), **kwargs)
    renderer = env.unwrapped.mujoco_renderer
    draw = renderer.render
    renderer.render = lambda mode, *camera: draw(mode)  # today's renderer knows its camera
    return Success(env)


def make_vec(env_id, num_envs, num_workers=0, **kwargs):
    """A batch; only reset_mask and seed restart its environments, step never does.

    num_workers: processes that simulate, shared by the processes of torchrun. With 0 or 1 this
    process simulates.
    """
    import_suite()
    num_workers //= int(os.environ.get("WORLD_SIZE", 1))
    if num_workers > 1 and "render_mode" not in kwargs:
        return WorkersEnv(env_id, num_envs, num_workers, kwargs)
    constructors = [functools.partial(make, env_id, **kwargs)] * num_envs
    envs = gym.vector.SyncVectorEnv(constructors, autoreset_mode="Disabled")
    envs.spec = gym.spec(name_of(env_id))
    return envs


# === 3. Environments in worker processes ===
class WorkersEnv:
    """A batch that workers simulate."""

    def __init__(self, env_id, num_envs, num_workers, kwargs):
        torch.set_num_threads(1)  # threads that wait for work would take cores from the workers
        self.num_envs = num_envs
        self.spec = gym.spec(name_of(env_id))
        self.pool = get_pool(num_workers)
        self.pool.close_unused()
        self.batch = next(self.pool.batches)
        self.workers = []
        self.slices = []  # of the rows, one per worker
        contents = []
        for k, worker in enumerate(self.pool.workers):
            rows = range(num_envs * k // num_workers, num_envs * (k + 1) // num_workers)
            if len(rows) == 0:  # fewer environments than workers
                continue
            self.workers.append(worker)
            self.slices.append(slice(rows.start, rows.stop))
            content = {"env_id": env_id, "num_envs": len(rows), "kwargs": kwargs}
            content |= {"module": "simulators.humanoidbench_env", "path": sys.path}
            content["folder"] = os.getcwd()
            contents.append(content)
        # closes it in the workers before they make the next one
        self.finalizer = weakref.finalize(self, self.pool.closed_batches.append, self.batch)
        example = self.call("make", contents, SECONDS_TO_MAKE)[0]
        self.single_action_space = example["action_space"]
        self.single_observation_space = example["observation_space"]
        self.tensors = {
            "action": torch.zeros(num_envs, *self.single_action_space.shape),
            "obs": torch.zeros(num_envs, *self.single_observation_space.shape).double(),
            "reward": torch.zeros(num_envs).double(),
            "terminated": torch.zeros(num_envs, dtype=torch.bool),
            "truncated": torch.zeros(num_envs, dtype=torch.bool),
            "success": torch.zeros(num_envs).double(),
            "restart": torch.zeros(num_envs, dtype=torch.bool),
        }
        for tensor in self.tensors.values():
            tensor.share_memory_()
        contents = []
        for rows in self.slices:
            share = {name: tensor[rows] for name, tensor in self.tensors.items()}
            contents.append({"tensors": share})
        self.call("share", contents)

    def call(self, command, contents=None, seconds=SECONDS_TO_STEP):
        return self.pool.call(self.workers, command, self.batch, contents, seconds)

    def shown(self, name):
        """A copy: the arrays of earlier steps must not change."""
        return self.tensors[name].numpy().copy()

    def step(self, action):
        self.tensors["action"].copy_(torch.as_tensor(action))
        self.call("step")
        results = [self.shown(name) for name in ("obs", "reward", "terminated", "truncated")]
        return *results, {"success": self.shown("success")}

    def reset(self, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.tensors["restart"].copy_(torch.as_tensor(mask))
        workers = []
        contents = []
        for worker, rows in zip(self.workers, self.slices, strict=True):
            if mask[rows].any():
                workers.append(worker)
                contents.append({"seed": None if seed is None else seed + rows.start})
        self.pool.call(workers, "reset", self.batch, contents)
        return self.shown("obs"), {}

    def close(self):
        self.finalizer()


class Share:
    """The rows of a batch that a worker simulates."""

    def __init__(self, env_id, num_envs, kwargs):
        self.env = make_vec(env_id, num_envs, **kwargs)

    def describe(self):
        """What the trainer must know to make the tensors."""
        return {
            "observation_space": self.env.single_observation_space,
            "action_space": self.env.single_action_space,
        }

    def take(self, tensors):
        """Keep the own rows of the tensors in shared memory, as arrays."""
        self.arrays = {name: tensor.numpy() for name, tensor in tensors.items()}

    def step(self):
        obs, reward, terminated, truncated, info = self.env.step(self.arrays["action"].copy())
        self.arrays["obs"][:] = obs
        self.arrays["reward"][:] = reward
        self.arrays["terminated"][:] = terminated
        self.arrays["truncated"][:] = truncated
        self.arrays["success"][:] = info["success"]

    def reset(self, seed):
        mask = self.arrays["restart"].copy()
        obs, _ = self.env.reset(seed=seed, options={"reset_mask": mask})
        self.arrays["obs"][mask] = obs[mask]


# === 4. What it costs here ===
def measure(env_id, num_envs=8, num_steps=50):
    """Print steps per second with 0, 2, 4 ... workers, and the memory of an environment."""
    for num_workers in range(0, min(os.cpu_count(), num_envs) + 1, 2):
        memory = resident_memory()
        envs = make_vec(env_id, num_envs, num_workers)
        envs.reset(seed=0)
        actions = np.random.default_rng(0).uniform(-1, 1, (num_steps, num_envs, *shape_of(envs)))
        started = time.perf_counter()
        for action in actions.astype(np.float32):
            _, _, terminated, truncated, _ = envs.step(action)
            ended = terminated | truncated
            if ended.any():
                envs.reset(options={"reset_mask": ended})
        speed = num_steps * num_envs / (time.perf_counter() - started)
        where = f"{num_workers} workers" if num_workers else "in process"
        line = f"{env_id}: {where}, {num_envs} environments: {speed:.0f} steps/s"
        if num_workers == 0:
            line += f", {(resident_memory() - memory) / num_envs:.0f} MB an environment"
        print(line)
        del envs


def shape_of(envs):
    return envs.single_action_space.shape


def resident_memory():
    """In MB"""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    measure(sys.argv[1] if len(sys.argv) > 1 else "h1hand-walk-v0")
