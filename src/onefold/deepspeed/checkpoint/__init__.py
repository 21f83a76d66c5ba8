"""DeepSpeed's package `checkpoint`, as far as libraries look into it."""
