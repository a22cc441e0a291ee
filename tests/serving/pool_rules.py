"""Any order of the calls that a pool of pages and one of slots have, against a mirror: what both machines of tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

IDS = st.lists(st.integers(1, 2), max_size=9)  # two tokens: prefixes often agree


class PoolRules(RuleBasedStateMachine):
    """A refused call changes nothing. A subclass makes the mirror, and has the rules of its own calls."""

    mirror: Any
    names = 0
    some = precondition(lambda self: self.mirror.tokens)

    def new(self) -> int:
        """The name of another sequence."""
        self.names += 1
        return self.names

    def any(self, data: st.DataObject) -> int:
        """The name of a sequence that is here."""
        return data.draw(st.sampled_from(sorted(self.mirror.tokens)))

    @rule(tokens=st.integers(0, 9))
    def open(self, tokens: int) -> None:
        self.mirror.alloc(self.new(), tokens)

    @rule(ids=IDS, tokens=st.integers(0, 5))
    def adopt(self, ids: list[int], tokens: int) -> None:
        self.mirror.adopt(self.new(), ids, tokens)

    @some
    @rule(data=st.data(), more=IDS, tokens=st.integers(0, 5))
    def adopt_what_is_here(self, data: st.DataObject, more: list[int], tokens: int) -> None:
        self.mirror.adopt(self.new(), self.mirror.tokens[self.any(data)] + more, tokens)

    @some
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def room(self, data: st.DataObject, tokens: int) -> None:
        self.mirror.alloc(self.any(data), tokens)

    @some
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.mirror.fork(self.any(data), self.new())

    @some
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.mirror.publish(self.any(data))

    @some
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.mirror.free(self.any(data))

    @invariant()
    def all_is_well(self) -> None:
        self.mirror.everything()
