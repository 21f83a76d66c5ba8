"""The room of tiers: where shards rest - the device, the host (and the thread that updates there), the disk.

Owns what moves between them. Nothing above asks which tier it talks to. Imports `memory`, `system`, `plan`, `errors`.
Words: state *rests* on a tier; a tier *fetches* what the computation will read and *stores* what it produced.
"""
