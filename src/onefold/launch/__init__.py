"""The room of the launcher: the ranks of one machine, started by torchrun, watched, and ended.

No rank imports it: `start_rank` runs by itself in the process that becomes one. Imports `system` and `errors`.
"""
