/* The encodings int8 (bits = 8) and int4 (bits = 4), in one pass over the values. */

#include "common.h"

/* Encode values + plus of n elements into out. Values are float32 (width = 4) or bfloat16 (width = 2). plus and loss may
   be null; both have feedback_width. loss may be plus, or values of its width. Returns -1, or the first block with an
   element that is not finite. */
int64_t diloco_encode(int bits, int width, const uint8_t *values, const uint8_t *plus, uint8_t *loss, int feedback_width,
                      int64_t n, float code_max, float scale_min, float scale_max, uint8_t *out) {
    struct feedback all = {plus, loss, feedback_width};
    uint8_t *codes = out + 4 * blocks_of(n);
    int8_t block_codes[BLOCK];
    float x[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        struct feedback feedback = feedback_at(all, start);
        load_values(values + width * start, width, feedback, count, x);
        if (!encode_block(bits, x, feedback, count, code_max, scale_min, scale_max, out + 4 * block, block_codes))
            return block;
        store_codes(bits, block_codes, start, count, codes);
    }
    return -1;
}

/* Whether an encoder could have written this chunk of n elements. */
int diloco_check(int bits, const uint8_t *data, int64_t n, float scale_min, float scale_max) {
    const uint8_t *codes = data + 4 * blocks_of(n);
    int bad = 0;
    for (int64_t block = 0; block < blocks_of(n); block++) {
        float scale = load_scale(data, block);
        bad |= !(scale >= scale_min && scale <= scale_max); /* NaN is neither */
    }
    if (bits == 8) {
        uint8_t bad_code = 0;
        for (int64_t i = 0; i < n; i++) bad_code |= codes[i] == 0x80;
        return !(bad | bad_code);
    }
    uint8_t bad_pair = n % 2 ? codes[n / 2] > 0x0f : 0;
    for (int64_t i = 0; i < (n + 1) / 2; i++) bad_pair |= ((codes[i] & 0x0f) == 0x08) | ((codes[i] & 0xf0) == 0x80);
    return !(bad | bad_pair);
}

#define FOR_BLOCKS(BODY)                                                                    \
    const uint8_t *codes = data + 4 * blocks_of(n);                                         \
    int8_t unpacked[BLOCK];                                                                 \
    for (int64_t at = start; at < stop;) {                                                  \
        int64_t block = at / BLOCK, first = block * BLOCK;                                  \
        int64_t end = first + BLOCK < stop ? first + BLOCK : stop;                          \
        int held = n - first < BLOCK ? (int)(n - first) : BLOCK;                            \
        const int8_t *code = block_codes_of(bits, codes, first, held, unpacked) + (at - first); \
        int count = (int)(end - at);                                                        \
        float scale = load_scale(data, block);                                         \
        BODY at = end;                                                                      \
    }

/* out <- elements start..stop of a checked chunk of n elements. */
void diloco_decode(int bits, const uint8_t *data, int64_t n, int64_t start, int64_t stop, float *out) {
    FOR_BLOCKS({
        for (int i = 0; i < count; i++) out[i] = (float)code[i] * scale;
        out += count;
    })
}

/* out <- out + weight * elements start..stop. */
void diloco_accumulate(int bits, const uint8_t *data, int64_t n, int64_t start, int64_t stop, float weight, float *out) {
    FOR_BLOCKS({
        for (int i = 0; i < count; i++) out[i] = fmaf(weight, (float)code[i] * scale, out[i]);
        out += count;
    })
}

/* The sum of squares of elements start..stop. */
double diloco_sum_squares(int bits, const uint8_t *data, int64_t n, int64_t start, int64_t stop) {
    double sum = 0;
    FOR_BLOCKS({
        int32_t squares = 0;
        for (int i = 0; i < count; i++) squares += code[i] * code[i];
        sum += (double)scale * (double)scale * squares;
    })
    return sum;
}
