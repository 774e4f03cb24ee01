"""Worker processes for simulators/maniskill_cpu.py: each simulates a share of the environments.

    from simulators import maniskill_cpu
    envs = maniskill_cpu.make("PickCube-v1", num_envs=64, num_workers=4)
    python -m simulators.maniskill_workers StackCube-v1    # steps per second with 0, 2, ... workers

SAPIEN keeps Python's lock while it simulates, so a second core needs a second process, which runs
maniskill_cpu.py on its rows of a batch. workers.py starts and ends these processes.

Environment i does, to the bit, what it does in one process. It starts with its own seed and draws
from its own stream, and no row depends on another one. Two things are outside of this promise:
a task of your own that draws from torch's global generator during a step, and entries of `info`
that are not one value per environment, which are left out.
"""

import importlib
import logging
import os
import statistics
import sys
import time
import warnings
import weakref

import gymnasium as gym
import numpy as np
import torch

from simulators.workers import SECONDS_TO_MAKE, SECONDS_TO_STEP, get_pool

FIRST_SEED = 2022  # ManiSkill builds environment i of a batch with the seed 2022 + i


# === 1. In the process that trains ===
def seeds_of_rows(seed, num_envs):
    """One seed per environment; from a single number ManiSkill makes the others like this."""
    seeds = np.atleast_1d(seed).tolist()
    if len(seeds) == 1 and num_envs > 1:
        seeds += np.random.RandomState(seeds[0]).randint(2**31, size=num_envs - 1).tolist()
    return seeds


class WorkersEnv(gym.Env):
    """A batch that workers simulate, with the interface of ManiSkill's batched environments.

    A reset of some environments returns the rows of the others as the last step showed them.
    """

    device = torch.device("cpu")
    reconfiguration_freq = 0

    def __init__(self, env_id, num_envs, num_workers, env_module, **kwargs):
        self.num_envs = num_envs
        self.pool = get_pool(num_workers)
        self.pool.close_unused()
        self.batch = next(self.pool.batches)
        self.workers = []
        self.slices = []  # of the rows, one per worker
        contents = []
        for k, worker in enumerate(self.pool.workers):
            start = num_envs * k // num_workers
            stop = num_envs * (k + 1) // num_workers
            if start == stop:  # fewer environments than workers
                continue
            self.workers.append(worker)
            self.slices.append(slice(start, stop))
            contents.append(
                {
                    "module": "simulators.maniskill_workers",
                    "env_id": env_id,
                    "env_module": env_module,
                    "rows": range(start, stop),
                    "kwargs": kwargs,
                    "path": sys.path,
                    "folder": os.getcwd(),
                    "torch_seed": torch.initial_seed() + k,
                }
            )
        # closes it in the workers before they make the next one
        self.finalizer = weakref.finalize(self, self.pool.closed_batches.append, self.batch)
        answers = self.call("make", contents, SECONDS_TO_MAKE)
        example = answers[0]
        self.single_observation_space = example["observation_space"]
        self.single_action_space = example["action_space"]
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.info = {}
        for name, (dtype, shape) in example["info"].items():
            self.info[name] = torch.zeros(num_envs, *shape, dtype=dtype)
        self.tensors = {
            "action": torch.zeros(self.action_space.shape),
            "obs": torch.zeros(num_envs, *self.single_observation_space.shape),
            "reward": torch.zeros(num_envs),
            "terminated": torch.zeros(num_envs, dtype=torch.bool),
            "truncated": torch.zeros(num_envs, dtype=torch.bool),
            "restart": torch.zeros(num_envs, dtype=torch.bool),
            "seed": torch.zeros(num_envs, dtype=torch.int64),
        }
        for tensor in (*self.tensors.values(), *self.info.values()):
            tensor.share_memory_()
        self.call("share", [{"tensors": self.tensors, "info": self.info}] * len(self.workers))

    def call(self, command, contents=None, seconds=SECONDS_TO_STEP):
        return self.pool.call(self.workers, command, self.batch, contents, seconds)

    def shown_info(self):
        """A copy: the tensors of earlier steps must not change."""
        info = {name: values.clone() for name, values in self.info.items()}
        self.elapsed_steps = info["elapsed_steps"]
        return info

    def step(self, action):
        self.tensors["action"].copy_(torch.as_tensor(action))
        self.call("step")
        obs = self.tensors["obs"].clone()
        reward = self.tensors["reward"].clone()
        terminated = self.tensors["terminated"].clone()
        truncated = self.tensors["truncated"].clone()
        return obs, reward, terminated, truncated, self.shown_info()

    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        restart = self.tensors["restart"]
        restart.zero_()
        restart[options.pop("env_idx", slice(None))] = True
        if seed is None and not options:  # an episode ended: as fast as a step
            affected = []
            for worker, rows in zip(self.workers, self.slices, strict=True):
                if restart[rows].any():
                    affected.append(worker)
            self.pool.call(affected, "restart", self.batch)
        else:
            is_seeded = seed is not None
            if is_seeded:
                self.tensors["seed"].copy_(torch.tensor(seeds_of_rows(seed, self.num_envs)))
            contents = [{"is_seeded": is_seeded, "options": options}] * len(self.workers)
            # with a new scene or without, which may take long
            self.call("reset", contents, SECONDS_TO_MAKE if options else SECONDS_TO_STEP)
        info = self.shown_info()
        info["reconfigure"] = options.get("reconfigure", False)
        return self.tensors["obs"].clone(), info

    def close(self):
        self.finalizer()


# === 2. In a worker ===
class Share:
    """The rows of a batch that this worker simulates."""

    def __init__(self, env_id, env_module, rows, kwargs, torch_seed):
        warnings.filterwarnings("ignore", "Failed to find system libvulkan")  # nothing is rendered
        logging.getLogger("mani_skill").setLevel("ERROR")  # its hints are for authors of tasks
        torch.manual_seed(torch_seed)
        from simulators import maniskill_cpu

        if env_module:
            importlib.import_module(env_module)
        self.rows = rows
        self.env = maniskill_cpu.make_env(env_id, len(rows), **kwargs)
        is_batched = not isinstance(self.env.unwrapped, maniskill_cpu.SeparateEnvs)
        seeds = [FIRST_SEED + row if is_batched else FIRST_SEED for row in rows]
        # the scenes of later rows were built with the seeds of the first ones
        options = {"reconfigure": is_batched and rows.start > 0}
        self.obs, self.info = self.env.reset(seed=seeds, options=options)

    def describe(self):
        """What the trainer must know to make the tensors."""
        info = {}
        for name, values in self.info.items():
            if torch.is_tensor(values) and values.shape[:1] == (len(self.rows),):
                info[name] = (values.dtype, values.shape[1:])
        return {
            "observation_space": self.env.get_wrapper_attr("single_observation_space"),
            "action_space": self.env.get_wrapper_attr("single_action_space"),
            "info": info,
        }

    def take(self, tensors, info):
        """Keep the own rows of the tensors in shared memory."""
        rows = slice(self.rows.start, self.rows.stop)
        self.tensors = {name: values[rows] for name, values in tensors.items()}
        self.shared_info = {name: values[rows] for name, values in info.items()}
        self.show(self.obs, self.info)

    def show(self, obs, info):
        self.tensors["obs"].copy_(obs)
        for name, shared in self.shared_info.items():
            shared.copy_(info[name])

    def step(self):
        action = self.tensors["action"].clone()
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.tensors["reward"].copy_(reward)
        self.tensors["terminated"].copy_(terminated)
        self.tensors["truncated"].copy_(truncated)
        self.show(obs, info)

    def reset(self, is_seeded, options):
        seed = self.tensors["seed"].tolist() if is_seeded else None
        env_idx = self.tensors["restart"].nonzero()[:, 0]
        self.show(*self.env.reset(seed=seed, options=options | {"env_idx": env_idx}))


# === 3. How fast it is here ===
def compare_speed(env_id, num_envs=64, rounds=5, steps=25):
    """Steps per second of wall time with 0, 2, 4 ... workers, which take turns."""
    from simulators import maniskill_cpu

    torch.set_num_threads(1)
    most_workers = min(os.cpu_count(), num_envs)
    batches = {}
    for num_workers in range(0, most_workers + 1, 2):
        batches[num_workers] = maniskill_cpu.make(env_id, num_envs, num_workers=num_workers)
        batches[num_workers].reset(seed=0)
    speeds = {num_workers: [] for num_workers in batches}
    actions = [batches[0].action_space.sample() for _ in range(steps)]
    for _ in range(rounds):
        for num_workers, batch in batches.items():
            started = time.perf_counter()
            for action in actions:
                batch.step(action)
            seconds = time.perf_counter() - started
            speeds[num_workers].append(steps * num_envs / seconds)
    print(f"{env_id}, {num_envs} environments, medians of {rounds} rounds:")
    in_process = statistics.median(speeds[0])
    for num_workers, measured in speeds.items():
        speed = statistics.median(measured)
        where = f"{num_workers} workers" if num_workers else "in process"
        print(f"  {where:<12}{speed:>9,.0f} steps/s{speed / in_process:>7.2f}x")


if __name__ == "__main__":
    compare_speed(sys.argv[1] if len(sys.argv) > 1 else "StackCube-v1")
