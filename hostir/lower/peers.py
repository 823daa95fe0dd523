"""What the ranks of a host program need to meet: streams, places and barriers, each stated once."""

from __future__ import annotations

from hostir.ir import Statement, Value
from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import CurrentStream
from hostir.ir.onesided_ops import Barrier, Rank
from hostir.ir.types import Kind
from hostir.ir.values import Bin, Expr, Lit, Ref
from hostir.lower.host import Host


class Peers:
    """Adds to the top level of a host program what statements between ranks stand on."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.places: dict[tuple[str, str], Ref] = {}
        self.met: set[tuple[str, str]] = set()
        self.user = Ref(Value(host.names.fresh("user"), Kind.STREAM))
        host.body.append(CurrentStream(self.user.value))

    def place(self, s: AllGather) -> Ref:
        """This rank's place among those of an allgather."""
        key = s.mesh.name, s.over
        if key not in self.places:
            place = self.places[key] = Ref(Value(self.host.names.fresh("r"), Kind.INDEX))
            self.host.body.append(Rank(place.value, self.host.values[s.x.name], s.over, span=s.span))
        return self.places[key]

    def past(self, s: AllGather, buffer: Value) -> list[Statement]:
        """A barrier behind the call before, where there is none yet: then nobody reads what that call left."""
        key = s.mesh.name, s.over
        if key in self.met:
            return []
        self.met.add(key)
        note = f"all ranks are done with what the call before left in {buffer}"
        return [Barrier(buffer, s.over, span=s.span, note=note)]

    def index(self, wish: str) -> Ref:
        """The index of a loop; its name is free again behind the loop."""
        index = Ref(Value(self.host.names.fresh(wish), Kind.INDEX))
        self.host.names.taken.discard(index.value.name)
        return index


def modulo(expr: Expr, ranks: int) -> Expr:
    """The place, or the stream, at which a count arrives that goes round."""
    return Bin("%", expr, Lit(ranks))
