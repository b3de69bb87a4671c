/* Products and transposes of small row-major matrices, in vectors of whatever the CPU has. */

#pragma once

#include <stdint.h>

#ifdef __AVX512F__
enum { WIDE = 16 };
#else
enum { WIDE = 8 };
#endif
enum { NARROW = 8 };
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef float narrow __attribute__((vector_size(4 * NARROW), aligned(4), may_alias));

/* c [ROWS, VECS vectors] (+)= a b; see multiply. */
#define TILE(name, vec, LANES, ROWS, VECS)                                                                             \
    static inline __attribute__((always_inline)) void name(                                                            \
        int p, const float *a, int ai, int ak, const float *b, int bs, float *c, int cs, int add) {                    \
        vec sum[ROWS][VECS];                                                                                           \
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)                                                         \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECS; v++)                                                     \
                sum[r][v] = add ? *(const vec *)(c + r * cs + v * LANES) : (vec){0};                                   \
        for (int k = 0; k < p; k++)                                                                                    \
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)                                                     \
                _Pragma("GCC unroll 8") for (int v = 0; v < VECS; v++)                                                 \
                    sum[r][v] += a[r * ai + k * ak] * *(const vec *)(b + k * bs + v * LANES);                          \
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)                                                         \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECS; v++)                                                     \
                *(vec *)(c + r * cs + v * LANES) = sum[r][v];                                                          \
    }

TILE(tile_wide_4x2, wide, WIDE, 4, 2)
TILE(tile_wide_4, wide, WIDE, 4, 1)
TILE(tile_wide_1, wide, WIDE, 1, 1)
TILE(tile_narrow_4, narrow, NARROW, 4, 1)
TILE(tile_narrow_1, narrow, NARROW, 1, 1)

/* c [m, n] (+)= a b. a [i, k] is at a + i ai + k ak; rows of b [p, n] and of c are bs and cs apart. */
static void multiply(
    int m, int n, int p, const float *a, int ai, int ak, const float *b, int bs, float *c, int cs, int add) {
    for (int i = 0; i < m;) {
        int rows = m - i >= 4 ? 4 : 1, j = 0;
        const float *from = a + i * ai;
        float *to = c + i * cs;
        if (rows == 4) {
            for (; j + 2 * WIDE <= n; j += 2 * WIDE) tile_wide_4x2(p, from, ai, ak, b + j, bs, to + j, cs, add);
            for (; j + WIDE <= n; j += WIDE) tile_wide_4(p, from, ai, ak, b + j, bs, to + j, cs, add);
            for (; j + NARROW <= n; j += NARROW) tile_narrow_4(p, from, ai, ak, b + j, bs, to + j, cs, add);
        } else {
            for (; j + WIDE <= n; j += WIDE) tile_wide_1(p, from, ai, ak, b + j, bs, to + j, cs, add);
            for (; j + NARROW <= n; j += NARROW) tile_narrow_1(p, from, ai, ak, b + j, bs, to + j, cs, add);
        }
        for (; j < n; j++)
            for (int r = 0; r < rows; r++) {
                float sum = add ? to[r * cs + j] : 0;
                for (int k = 0; k < p; k++) sum += from[r * ai + k * ak] * b[k * bs + j];
                to[r * cs + j] = sum;
            }
        i += rows;
    }
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* GCC has that from 12 on */
typedef int32_t lanes __attribute__((vector_size(4 * NARROW)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

/* One turn of the bits of row and column, of three that transpose 8 x 8. */
static inline void interleave(const narrow *from, narrow *to) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        to[2 * i] = PICK(from[i], from[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        to[2 * i + 1] = PICK(from[i], from[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
}

/* out [n, m] <- a [m, n], whose rows are `stride` apart. */
static void transpose(int m, int n, const float *a, int stride, float *out) {
    int i = 0;
    for (; i + NARROW <= m; i += NARROW) {
        int j = 0;
        for (; j + NARROW <= n; j += NARROW) {
            narrow x[NARROW], y[NARROW];
            for (int k = 0; k < NARROW; k++) x[k] = *(const narrow *)(a + (i + k) * stride + j);
            interleave(x, y), interleave(y, x), interleave(x, y);
            for (int k = 0; k < NARROW; k++) *(narrow *)(out + (j + k) * m + i) = y[k];
        }
        for (; j < n; j++)
            for (int k = i; k < i + NARROW; k++) out[j * m + k] = a[k * stride + j];
    }
    for (; i < m; i++)
        for (int j = 0; j < n; j++) out[j * m + i] = a[i * stride + j];
}
