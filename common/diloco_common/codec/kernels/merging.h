/* What is done with a merged pseudo-gradient, a block at a time. */

#pragma once

#include "common.h"

/* One contribution to a weighted sum: a chunk of n elements, and its element with which the sum begins. */
struct chunk_source {
    const uint8_t *data;
    int64_t n, start;
    float weight;
};

/* Of one block. */
static inline double sum_squares_of(const float *x) {
    float lanes[16] = {0};
    double sum = 0;
    for (int i = 0; i < BLOCK; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += x[i + lane] * x[i + lane];
    for (int lane = 0; lane < 16; lane++) sum += lanes[lane];
    return sum;
}

/* velocity <- momentum * velocity + g; theta <- theta - lr * (g + momentum * velocity). Velocity is kept rounded. */
static inline void nesterov(const float *g, int count, float momentum, float lr, bfloat16_t *velocity, float *theta) {
    for (int i = 0; i < count; i++) {
        float v = momentum * from_bfloat16(velocity[i]) + g[i];
        velocity[i] = to_bfloat16(clamped(v, BFLOAT16_MAX));
        theta[i] = fmaf(-lr, fmaf(momentum, v, g[i]), theta[i]);
    }
}
