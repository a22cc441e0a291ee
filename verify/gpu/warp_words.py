"""branch_bits: which branches of a loop depend on what all lanes of a warp have found together.

REDUX makes a number of all lanes', VOTE.ANY a predicate. From there what depends on them is followed through the arithmetic of
integers, bit by bit where it can be: in the end a word is tested for a bit, or the compiler has found a shorter test.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .instructions import Instruction

__all__ = ["Bit", "branch_bits"]

_REGISTER, _PREDICATE = re.compile(r"(U?R)(\d+)"), re.compile(r"U?P[0-9T]")
_NUMBER, _BYTE = re.compile(r"-?(?:0x[0-9a-f]+|\d+)"), re.compile(r"(\w+)\.B(\d)")
_OF_WARP, _BITS_OF_WARP = re.compile(r"C?REDUX\.(?:OR|MIN|MAX)|VOTE\.ANY"), "REDUX.OR"
_INTEGERS = re.compile(r"U?(?:P?LOP3|SHF|IADD|IMAD|V?IMNMX|VIADD|SEL|ISETP|MOV|LEA|BMSK|SGXT)|R2UR|VOTE")
_PACKED = re.compile(r"CS2R$|F\w+2$")  # that write two registers
_WIDTH = {"WIDE": 2, "64": 2, "128": 4}
_WRITES_NOTHING = re.compile("BRA|BAR|WARPSYNC")
# Results for all values of three inputs: of the inputs themselves they are 0xf0, 0xcc and 0xaa.
_NOT, _AND, _OR, _XOR = 0x0F, 0xC0, 0xFC, 0x3C
_NOWHERE = -1  # the place of no instruction


class Bit(NamedTuple):
    """A bit of a word of a warp, or its opposite if `positive` is False. place: of the instruction that made the word. number:
    None if it isn't known. `branch_bits` gives positive=None where the word is computed from others, so that it may be either.
    """

    place: int
    number: int | None
    positive: bool | None = True


_Value = bool | Bit | None  # None if it doesn't depend on a warp's lanes, or on more than them
_Bits = tuple[_Value, ...]  # of a register, the lowest first; of a predicate one
_State = dict[str, _Bits]
_ZERO: _Bits = (False,) * 32


def branch_bits(body: Sequence[Instruction], targets: Sequence[int | None]) -> list[Bit | None]:
    """For each instruction of a loop the bit by which it branches, None if it doesn't or not by a warp's.

    targets: for each the place that it branches to, counted from the loop's first instruction.
    """
    if not any(_OF_WARP.match(instruction.name) for instruction in body):
        return [None] * len(body)
    exact = {at for at, instruction in enumerate(body) if instruction.name.startswith(_BITS_OF_WARP)}
    _, state = _turn(body, targets, exact, {})
    found, _ = _turn(body, targets, exact, state)  # a register may keep a word from one turn to the next
    return [bit if bit is None or bit.place in exact else bit._replace(positive=None) for bit in found]


def _turn(
    body: Sequence[Instruction], targets: Sequence[int | None], exact: set[int], start: _State
) -> tuple[list[Bit | None], _State]:
    """(the bits, what is known at the end), from what is known at the start. exact: see _execute."""
    state: _State | None = dict(start)
    waiting, found = dict[int, list[_State]](), list[Bit | None]()
    for at, (instruction, target) in enumerate(zip(body, targets, strict=True)):
        for other in waiting.pop(at, []):
            state = other if state is None else _common(state, other)
        known = {} if state is None else state
        taken = _taken(instruction, known)
        found.append(taken if isinstance(taken, Bit) and target is not None else None)
        if target is not None and target > at:
            waiting.setdefault(target, []).append(dict(known))
        if not _WRITES_NOTHING.match(instruction.name):
            _execute(at, instruction, known, exact)
        state = None if taken is True else known  # what follows is then known from elsewhere
    return found, state or {}


def _common(one: _State, other: _State) -> _State:
    """What is known in both."""
    return {name: _alike(one[name], other[name]) for name in one.keys() & other.keys()}


def _alike(one: _Bits, other: _Bits) -> _Bits:
    return tuple(x if x == y else None for x, y in zip(one, other, strict=True))


def _taken(branch: Instruction, state: _State) -> _Value:
    """Whether an instruction branches: by its guard and by operands before the target."""
    if not branch.name.startswith("BRA"):
        return False
    taken: _Value = True
    for condition in (branch.guard or "PT", *branch.operands[:-1]):
        truth = _read(condition, state)[0] if _PREDICATE.fullmatch(condition.lstrip("!")) else None
        several = isinstance(taken, Bit) and isinstance(truth, Bit) and taken[:2] != truth[:2]
        taken = Bit(_NOWHERE, None) if several else _table(_AND, taken, truth)
    return taken


def _execute(at: int, instruction: Instruction, state: _State, exact: set[int]) -> None:
    """Change what is known. exact: places of words whose bits keep their numbers; others' have that of their place in a word."""
    made = {name: _read(name, {}) for name in _written(instruction)}
    with contextlib.suppress(IndexError):  # an instruction of another form
        results = _results(at, instruction, state)
        made |= {name: bits for name, bits in results if len(bits) == len(made.get(name, ()))}
    if _INTEGERS.match(instruction.name):
        read = itertools.chain.from_iterable(_read(operand, state) for operand in instruction.operands)
        places = {bit.place for bit in read if isinstance(bit, Bit)}
        if places - exact or len(places) > 1:
            made = {name: _numbered(at, bits) for name, bits in made.items()}
    if instruction.guard:
        made = {name: _alike(bits, _read(name, state)) for name, bits in made.items()}
    state.update(made)


def _numbered(at: int, bits: _Bits) -> _Bits:
    """Bits of a word that is made from others of the warp's, or a predicate."""
    if len(bits) == 1:
        return (Bit(at, None) if bits[0] is None else bits[0],)
    return tuple(
        bit if isinstance(bit, bool) else Bit(at, number, bit is None or bit.positive)
        for number, bit in enumerate(bits)
    )


def _written(instruction: Instruction) -> Iterator[str]:
    """The registers and predicates that an instruction writes."""
    operands = instruction.operands
    if operands[0] == "PR":
        yield from (f"P{number}" for number in range(7))
        return
    if instruction.name.startswith("VOTE"):
        rest = []
    elif _PREDICATE.fullmatch(operands[0]):
        rest = operands[1:2]
    else:
        rest = list(itertools.takewhile(_PREDICATE.fullmatch, operands[1:3]))
    for name in (operands[0], *rest):
        if _PREDICATE.fullmatch(name) and not name.endswith("T"):
            yield name
        elif register := _REGISTER.fullmatch(name):
            yield from (f"{register[1]}{int(register[2]) + n}" for n in range(_registers(instruction.name)))


def _registers(name: str) -> int:
    """How many an instruction writes."""
    base, *kinds = name.split(".")
    if _PACKED.match(base):
        return 2
    return max((int(kind[1:]) if re.fullmatch(r"x\d+", kind) else _WIDTH.get(kind, 1) for kind in kinds), default=1)


def _results(at: int, instruction: Instruction, state: _State) -> Iterator[tuple[str, _Bits]]:
    """What an instruction writes, where its bits are told here."""
    name, operands = instruction.name, instruction.operands
    base = name.split(".")[0].removeprefix("U")
    tests = base in ("LOP3", "R2UR") and _PREDICATE.fullmatch(operands[0]) is not None
    to, *sources = operands[tests:]
    read = [_read(one, state) for one in sources]
    if _OF_WARP.match(name):
        yield to, (Bit(at, None),) if _PREDICATE.fullmatch(to) else tuple(Bit(at, number) for number in range(32))
    elif base in ("MOV", "R2UR"):
        yield to, read[0]
    elif name.startswith(("IMAD.MOV", "IMAD.U32")) and read[:2] == [_ZERO, _ZERO]:
        yield to, read[2]
    elif base == "SHF" and (count := _number(sources[1])) is not None and "64" not in name:
        yield to, _shifted(name, read[0], read[2], count)
    elif base == "LOP3" and (table := _number(sources[3])) is not None:
        bits = tuple(_table(table, *inputs) for inputs in zip(*read[:3], strict=False))
        yield to, bits
        if tests:
            yield operands[0], (_table(_OR, _any(bits), read[4][0]),)
    elif base == "PLOP3" and (table := _number(sources[4])) is not None:
        yield to, (_table(table, *(one[0] for one in read[1:4])),)
    elif base == "ISETP" and ".AND" in name and ".EX" not in name:
        truth = _compared(name, read[1], read[2])
        yield to, (_table(_AND, truth, read[3][0]),)
        yield sources[0], (_table(_AND, _table(_NOT, truth), read[3][0]),)
    elif base == "R2P" and (mask := _number(sources[1])) is not None:
        yield from ((f"P{n}", (read[0][n],) if mask >> n & 1 else _read(f"P{n}", state)) for n in range(7))


def _read(operand: str, state: _State) -> _Bits:
    """The bits of a register or a number, or a predicate's one."""
    if operand[:1] in ("!", "~"):
        return tuple(_table(_NOT, bit) for bit in _read(operand[1:], state))
    if operand in ("PT", "UPT"):
        return (True,)
    if _PREDICATE.fullmatch(operand):
        return state.get(operand, (None,))
    if operand in ("RZ", "URZ"):
        return _ZERO
    if (number := _number(operand)) is not None:
        return tuple(bool(number >> place & 1) for place in range(32))
    if byte := _BYTE.fullmatch(operand):
        return (_read(byte[1], state)[8 * int(byte[2]) :] + _ZERO)[:32]
    return state.get(operand, (None,) * 32)


def _number(operand: str) -> int | None:
    return int(operand, 0) if _NUMBER.fullmatch(operand) else None


def _shifted(name: str, low: _Bits, high: _Bits, count: int) -> _Bits:
    """Of two words by so many bits: the low one to the left, or the high one to the right."""
    if ".L" in name:
        return (_ZERO[:count] + low)[:32] if ".HI" not in name else (None,) * 32
    sign = high[-1] if ".S32" in name else False
    return (high[count:] + (sign,) * 32)[:32] if ".HI" in name else (None,) * 32


def _compared(name: str, one: _Bits, other: _Bits) -> _Value:
    """Whether numbers differ or are equal; and whether one is less where a sign tells it, or whether it's 0."""
    if ".NE" in name or ".EQ" in name:
        differ = _any(tuple(_table(_XOR, x, y) for x, y in zip(one, other, strict=False)))
        return differ if ".NE" in name else _table(_NOT, differ)
    least, most = (one, other) if ".LT" in name or ".GE" in name else (other, one)
    signed, less = ".U32" not in name, None
    if signed and most == _ZERO:
        less = least[-1]
    elif signed and all(bit is True for bit in least):  # -1
        less = _table(_NOT, most[-1])
    elif least == _ZERO and (not signed or most[-1] is False):
        less = _any(most)
    return less if ".LT" in name or ".GT" in name else _table(_NOT, less)


def _any(bits: _Bits) -> _Value:
    found: _Value = False
    for bit in bits:
        found = _table(_OR, found, bit)
    return found


def _table(table: int, one: _Value, other: _Value = False, third: _Value = False) -> _Value:
    """A table's result, if it follows from numbers and from one bit of a warp's."""
    inputs = (one, other, third)
    first = next((bit for bit in inputs if isinstance(bit, Bit)), None)
    results = []
    for value in (False, True):  # of that bit
        possible = [
            (x,) if isinstance(x, bool)
            else (value == x.positive,) if isinstance(x, Bit) and first is not None and x[:2] == first[:2]
            else (False, True)
            for x in inputs
        ]  # fmt: skip
        found = {table >> (4 * a + 2 * b + c) & 1 for a, b, c in itertools.product(*possible)}
        results.append(found.pop() == 1 if len(found) == 1 else None)
    if None in results:
        return None
    return results[0] if results[0] == results[1] or first is None else first._replace(positive=results[1] is True)
