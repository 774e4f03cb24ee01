"""A stand-in for Isaac Lab on a CPU: its names, the order of its steps, its shared buffers.

Written after Isaac Lab 2.3.2, and after newer versions where compute_final_obs is concerned.
"""
