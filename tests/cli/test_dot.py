from __future__ import annotations

import re

import hostir as hi
from hostir.cli.lower import to_dot

PIPELINE = """hostir 1
mesh @mesh [didx] = 0 1
program @pipeline(%a: f32[4, 2@didx, K], %b: f32[K, 8]) -> (%c) streams 2 {
  %user = current_stream
  %full: f32[4, 2, K] = allocate
  %c: f32[4, 2, 8] = allocate
  for %s in 0..2 { set_stream %s   synchronize %user }
  for %i in 0..4 {
    set_stream %i % 2
    %a_i = select %a[%i]
    %full_i = select %full[%i]
    %h = allgather %a_i -> %full_i over didx
    wait %h
    %c_i = select %c[%i]
    matmul %full_i, %b -> %c_i
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }
  free %full
}
"""


class Graph:
    """Nodes by label, and edges with their styles."""

    def __init__(self, text: str) -> None:
        self.names = {label: name for name, label in re.findall(r'^ *(n\d+) \[label="(.*?)"', text, re.MULTILINE)}
        self.edges = {(a, b): style for a, b, style in re.findall(r"(n\d+) -> (n\d+) \[style=(\w+)\]", text)}

    def node(self, start: str) -> str:
        return next(name for label, name in self.names.items() if label.startswith(start))

    def edge(self, source: str, target: str) -> str | None:
        return self.edges.get((self.node(source), self.node(target)))


def graph(text: str) -> Graph:
    return Graph(to_dot(hi.parse(text)))


def test_solid_edges_follow_data_through_views_and_waits() -> None:
    g = graph(PIPELINE)
    assert g.edge("%a:", "%a_i = select") == "solid"
    assert g.edge("%a_i = select", "%h = allgather") == "solid"
    assert g.edge("wait %h", "matmul") == "solid"
    assert g.edge("%h = allgather", "matmul") is None  # its result is read only after the wait
    assert g.edge("matmul", "output %c") == "solid"
    assert g.edge("wait %h", "free %full") == "solid"


def test_dashed_edges_lead_from_a_statement_to_its_wait() -> None:
    g = graph(PIPELINE)
    assert g.edge("%h = allgather", "wait %h") == "dashed"
    assert g.edge("%a:", "synchronize %user") == "dashed"  # inputs are ready on the caller's stream
    assert g.edge("matmul", "synchronize %s") == "dashed"


def test_dotted_edges_order_the_statements_of_a_stream() -> None:
    g = graph(PIPELINE)
    assert g.edge("synchronize %user", "%h = allgather") == "dotted"  # %s and %i % 2 name streams of one pool
    assert g.edge("synchronize %s", "free %full") == "dotted"
    assert g.edge("free %full", "output %c") == "dotted"


def test_streams_with_different_numbers_are_different() -> None:
    g = graph("""hostir 1
mesh @mesh [didx] = 0
program @two(%a: f32[4]) -> (%b, %c) streams 2 {
  %user = current_stream
  %b: f32[4] = allocate
  %c: f32[4] = allocate
  set_stream 0
  synchronize %user
  relu %a -> %b
  set_stream 1
  synchronize %user
  gelu %a -> %c
  set_stream %user
  synchronize 0
  synchronize 1
}
""")
    assert g.edge("relu", "synchronize 0") == "dashed"
    assert g.edge("gelu", "synchronize 0") is None
    assert g.edge("gelu", "synchronize 1") == "dashed"
    assert g.edge("relu", "gelu") is None


def test_a_fusion_has_solid_edges_only() -> None:
    text = to_dot(
        hi.parse("""hostir 1
mesh @mesh [didx] = 0 1
fusion @f(%a: f32[4@didx, 8], %b: f32[8, 8]) -> (%d) {
  %c: f32[4@didx, 8] = matmul %a, %b
  %d: f32[4@didx, 8] = add %c, %a
}
""")
    )
    g = Graph(text)
    assert set(g.edges.values()) == {"solid"}
    assert g.edge("%a:", "%c:") == g.edge("%a:", "%d:") == g.edge("%c:", "%d:") == "solid"


def test_loops_are_clusters_and_braces_balance() -> None:
    text = to_dot(hi.parse(PIPELINE))
    assert text.count("subgraph cluster_") == 3
    assert 'label="for %i in 0..4"' in text
    depth = 0
    for character in re.sub(r'"(\\.|[^"\\])*"', "", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0


def test_the_text_is_the_same_every_time() -> None:
    assert to_dot(hi.parse(PIPELINE)) == to_dot(hi.parse(PIPELINE))


RANKS = """hostir 1
mesh @mesh [didx] = 0 1
program @ranks(%a: f32[4@didx, 8], %b: f32[8, 3]) -> (%c) streams 1 {
  %user = current_stream
  %full: f32[4, 8] = allocate_symmetric
  %arrived: flag[2] = allocate_symmetric
  %c: f32[4, 3] = allocate
  %t: f32[4@didx, 8] = allocate
  %r = rank of %a over didx
  barrier of %a over didx
  set_stream 0
  synchronize %user
  %mine = chunk %full[%r of 2]
  for %i in 0..2 {
    put %a -> %mine at %i over didx
    signal %arrived[%r] = 1 at %i over didx
  }
  set_stream %user
  matmul %full, %b -> %c ready %arrived >= 1 from %r
  synchronize 0
  wait_signal %arrived[0] >= 1
  if %r == 0 {
    %sent = send %a to 1 over didx
    wait %sent
  }
  if %r == 1 {
    %h = recv %t from 0 over didx
    wait %h
    relu %t -> %t
  }
  free %t
}
"""


def test_sends_puts_and_signals_are_drawn_on_their_streams() -> None:
    g = graph(RANKS)
    assert g.edge("put %a", "signal %arrived") == "dotted"
    assert g.edge("barrier of %a", "synchronize %user") == "dashed"
    assert g.edge("%a:", "put %a") == "solid"
    assert g.edge("%a:", "%sent = send") == "solid"
    assert g.edge("%sent = send", "wait %sent") == "dashed"
    assert g.edge("barrier of %a", "matmul") == "dotted"
    text = to_dot(hi.parse(RANKS))
    assert 'label="if %r == 0"' in text
    assert text.count("subgraph cluster_") == 3


def test_a_wait_for_flags_follows_the_signals_that_set_them() -> None:
    g = graph(RANKS)
    assert g.edge("signal %arrived", "wait_signal %arrived") == "dashed"
    assert g.edge("signal %arrived", "matmul") == "dashed"
    linear = graph(RANKS.replace("%b: f32[8, 3]", "%b: f32[3, 8]").replace("matmul", "linear"))
    assert linear.edge("signal %arrived", "linear") == "dashed"
    assert g.edge("put %a", "matmul") == "solid"  # the put wrote a view of the operand


def test_a_received_tensor_is_read_after_its_wait() -> None:
    g = graph(RANKS)
    assert g.edge("%h = recv", "relu %t") is None
    assert g.edge("wait %h", "relu %t") == "solid"
