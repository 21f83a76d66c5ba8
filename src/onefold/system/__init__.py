"""The room of the machine: its cores, memory, network interfaces and environment; replacing files in one step.

Owns what a process finds out about where it runs. It talks to no other rank. Imports `errors` only.
"""
