/* The encodings float32 (bits = 32) and bfloat16 (bits = 16), and merging their contributions. */

#include "merging.h"

/* As diloco_encode, at most `most` in magnitude. Values are float32 (width = 4) or bfloat16 (width = 2). */
int64_t diloco_encode_plain(int bits, int width, const uint8_t *values, const uint8_t *plus, uint8_t *loss,
                            int feedback_width, int64_t n, float most, uint8_t *out) {
    struct feedback all = {plus, loss, feedback_width};
    float x[BLOCK];
    for (int64_t block = 0, start = 0; start < n; block++, start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        struct feedback feedback = feedback_at(all, start);
        load_values(values + width * start, width, feedback, count, x);
        if (largest_bits(x, count) >= 0x7f800000) return block;
        if (bits == 32) {
            memcpy(out + 4 * start, x, 4 * (size_t)count);
            for (int i = 0; i < count; i++) x[i] = 0;
        } else {
            bfloat16_t *halves = (bfloat16_t *)(out + 2 * start);
            for (int i = 0; i < count; i++) {
                halves[i] = to_bfloat16(clamped(x[i], most));
                x[i] -= from_bfloat16(halves[i]);
            }
        }
        store_loss(feedback, count, x);
    }
    return -1;
}

/* x <- x + weight * value, `count` elements of a chunk from element `first` on. */
static void add_plain(int bits, const uint8_t *data, int64_t first, int count, float weight, float *x) {
    if (bits == 32) {
        const float32_t *values = (const float32_t *)data + first;
        for (int i = 0; i < count; i++) x[i] = fmaf(weight, values[i], x[i]);
    } else {
        const bfloat16_t *values = (const bfloat16_t *)data + first;
        for (int i = 0; i < count; i++) x[i] = fmaf(weight, from_bfloat16(values[i]), x[i]);
    }
}

/* The sum of squares of elements start..stop of a chunk: not finite if an element is not. */
double diloco_sum_squares_plain(int bits, const uint8_t *data, int64_t start, int64_t stop) {
    double lanes[8] = {0}, sum = 0;
    float x[BLOCK];
    for (int64_t first = start; first < stop; first += BLOCK) {
        int count = stop - first < BLOCK ? (int)(stop - first) : BLOCK;
        memset(x, 0, sizeof x);
        add_plain(bits, data, first, count, 1.0f, x);
        for (int i = 0; i < BLOCK; i += 8)
            for (int lane = 0; lane < 8; lane++) lanes[lane] += (double)x[i + lane] * x[i + lane];
    }
    for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
    return sum;
}

/* x <- the weighted sum of elements first..first+count, counted from each source's start; then zeros. */
static void sum_plain(int bits, const struct chunk_source *sources, int num_sources, int64_t first, int count, float *x) {
    memset(x, 0, BLOCK * sizeof *x);
    for (const struct chunk_source *source = sources; source < sources + num_sources; source++)
        add_plain(bits, source->data, source->start + first, count, source->weight, x);
}

/* out (may be null) <- the weighted sum of n elements; returns its sum of squares. */
double diloco_sum_plain(int bits, const struct chunk_source *sources, int num_sources, int64_t n, float *out) {
    double squares = 0;
    float x[BLOCK];
    for (int64_t first = 0; first < n; first += BLOCK) {
        int count = n - first < BLOCK ? (int)(n - first) : BLOCK;
        sum_plain(bits, sources, num_sources, first, count, x);
        squares += sum_squares_of(x);
        if (out) memcpy(out + first, x, 4 * (size_t)count);
    }
    return squares;
}

/* As diloco_sum_nesterov. */
void diloco_sum_nesterov_plain(int bits, const struct chunk_source *sources, int num_sources, int64_t n, float momentum,
                               float lr, bfloat16_t *velocity, float *theta) {
    float g[BLOCK];
    for (int64_t first = 0; first < n; first += BLOCK) {
        int count = n - first < BLOCK ? (int)(n - first) : BLOCK;
        sum_plain(bits, sources, num_sources, first, count, g);
        nesterov(g, count, momentum, lr, velocity + first, theta + first);
    }
}
