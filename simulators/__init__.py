"""Simulators that need packages of their own, behind the interface that the scripts train on.

`maniskill_cpu` runs ManiSkill's tasks in a batch on a CPU, and `maniskill_workers` shares a batch
among processes. `playground` runs MuJoCo Playground's tasks on JAX, `humanoidbench_env` those of
HumanoidBench, and `isaaclab_env` those of Isaac Lab and mjlab. `workers` is what processes that
simulate have in common. Importing this package imports none of them, so a script needs only what
it uses.
"""
