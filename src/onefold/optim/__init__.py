"""The room of optimizers: rules, the update of one buffer, the step, the optimizers users name, averages of weights.

Owns everything between reduced gradients and new weights. Imports `engine` and what that may import; and its kernels.
Words: a *rule* is an optimizer as arithmetic on flat tensors; an *update* applies it to one flat buffer; a *step* is
all updates, behind one global norm.
"""
