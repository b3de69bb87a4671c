/* What the kernels share: blocks of 256 elements, nibbles, and bfloat16. One library is made of all the .c files in this
   folder (codec/native.py).

   A chunk of n elements is the float32 scales of its blocks of 256, then the codes (docs/wire-format.md). Encoding gives
   the same bytes as the torch code in codec/, bit for bit. So no operation may be fused or reordered: compile with
   -ffp-contract=off and without -ffast-math. Pointers into chunks may be unaligned. Nothing is allocated, and every
   function is safe from any thread. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256

/* In a chunk, so at any address; a bfloat16 as its bits. */
typedef uint16_t bfloat16_t __attribute__((aligned(1)));
typedef float float32_t __attribute__((aligned(1)));

static inline int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

static inline float load_scale(const uint8_t *data, int64_t block) {
    float scale;
    memcpy(&scale, data + 4 * block, 4);
    return scale;
}

static inline int stored_bits(int bits) { return bits == 8 ? 8 : 4; }

static inline float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#define BFLOAT16_MAX 0x1.fep127f

/* Rounds to nearest, ties to even. */
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float clamped(float value, float most) {
    float below = value > most ? most : value;
    return below < -most ? -most : below;
}

/* Error feedback: what was lost of the contribution before (may be null) is added, and what is lost of this one (may be
   null) is written. Both are float32 (width = 4) or bfloat16 (width = 2). */
struct feedback {
    const uint8_t *plus;
    uint8_t *loss;
    int width;
};

/* From element `start` on. */
static inline struct feedback feedback_at(struct feedback all, int64_t start) {
    int64_t offset = all.width * start;
    return (struct feedback){all.plus ? all.plus + offset : 0, all.loss ? all.loss + offset : 0, all.width};
}

static const struct feedback NO_FEEDBACK = {0, 0, 4};

/* x <- x + plus. */
static inline void add_feedback(struct feedback feedback, int count, float *x) {
    if (!feedback.plus) return;
    if (feedback.width == 4) {
        const float *plus = (const float *)feedback.plus;
        for (int i = 0; i < count; i++) x[i] += plus[i];
    } else {
        const bfloat16_t *plus = (const bfloat16_t *)feedback.plus;
        for (int i = 0; i < count; i++) x[i] += from_bfloat16(plus[i]);
    }
}

/* loss <- x, rounded to its width, at most the largest bfloat16. */
static inline void store_loss(struct feedback feedback, int count, const float *x) {
    if (!feedback.loss) return;
    if (feedback.width == 4) {
        memcpy(feedback.loss, x, 4 * (size_t)count);
    } else {
        bfloat16_t *loss = (bfloat16_t *)feedback.loss;
        for (int i = 0; i < count; i++) loss[i] = to_bfloat16(clamped(x[i], BFLOAT16_MAX));
    }
}

/* x <- values + plus, `count` elements. Values are float32 (width = 4) or bfloat16 (width = 2). */
static inline void load_values(const void *values, int width, struct feedback feedback, int count, float *x) {
    if (width == 4)
        memcpy(x, values, 4 * (size_t)count);
    else
        for (int i = 0; i < count; i++) x[i] = from_bfloat16(((const bfloat16_t *)values)[i]);
    add_feedback(feedback, count, x);
}

/* The bits of the largest magnitude; those of NaN and infinity are the largest of all. */
static inline uint32_t largest_bits(const float *x, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Encode one block, and store its scale and codes. What is lost of x goes to `feedback`. Returns 0 if an element is not
   finite. Overwrites x. */
static inline int encode_block(int bits, float x[BLOCK], struct feedback feedback, int count, float code_max,
                               float scale_min, float scale_max, uint8_t *scale_out, int8_t *codes) {
    float absmax;
    for (int i = count; i < BLOCK; i++) x[i] = 0;
    uint32_t largest = largest_bits(x, BLOCK);
    if (largest >= 0x7f800000) return 0;
    memcpy(&absmax, &largest, 4);
    float scale = absmax / code_max;
    if (scale > scale_max) scale = scale_max;
    if (scale < scale_min) scale = 1.0f;
    memcpy(scale_out, &scale, 4);
    for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)(int32_t)rintf(x[i] / scale);
    if (feedback.loss) {
        for (int i = 0; i < BLOCK; i++) x[i] -= (float)codes[i] * scale;
        store_loss(feedback, count, x);
    }
    return 1;
}

static inline void pack_nibbles(const int8_t *codes, int count, uint8_t *out) {
    for (int i = 0; i < (count + 1) / 2; i++) out[i] = (uint8_t)((codes[2 * i] & 0x0f) | ((uint8_t)codes[2 * i + 1] << 4));
}

static inline void store_codes(int bits, const int8_t *block_codes, int64_t start, int count, uint8_t *codes) {
    if (bits == 8) {
        memcpy(codes + start, block_codes, (size_t)count);
        return;
    }
    pack_nibbles(block_codes, count, codes + start / 2);
}

static inline void unpack_nibbles(const uint8_t *packed, int count, int8_t *codes) {
    for (int i = 0; i < (count + 1) / 2; i++) {
        codes[2 * i] = (int8_t)(packed[i] << 4) >> 4;
        codes[2 * i + 1] = (int8_t)packed[i] >> 4;
    }
}

/* The codes of one block, in place if they need no unpacking. */
static inline const int8_t *block_codes_of(int bits, const uint8_t *codes, int64_t first, int count, int8_t *unpacked) {
    if (bits == 8) return (const int8_t *)(codes + first);
    unpack_nibbles(codes + first / 2, count, unpacked);
    return unpacked;
}
