"""The room of setup: `shard` and the decisions it makes once - units, placements, formats; `gathered`, `accumulate`.

Owns how a plan becomes structure. Nothing decided here is asked again at run time. Imports `optim` and below.
Words: a *unit spec* is a unit to be; to *materialize* is to give parameters on the meta device their values; *kept*
units stay gathered between a forward and its backward.
"""
