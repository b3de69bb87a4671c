/* What a learner computes with an anchor, in bfloat16: its progress since that version, and what the next version adds to
   the model. */

#include "common.h"

/* As to_bfloat16, but NaN stays NaN whatever its bits. What bfloat16 cannot hold becomes infinite. */
static inline uint16_t any_to_bfloat16(float value) { return value == value ? to_bfloat16(value) : 0x7fc0; }

/* progress <- anchor - theta, n elements. Theta is float32 (width = 4) or bfloat16 (width = 2). */
void diloco_progress(const bfloat16_t *restrict anchor, int width, const void *theta, int64_t n,
                     bfloat16_t *restrict progress) {
    const float *restrict singles = theta;
    const bfloat16_t *restrict halves = theta;
    if (width == 4)
        for (int64_t i = 0; i < n; i++) progress[i] = any_to_bfloat16(from_bfloat16(anchor[i]) - singles[i]);
    else
        for (int64_t i = 0; i < n; i++)
            progress[i] = any_to_bfloat16(from_bfloat16(anchor[i]) - from_bfloat16(halves[i]));
}

/* What a version is compared with: a float32 tensor, or an anchor less the progress since then, which may be null. */
struct reference {
    const float *values;
    const bfloat16_t *anchor, *progress;
};

static struct reference reference_at(struct reference all, int64_t start) {
    return (struct reference){all.values ? all.values + start : 0, all.anchor ? all.anchor + start : 0,
                              all.progress ? all.progress + start : 0};
}

/* out <- version - reference, n elements. */
static inline void subtract(const bfloat16_t *restrict version, struct reference reference, int64_t n,
                            float *restrict out) {
    const float *restrict values = reference.values;
    const bfloat16_t *restrict anchor = reference.anchor, *restrict progress = reference.progress;
    if (values)
        for (int64_t i = 0; i < n; i++) out[i] = from_bfloat16(version[i]) - values[i];
    else if (progress)
        for (int64_t i = 0; i < n; i++)
            out[i] = from_bfloat16(version[i]) - from_bfloat16(anchor[i]) + from_bfloat16(progress[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = from_bfloat16(version[i]) - from_bfloat16(anchor[i]);
}

void diloco_difference(const bfloat16_t *version, const float *values, const bfloat16_t *anchor,
                       const bfloat16_t *progress, int64_t n, float *out) {
    subtract(version, (struct reference){values, anchor, progress}, n, out);
}

/* after <- base + the decoded change, at most anchor_max in magnitude, as bfloat16; out (may be null) <- after -
   reference. A checked chunk of n elements. */
void diloco_decode_change(int bits, const uint8_t *data, const bfloat16_t *base, int64_t n, float anchor_max,
                          bfloat16_t *after, const float *values, const bfloat16_t *anchor, const bfloat16_t *progress,
                          float *out) {
    struct reference reference = {values, anchor, progress};
    const uint8_t *codes = data + 4 * blocks_of(n);
    int8_t unpacked[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        const int8_t *code = block_codes_of(bits, codes, start, count, unpacked);
        float unit = load_scale(data, block);
        for (int i = 0; i < count; i++) {
            float sum = from_bfloat16(base[start + i]) + (float)code[i] * unit;
            after[start + i] = to_bfloat16(clamped(sum, anchor_max));
        }
        if (out) subtract(after + start, reference_at(reference, start), count, out + start);
    }
}
