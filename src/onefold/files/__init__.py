"""The room of files: directories of safetensors, and what tensors are called in them. Imports `plan`, `errors`."""
