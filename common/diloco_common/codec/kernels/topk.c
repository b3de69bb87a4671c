/* The encoding topk64_2bit: the 64 largest magnitudes of every 4096 elements (docs/wire-format.md, codec/topk.py).

   A chunk is the levels of all its blocks, then 12 bits per index, then 2 bits per code. Every block but the last has
   64 entries, so its entries begin at a whole byte of either. */

#include "merging.h"

#define TOP_BLOCK 4096
#define KEPT 64
#define GROUPS 128
#define FRACTION 0x1p-46 /* Magnitudes are summed as multiples of this part of the largest one's power of two. */
#define INFINITY_BITS 0x7f800000
#define SMALLEST_NORMAL_BITS 0x00800000

/* A chunk of n elements, as pointers to its parts. */
struct chunk {
    const uint8_t *levels, *indices, *codes;
    int64_t n;
};

static int64_t top_blocks_of(int64_t n) { return (n + TOP_BLOCK - 1) / TOP_BLOCK; }
static int64_t kept_of(int64_t n) { return (n + KEPT - 1) / KEPT; }

static int64_t index_bytes_of(int64_t n) { return (3 * kept_of(n) + 1) / 2; }

static struct chunk chunk_of(const uint8_t *data, int64_t n) {
    const uint8_t *indices = data + 8 * top_blocks_of(n);
    return (struct chunk){data, indices, indices + index_bytes_of(n), n};
}

/* ------------------------------------------------------------------ selecting */

/* The largest number that at least KEPT of the GROUPS maxima reach, or a little less. */
static int32_t bound_of(const int32_t *maxima) {
    int32_t low = 0, high = 0;
    for (int i = 0; i < GROUPS; i++) high = maxima[i] > high ? maxima[i] : high;
    while (high - low > 1 << 16) { /* 1 % of a magnitude; finer finds hardly fewer candidates */
        int32_t middle = low + (high - low) / 2, reached = 0;
        for (int i = 0; i < GROUPS; i++) reached += maxima[i] >= middle;
        if (reached >= KEPT)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The elements that reach `bound`, in order: their magnitudes and indices. Returns how many. */
static int candidates_of(const int32_t *magnitudes, int32_t bound, int32_t *found, uint16_t *indices) {
    uint8_t reached[TOP_BLOCK];
    int num_found = 0;
    for (int i = 0; i < TOP_BLOCK; i++) reached[i] = magnitudes[i] >= bound;
    for (int start = 0; start < TOP_BLOCK; start += 8) {
        uint64_t eight;
        memcpy(&eight, reached + start, 8);
        for (; eight; eight &= eight - 1) { /* from the lowest byte on; little-endian, as payloads are */
            int i = start + __builtin_ctzll(eight) / 8;
            found[num_found] = magnitudes[i];
            indices[num_found++] = (uint16_t)i;
        }
    }
    return num_found;
}

/* The num_kept-th largest of the magnitudes, all at least `low`. */
static int32_t smallest_kept(const int32_t *found, int num_found, int num_kept, int32_t low) {
    int32_t high = 0;
    for (int i = 0; i < num_found; i++) high = found[i] > high ? found[i] : high;
    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2, reached = 0;
        for (int i = 0; i < num_found; i++) reached += found[i] >= middle;
        if (reached >= num_kept)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The num_kept largest magnitudes of a block of `count` elements and their indices, ascending. Of equal ones the first.
   magnitudes: TOP_BLOCK, those beyond `count` negative. */
static void select_kept(const int32_t *magnitudes, const int32_t *maxima, int count, int num_kept, int32_t *kept,
                        uint16_t *kept_indices) {
    int32_t found[TOP_BLOCK + 1];
    uint16_t indices[TOP_BLOCK + 1];
    int32_t bound = count == TOP_BLOCK ? bound_of(maxima) : 0;
    int num_found = candidates_of(magnitudes, bound, found, indices);
    int32_t least = smallest_kept(found, num_found, num_kept, bound);
    int larger = 0, taken = 0;
    for (int i = 0; i < num_found; i++) larger += found[i] > least;
    for (int i = 0, ties = num_kept - larger; i < num_found && taken < num_kept; i++) {
        if (found[i] < least || (found[i] == least && ties-- <= 0)) continue;
        kept[taken] = found[i];
        kept_indices[taken++] = indices[i];
    }
}

/* ------------------------------------------------------------------ encoding */

static double magnitude_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* ranks[i]: how many entries come before entry i, by descending magnitude, and then by index. */
static void rank(const int32_t *kept, int num_kept, int32_t *ranks) {
    for (int i = 0; i < num_kept; i++) ranks[i] = 0;
    for (int j = 0; j < num_kept; j++)
        for (int i = 0; i < num_kept; i++) ranks[i] += kept[j] + (j < i) > kept[i];
}

/* The levels, low and high, of the kept magnitudes. Returns how many of the largest are high. */
static int levels_of(const int32_t *kept, const int32_t *ranks, int num_kept, float *levels) {
    double sorted[KEPT], highs[KEPT] = {0}, all = 0, largest = 0;
    for (int i = 0; i < num_kept; i++) {
        double magnitude = magnitude_of(kept[i]);
        sorted[ranks[i]] = magnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t exponent_bits;
    float as_float = (float)largest;
    memcpy(&exponent_bits, &as_float, 4);
    exponent_bits &= INFINITY_BITS;
    double power = magnitude_of(exponent_bits < SMALLEST_NORMAL_BITS ? SMALLEST_NORMAL_BITS : exponent_bits);
    double unit = power * FRACTION;
    for (int i = 0; i < num_kept; i++) highs[i] = all += floor(sorted[i] / unit);
    double explained[KEPT];
    for (int i = 0; i < num_kept; i++) {
        int above = i + 1, below = num_kept - above > 1 ? num_kept - above : 1;
        double high = highs[i], low = all - high;
        explained[i] = high * high / above + low * low / below;
    }
    int num_high = 1;
    for (int i = 1; i < num_kept; i++)
        if (explained[i] > explained[num_high - 1]) num_high = i + 1;
    int num_low = num_kept - num_high > 1 ? num_kept - num_high : 1;
    double high = highs[num_high - 1] / num_high * unit, low = (all - highs[num_high - 1]) / num_low * unit;
    if (num_kept == 1) low = high;
    double smallest = magnitude_of(SMALLEST_NORMAL_BITS);
    levels[0] = low < smallest ? 0 : (float)low;
    levels[1] = high < smallest ? 0 : (float)high;
    return num_high;
}

/* Write the entries of one block; both outputs begin at a whole byte. */
static void pack(const uint16_t *indices, const uint8_t *codes, int num_kept, uint8_t *index_out, uint8_t *code_out) {
    for (int i = 0; i < num_kept; i += 2) {
        uint32_t both = indices[i] | (i + 1 < num_kept ? (uint32_t)indices[i + 1] << 12 : 0);
        *index_out++ = (uint8_t)both;
        *index_out++ = (uint8_t)(both >> 8);
        if (i + 1 < num_kept) *index_out++ = (uint8_t)(both >> 16);
    }
    for (int i = 0; i < num_kept; i += 4) {
        uint8_t four = 0;
        for (int k = i; k < num_kept && k < i + 4; k++) four |= (uint8_t)(codes[k] << 2 * (k - i));
        *code_out++ = four;
    }
}

/* x <- values + plus, with their magnitudes as bits (negative beyond `count`), and those of GROUPS groups. */
static void load(const void *values, int width, struct feedback feedback, int count, float *x, int32_t *magnitudes,
                 int32_t *maxima) {
    load_values(values, width, feedback, count, x);
    memcpy(magnitudes, x, 4 * (size_t)count);
    for (int i = 0; i < count; i++) magnitudes[i] &= 0x7fffffff;
    for (int i = count; i < TOP_BLOCK; i++) magnitudes[i] = -1;
    for (int i = 0; i < GROUPS; i++) maxima[i] = 0;
    for (int start = 0; start < TOP_BLOCK; start += GROUPS)
        for (int i = 0; i < GROUPS; i++)
            maxima[i] = magnitudes[start + i] > maxima[i] ? magnitudes[start + i] : maxima[i];
}

/* Encode one block, and store its entries. x: the values, of which what is sent is subtracted. */
static void encode_top(const int32_t *magnitudes, const int32_t *maxima, int count, float *x, uint8_t *levels_out,
                       uint8_t *index_out, uint8_t *code_out) {
    int num_kept = (int)kept_of(count);
    int32_t kept[KEPT], ranks[KEPT];
    uint16_t indices[KEPT];
    uint8_t codes[KEPT];
    float levels[2];
    select_kept(magnitudes, maxima, count, num_kept, kept, indices);
    rank(kept, num_kept, ranks);
    int num_high = levels_of(kept, ranks, num_kept, levels);
    for (int i = 0; i < num_kept; i++) {
        int is_high = ranks[i] < num_high, is_negative = signbit(x[indices[i]]) != 0;
        codes[i] = (uint8_t)(is_negative << 1 | is_high);
        x[indices[i]] -= is_negative ? -levels[is_high] : levels[is_high];
    }
    memcpy(levels_out, levels, 8);
    pack(indices, codes, num_kept, index_out, code_out);
}

/* As diloco_encode. Values are float32 (width = 4) or bfloat16 (width = 2). */
int64_t diloco_encode_top(int width, const uint8_t *values, const uint8_t *plus, uint8_t *loss, int feedback_width,
                          int64_t n, uint8_t *out) {
    struct feedback all = {plus, loss, feedback_width};
    uint8_t *indices = out + 8 * top_blocks_of(n), *codes = indices + index_bytes_of(n);
    float x[TOP_BLOCK];
    int32_t magnitudes[TOP_BLOCK], maxima[GROUPS];
    for (int64_t block = 0, start = 0; start < n; block++, start += TOP_BLOCK) {
        int count = n - start < TOP_BLOCK ? (int)(n - start) : TOP_BLOCK;
        struct feedback feedback = feedback_at(all, start);
        load(values + width * start, width, feedback, count, x, magnitudes, maxima);
        for (int i = 0; i < GROUPS; i++)
            if (maxima[i] >= INFINITY_BITS) return block;
        encode_top(magnitudes, maxima, count, x, out + 8 * block, indices + 96 * block, codes + 16 * block);
        store_loss(feedback, count, x);
    }
    return -1;
}

/* ------------------------------------------------------------------ decoding */

/* The entries of one block. */
struct entries {
    const uint8_t *indices, *codes;
    float values[4]; /* by code: low, high, -low, -high */
    int num_kept;
};

static struct entries entries_of(const struct chunk *chunk, int64_t block) {
    float levels[2];
    memcpy(levels, chunk->levels + 8 * block, 8);
    int64_t held = chunk->n - block * TOP_BLOCK;
    return (struct entries){chunk->indices + 96 * block, chunk->codes + 16 * block,
                            {levels[0], levels[1], -levels[0], -levels[1]},
                            held < TOP_BLOCK ? (int)kept_of(held) : KEPT};
}

static int index_at(const struct entries *entries, int i) {
    const uint8_t *at = entries->indices + 3 * (i / 2);
    return i % 2 ? at[1] >> 4 | at[2] << 4 : at[0] | (at[1] & 0x0f) << 8;
}

static float value_at(const struct entries *entries, int i) {
    return entries->values[entries->codes[i / 4] >> 2 * (i % 4) & 3];
}

/* Whether a level is 0 or normal and finite, without sign. */
static int is_level(uint32_t bits) { return bits == 0 || (bits >= SMALLEST_NORMAL_BITS && bits < INFINITY_BITS); }

/* Whether an encoder could have written this chunk of n elements. */
int diloco_check_top(const uint8_t *data, int64_t n) {
    struct chunk chunk = chunk_of(data, n);
    int64_t num_kept = kept_of(n);
    int good = 1;
    for (int64_t block = 0; block < top_blocks_of(n); block++) {
        uint32_t levels[2];
        memcpy(levels, data + 8 * block, 8);
        good &= is_level(levels[0]) & is_level(levels[1]) & (levels[0] <= levels[1]);
        struct entries entries = entries_of(&chunk, block);
        int64_t held = n - block * TOP_BLOCK;
        for (int i = 0, last = -1; i < entries.num_kept; i++) {
            int index = index_at(&entries, i);
            good &= (index > last) & (index < held);
            last = index;
        }
    }
    if (num_kept % 2) good &= chunk.codes[-1] < 1 << 4;
    if (num_kept % 4) good &= chunk.codes[(num_kept - 1) / 4] < 1 << 2 * (num_kept % 4);
    return good;
}

/* For the elements first..first+count that a chunk has sent: x[at] <- BODY, where `value` is the element first + at. */
#define FOR_SENT(CHUNK, FIRST, COUNT, BODY)                                                       \
    for (int64_t block = (FIRST) / TOP_BLOCK; block * TOP_BLOCK < (FIRST) + (COUNT); block++) {   \
        struct entries entries = entries_of(CHUNK, block);                                        \
        for (int i = 0; i < entries.num_kept; i++) {                                              \
            int64_t at = block * TOP_BLOCK + index_at(&entries, i) - (FIRST);                     \
            float value = value_at(&entries, i);                                                  \
            if (at >= 0 && at < (COUNT)) BODY;                                                    \
        }                                                                                         \
    }

/* out <- elements start..stop of a checked chunk of n elements. */
void diloco_decode_top(const uint8_t *data, int64_t n, int64_t start, int64_t stop, float *out) {
    struct chunk chunk = chunk_of(data, n);
    for (int64_t first = start; first < stop; first += TOP_BLOCK, out += TOP_BLOCK) {
        int64_t count = stop - first < TOP_BLOCK ? stop - first : TOP_BLOCK;
        memset(out, 0, 4 * (size_t)count);
        FOR_SENT(&chunk, first, count, out[at] = value)
    }
}

/* out <- out + weight * elements start..stop. */
void diloco_accumulate_top(const uint8_t *data, int64_t n, int64_t start, int64_t stop, float weight, float *out) {
    struct chunk chunk = chunk_of(data, n);
    FOR_SENT(&chunk, start, stop - start, out[at] = fmaf(weight, value, out[at]))
}

/* The sum of squares of elements start..stop. */
double diloco_sum_squares_top(const uint8_t *data, int64_t n, int64_t start, int64_t stop) {
    struct chunk chunk = chunk_of(data, n);
    double sum = 0;
    FOR_SENT(&chunk, start, stop - start, sum += (double)value * value)
    return sum;
}

/* ------------------------------------------------------------------ merging */

/* x <- the weighted sum of elements first..first+count, counted from each source's start. */
static void sum_top(const struct chunk_source *sources, int num_sources, int64_t first, int count, float *x) {
    for (int i = 0; i < TOP_BLOCK; i++) x[i] = 0;
    for (const struct chunk_source *source = sources; source < sources + num_sources; source++) {
        struct chunk chunk = chunk_of(source->data, source->n);
        FOR_SENT(&chunk, source->start + first, count, x[at] = fmaf(source->weight, value, x[at]))
    }
}

/* out (may be null) <- the weighted sum of n elements; returns its sum of squares. */
double diloco_sum_top(const struct chunk_source *sources, int num_sources, int64_t n, float *out) {
    double squares = 0;
    float x[TOP_BLOCK];
    for (int64_t at = 0; at < n; at += TOP_BLOCK) {
        int count = n - at < TOP_BLOCK ? (int)(n - at) : TOP_BLOCK;
        sum_top(sources, num_sources, at, count, x);
        for (int i = 0; i < TOP_BLOCK; i += BLOCK) squares += sum_squares_of(x + i);
        if (out) memcpy(out + at, x, 4 * (size_t)count);
    }
    return squares;
}

/* As diloco_sum_nesterov. */
void diloco_sum_nesterov_top(const struct chunk_source *sources, int num_sources, int64_t n, float momentum, float lr,
                             bfloat16_t *velocity, float *theta) {
    float g[TOP_BLOCK];
    for (int64_t at = 0; at < n; at += TOP_BLOCK) {
        int count = n - at < TOP_BLOCK ? (int)(n - at) : TOP_BLOCK;
        sum_top(sources, num_sources, at, count, g);
        nesterov(g, count, momentum, lr, velocity + at, theta + at);
    }
}
