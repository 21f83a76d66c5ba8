"""The room of files: directories of safetensors, and what tensors are called in them.

Owns names, headers and bytes; it knows nothing of ranks. Imports `plan` and `errors`.
Words: a tensor is *stored* where a file has it; a *matching* says which stored tensor is which of the model's.
"""
