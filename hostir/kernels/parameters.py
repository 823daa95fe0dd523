"""Parameters of compiled Triton kernels, as the driver takes them. No other place knows how Triton passes arguments.

Triton 3.6 and 3.7 pass the same parameters: those that are not constants, in order, with tuples flattened. A tensor
descriptor is passed as a tensor map, sizes and strides. Two pointers to scratch memory come last.
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
}  # how `struct` packs a parameter of a type of Triton's


class Taping(threading.local):
    """The writer of the calls of the driver that a thread makes.

    Fields:
        writer: a `hostir.machines.cuda.tape.TapeWriter`; None while nothing is recorded.
    """

    writer: Any = None

    def keep(self, *tensors: object) -> None:
        """Keep tensors that a recorded launch uses as long as the recording."""
        if self.writer is not None:
            self.writer.kept += tensors


TAPING = Taping()


@dataclass(frozen=True)
class KernelLaunch:
    """The common part of all launches of a compiled Triton kernel.

    Fields:
        function: the handle of the kernel, a CUfunction.
        warps, ctas: warps of a CTA, and CTAs of a cluster.
        shared: bytes of shared memory.
        dependent: whether the kernel may start before the one ahead of it on its stream has ended.
        cooperative: whether all programs must be resident at once.
        types: the types of the kernel's parameters, flat, in Triton's words; see `parameter_types`.
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
        """Return the launch of a kernel that Triton has compiled and loaded (versions 3.6 and 3.7).

        Raises TypeError for a kernel that needs scratch memory, or a tensor descriptor without a tensor map.
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
    """Return the types of a kernel's arguments, in the structure in which a launch gives them.

    Tuples stay tuples, and constants stay `constexpr`. A tensor descriptor becomes a tensor map, sizes and strides.

    Args:
        signature: the types of a compiled kernel's arguments.
        described: Triton's layouts of the tensor descriptors, of those that kernels read through tensor maps.
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
    """Yield the type and the value of each parameter that a kernel has: none for constants."""
    if len(types) != len(arguments):
        raise TypeError(f"{len(arguments)} arguments for {len(types)} parameters")
    for each, value in zip(types, arguments, strict=True):
        if isinstance(each, tuple):
            yield from flat(each, value)
        elif each != "constexpr":
            yield each, value


def packed(types: Sequence[Any], arguments: Sequence[Any]) -> tuple[bytes, list[int], list[tuple[int, int, bool]]]:
    """Pack a kernel's parameters as the driver reads them.

    Returns the bytes, the offset of each parameter, and the offset and value of each address, with True for those in
    tensor maps. Two null pointers follow the parameters: kernels of hostir need no scratch memory.
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
    """Return the bytes of a tensor map that Triton has encoded: they are the last ones of its object."""
    return ctypes.string_at(id(encoded) + type(encoded).__basicsize__ - MAP_BYTES, MAP_BYTES)


def address_of_map(data: bytes) -> int:
    """Return the address of the tensor that a tensor map describes: its first 64 bits."""
    return int(struct.unpack_from("<Q", data)[0])
