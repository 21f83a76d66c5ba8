"""The room of the engine: one sharded model at run time - units, their gradients, the order of gathers, the hooks.

Owns what happens in forward and backward passes. Imports `comm`, `tiers`, `memory`, `plan`, `errors`.
Words: a *unit* is gathered, reduced and released as one; a *pass* is one outermost forward or one backward; *reduced*
is a gradient that was averaged over the ranks; the *session* is all that belongs to one sharded model.
"""
