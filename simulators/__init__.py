"""Simulators that need packages of their own, behind the interface that the scripts train on.

`maniskill_cpu` runs ManiSkill's tasks in a batch on a CPU, and `maniskill_workers` shares a batch
among processes. `playground` runs MuJoCo Playground's tasks on JAX. Importing this package imports
none of them, so a script needs only what it uses.
"""
