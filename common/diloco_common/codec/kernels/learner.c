/* What a learner computes with a version as it came, an anchor, in the pass that reads it: its contribution, and what
   the next version adds to the model. Anchors are bfloat16. */

#include "common.h"

/* As diloco_encode, of anchor - snapshot + residual. */
int64_t diloco_encode_from_anchor(int bits, const bfloat16_t *anchor, const float *snapshot, const uint8_t *residual,
                                  uint8_t *loss, int width, int64_t n, float code_max, float scale_min,
                                  float scale_max, uint8_t *out) {
    struct feedback feedback = {residual, loss, width};
    uint8_t *codes = out + 4 * blocks_of(n);
    int8_t block_codes[BLOCK];
    float values[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        for (int i = 0; i < count; i++) values[i] = from_bfloat16(anchor[start + i]);
        if (!encode_block(bits, values, snapshot ? snapshot + start : 0, feedback_at(feedback, start), count, code_max,
                          scale_min, scale_max, out + 4 * block, block_codes))
            return block;
        store_codes(bits, block_codes, start, count, codes);
    }
    return -1;
}

/* The reference that a version is compared with: a snapshot in float32, or the anchor before. One of them is null. */
static void subtract(const float *x, const float *snapshot, const bfloat16_t *anchor, int count, float *out) {
    if (snapshot)
        for (int i = 0; i < count; i++) out[i] = x[i] - snapshot[i];
    else
        for (int i = 0; i < count; i++) out[i] = x[i] - from_bfloat16(anchor[i]);
}

/* out <- values - reference, n elements. */
void diloco_difference(const bfloat16_t *values, const float *snapshot, const bfloat16_t *anchor, int64_t n,
                       float *out) {
    float x[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        for (int i = 0; i < count; i++) x[i] = from_bfloat16(values[start + i]);
        subtract(x, snapshot ? snapshot + start : 0, anchor ? anchor + start : 0, count, out + start);
    }
}

/* after <- base + the decoded change, at most anchor_max in magnitude, as bfloat16; out (may be null) <- after -
   reference. A checked chunk of n elements. */
void diloco_decode_change(int bits, const uint8_t *data, const bfloat16_t *base, int64_t n, float anchor_max,
                          bfloat16_t *after, const float *snapshot, const bfloat16_t *anchor, float *out) {
    const uint8_t *codes = data + 4 * blocks_of(n);
    int8_t unpacked[BLOCK];
    float x[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        const int8_t *code = block_codes_of(bits, codes, start, count, unpacked);
        float unit = load_unit(bits, data, block);
        for (int i = 0; i < count; i++) {
            float sum = from_bfloat16(base[start + i]) + (float)code[i] * unit;
            uint16_t rounded = to_bfloat16(clamped(sum, anchor_max));
            after[start + i] = rounded;
            x[i] = from_bfloat16(rounded);
        }
        if (out) subtract(x, snapshot ? snapshot + start : 0, anchor ? anchor + start : 0, count, out + start);
    }
}
