"""The room of many machines: hostfiles, ssh, Slurm, Kubernetes; what is checked before, what is tried again after.

Imports `launch`, `system`, `errors`.
Words: a *probe* finds out whether one machine answers, the *preflight* whether all do; a *restart* runs the job again
on the machines that are left.
"""
