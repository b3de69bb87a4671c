/* Loads a library of kernels and prints a hash of what each makes of the same numbers: equal on every machine.

   cc -O1 run_kernels.c -ldl -lm && ./a.out kernels.so */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N 20005 /* neither whole blocks of 256 nor of 4096 */

static uint64_t state = 1;
static uint32_t next(void) { return (uint32_t)((state = state * 6364136223846793005u + 1442695040888963407u) >> 32); }

/* Magnitudes from 2^-40 to 1, some zeros, some ties. */
static float number(void) {
    uint32_t exponent = next() % 40, mantissa = next() & 0x7fffff, sign = next() << 31, kind = next() % 8;
    uint32_t bits = kind == 0 ? sign : sign | (127 - exponent) << 23 | (kind == 1 ? 0 : mantissa);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void print_hash(const char *name, const void *data, size_t n) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

static void *library;
static void *found(const char *name) {
    void *function = dlsym(library, name);
    if (!function) fprintf(stderr, "%s is not in the library\n", name), exit(2);
    return function;
}

static float values[N], plus[N], loss[N], out[N];
static uint16_t base[N], anchor[N], snapshot[N], residual[N];
static uint8_t chunk[8 * N];

typedef int64_t encode_function(int, int, const void *, const void *, void *, int, int64_t, float, float, float, uint8_t *);
typedef int64_t encode_plain_function(int, int, const void *, const void *, void *, int, int64_t, float, uint8_t *);
typedef void progress_function(const uint16_t *, int, const void *, int64_t, uint16_t *);
typedef void difference_function(const uint16_t *, const float *, const uint16_t *, const uint16_t *, int64_t, float *);
typedef int64_t change_function(int, const float *, const uint16_t *, int64_t, float, float, float, float, uint8_t *,
                                uint16_t *);
typedef void decode_function(int, const uint8_t *, int64_t, int64_t, int64_t, float *);

static void run_blocks(int bits, float code_max, float scale_max) {
    memset(chunk, 0, sizeof chunk);
    encode_function *encode = (encode_function *)found("diloco_encode");
    encode(bits, 4, values, plus, loss, 4, N, code_max, 0x1p-126f, scale_max, chunk);
    print_hash("encode", chunk, sizeof chunk);
    print_hash("loss", loss, sizeof loss);
    memcpy(residual, base, sizeof residual);
    encode(bits, 2, snapshot, residual, residual, 2, N, code_max, 0x1p-126f, scale_max, chunk);
    print_hash("encode bfloat16", chunk, sizeof chunk);
    print_hash("loss for residual", residual, sizeof residual);
    ((decode_function *)found("diloco_decode"))(bits, chunk, N, 256, N, out);
    print_hash("decode", out, sizeof out);
    ((change_function *)found("diloco_encode_change"))(bits, values, base, N, code_max, 0x1p-126f, scale_max,
                                                       0x1.fep+127f, chunk, anchor);
    print_hash("change", chunk, sizeof chunk);
    print_hash("anchor", anchor, sizeof anchor);
}

int main(int count, char **arguments) {
    library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) return fprintf(stderr, "%s\n", count > 1 ? dlerror() : "which library?"), 2;
    for (int i = 0; i < N; i++) {
        values[i] = number(), plus[i] = number();
        base[i] = (uint16_t)(next() & 0x8000) | (uint16_t)((127 - next() % 20) << 7) | (next() & 0x7f);
    }
    ((progress_function *)found("diloco_progress"))(base, 4, values, N, snapshot);
    print_hash("progress", snapshot, sizeof snapshot);
    ((difference_function *)found("diloco_difference"))(snapshot, NULL, base, snapshot, N, out);
    print_hash("difference", out, sizeof out);
    run_blocks(8, 127.0f, 0x1.020406p+121f);
    run_blocks(4, 7.0f, 0x1.249248p+125f);
    memset(chunk, 0, sizeof chunk);
    ((encode_plain_function *)found("diloco_encode_plain"))(16, 4, values, plus, loss, 4, N, 0x1.fep+127f, chunk);
    print_hash("bfloat16", chunk, sizeof chunk);
    print_hash("loss", loss, sizeof loss);
    return 0;
}
