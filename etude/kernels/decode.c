/* The operations between the matrix products of a decode step on a CPU, each in one pass over n rows.

   In eager torch a layer is forty calls for a few microseconds of work each. These are float32, computed row by row in a
   fixed order (so a row's bits do not depend on its neighbours), with threads over rows. Each has a plain torch version
   beside the Python function that calls it (fused.py, paged.py, draw.py), with which the tests compare it. Tensors are
   dense in their last dimension; strides are in floats. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SMALL 4096 /* multiplications below which threads cost more than they save */
#define FEW 8 /* sequences below which threads split heads too: there may be more threads than sequences */
#define BLOCK 64 /* probabilities summed in float32 before they are added to a sum in float64 */
#define MIN_LOG -80.0f /* a logarithm below which a probability is 0 */

/* e^x for x <= 0, to two units in the last place; unlike libm's, it vectorizes in a loop. */
static inline float exp_negative(float x)
{
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } two = { ((int32_t)n + 127) << 23 };
    return p * two.f;
}

static inline float dot(const float *a, const float *b, long dim)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < dim; i++)
        sum += a[i] * b[i];
    return sum;
}

void rms_norm(const float *x, const float *weight, float *out, long rows, long dim, float eps)
{
#pragma omp parallel for if (rows * dim > 16 * SMALL)
    for (long row = 0; row < rows; row++) {
        const float *in = x + row * dim;
        float scale = 1.0f / sqrtf(dot(in, in, dim) / dim + eps);
#pragma omp simd
        for (long i = 0; i < dim; i++)
            out[row * dim + i] = in[i] * scale * weight[i];
    }
}

/* x [rows, 2 * dim] -> silu(first half) * second half */
void swiglu(const float *x, float *out, long rows, long dim)
{
#pragma omp parallel for if (rows * dim > 4 * SMALL)
    for (long row = 0; row < rows; row++) {
        const float *gate = x + 2 * row * dim, *up = gate + dim;
#pragma omp simd
        for (long i = 0; i < dim; i++) {
            float e = exp_negative(-fabsf(gate[i]));
            out[row * dim + i] = gate[i] * up[i] * (gate[i] < 0 ? e : 1.0f) / (1.0f + e);
        }
    }
}

/* Rotate the halves of x [rows, heads, dim] by the angles of their row: cos and sin [rows, dim / 2]. */
void rotate(const float *x, long stride, const float *cos, const float *sin, float *out, long rows, long heads, long dim)
{
    long half = dim / 2;
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++) {
            const float *a = x + row * stride + head * dim, *b = a + half, *c = cos + row * half, *s = sin + row * half;
            float *to = out + (row * heads + head) * dim;
#pragma omp simd
            for (long i = 0; i < half; i++) {
                to[i] = a[i] * c[i] - b[i] * s[i];
                to[half + i] = b[i] * c[i] + a[i] * s[i];
            }
        }
}

/* Store new keys and values [n, heads * dim] in their slots; without values only keys. */
void store_pages(
    const float *k, long k_stride, const float *v, long v_stride, float *keys, float *values, const int64_t *slots,
    long n, long width)
{
    for (long i = 0; i < n; i++) {
        memcpy(keys + slots[i] * width, k + i * k_stride, width * sizeof(float));
        if (v)
            memcpy(values + slots[i] * width, v + i * v_stride, width * sizeof(float));
    }
}

/* Attend from the queries of a sequence to its first `tokens` tokens: `group` queries for each of `kv_heads` key heads.
   All heads of a page are computed while it is in the L1 cache: memory is read once, in order. `scores` has room for
   `longest` values per query. */
static inline void attend_heads(
    const float *q, const float *keys, const float *values, long stride, const int64_t *pages, long page, float *out,
    float *scores, long longest, long tokens, long kv_heads, long group, long dim, long value_dim, float scale)
{
    for (long start = 0; start < tokens; start += page) {
        const float *first = keys + pages[start / page] * page * stride;
        long count = start + page < tokens ? page : tokens - start;
        for (long query = 0; query < kv_heads * group; query++) {
            const float *one = q + query * dim, *key = first + query / group * dim;
            float *score = scores + query * longest + start;
            for (long t = 0; t < count; t++)
                score[t] = dot(one, key + t * stride, dim) * scale;
        }
    }
    for (long query = 0; query < kv_heads * group; query++) {
        float *score = scores + query * longest, most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
        for (long t = 0; t < tokens; t++)
            most = score[t] > most ? score[t] : most;
#pragma omp simd reduction(+ : sum)
        for (long t = 0; t < tokens; t++) {
            score[t] = exp_negative(score[t] - most);
            sum += score[t];
        }
        for (long t = 0; t < tokens; t++)
            score[t] /= sum;
    }
    memset(out, 0, kv_heads * group * value_dim * sizeof(float));
    for (long start = 0; start < tokens; start += page) {
        const float *first = values + pages[start / page] * page * stride;
        long count = start + page < tokens ? page : tokens - start;
        for (long query = 0; query < kv_heads * group; query++) {
            const float *weight = scores + query * longest + start, *value = first + query / group * dim;
            float *to = out + query * value_dim;
            for (long t = 0; t < count; t++) {
#pragma omp simd
                for (long i = 0; i < value_dim; i++)
                    to[i] += weight[t] * value[t * stride + i];
            }
        }
    }
}

/* Attend with one query per sequence over its pages. Slabs are [slots, kv heads, dim]; `stride` is from slot to slot;
   values may be the first part of the keys. `scratch` holds `longest` floats for every (sequence, head). Threads split
   sequences or, where there are few, their heads. */
void attend_pages(
    const float *q, const float *keys, const float *values, long stride, const int64_t *tables, long width,
    const int64_t *lengths, long page, float *out, float *scratch, long longest,
    long n, long heads, long kv_heads, long dim, long value_dim, float scale)
{
    long group = heads / kv_heads, together = n < FEW ? 1 : kv_heads, parts = kv_heads / together;
#pragma omp parallel for if (n * longest * heads * dim > 16 * SMALL) schedule(dynamic, 1)
    for (long part = 0; part < n * parts; part++) {
        long row = part / parts, head = part % parts * together, query = row * heads + head * group;
        const float *one = q + query * dim, *key = keys + head * dim, *value = values + head * dim;
        const int64_t *pages = tables + row * width;
        float *to = out + query * value_dim, *scores = scratch + query * longest;
        long tokens = lengths[row];
#define ATTEND(dim, value_dim) \
    attend_heads( \
        one, key, value, stride, pages, page, to, scores, longest, tokens, together, group, dim, value_dim, scale)
        if (dim == 32 && value_dim == 32) /* the common widths as constants: the loops unroll */
            ATTEND(32, 32);
        else if (dim == 64 && value_dim == 64)
            ATTEND(64, 64);
        else
            ATTEND(dim, value_dim);
#undef ATTEND
    }
}

/* The first index at which the cumulative sum of the probabilities passes `target`: blocks first, then inside one. */
static long search(const float *probabilities, long size, double target)
{
    double before = 0;
    long last = 0;
    for (long start = 0; start < size; start += BLOCK) {
        long end = start + BLOCK < size ? start + BLOCK : size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = start; i < end; i++)
            sum += probabilities[i];
        if (before + sum > target)
            for (long i = start; i < end; i++) {
                before += probabilities[i];
                if (before > target)
                    return i;
                last = probabilities[i] > 0 ? i : last;
            }
        else {
            before += sum;
            for (long i = end - 1; sum > 0 && i >= start; i--)
                if (probabilities[i] > 0) {
                    last = i;
                    break;
                }
        }
    }
    return last; /* the target rounded up to the total: the last token with any probability */
}

/* Sample a token from each row of logits by its uniform in [0, 1); at temperature 0 take the likeliest. `scratch` holds
   a float for every logit. Log-probabilities are given as sampled and under the model's own distribution. */
void draw(
    const float *logits, const float *temperatures, const double *uniforms, int64_t *tokens, float *logprobs,
    float *raws, float *scratch, long rows, long size)
{
#pragma omp parallel for if (rows * size > 4 * SMALL)
    for (long row = 0; row < rows; row++) {
        const float *in = logits + row * size;
        float *probabilities = scratch + row * size, most = -INFINITY;
        float temperature = temperatures[row], inverse = temperature > 0 ? 1 / temperature : 1;
        double total = 0, raw_total = 0; /* with and without the temperature */
        long best = 0;
#pragma omp simd reduction(max : most)
        for (long i = 0; i < size; i++)
            most = in[i] > most ? in[i] : most;
        while (best < size - 1 && in[best] != most)
            best++;
        for (long start = 0; start < size; start += BLOCK) {
            long end = start + BLOCK < size ? start + BLOCK : size;
            float sum = 0, part = 0;
#pragma omp simd reduction(+ : sum, part)
            for (long i = start; i < end; i++) {
                float less = in[i] - most, tempered = exp_negative(less * inverse);
                part += inverse == 1 ? tempered : exp_negative(less);
                sum += probabilities[i] = less * inverse < MIN_LOG ? 0 : tempered;
            }
            raw_total += part;
            total += sum;
        }
        long token = temperature > 0 ? search(probabilities, size, uniforms[row] * total) : best;
        tokens[row] = token;
        raws[row] = (float)(in[token] - most - log(raw_total));
        logprobs[row] = temperature > 0 ? (float)((double)(in[token] - most) * inverse - log(total)) : 0;
    }
}
