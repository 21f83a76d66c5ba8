"""The room of the launcher: the ranks of one machine, started by torchrun, watched, and ended.

No rank imports it: `start_rank` runs by itself in the process that becomes one. Imports `system` and `errors`.
Words: a *node* is one machine's part of a run; a *failure* is the end of the rank that failed first; *leftovers* are
processes that ranks started and left behind.
"""
