"""The torch operators that the functions and layers call. Each family of operators has one file.

The operators are `torch.ops.hostir.*`, and the operators of `torch.ops.symm_mem` that hostir can replace. The file of a
family has the operators' schemas, kernels, fusions and gradients. The kernel of an operator runs a fusion: a sharded
computation that hostir compiles for the process group.

All families share six files. `library` registers operators with torch. `gradients` records calls for autograd.
`layouts` maps tensors to the operands of a fusion. `fusions` writes the text of a fusion. `running` runs a fusion on a
group. `remembered` repeats calls with known layouts.
"""
