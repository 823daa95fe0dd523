"""nvFuser's dump of host IR as a second textual form of host programs.

`read_nvfuser` reads what `NVFUSER_DUMP=host_ir` prints, in the spellings of its versions so far; `print_nvfuser` prints
any host program in today's. Reading what we print gives an equal program, up to names.

| here | today's spelling, which we print | also read |
|---|---|---|
| `%x: f32[4, 8@didx, 16]` | `T0_g_float[iS0{4}, ideviceIdx.x1{8}, iS2{16}] (DeviceMesh{0 .. 7})` | no dtype, no mesh |
| `M@didx`, `(2 M/2@didx)` | `ideviceIdx.x0{8}, iS1{( ceilDiv(M, 8) )}`, an axis split in its factors | |
| mesh `[dp, tp]`, `@dp`, `@tp` | `DeviceMesh{{0 1}{2 3}}`, `deviceIdx.y`, `deviceIdx.x` | |
| `partial(didx)` | one more axis on the devices, in front: `ideviceIdx.x3{8}rf` | without `rf` |
| `%x = allocate` | `T0.. = ALLOCATE(mem_type=global, zero_init=false)` | `ALLOCATE(buffer=T0.., ..)` |
| `free %x` | `Deallocate {`, `T0..`, `}` | |
| `%y = select %x[%i]` | `T1.. = HirAliasSelect( T0.., axis = iS0{4}, index = i0 )` | `select( .. )` |
| `%y = chunk %x[%i of 4]` | `T1[istreamIdx3{4}, ..].. = ShardByStream(T0.., stream_index=i0)` | |
| `%y = permute %x (1, 0)` | `T1[iS3{..}, iS2{..}].. = Set.Permute( T0.. )`: axes numbered in the old order | |
| `%y = reshape %x` | `T1.. = view( T0.. )` | `reshape`, `broadcast`, `squeeze` |
| `%y = shard %x` | `T1[ideviceIdx.x3{8}, ..].. = Set( T0.. )`, its result on devices, where T1 is new | |
| `%y = as_partial %x over didx` | `T1.. = AsPartial(T0.., over=deviceIdx.x)`, ours | |
| `matmul`, `linear`, `relu`, `gelu`, `silu` | `T2.. = matmul(T0.., T1..)`, ... | |
| `add`, `mul` | `T2.. = T0.. + T1..;` and `*` | |
| `copy`, `cast` | `T1.. = Set( T0.., cache_op=Streaming )`, `T1.. = __float2bfloat(T0..);` | |
| `sum %x axis 0` | `T1[rS2{..}, ..].. = reduction( T0.., op = add, .. )`: the axis that was summed is printed | |
| `%h = allgather %x -> %y over didx` | `Communication 7 (type=Allgather, team=(0 1), input=T0.., output=T1.., ..)` | |
| `wait %h` | `Wait(Communication 7)` | `Wait Communication 7` |
| `%s = current_stream` | `Stream 0x0 = GetCurrentStream()` | `GetCurrentStream into Stream 0` |
| `set_stream %i % 4` | `SetCurrentStream(Stream ( i0 % numberOfStreams ))` | `SetCurrentStream to Stream ..` |
| `synchronize %s` | `Synchronize(Stream 0x0)` | `Synchronize Stream 0` |
| `delay 5 us` | `Delay(5)`, ours | |
| `for %i in 0..4` | `FOR i0 from 0 to 4:` | `FOR i0 in iS0{i0}:` |
| `streams 2` | `numberOfStreams = 2` behind the container, unless it is 4, nvFuser's default | |

How a dump is understood, where it leaves something open:

- A computation writes what its result's name stands for, a buffer or a view; if nothing, a buffer is allocated first.
  Selecting the same slice again changes nothing.
- A Stream axis is a plain axis outside loops. In a loop, a tensor that is made there holds the round's slice of it.
- Sizes that the statements force to be equal get one name, the first that appears: a matmul of `[i3, i4]` and
  `[i5, i6]` makes i5 an alias of i4, a device axis `{i2}` over 8 devices makes i2 an alias of 8 (`Program.aliases`).
  Both names may be bound, to one value. `ceilDiv` is taken to leave no remainder; binding the sizes checks that.
- A tensor without a dtype is f32. Without any printed mesh, the devices are the first team that communicates; without
  one, as many as a device axis is long; else device 0 alone.
- A stream is a member of the pool by index (4 of them, or numberOfStreams). An index that may lie beyond the pool
  begins again at 0; a stream by address that GetCurrentStream did not give becomes one more member.
- A device axis that a reducing communication sums is a partial sum where a computation left it so; in an input it is
  summed on each rank first.
- Options without a meaning here (`mem_type`, `size`, `cache_op`, `backend`, the root's other receivers) are ignored.

What host programs have no meaning for (posted kernels, point-to-point and rank-dependent code, zero-filled buffers,
...) is one diagnostic with its place. So is, when printing, what a dump cannot say: messages, one-sided communication,
conditions and ranks. No text raises anything but HostIRError.
"""

from __future__ import annotations

from hostir.ir.nvfuser_parse import parse_dump
from hostir.ir.nvfuser_print import print_dump
from hostir.ir.nvfuser_read import Reader
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic

__all__ = ["print_nvfuser", "read_nvfuser"]


def read_nvfuser(text: str, file: str = "<text>") -> tuple[Program, list[Diagnostic]]:
    """Reads a dump of nvFuser's host IR. Returns the host program, and warnings about what was left out of it.

    The program is named after the file. Raises HostIRError, with file:line:col and a caret, for what is no dump and for
    what a host program cannot say.
    """
    return Reader(parse_dump(text, file), file).program()


def print_nvfuser(program: Program) -> str:
    """Prints a host program in nvFuser's spelling: deterministic, tensors numbered in the order of definition.

    Raises HostIRError for a fusion. Names, and comments of passes, do not survive.
    """
    return print_dump(program)
