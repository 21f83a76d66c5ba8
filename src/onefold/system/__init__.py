"""The room of the machine: cores, memory, network interfaces and environment; replacing files in one step.

Owns what a process finds out about where it runs. It talks to no other rank. Imports `errors` only.
Words: a *share* is the cores on which a rank's updates run; a *quota* is how many cores a control group may use.
"""
