/* An inner step of the built-in GPT (diloco_demo.gpt): forward, backward, clip, then Muon or AdamW, in float32.

   For models so small that calling torch costs more than the arithmetic. A row is one model with the state of its
   optimizer, as in stacked.py, which has the same mathematics in torch. Sums are rounded in another order: a test holds
   the losses of both to 1e-5, and parameters to 1e-3 and 2e-5. All matrices are row-major.

   Shapes: N tokens (of at most CHUNK sequences of T), W width, H hidden width, D = W / heads, V = 256. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

enum { V = 256, CHUNK = 4, NEWTON_SCHULZ_STEPS = 5 };
#define NORM_EPS 1.1920929e-7f
#define ADAMW_EPS 1e-8f
#define RMS_OF_ADAMW 0.2f

struct model {
    int layers, width, hidden, heads, context, is_muon;
    const float *cos, *sin; /* [context, D / 2] */
};

struct rates { /* as RATES of native.py */
    float lr, muon_lr, muon_momentum, beta1, beta2, decay, clip, share, steps;
};

/* ------------------------------------------------------------ elements */

/* To 3e-7 of the value (polynomial of Cephes), and so that a compiler can vectorise it. */
static inline float exp_of(float x) {
    x = x > 88 ? 88 : x < -87 ? -87 : x;
    float whole = __builtin_rintf(x * 1.44269504f), part = x - whole * 0.693147181f;
    float sum = 1.9875691500e-4f;
    sum = sum * part + 1.3981999507e-3f;
    sum = sum * part + 8.3334519073e-3f;
    sum = sum * part + 4.1665795894e-2f;
    sum = sum * part + 1.6666665459e-1f;
    sum = sum * part + 5.0000001201e-1f;
    sum = sum * part * part + part + 1;
    union { int32_t bits; float value; } scale = {((int32_t)whole + 127) << 23};
    return sum * scale.value;
}

/* Softmax of x [n] in place; returns the logarithm of the sum of exponentials. */
static float softmax(int n, float *x) {
    float highest[WIDE], most = x[0], sum = 0;
    int whole = n / WIDE * WIDE;
    for (int j = 0; j < WIDE; j++) highest[j] = most;
    for (int i = 0; i < whole; i += WIDE)
        for (int j = 0; j < WIDE; j++) highest[j] = x[i + j] > highest[j] ? x[i + j] : highest[j];
    for (int j = 0; j < WIDE; j++) most = highest[j] > most ? highest[j] : most;
    for (int i = whole; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int i = 0; i < n; i++) sum += x[i] = exp_of(x[i] - most);
    for (int i = 0; i < n; i++) x[i] /= sum;
    return most + logf(sum);
}

/* y <- x over its root mean square, row by row [n, width]; `inverse` [n] is kept for the way back. */
static void norm(int n, int width, const float *x, float *y, float *inverse) {
    for (int i = 0; i < n; i++, x += width, y += width) {
        float sum = 0;
        for (int j = 0; j < width; j++) sum += x[j] * x[j];
        inverse[i] = 1 / sqrtf(sum / width + NORM_EPS);
        for (int j = 0; j < width; j++) y[j] = x[j] * inverse[i];
    }
}

/* dx += the gradient of norm, whose output was y. */
static void norm_back(int n, int width, const float *y, const float *inverse, const float *dy, float *dx) {
    for (int i = 0; i < n; i++, y += width, dy += width, dx += width) {
        float sum = 0;
        for (int j = 0; j < width; j++) sum += dy[j] * y[j];
        for (int j = 0; j < width; j++) dx[j] += inverse[i] * (dy[j] - y[j] * (sum / width));
    }
}

/* Query and key of qkv [n, 3 W] by the angle of their position, or back by it. */
static void rotate(const struct model *of, int n, float *qkv, float way) {
    int half = of->width / of->heads / 2;
    for (int i = 0; i < n; i++, qkv += 3 * of->width) {
        const float *c = of->cos + i % of->context * half, *s = of->sin + i % of->context * half;
        for (int head = 0; head < 2 * of->heads; head++)
            for (int j = 0; j < half; j++) {
                float *pair = qkv + (head * half + j) * 2, a = pair[0], b = pair[1];
                pair[0] = a * c[j] - way * b * s[j];
                pair[1] = way * a * s[j] + b * c[j];
            }
    }
}

/* ------------------------------------------------------------ the model */

struct layer {
    const float *qkv, *out, *gate_up, *down; /* [3 W, W], [W, W], [2 H, W], [W, H] */
    float *normed, *inverse, *q_k_v, *weights, *mixed, *normed2, *inverse2, *gates, *active; /* of the way there */
};

/* Values that lie behind each other, and where they are in theta or in its gradient. */
struct places {
    int64_t layers, qkv, out, gate_up, down, each, head, all;
};

static struct places places_of(const struct model *of) {
    int64_t w = of->width, h = of->hidden, each = 4 * w * w + 3 * w * h;
    struct places at = {V * w, 0, 3 * w * w, 4 * w * w, 4 * w * w + 2 * w * h, each, V * w + of->layers * each, 0};
    at.all = at.head + V * w;
    return at;
}

struct scratch {
    struct layer *layers;
    float *x, *normed, *inverse, *logits, *dx, *dnormed, *dmixed, *dqkv, *dgates, *dactive, *turned, *square, *square2;
    float *gradient, *memory;
};

static int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Memory that is handed out piece by piece, in floats; without any, it counts how much would be. */
struct store {
    float *memory;
    int64_t used;
};

static float *take(struct store *store, int64_t n) {
    float *taken = store->memory ? store->memory + store->used : 0;
    store->used += (n + 15) / 16 * 16;
    return taken;
}

/* What so many sequences at once need. */
static void lay_out(const struct model *of, int64_t sequences, struct scratch *s, struct store *store) {
    int64_t n = sequences * of->context, w = of->width, h = of->hidden, t = of->context, matrix = w * h;
    for (int i = 0; i < of->layers; i++) {
        struct layer *l = &s->layers[i];
        l->normed = take(store, n * w), l->normed2 = take(store, n * w), l->mixed = take(store, n * w);
        l->q_k_v = take(store, n * 3 * w), l->gates = take(store, n * 2 * h), l->active = take(store, n * h);
        l->inverse = take(store, n), l->inverse2 = take(store, n);
        l->weights = take(store, sequences * of->heads * t * t);
    }
    s->x = take(store, n * w), s->normed = take(store, n * w), s->inverse = take(store, n);
    s->logits = take(store, n * V), s->dx = take(store, n * w), s->dactive = take(store, n * h);
    s->dnormed = s->dmixed = take(store, n * w); /* never needed at once */
    s->dqkv = take(store, most_of(n * 3 * w, matrix)), s->dgates = take(store, most_of(n * 2 * h, matrix));
    s->turned = take(store, most_of(w * most_of(most_of(3 * w, 2 * h), V), t * w));
    s->square = take(store, most_of(w * w, t * t)), s->square2 = take(store, w * w);
    s->gradient = take(store, places_of(of).all);
}

/* Null memory or layers if there is no room. */
static struct scratch scratch_of(const struct model *of, int64_t sequences) {
    struct scratch s = {.layers = malloc(sizeof(struct layer) * (size_t)of->layers)};
    struct store store = {0};
    if (!s.layers) return s;
    lay_out(of, sequences, &s, &store);
    s.memory = aligned_alloc(64, sizeof(float) * (size_t)store.used);
    store = (struct store){s.memory, 0};
    if (s.memory) lay_out(of, sequences, &s, &store);
    return s;
}

/* y [n, outs] (+)= x w^T, with w [outs, ins] as a Linear has it. */
static void linear(int n, int ins, int outs, const float *x, const float *w, float *y, int add, float *turned) {
    transpose(outs, ins, w, ins, turned);
    multiply(n, outs, ins, x, ins, 1, turned, outs, y, outs, add);
}

/* dx [n, ins] <- dy w, and dw += dy^T x. */
static void linear_back(
    int n, int ins, int outs, const float *x, const float *w, const float *dy, float *dx, float *dw) {
    multiply(outs, ins, n, dy, 1, outs, x, ins, dw, ins, 1);
    multiply(n, ins, outs, dy, outs, 1, w, ins, dx, ins, 0);
}

/* mixed [n, W] <- causal attention over q_k_v; its weights are kept. */
static void attend(const struct model *of, int sequences, struct layer *l, float *turned) {
    int t = of->context, w = of->width, d = w / of->heads;
    float scale = 1 / sqrtf((float)d);
    for (int64_t block = 0; block < sequences * of->heads; block++) {
        int64_t sequence = block / of->heads, head = block % of->heads;
        const float *q = l->q_k_v + sequence * t * 3 * w + head * d, *k = q + w, *v = q + 2 * w;
        float *weights = l->weights + block * t * t;
        transpose(t, d, k, 3 * w, turned);
        multiply(t, t, d, q, 3 * w, 1, turned, t, weights, t, 0);
        for (int i = 0; i < t; i++) {
            for (int j = 0; j <= i; j++) weights[i * t + j] *= scale;
            softmax(i + 1, weights + i * t);
            for (int j = i + 1; j < t; j++) weights[i * t + j] = 0;
        }
        multiply(t, d, t, weights, t, 1, v, 3 * w, l->mixed + sequence * t * w + head * d, w, 0);
    }
}

static void attend_back(const struct model *of, int sequences, struct layer *l, struct scratch *s) {
    int t = of->context, w = of->width, d = w / of->heads;
    float scale = 1 / sqrtf((float)d), *dweights = s->square;
    for (int64_t block = 0; block < sequences * of->heads; block++) {
        int64_t sequence = block / of->heads, head = block % of->heads, at = sequence * t * 3 * w + head * d;
        const float *q = l->q_k_v + at, *k = q + w, *v = q + 2 * w, *weights = l->weights + block * t * t;
        const float *dmixed = s->dmixed + sequence * t * w + head * d;
        float *dq = s->dqkv + at, *dk = dq + w, *dv = dq + 2 * w;
        multiply(t, d, t, weights, 1, t, dmixed, w, dv, 3 * w, 0);
        transpose(t, d, v, 3 * w, s->turned);
        multiply(t, t, d, dmixed, w, 1, s->turned, t, dweights, t, 0);
        for (int i = 0; i < t; i++) {
            float sum = 0;
            for (int j = 0; j < t; j++) sum += dweights[i * t + j] * weights[i * t + j];
            for (int j = 0; j < t; j++) dweights[i * t + j] = weights[i * t + j] * (dweights[i * t + j] - sum) * scale;
        }
        multiply(t, d, t, dweights, t, 1, k, 3 * w, dq, 3 * w, 0);
        multiply(t, d, t, dweights, 1, t, q, 3 * w, dk, 3 * w, 0);
    }
}

/* The sum of the losses of some sequences; s->logits become the model's probabilities. */
static double forward(
    const struct model *of, const float *theta, int sequences, const int64_t *inputs, const int64_t *targets,
    struct scratch *s) {
    struct places at = places_of(of);
    int n = sequences * of->context, w = of->width, h = of->hidden;
    for (int i = 0; i < n; i++) memcpy(s->x + i * w, theta + inputs[i] * w, sizeof(float) * (size_t)w);
    for (int i = 0; i < of->layers; i++) {
        struct layer *l = &s->layers[i];
        const float *values = theta + at.layers + i * at.each;
        l->qkv = values + at.qkv, l->out = values + at.out;
        l->gate_up = values + at.gate_up, l->down = values + at.down;
        norm(n, w, s->x, l->normed, l->inverse);
        linear(n, w, 3 * w, l->normed, l->qkv, l->q_k_v, 0, s->turned);
        rotate(of, n, l->q_k_v, 1);
        attend(of, sequences, l, s->turned);
        linear(n, w, w, l->mixed, l->out, s->x, 1, s->turned);
        norm(n, w, s->x, l->normed2, l->inverse2);
        linear(n, w, 2 * h, l->normed2, l->gate_up, l->gates, 0, s->turned);
        for (int j = 0; j < n; j++) {
            const float *gate = l->gates + j * 2 * h, *up = gate + h;
            for (int k = 0; k < h; k++) l->active[j * h + k] = gate[k] / (1 + exp_of(-gate[k])) * up[k];
        }
        linear(n, h, w, l->active, l->down, s->x, 1, s->turned);
    }
    norm(n, w, s->x, s->normed, s->inverse);
    linear(n, w, V, s->normed, theta + at.head, s->logits, 0, s->turned);
    double loss = 0;
    for (int i = 0; i < n; i++) {
        float *logits = s->logits + i * V, right = logits[targets[i]];
        loss += softmax(V, logits) - right;
    }
    return loss;
}

/* s->gradient += that of the sum of the losses over `tokens`, after forward. */
static void backward(
    const struct model *of, const float *theta, int sequences, const int64_t *inputs, const int64_t *targets,
    int64_t tokens, struct scratch *s) {
    struct places at = places_of(of);
    int n = sequences * of->context, w = of->width, h = of->hidden;
    float *g = s->gradient, per_token = 1 / (float)tokens;
    for (int i = 0; i < n; i++) s->logits[i * V + targets[i]] -= 1;
    for (int i = 0; i < n * V; i++) s->logits[i] *= per_token;
    memset(s->dx, 0, sizeof(float) * (size_t)(n * w));
    linear_back(n, w, V, s->normed, theta + at.head, s->logits, s->dnormed, g + at.head);
    norm_back(n, w, s->normed, s->inverse, s->dnormed, s->dx);
    for (int i = of->layers - 1; i >= 0; i--) {
        struct layer *l = &s->layers[i];
        float *into = g + at.layers + i * at.each;
        linear_back(n, h, w, l->active, l->down, s->dx, s->dactive, into + at.down);
        for (int j = 0; j < n; j++) {
            const float *gate = l->gates + j * 2 * h, *up = gate + h, *d = s->dactive + j * h;
            float *dgate = s->dgates + j * 2 * h, *dup = dgate + h;
            for (int k = 0; k < h; k++) {
                float open = 1 / (1 + exp_of(-gate[k]));
                dup[k] = d[k] * gate[k] * open;
                dgate[k] = d[k] * up[k] * open * (1 + gate[k] * (1 - open));
            }
        }
        linear_back(n, w, 2 * h, l->normed2, l->gate_up, s->dgates, s->dnormed, into + at.gate_up);
        norm_back(n, w, l->normed2, l->inverse2, s->dnormed, s->dx);
        linear_back(n, w, w, l->mixed, l->out, s->dx, s->dmixed, into + at.out);
        attend_back(of, sequences, l, s);
        rotate(of, n, s->dqkv, -1);
        linear_back(n, w, 3 * w, l->normed, l->qkv, s->dqkv, s->dnormed, into + at.qkv);
        norm_back(n, w, l->normed, l->inverse, s->dnormed, s->dx);
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < w; j++) g[inputs[i] * w + j] += s->dx[i * w + j];
}

/* ------------------------------------------------------------ the optimizer */

static void adamw(int64_t n, float *theta, float *m, float *v, const float *g, const struct rates *r) {
    float rate = r->lr * r->share / (1 - powf(r->beta1, r->steps)), root = sqrtf(1 - powf(r->beta2, r->steps));
    float kept = 1 - r->lr * r->decay * r->share;
    for (int64_t i = 0; i < n; i++) {
        m[i] += (1 - r->beta1) * (g[i] - m[i]);
        v[i] = r->beta2 * v[i] + (1 - r->beta2) * g[i] * g[i];
        theta[i] = kept * theta[i] - rate * m[i] / (sqrtf(v[i]) / root + ADAMW_EPS);
    }
}

/* x [rows, columns] <- about U V^T of it, as diloco_demo.muon.orthogonal; rows <= columns. */
static void orthogonal(int rows, int columns, float *x, struct scratch *s) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    float *gram = s->square, *two = s->square2, *next = s->turned, length = 0;
    for (int i = 0; i < rows * columns; i++) length += x[i] * x[i];
    length = sqrtf(length);
    length = length < 1e-7f ? 1e-7f : length;
    for (int i = 0; i < rows * columns; i++) x[i] /= length;
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        transpose(rows, columns, x, columns, next);
        multiply(rows, rows, columns, x, columns, 1, next, rows, gram, rows, 0);
        multiply(rows, rows, rows, gram, rows, 1, gram, rows, two, rows, 0);
        for (int i = 0; i < rows * rows; i++) two[i] = b * gram[i] + c * two[i];
        for (int i = 0; i < rows * columns; i++) next[i] = a * x[i];
        multiply(rows, columns, rows, two, rows, 1, x, columns, next, columns, 1);
        memcpy(x, next, sizeof(float) * (size_t)(rows * columns));
    }
}

/* One matrix [rows, columns]. Where it is tall, its transpose is made orthogonal. */
static void muon(
    int rows, int columns, float *theta, float *m, const float *g, const struct rates *r, struct scratch *s) {
    int is_tall = rows > columns, n = rows * columns, most = is_tall ? rows : columns;
    float rate = r->muon_lr * r->share, step = rate * RMS_OF_ADAMW * sqrtf((float)most), *x = s->dgates;
    for (int i = 0; i < n; i++) {
        m[i] += (1 - r->muon_momentum) * (g[i] - m[i]);
        x[i] = g[i] + r->muon_momentum * (m[i] - g[i]);
    }
    if (is_tall) {
        transpose(rows, columns, x, columns, s->dqkv);
        orthogonal(columns, rows, s->dqkv, s);
        transpose(columns, rows, s->dqkv, rows, x);
    } else {
        orthogonal(rows, columns, x, s);
    }
    for (int i = 0; i < n; i++) theta[i] = theta[i] * (1 - rate * r->decay) - step * x[i];
}

static void update(const struct model *of, float *theta, float *m, float *v, const struct rates *r, struct scratch *s) {
    struct places at = places_of(of);
    int w = of->width, h = of->hidden;
    float *g = s->gradient;
    double squares = 0;
    for (int64_t i = 0; i < at.all; i++) squares += (double)g[i] * g[i];
    float cut = r->clip / ((float)sqrt(squares) + 1e-6f);
    if (!(cut > 1))
        for (int64_t i = 0; i < at.all; i++) g[i] *= cut;
    if (!of->is_muon) {
        adamw(at.all, theta, m, v, g, r);
        return;
    }
    adamw(at.layers, theta, m, v, g, r);
    adamw(at.all - at.head, theta + at.head, m + at.head, v + at.head, g + at.head, r);
    for (int i = 0; i < of->layers; i++) {
        const struct { int64_t begin; int rows, columns; } matrices[] = {
            {at.qkv, w, w}, {at.qkv + w * w, w, w}, {at.qkv + 2 * w * w, w, w}, {at.out, w, w},
            {at.gate_up, h, w}, {at.gate_up + h * w, h, w}, {at.down, w, h},
        };
        for (size_t k = 0; k < sizeof matrices / sizeof *matrices; k++) {
            int64_t begin = at.layers + i * at.each + matrices[k].begin;
            muon(matrices[k].rows, matrices[k].columns, theta + begin, m + begin, g + begin, r, s);
        }
    }
}

/* ------------------------------------------------------------ what Python calls */

/* P: the length of a row. */
int64_t lab_parameters(const struct model *of) { return places_of(of).all; }

/* Of each of `count` rows: its loss on [batch, T] tokens, and, where there are rates, a step in place. `rows` are
   indices into theta, momentum and second [., P]. Returns 0, or 1 if there was no memory. */
int lab_inner_steps(
    const struct model *of, int64_t count, const int64_t *rows, int64_t batch, const int64_t *inputs,
    const int64_t *targets, float *theta, float *momentum, float *second, const struct rates *rates, float *losses) {
    struct places at = places_of(of);
    struct scratch s = scratch_of(of, batch < CHUNK ? batch : CHUNK);
    int64_t tokens = batch * of->context;
    for (int64_t i = 0; s.memory && s.layers && i < count; i++, inputs += tokens, targets += tokens) {
        float *values = theta + rows[i] * at.all;
        double loss = 0;
        memset(s.gradient, 0, sizeof(float) * (size_t)at.all);
        for (int64_t begin = 0; begin < batch; begin += CHUNK) {
            int sequences = (int)(batch - begin < CHUNK ? batch - begin : CHUNK);
            const int64_t *in = inputs + begin * of->context, *out = targets + begin * of->context;
            loss += forward(of, values, sequences, in, out, &s);
            if (rates) backward(of, values, sequences, in, out, tokens, &s);
        }
        losses[i] = (float)(loss / (double)tokens);
        if (rates) update(of, values, momentum + rows[i] * at.all, second + rows[i] * at.all, &rates[i], &s);
    }
    int failed = !s.memory || !s.layers;
    free(s.memory);
    free(s.layers);
    return failed;
}
