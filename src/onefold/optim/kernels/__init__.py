"""The room of update kernels: the compiled and the Triton twin of a rule, bit for bit what torch would compute.

Owns the only uses of ctypes on arithmetic and of Triton. Knows rules by name alone. Imports `comm` (for the order of
sums), `memory`, `plan`, `errors`.
"""
