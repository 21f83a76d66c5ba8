"""DeepSpeed's package `checkpoint`, as far as others look into it."""
