"""What is read of a compiled GPU program: records, launches and binaries, from files made here by their formats."""

from __future__ import annotations

import random
from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops.devices import gpu_specs
from attnops.verify.gpu.cubin import CubinFunction, cubin_functions
from attnops.verify.gpu.gpu_kernels import gpu_kernels, triton_names
from attnops.verify.gpu.launches import Launch, launches
from attnops.verify.gpu.mosaic_kernels import mosaic_function
from attnops.verify.gpu.records import records
from attnops.verify.gpu.wire import fields_of, varint

# -- making them -----------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(_varint(number << 3) + _varint(value))
        else:
            parts.append(_varint(number << 3 | 2) + _varint(len(value)) + value)
    return b"".join(parts)


def _file(*parts: bytes) -> bytes:
    """A file of records by Riegeli's description: a signature's chunk, one of uncompressed records, headers of blocks."""
    sizes = b"".join(_varint(len(part)) for part in parts)
    data = b"\0" + _varint(len(sizes)) + sizes + b"".join(parts)
    stream = pack("<QQQQQ", 1, 0, 1, ord("s"), 0)
    stream += pack("<QQQQQ", 1, len(data), 1, ord("r") | len(parts) << 8, sum(map(len, parts))) + data
    first = bytes.fromhex("83af70d10d884a3f") + pack("<QQ", 0, 64)
    room = 65536 - 24
    blocks = [stream[at : at + room] for at in range(0, len(stream), room)]
    return first + blocks[0] + b"".join(pack("<QQQ", 1, 2, 3) + block for block in blocks[1:])


def _binary(name: str, registers: int, stack: int, shared: int, others: tuple[str, ...] = ()) -> bytes:
    """An ELF file with one kernel, its attributes and its shared memory, and other functions of 8 registers before it."""
    names = b"\0"
    offsets = {}
    for text in (".strtab", ".symtab", ".nv.info", f".nv.shared.{name}", *others, name):
        offsets[text] = len(names)
        names += text.encode() + b"\0"
    symbols = pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += b"".join(pack("<IBBHQQ", offsets[function], 0x12, 0, 0, 0, 0) for function in (*others, name))
    info = b"".join(pack("<BBHII", 4, 0x2F, 8, at, 8) for at in range(1, len(others) + 1))
    at = len(others) + 1
    info += pack("<BBHII", 4, 0x2F, 8, at, registers) + pack("<BBH", 3, 0x50, 0) + pack("<BBHII", 4, 0x11, 8, at, stack)
    places, data = [], b""
    for part in (names, symbols, info):
        places.append(64 + len(data))
        data += part
    section = "<IIQQQQIIQQ"
    table = pack(section, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    table += pack(section, offsets[".strtab"], 3, 0, 0, places[0], len(names), 0, 0, 1, 0)
    table += pack(section, offsets[".symtab"], 2, 0, 0, places[1], len(symbols), 1, 0, 8, 24)
    table += pack(section, offsets[".nv.info"], 0x70000000, 0, 0, places[2], len(info), 2, 0, 4, 0)
    table += pack(section, offsets[f".nv.shared.{name}"], 8, 0, 0, 64, shared, 0, 0, 4, 0)
    head = bytearray(64)
    head[:7] = b"\x7fELF\x02\x01\x01"
    head[0x28:0x30] = pack("<Q", 64 + len(data))
    head[0x3A:0x40] = pack("<HHH", 64, 5, 1)
    return bytes(head) + data + table


def _kernel(name: str, binary: bytes, threads: int, grid: tuple[int, ...], shared: int) -> bytes:
    loaded = _message((2, _message((1, binary))), (3, 6), (4, name.encode()))
    blocks = _message((2, _message(*enumerate(grid, 1))))
    sizes = _message((1, _message((1, threads), (2, 1), (3, 1))))
    return _message((1, name.encode()), (2, loaded), (3, blocks), (4, sizes), *([(6, shared)] if shared else []))


def _program(*kernels: bytes) -> bytes:
    module = _message((1, b"a module"), (8, b"name"))
    return _message((1, module), *((13, _message((1, _message((3, 7))), (36, _message((3, k))))) for k in kernels))


def _compiled(file: bytes) -> Any:
    return SimpleNamespace(runtime_executable=lambda: SimpleNamespace(serialize=lambda: file))


# -- reading them ----------------------------------------------------------------------------------------------------


def test_records_of_many_blocks_and_files_in_files() -> None:
    long = random.Random(0).randbytes(200_000)
    parts = [b"one", b"", long, b"four"]
    assert list(records(b"before" + _file(*parts))) == parts
    assert list(records(_file(b"outer", _file(*parts)))) == [b"outer", *parts]
    with pytest.raises(ValueError, match="no file"):
        list(records(b"nothing"))


def test_compressed_records() -> None:
    cramjam = pytest.importorskip("cramjam")
    plain = b"attention " * 1000
    for mark, packed in (
        (b"b", bytes(cramjam.brotli.compress(plain))),
        (b"z", bytes(cramjam.zstd.compress(plain))),
        (b"s", bytes(cramjam.snappy.compress_raw(plain))),
    ):
        size = _varint(len(plain))
        sizes = {b"b": cramjam.brotli.compress, b"z": cramjam.zstd.compress, b"s": cramjam.snappy.compress_raw}[mark](
            size
        )
        lengths = _varint(len(size)) + bytes(sizes)
        data = mark + _varint(len(lengths)) + lengths + _varint(len(plain)) + packed
        stream = pack("<QQQQQ", 1, len(data), 1, ord("r") | 1 << 8, len(plain)) + data
        head = bytes.fromhex("83af70d10d884a3f") + pack("<QQ", 0, 64)
        assert list(records(head + stream)) == [plain]


def test_a_binary() -> None:
    """From Hopper on a kernel's own section counts the driver's 1 KiB."""
    made = _binary("attend", 168, 24, 1024 + 512)
    assert cubin_functions(made, (9, 0)) == (CubinFunction("attend", 168, 24, 512),)
    assert cubin_functions(_binary("attend", 255, 0, 512), (8, 0)) == (CubinFunction("attend", 255, 0, 512),)
    for cut in (4, 60, 100, len(made) - 10):
        with pytest.raises(ValueError, match=r"GPU|ELF"):
            cubin_functions(made[:cut], (9, 0))


FORWARD = _binary("attnops_flash_forward", 168, 0, 1024)
DQ = _binary("attnops_flash_dq__1", 200, 16, 1024, ("__cuda_sm10x_guardrail",))  # as by NVIDIA's linker
PROGRAM = _program(
    _kernel("loop_fusion", _binary("loop_fusion", 10, 0, 0), 128, (512, 1, 1), 0),
    _kernel("attnops_flash_forward", FORWARD, 256, (16, 16, 2), 98304),
    _kernel("attnops_flash_dq__1", DQ, 128, (32, 4, 1), 65536),
)


def test_a_kernel_among_functions_that_check_tensor_memory() -> None:
    """Which NVIDIA's linker adds."""
    guards = ("__cuda_sm10x_guardrail_one", "__cuda_sm10x_guardrail_two")
    binary = _binary("attend_mosaic_gpu_kernel", 128, 272, 4096, guards)
    assert [one.name for one in cubin_functions(binary, (10, 0))] == [*guards, "attend_mosaic_gpu_kernel"]
    assert mosaic_function(binary, (10, 0))[:3] == ("attend_mosaic_gpu_kernel", 128, 272)
    with pytest.raises(ValueError, match="not enough values"):
        mosaic_function(_binary("attend", 128, 0, 4096), (10, 0))


def test_launches() -> None:
    """In the program's order; the number that XLA puts behind a second name is none of ours."""
    found = launches(_compiled(_file(b"\x0a\x03abc", PROGRAM)))
    assert found is not None
    assert [launch[:4] for launch in found] == [
        ("loop_fusion", 512, 128, 0),
        ("attnops_flash_forward", 512, 256, 98304),
        ("attnops_flash_dq", 128, 128, 65536),
    ]
    assert found[1] == Launch("attnops_flash_forward", 512, 256, 98304, FORWARD)
    assert launches(_compiled(b"another format")) is None


TEXT = "".join(
    f'%p = custom-call(), custom_call_target="__gpu$xla.gpu.triton", backend_config={{grid_x = 16 : i32, ir = "ML\\EF\\22", '
    f'name = "{name}", num_stages = 2 : i32, num_warps = 8 : i32}}\n'
    for name in ("attnops_flash_forward", "attnops_flash_dq")
)


def test_kernels_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnops.verify.gpu.gpu_kernels.disassembled", lambda cubin: None)
    assert triton_names(TEXT) == ("attnops_flash_forward", "attnops_flash_dq")
    forward, dq = gpu_kernels(_compiled(_file(PROGRAM)), TEXT, gpu_specs()["h100"])
    assert (forward.registers, forward.stack_bytes, forward.shared_bytes, forward.threads) == (168, 0, 98304, 256)
    assert forward.occupancy is not None
    assert (forward.occupancy.blocks, forward.occupancy.bound) == (1, ("registers",))
    assert (dq.name, dq.registers, dq.stack_bytes, dq.blocks, dq.loops) == ("attnops_flash_dq", 200, 16, 128, None)
    assert dq.to_dict()["occupancy"]["blocks"] == 2  # 200 x 32 = 6400: 2 warps a quarter, 8 in all, 4 of a block
    # another form of the file: the names stay
    unread = gpu_kernels(_compiled(b"?"), TEXT, gpu_specs()["h100"])
    assert [(kernel.name, kernel.registers) for kernel in unread] == [
        ("attnops_flash_forward", None), ("attnops_flash_dq", None),
    ]  # fmt: skip


@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_damaged_files_are_unread(noise: bytes, at: int, inside: bool) -> None:
    """Whatever bytes come: what can be read, or nothing; never another error."""
    file = _file(PROGRAM)
    at = min(at * (len(file) // 400 + 1), len(file))
    damaged = file[:at] + noise + file[at + (len(noise) if inside else 0) :]
    found = launches(_compiled(damaged))
    assert found is None or all(isinstance(launch, Launch) for launch in found)
    for launch in found or ():
        try:
            cubin_functions(launch.cubin, (9, 0))
        except ValueError:
            continue


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        fields = fields_of(data)
    except ValueError:
        return
    assert 0 not in fields


@given(st.integers(0, 2**63))
def test_numbers(number: int) -> None:
    assert varint(b"x" + _varint(number), 1) == (number, 1 + len(_varint(number)))
