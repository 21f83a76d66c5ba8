"""The room of collectives that are copies between GPUs of one machine. Behind the seam `Comm`; nobody else knows.

Owns memory that several processes see. Imports `comm`, `memory`, `errors`.
Words: a *pool* is such memory, by rank; the *staging* buffers are where other ranks put gradients before they are
summed.
"""
