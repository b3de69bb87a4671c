/* The inner loops of the encodings int8, int4 and bfloat16, and of merging, on a CPU. Each takes one pass over the values.

   A chunk of n elements is the float32 scales of its blocks of 256, then the codes (docs/wire-format.md). Encoding gives
   the same bytes as the torch code in codec/, bit for bit. So no operation may be fused or reordered: compile with
   -ffp-contract=off and without -ffast-math. Pointers to bytes may be unaligned. Nothing is allocated, and every function
   is safe from any thread. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define CACHE_LINE 64
#define AHEAD 4096 /* A merge prefetches this many elements ahead, because the CPU does not do so for many streams. */

static int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

static float load_scale(const uint8_t *data, int64_t block) {
    float scale;
    memcpy(&scale, data + 4 * block, 4);
    return scale;
}

/* x <- values - minus + plus for one block. Returns the bits of its largest magnitude; those of NaN and infinity are the
   largest of all. */
static uint32_t load_block(const float *values, const float *minus, const float *plus, int count, float *x) {
    if (minus)
        for (int i = 0; i < count; i++) x[i] = values[i] - minus[i];
    else
        memcpy(x, values, 4 * (size_t)count);
    if (plus)
        for (int i = 0; i < count; i++) x[i] += plus[i];
    for (int i = count; i < BLOCK; i++) x[i] = 0;
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Encode one block, and store its scale and codes. Returns 0 if an element is not finite. */
static int encode_block(const float *values, const float *minus, const float *plus, float *loss, int count,
                        float code_max, float scale_min, float scale_max, uint8_t *scale_out, int8_t *codes) {
    float x[BLOCK], absmax;
    uint32_t largest = load_block(values, minus, plus, count, x);
    if (largest >= 0x7f800000) return 0;
    memcpy(&absmax, &largest, 4);
    float scale = absmax / code_max;
    if (scale > scale_max) scale = scale_max;
    if (scale < scale_min) scale = 1.0f;
    memcpy(scale_out, &scale, 4);
    for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)(int32_t)rintf(x[i] / scale);
    if (loss) {
        for (int i = 0; i < BLOCK; i++) x[i] -= (float)codes[i] * scale;
        memcpy(loss, x, 4 * (size_t)count);
    }
    return 1;
}

static void pack_nibbles(const int8_t *codes, int count, uint8_t *out) {
    for (int i = 0; i < (count + 1) / 2; i++) out[i] = (uint8_t)((codes[2 * i] & 0x0f) | ((uint8_t)codes[2 * i + 1] << 4));
}

static void store_codes(int bits, const int8_t *block_codes, int64_t start, int count, uint8_t *codes) {
    if (bits == 8)
        memcpy(codes + start, block_codes, (size_t)count);
    else
        pack_nibbles(block_codes, count, codes + start / 2);
}

static void unpack_nibbles(const uint8_t *packed, int count, int8_t *codes) {
    for (int i = 0; i < (count + 1) / 2; i++) {
        codes[2 * i] = (int8_t)(packed[i] << 4) >> 4;
        codes[2 * i + 1] = (int8_t)packed[i] >> 4;
    }
}

/* Encode values - minus + plus (minus and plus may be null) of n elements into out, as int8 (bits = 8) or int4 (bits = 4);
   loss (may be null, may be values) is what was lost. Returns -1, or the first block with an element that is not finite. */
int64_t diloco_encode(int bits, const float *values, const float *minus, const float *plus, float *loss, int64_t n,
                      float code_max, float scale_min, float scale_max, uint8_t *out) {
    uint8_t *codes = out + 4 * blocks_of(n);
    int8_t block_codes[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        if (!encode_block(values + start, minus ? minus + start : 0, plus ? plus + start : 0, loss ? loss + start : 0,
                          count, code_max, scale_min, scale_max, out + 4 * block, block_codes))
            return block;
        store_codes(bits, block_codes, start, count, codes);
    }
    return -1;
}

/* The codes of one block, in place if they need no unpacking. */
static const int8_t *block_codes_of(int bits, const uint8_t *codes, int64_t first, int count, int8_t *unpacked) {
    if (bits == 8) return (const int8_t *)(codes + first);
    unpack_nibbles(codes + first / 2, count, unpacked);
    return unpacked;
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
        float scale = load_scale(data, block);                                              \
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

/* One contribution to a weighted sum: its scales and codes, from the block in which the sum begins. */
struct source {
    const uint8_t *scales, *codes;
    float weight;
};

/* Elements at..stop, as many as are in the first one's block: x <- sum of weight * decoded, then zeros; returns how many.
   Elements are counted from the sources' first block. */
static int sum_block(int bits, const struct source *sources, int num_sources, int64_t at, int64_t stop, float *x) {
    int64_t block = at / BLOCK, first = block * BLOCK;
    int from = (int)(at - first), to = stop - first < BLOCK ? (int)(stop - first) : BLOCK, count = to - from;
    int8_t unpacked[BLOCK];
    for (int i = 0; i < BLOCK; i++) x[i] = 0;
    for (const struct source *source = sources; source < sources + num_sources; source++) {
        const int8_t *code = block_codes_of(bits, source->codes, first, to, unpacked) + from;
        for (int i = 0; i < BLOCK * bits / 8; i += CACHE_LINE)
            __builtin_prefetch(source->codes + (first + AHEAD) * bits / 8 + i);
        float factor = source->weight * load_scale(source->scales, block);
        for (int i = 0; i < count; i++) x[i] = fmaf(factor, (float)code[i], x[i]);
    }
    return count;
}

static double sum_squares_of(const float *x) {
    float lanes[16] = {0};
    double sum = 0;
    for (int i = 0; i < BLOCK; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += x[i + lane] * x[i + lane];
    for (int lane = 0; lane < 16; lane++) sum += lanes[lane];
    return sum;
}

/* out (may be null) <- the weighted sum; returns its sum of squares. */
double diloco_sum(int bits, const struct source *sources, int num_sources, int64_t start, int64_t stop, float *out) {
    double squares = 0;
    float x[BLOCK];
    for (int64_t at = start, count; at < stop; at += count) {
        count = sum_block(bits, sources, num_sources, at, stop, x);
        squares += sum_squares_of(x);
        if (out) memcpy(out + (at - start), x, 4 * (size_t)count);
    }
    return squares;
}

/* g = the weighted sum; velocity <- momentum * velocity + g; theta <- theta - lr * (g + momentum * velocity). */
void diloco_sum_nesterov(int bits, const struct source *sources, int num_sources, int64_t start, int64_t stop,
                         float momentum, float lr, float *velocity, float *theta) {
    float g[BLOCK];
    for (int64_t at = start, count; at < stop; at += count, velocity += count, theta += count) {
        count = sum_block(bits, sources, num_sources, at, stop, g);
        for (int i = 0; i < count; i++) {
            float v = momentum * velocity[i] + g[i];
            velocity[i] = v;
            theta[i] = fmaf(-lr, fmaf(momentum, v, g[i]), theta[i]);
        }
    }
}

static float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to nearest, ties to even. */
static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* out <- values, n elements, as bfloat16, clamped to `most` in magnitude. Returns 0 if an element is not finite. */
int diloco_encode_bfloat16(const float *values, int64_t n, float most, uint16_t *out) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
        float value = values[i] > most ? most : values[i];
        out[i] = to_bfloat16(value < -most ? -most : value);
    }
    return largest < 0x7f800000;
}

/* Encode the change from base to values, n elements, as diloco_encode does; anchor <- base + decoded, at most anchor_max. */
int64_t diloco_encode_change(int bits, const float *values, const uint16_t *base, int64_t n, float code_max,
                             float scale_min, float scale_max, float anchor_max, uint8_t *out, uint16_t *anchor) {
    uint8_t *codes = out + 4 * blocks_of(n);
    int8_t block_codes[BLOCK];
    float before[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        for (int i = 0; i < count; i++) before[i] = from_bfloat16(base[start + i]);
        if (!encode_block(values + start, before, 0, 0, count, code_max, scale_min, scale_max, out + 4 * block,
                          block_codes))
            return block;
        store_codes(bits, block_codes, start, count, codes);
        float scale = load_scale(out, block);
        for (int i = 0; i < count; i++) {
            float after = before[i] + (float)block_codes[i] * scale;
            after = after > anchor_max ? anchor_max : after;
            anchor[start + i] = to_bfloat16(after < -anchor_max ? -anchor_max : after);
        }
    }
    return -1;
}
