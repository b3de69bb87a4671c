/* A version as a change: its codes and the anchor that they lead to, in one pass (codec/change.py). */

#include "common.h"

/* Encode the change from base to values, n elements, as diloco_encode does; anchor <- base + decoded, at most anchor_max. */
int64_t diloco_encode_change(int bits, const float *values, const bfloat16_t *base, int64_t n, float code_max,
                             float scale_min, float scale_max, float anchor_max, uint8_t *out, bfloat16_t *anchor) {
    uint8_t *codes = out + 4 * blocks_of(n);
    int8_t block_codes[BLOCK];
    float before[BLOCK], x[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        for (int i = 0; i < count; i++) before[i] = from_bfloat16(base[start + i]);
        for (int i = 0; i < count; i++) x[i] = values[start + i] - before[i];
        if (!encode_block(bits, x, NO_FEEDBACK, count, code_max, scale_min, scale_max, out + 4 * block, block_codes))
            return block;
        store_codes(bits, block_codes, start, count, codes);
        float unit = load_scale(out, block);
        for (int i = 0; i < count; i++) {
            float after = before[i] + (float)block_codes[i] * unit;
            anchor[start + i] = to_bfloat16(clamped(after, anchor_max));
        }
    }
    return -1;
}
