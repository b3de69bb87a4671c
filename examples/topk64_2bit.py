"""An encoding of your own: the 64 elements of largest magnitude of every 4096, in 0.234 bits per element.

Each is sent with a 12-bit index and 2 bits: its sign, and which of two levels of its block it has (SparseLoCo, arXiv
2508.15706). The others decode to 0, so it needs error feedback. Its loss was 13 % higher than that of int8, and with
Muon it diverges, so it is for links that can carry nothing else. With it, averaged momentum is mostly noise. Its
package has the entry point

[project.entry-points."diloco.codec"]
topk64_2bit = "topk64_2bit:CODEC"

and is installed on every machine of the run. Then: diloco up --set sync.push=plugin:topk64_2bit

A chunk of n elements has B = ceil(n / 4096) blocks and K = ceil(n / 64) entries, and entry i belongs to block i // 64:

    low[0] high[0] .. low[B-1] high[B-1]     float32
    index[0] .. index[K-1]                   12 bits each, in its block, ascending there; from the lowest bit on
    code[0] .. code[K-1]                     2 bits each, sign << 1 | is_high; unused last bits are 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_common.codec.base import Codec, refuse_non_finite
from diloco_common.codec.memory import scratch
from diloco_common.errors import BadPayload

BLOCK = 4096
"""Elements that share two levels; only the last block of a chunk may have fewer."""
SHARE = 64
"""ceil(n / SHARE) of n elements are sent."""
KEPT = BLOCK // SHARE
LEVEL_MIN = torch.finfo(torch.float32).tiny  # 2^-126: a level is 0 or a normal number
INFINITY_BITS = 0x7F80_0000
FRACTION_BITS = 46
"""Magnitudes are summed as multiples of 2^-46 of the largest one's power of two. 64 of them stay below 2^53, so
float64 sums are exact and do not depend on their order."""
LAST = BLOCK - 1
MAGNITUDE = 0x7FFF_FFFF
BLOCKS_AT_ONCE = 128
"""Blocks per selection. With fewer, torch is called more often per element; with more, they leave the cache."""


class TopK(Codec):
    """y = +-low or +-high for the elements that are sent, 0 for the others.

    The ceil(n / 64) largest magnitudes of a block of n elements are sent; among equal ones, the first. The larger of
    them decode to `high`, the others to `low`. Each level is the mean of its group. The border between the groups gives
    the least squared error. A level below 2^-126 is written as 0.

    Error: the sum of (x - y)^2 over a block is at most the sum of x^2. A gaussian block keeps 12 % of that sum, a
    heavy-tailed one up to 70 %.
    """

    name = "plugin:topk64_2bit"
    progress_dtype = torch.bfloat16

    def num_bytes(self, num_elements: int) -> int:
        num_kept = _num_kept(num_elements)
        return 8 * _num_blocks(num_elements) + _num_index_bytes(num_kept) + _num_code_bytes(num_kept)

    def encode_values(self, values: Tensor, out: Tensor) -> None:
        num_elements, device = values.numel(), values.device
        self._check_size(out, num_elements)
        levels, index_bytes, code_bytes = _split(out, num_elements)
        num_kept = _num_kept(num_elements)
        keys = scratch("keys_kept", torch.int64, num_kept, device)
        bits = values.view(torch.int32)
        whole, rest = divmod(num_elements, BLOCK)
        for start in range(0, whole, BLOCKS_AT_ONCE):
            stop = min(start + BLOCKS_AT_ONCE, whole)
            _select(bits[start * BLOCK : stop * BLOCK].view(-1, BLOCK), keys[start * KEPT : stop * KEPT].view(-1, KEPT))
        if rest:
            _select(bits[whole * BLOCK :].view(1, rest), keys[whole * KEPT :].view(1, -1))
        if num_kept and (keys.amax() >> 13) >= INFINITY_BITS:  # waits for the device
            refuse_non_finite(values)

        entries = scratch("entries", torch.int16, num_kept, device)
        if whole:
            _quantise(keys[: whole * KEPT].view(-1, KEPT), levels[:whole], entries[: whole * KEPT].view(-1, KEPT))
        if rest:
            _quantise(keys[whole * KEPT :].view(1, -1), levels[whole:], entries[whole * KEPT :].view(1, -1))
        _pack(entries, index_bytes, code_bytes)

    def check(self, data: Tensor, num_elements: int) -> None:
        self._check_size(data, num_elements)
        levels, index_bytes, code_bytes = _split(data, num_elements)
        num_kept = _num_kept(num_elements)
        positions = _positions(index_bytes, num_kept)
        levels_valid = _levels_valid(levels)
        valid = levels_valid.all() & (positions[1:] > positions[:-1]).all() & (positions[-1] < num_elements)
        if num_kept % 2:
            valid &= index_bytes[-1] < 1 << 4
        if num_kept % 4:
            valid &= code_bytes[-1] < 1 << 2 * (num_kept % 4)
        if valid:  # waits for the device
            return
        block, why = _what_is_wrong(levels, levels_valid, positions, num_elements)
        raise BadPayload(f"{self.name}: block {block} has {why}; the sender's encoder is at fault")

    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        stop = start + out.numel()
        first, last = start // BLOCK, _num_blocks(stop)
        whole_stop = min(last * BLOCK, num_elements)
        into, whole_start = out, first * BLOCK
        if (start, stop) != (whole_start, whole_stop):
            into = scratch("whole_blocks", torch.float32, whole_stop - whole_start, out.device)
        positions, sent = _entries(data, num_elements, first, last)
        into.zero_().scatter_(0, positions, sent)
        if into is not out:
            out.copy_(into[start - whole_start : stop - whole_start])


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def _num_kept(num_elements: int) -> int:
    return -(-num_elements // SHARE)  # for all blocks together: whole ones have a multiple of SHARE elements


def _num_index_bytes(num_kept: int) -> int:
    return -(-3 * num_kept // 2)


def _num_code_bytes(num_kept: int) -> int:
    return -(-num_kept // 4)


def _split(data: Tensor, num_elements: int) -> tuple[Tensor, Tensor, Tensor]:
    """As views: the levels, low and high, (blocks, 2) float32; the bytes of the indices; the bytes of the codes."""
    levels_end = 8 * _num_blocks(num_elements)
    indices_end = levels_end + _num_index_bytes(_num_kept(num_elements))
    return data[:levels_end].view(torch.float32).view(-1, 2), data[levels_end:indices_end], data[indices_end:]


# A key is magnitude bits << 13 | (4095 - index in block) << 1 | sign bit. No two keys of a block are equal, and the
# largest keys are the entries to send. So ties need no further rule.


def _select(bits: Tensor, out: Tensor) -> None:
    """The keys of the entries of `bits` (blocks, n) int32, into `out` (blocks, k) int64, descending."""
    num_blocks, num_elements = bits.shape
    wide = scratch("keys", torch.int64, bits.numel(), bits.device).view(num_blocks, num_elements).copy_(bits)
    in_block = torch.arange(num_elements, device=bits.device)
    signs = wide < 0
    wide.bitwise_and_(MAGNITUDE).bitwise_left_shift_(13).bitwise_or_((LAST - in_block) << 1).bitwise_or_(signs)
    out.copy_(torch.topk(wide, out.shape[1], dim=1).values)


def _quantise(keys: Tensor, levels: Tensor, entries: Tensor) -> None:
    """`keys` (blocks, k) int64, descending, to `levels` (blocks, 2) float32 and `entries` (blocks, k) int16.

    An entry is index << 2 | code, ascending in a block; a code is sign << 1 | (1 if high).
    """
    num_kept, device = keys.shape[1], keys.device
    magnitude_bits = (keys >> 13).int()
    magnitudes = magnitude_bits.view(torch.float32).double()
    power = (magnitude_bits[:, :1] & INFINITY_BITS).view(torch.float32).double()
    unit = power.clamp_(min=LEVEL_MIN).mul_(2.0**-FRACTION_BITS)
    highs = magnitudes.div_(unit).floor_().cumsum(1)  # sum of the 1st, of the first 2, and so on: exact
    lows = highs[:, -1:] - highs
    num_high = torch.arange(1, num_kept + 1, dtype=torch.float64, device=device)
    num_low = (num_kept - num_high).clamp_(min=1)
    # The squared error is the sum of squares minus, for each of the two groups, (sum of the group)^2 / its size.
    last_high = (highs * highs / num_high).add_(lows * lows / num_low).argmax(1, keepdim=True)
    means = torch.cat([(lows / num_low).gather(1, last_high), (highs / num_high).gather(1, last_high)], 1)
    if num_kept == 1:
        means[:, 0] = means[:, 1]
    means.mul_(unit)
    levels.copy_(means.masked_fill_(means < LEVEL_MIN, 0.0))
    is_high = torch.arange(num_kept, device=device) <= last_high
    index = LAST - (keys >> 1 & LAST)
    unsorted = (index << 2 | (keys & 1) << 1 | is_high).short()
    entries.copy_(unsorted.sort(dim=1).values)


def _pack(entries: Tensor, index_bytes: Tensor, code_bytes: Tensor) -> None:
    num_kept, device = entries.numel(), entries.device
    padded = torch.zeros(-(-num_kept // 4) * 4, dtype=torch.int32, device=device)
    padded[:num_kept] = entries
    indices = (padded >> 2).view(-1, 2)
    triples = (indices[:, 0] | indices[:, 1] << 12).view(torch.uint8).view(-1, 4)[:, :3]
    index_bytes.copy_(triples.reshape(-1)[: index_bytes.numel()])
    codes = (padded & 3).view(-1, 4)
    code_bytes.copy_(codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6)


def _entries(data: Tensor, num_elements: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Entries of blocks first..last of a chunk: positions (entries,) int64, from the first block on, and values."""
    levels, index_bytes, code_bytes = _split(data, num_elements)
    start, stop = first * KEPT, min(last * KEPT, _num_kept(num_elements))
    num_kept = stop - start
    positions = _positions(index_bytes[_num_index_bytes(start) : _num_index_bytes(stop)], num_kept)
    shifts = torch.arange(0, 8, 2, device=data.device, dtype=torch.uint8)
    codes = (code_bytes[_num_code_bytes(start) : _num_code_bytes(stop), None] >> shifts & 3).view(-1)[:num_kept]
    four = torch.cat([levels[first:last], -levels[first:last]], 1).view(-1)  # low, high, -low, -high
    return positions, four[(positions >> 12) * 4 + codes]


def _positions(index_bytes: Tensor, num_kept: int) -> Tensor:
    """The position of each entry in the chunk, (num_kept,) int64."""
    device = index_bytes.device
    num_triples = -(-num_kept // 2)
    triples = torch.zeros(num_triples, 4, dtype=torch.uint8, device=device)
    whole = index_bytes.numel() // 3
    triples[:whole, :3] = index_bytes[: 3 * whole].view(-1, 3)
    if num_kept % 2:
        triples[-1, :2] = index_bytes[3 * whole :]
    both = triples.view(torch.int32)
    indices = torch.cat([both & LAST, both >> 12], 1).view(-1)[:num_kept]
    return indices.long() + (torch.arange(num_kept, device=device) >> 6 << 12)


def _levels_valid(levels: Tensor) -> Tensor:
    """Whether low and high of each block are 0 or normal, and low <= high: (blocks,) bool. Compares their bits."""
    low, high = levels.view(torch.int32).unbind(1)
    smallest = 0x0080_0000
    return (
        ((low == 0) | (low >= smallest)) & ((high == 0) | (high >= smallest)) & (low <= high) & (high < INFINITY_BITS)
    )


def _what_is_wrong(levels: Tensor, levels_valid: Tensor, positions: Tensor, num_elements: int) -> tuple[int, str]:
    """The first block that no encoder could have written, and why. There is one."""
    bad_levels = levels_valid.logical_not().nonzero()
    if bad_levels.numel():
        block = int(bad_levels[0])
        low, high = levels[block].tolist()
        return block, f"levels {low:g} and {high:g}: each must be 0 or normal and finite, the lower one first"
    not_ascending = (positions[1:] <= positions[:-1]).nonzero()
    if not_ascending.numel():
        return int(not_ascending[0] + 1) // KEPT, "indices that do not ascend"
    block = (positions.numel() - 1) // KEPT
    if positions[-1] >= num_elements:
        return block, f"the index {int(positions[-1]) % BLOCK}, but {num_elements - block * BLOCK} elements"
    return block, "unused last bits that are not 0"


CODEC = TopK()
