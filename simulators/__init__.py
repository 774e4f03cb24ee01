"""Simulators that need packages of their own, behind the interface that the scripts train on.

`maniskill_cpu` runs ManiSkill's tasks in a batch on a CPU. `playground` runs MuJoCo Playground's
tasks on JAX. Importing this package imports neither, so a script needs only what it uses.
"""
