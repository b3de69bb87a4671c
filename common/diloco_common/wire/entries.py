"""Counts the entries of a protobuf message, and checks their sizes, before it is parsed.

A parser makes an object for every entry, even one of two bytes: 4 MiB of message would become 100 MiB before anybody
could refuse it. The encoding: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations


def has_at_most(data: bytes, entries: int, each_bytes: int) -> bool:
    """Whether a message has at most `entries` fields, none longer than `each_bytes`. Stops counting at damage."""
    at = 0
    end = len(data)
    try:
        for _ in range(entries):
            if at >= end:
                return True
            tag, size, at = data[at], data[at + 1], at + 2
            if tag & 0x87 == 2 and size < 0x80:  # bytes, texts and messages, as most are
                at += size
                continue
            if tag >= 0x80:
                at = _end_of_varint(data, at - 1)
                size, at = data[at], at + 1
            match tag & 7:
                case 2:
                    if size >= 0x80:
                        size, at = _varint(data, at - 1)
                    at += size
                    if size > each_bytes:
                        return False
                case 0:
                    at = _end_of_varint(data, at - 1)
                case 1:
                    at += 7
                case 5:
                    at += 3
                case 3:
                    return False  # a group: no message of ours has one, and the parser would skip it and go on
                case _:
                    return True  # not a wire type: the parser refuses it here
    except IndexError:
        return True
    return at >= end


def size_of(data: bytes, number: int, entries: int) -> int | None:
    """Total bytes of all fields with this number; None if there are more than `entries` fields, or a group.

    Stops counting at damage.
    """
    at = total = 0
    end = len(data)
    try:
        for _ in range(entries):
            if at >= end:
                return total
            tag, at = _varint(data, at)
            match tag & 7:
                case 2:
                    size, at = _varint(data, at)
                    at += size
                    total += size if tag >> 3 == number else 0
                case 0:
                    at = _end_of_varint(data, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 3:
                    return None
                case _:
                    return total
    except IndexError:
        return total
    return total if at >= end else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The value, and the offset of its end."""
    end = _end_of_varint(data, at)
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data[at : min(end, at + 10)])), end


def _end_of_varint(data: bytes, at: int) -> int:
    while data[at] >= 0x80:
        at += 1
    return at + 1
