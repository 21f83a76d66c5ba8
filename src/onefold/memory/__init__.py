"""The room of memory: flat buffers and the forms of master weights, streams and tickets, pinned memory.

Owns the only uses of CUDA streams and events. Imports `plan` and `errors`.
Words: a *buffer* is memory that a unit's parameters are views of; a *lane* is a queue of work beside the computation; a
*ticket* says when something is done and keeps alive what it needs until then; the *master* weights are the exact ones.
"""
