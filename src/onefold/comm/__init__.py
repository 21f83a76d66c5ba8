"""The room of communication: process groups, meshes, collectives, and what ranks tell each other.

Owns the only uses of torch.distributed's collectives; everybody else has a `Comm`. Imports `memory`, `plan`,
`errors`.
Words: an *axis* of a mesh is a set of ranks; ranks that *share* hold one shard each, *replicas* hold the same shard;
the *control plane* is what ranks tell each other over host memory; a *side channel* carries messages beside the loop.
"""
