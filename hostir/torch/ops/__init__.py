"""The operators behind the layers: one file a family.

They are `torch.ops.hostir.*`, and the operators of `torch.ops.symm_mem` that hostir can take over. A file has the
schemas, the kernels, the layouts, the fusion and the gradient of its family. Shared by all: `library` registers
operators with torch, `gradients` records calls for autograd, `layouts` maps tensors to the operands of a fusion, and
`running` runs a fusion on a group.
"""
