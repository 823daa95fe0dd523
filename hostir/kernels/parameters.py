"""Parameters of compiled Triton kernels in the form that the CUDA driver takes.

Only this module knows how Triton passes arguments. Triton 3.6 and 3.7 do it in the same way: they flatten tuples, leave
out constants, and pass all other arguments in order. A tensor descriptor becomes a tensor map, sizes and strides. Two
pointers to scratch memory come last.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
CODES = {
    **{"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"},
    **{"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
    **{"fp32": "f", "f32": "f", "fp64": "d"},
}  # the format characters of `struct`, by the names of Triton's types


class Taping(threading.local):
    """Per-thread state: the writer that records the thread's driver calls on a tape.

    Fields:
        writer: a `hostir.machines.cuda.tape.TapeWriter`; None while the thread records nothing.
    """

    writer: Any = None

    def keep(self, *tensors: object) -> None:
        """Keep tensors alive as long as the tape that is being recorded: a launch on the tape uses them."""
        if self.writer is not None:
            self.writer.kept += tensors


TAPING = Taping()


@dataclass(frozen=True)
class KernelLaunch:
    """The properties of a compiled Triton kernel that all its launches share.

    Fields:
        function: the handle of the kernel, a CUfunction.
        warps, ctas: warps of a CTA, and CTAs of a cluster.
        shared: bytes of shared memory.
        dependent: True if the kernel may start before the previous kernel of its stream has ended.
        cooperative: True if all programs must be resident at once.
        types: the types of the kernel's parameters, from `parameter_types`.
    """

    name: str
    function: int
    warps: int
    ctas: int
    shared: int
    dependent: bool
    cooperative: bool
    types: tuple[Any, ...]

    @staticmethod
    def of(kernel: Any) -> KernelLaunch:
        """Return the properties of a kernel that Triton 3.6 or 3.7 has compiled and loaded.

        Raises TypeError if the kernel needs scratch memory, or takes a tensor descriptor without a tensor map.
        """
        about = kernel.metadata
        if getattr(about, "global_scratch_size", 0) or getattr(about, "profile_scratch_size", 0):
            raise TypeError(f"{about.name} needs scratch memory")
        return KernelLaunch(
            name=about.name,
            function=kernel.function,
            warps=about.num_warps,
            ctas=about.num_ctas,
            shared=about.shared,
            dependent=bool(about.launch_pdl),
            cooperative=bool(about.launch_cooperative_grid),
            types=parameter_types(kernel.src.signature.values(), getattr(about, "tensordesc_meta", None)),
        )


def parameter_types(signature: Any, described: Any) -> tuple[Any, ...]:
    """Return Triton's names of the types of a kernel's parameters, nested in tuples like the arguments of a launch.

    Constants are included, with the type `constexpr`. A tensor descriptor becomes a tensor map, sizes and strides.
    Raises TypeError for a tensor descriptor without a tensor map.

    Args:
        signature: the types of a compiled kernel's arguments.
        described: Triton's metadata of the tensor descriptors, in order. An entry is None if the kernel does not read
            the descriptor through a tensor map.
    """
    types: list[Any] = []
    number = 0
    for each in signature:
        if not (isinstance(each, str) and each.startswith("tensordesc")):
            types.append(each)
            continue
        if not described or described[number] is None:
            raise TypeError(f"a kernel takes {each} without a tensor map")
        axes = each[each.index("[") : each.index("]")].count(",") + 1
        types += ["nvTmaDesc", *["i32"] * axes, *["i64"] * axes]
        number += 1
    return tuple(types)


def flat(types: Sequence[Any], arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the type and the value of each parameter. Flatten tuples, and skip constants, which are not parameters."""
    if len(types) != len(arguments):
        raise TypeError(f"{len(arguments)} arguments for {len(types)} parameters")
    for each, value in zip(types, arguments, strict=True):
        if isinstance(each, tuple):
            yield from flat(each, value)
        elif each != "constexpr":
            yield each, value


def packed(types: Sequence[Any], arguments: Sequence[Any]) -> tuple[bytes, list[int], list[tuple[int, int, bool]]]:
    """Pack a kernel's parameters as the driver reads them.

    Returns the bytes, the offset of each parameter, and a triple `(offset, address, in_map)` for each address that is
    not 0. `in_map` is True if the address is in a tensor map. Two null pointers follow the parameters, because kernels
    of hostir need no scratch memory.
    """
    image, offsets, addresses = bytearray(), list[int](), list[tuple[int, int, bool]]()

    def put(data: bytes, alignment: int) -> int:
        image.extend(bytes(-len(image) % alignment))
        offsets.append(len(image))
        image.extend(data)
        return offsets[-1]

    for type_, value in (*flat(types, arguments), ("*scratch", 0), ("*scratch", 0)):
        if type_ == "nvTmaDesc":
            data = tensor_map(value)
            addresses.append((put(data, MAP_ALIGNMENT), address_of_map(data), True))
        elif type_.startswith("*"):
            address = 0 if value is None else int(value)
            at = put(struct.pack("<Q", address), 8)
            addresses += [(at, address, False)] if address else []
        else:
            data = struct.pack("<" + CODES[type_], value)
            put(data, len(data))
    return bytes(image), offsets, addresses


def tensor_map(encoded: Any) -> bytes:
    """Return the bytes of a tensor map that Triton has encoded. They are the last bytes of the object `encoded`."""
    return ctypes.string_at(id(encoded) + type(encoded).__basicsize__ - MAP_BYTES, MAP_BYTES)


def address_of_map(data: bytes) -> int:
    """Return the address of the tensor that a tensor map describes: the first 64 bits of the map."""
    return int(struct.unpack_from("<Q", data)[0])
