"""Benchmarks: `python -m bench` in a checkout, `python -m gpunet.bench` anywhere.

`figures` lists what can be measured, and the module of each: ``measure(effort)`` returns its rows. `timing`
measures times side by side, `rows` holds results, `report` shows them, `machine` says where they are from.
"""
