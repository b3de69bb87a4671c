/* Merging contributions in int8 or int4: their weighted sum is formed block by block and never stored. */

#include "merging.h"

#define CACHE_LINE 64
#define AHEAD 4096 /* Elements to prefetch ahead, because the CPU does not do so for many streams. */

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
        for (int i = 0; i < BLOCK * stored_bits(bits) / 8; i += CACHE_LINE)
            __builtin_prefetch(source->codes + (first + AHEAD) * stored_bits(bits) / 8 + i);
        float factor = source->weight * load_scale(source->scales, block);
        for (int i = 0; i < count; i++) x[i] = fmaf(factor, (float)code[i], x[i]);
    }
    return count;
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
                         float momentum, float lr, bfloat16_t *velocity, float *theta) {
    float g[BLOCK];
    for (int64_t at = start, count; at < stop; at += count, velocity += count, theta += count) {
        count = sum_block(bits, sources, num_sources, at, stop, g);
        nesterov(g, count, momentum, lr, velocity, theta);
    }
}
