"""A stand-in for HumanoidBench: the same names and the same defects, on a small robot."""

from gymnasium.envs import register

from .env import TASKS

for task, task_class in TASKS.items():
    register(
        id=f"h1hand-{task}-v0",
        entry_point="humanoid_bench.env:HumanoidEnv",
        max_episode_steps=task_class.max_episode_steps,
        kwargs={"robot": "h1hand", "control": "pos", "task": task},
    )
