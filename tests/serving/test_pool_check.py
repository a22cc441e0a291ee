"""check() finds each way in which a page pool's books can be wrong, and says which."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnops.errors import AttnOpsError
from attnops.serving import PagePool


def pool() -> PagePool:
    """'a' has pages 0 and 1 published and room in 2; 3 is cached, 4 was returned, 5 to 7 are new."""
    made = PagePool(8, 2)
    made.alloc("a", 5)
    made.append("a", [1, 2, 3, 4])
    made.publish("a")
    made.alloc("old", 3)
    made.append("old", [7, 8, 9])
    made.publish("old")
    made.free("old")
    made.check()
    return made


def _forget_key(p: PagePool) -> None:
    del p._index.page_of[p._index.content[3].key]


def _spoil_key(p: PagePool) -> None:
    p._index.content[0] = p._index.content[0]._replace(before=b"x")


def _spoil_tokens(p: PagePool) -> None:
    p._sequences["a"].tokens[0] = 99


def _share_room(p: PagePool) -> None:
    p.alloc("b", 0)
    p._sequences["b"].pages.append(2)
    p._owners.retain([2])


def _release(p: PagePool, *, forget: bool) -> None:
    """Page 0 of 'a', which a window would leave behind; `forget`: only its number stays."""
    p._window = p._window._replace(tokens=2)
    p._sequences["a"].released = 1
    if forget:
        p._sequences["a"].pages[0] = 8


BROKEN: dict[str, Callable[[PagePool], object]] = {
    r"sequence 'a' has page 8 of 8": lambda p: p._sequences["a"].pages.append(8),
    r"sequence 'a' has page 0 2 times": lambda p: p._sequences["a"].pages.append(0),
    r"sequence 'a' has 7 tokens in 6 slots": lambda p: setattr(p._sequences["a"], "length", 7),
    r"sequence 'a' has 3 tokens and 4 token ids": lambda p: setattr(p._sequences["a"], "length", 3),
    r"sequence 'a' has 3 keys for 4 token ids": lambda p: p._sequences["a"].keys.append(b""),
    r"page 1 has 2 references but is in 1 tables": lambda p: p._owners.references.update({1: 2}),
    r"page 3 has 0 references but is in 1 tables": lambda p: p._sequences["a"].pages.append(3),
    r"page 4 is free 2 times": lambda p: p._owners.returned[0].append(4),
    r"page 1 is both free and used": lambda p: p._owners.returned[0].append(1),
    r"page 3 is both free and cached": lambda p: p._owners.returned[0].append(3),
    r"page 0 is both cached and used": lambda p: p._index.unused[0].update({0: None}),
    r"page 3 is cached, but no prefix leads to it": lambda p: p._index.remove(3),
    r"page 3 is found by its prefix, but neither cached nor used": lambda p: p._index.unused[0].pop(3),
    r"pages \[4\] are neither free nor cached nor used": lambda p: p._owners.returned[0].clear(),
    r"the key of cached page 3 doesn't lead to it": _forget_key,
    r"cached page 0 has a key that doesn't match its tokens and prefix": _spoil_key,
    r"a key leads to page 6, whose content isn't known": lambda p: p._index.page_of.update({b"x": 6}),
    r"cached page 0 holds other tokens than sequence 'a'": _spoil_tokens,
    r"page 2 is room of sequence 'a' and has 2 owners": _share_room,
    r"sequence 'a' has released 1 pages, and its next token sees page 0": lambda p: setattr(
        p._sequences["a"], "released", 1
    ),
    r"sequence 'a' has released page 0, but it is still in its table": lambda p: _release(p, forget=False),
    r"page 0 has 1 references but is in 0 tables": lambda p: _release(p, forget=True),
    r"key 1 of sequence 'a' doesn't match its tokens": lambda p: p._sequences["a"].keys.__setitem__(1, b""),
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_wrong_is_said(words: str) -> None:
    made = pool()
    BROKEN[words](made)
    with pytest.raises(AttnOpsError, match=f"contradicts itself: .*{words}"):
        made.check()
