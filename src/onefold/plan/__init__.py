"""The room of the plan: the table of where training state rests, geometry, number formats, bytes.

Owns integers and dtypes; no tensor is moved here. Imports `errors` only.
Words: a *placement* is one cell of the table, a *plan* the table; a *layout* is where parameters lie in a flat buffer
and which range of it is whose *shard*; a *slot* is one parameter's place there, a *piece* the part of it in one
shard.
"""
