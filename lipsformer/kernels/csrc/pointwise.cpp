// GELU, residuals and CenterNorm, each in one pass over the map.
//
// Sums over rows are taken in parts that depend on the shape alone and added in order, so results
// do not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace {

constexpr int64_t ALONE = 1 << 15;  // floats up to which one thread is faster
constexpr int64_t BLOCK = 1 << 12;  // floats of a map that is taken as one long row
constexpr int64_t PART = 64;        // least rows of a part
constexpr int64_t PARTS = 64;

struct Whole {
    vec load(const float *p) const { return ::load(p); }
    void store(float *p, vec x) const { ::store(p, x); }
};

struct Rest {
    int64_t n;
    vec load(const float *p) const { return load_first(p, n); }
    void store(float *p, vec x) const { store_first(p, x, n); }
};

// step(i, lanes) for every vector of a row; lanes loads zeros behind the row's end.
template <class Step>
inline void each(int64_t n, Step step) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(i, Whole{});
    if (i < n) step(i, Rest{n - i});
}

inline vec gelu(vec z) {
    vec value, density;
    normal(z, value, density);
    return z * value;
}

// The parts into which rows are summed.
struct Parts {
    int64_t rows, count;
    explicit Parts(int64_t rows) : rows(rows), count(std::clamp<int64_t>(rows / PART, 1, PARTS)) {}
    int64_t begin(int64_t part) const { return rows * part / count; }
};

void add_parts(const float *parts, int64_t count, int64_t n, float *total) {
    for (int64_t part = 0; part < count; ++part)
        for (int64_t i = 0; i < n; ++i) total[i] += parts[part * n + i];
}

}  // namespace

extern "C" {

// activated = GELU(z), grad *= GELU'(z).
void gelu_gradient(const float *z, float *grad, float *activated, int64_t n, int64_t threads) {
    if (n < ALONE) threads = 1;
    parallel_for(threads, (n + BLOCK - 1) / BLOCK, [&](int64_t block) {
        const int64_t start = block * BLOCK;
        each(std::min(BLOCK, n - start), [=](int64_t i, auto lanes) {
            const vec x = lanes.load(z + start + i);
            vec value, density;
            normal(x, value, density);
            float *g = grad + start + i;
            lanes.store(activated + start + i, x * value);
            lanes.store(g, lanes.load(g) * (value + x * density));
        });
    });
}

// y = x + scale * GELU(z), where z has the samples of index alone if it is given. The scale is one
// row (stride 0) or one per sample of z.
void gelu_residual(const float *x, const float *z, const float *scale, int64_t scale_stride,
                   const int64_t *index, float *y, int64_t samples, int64_t kept, int64_t tokens,
                   int64_t channels, int64_t threads) {
    std::vector<int64_t> slots(samples, -1);  // where in z a sample is
    for (int64_t k = 0; k < kept; ++k) slots[index == nullptr ? k : index[k]] = k;
    if (samples * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, samples * tokens, [&](int64_t row) {
        const int64_t slot = slots[row / tokens];
        const float *from = x + row * channels;
        float *to = y + row * channels;
        if (slot < 0) {
            std::copy(from, from + channels, to);
            return;
        }
        const float *branch = z + (slot * tokens + row % tokens) * channels;
        const float *factor = scale + slot * scale_stride;
        each(channels, [=](int64_t i, auto lanes) {
            const vec added = lanes.load(factor + i) * gelu(lanes.load(branch + i));
            lanes.store(to + i, lanes.load(from + i) + added);
        });
    });
}

// grad_z = grad * scale * GELU'(z); grad_scale, of the scale's shape, sums grad * GELU(z).
void gelu_residual_gradients(const float *grad, const float *z, const float *scale,
                             int64_t scale_stride, const int64_t *index, float *grad_z,
                             float *grad_scale, int64_t kept, int64_t tokens, int64_t channels,
                             int64_t threads) {
    const Parts parts(tokens);
    std::vector<float> sums(kept * parts.count * channels);
    if (kept * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, kept * parts.count, [&](int64_t unit) {
        const int64_t k = unit / parts.count, part = unit % parts.count;
        const int64_t sample = index == nullptr ? k : index[k];
        const float *factor = scale + k * scale_stride;
        float *total = sums.data() + unit * channels;
        for (int64_t token = parts.begin(part); token < parts.begin(part + 1); ++token) {
            const float *from = grad + (sample * tokens + token) * channels;
            const float *branch = z + (k * tokens + token) * channels;
            float *to = grad_z + (k * tokens + token) * channels;
            each(channels, [=](int64_t i, auto lanes) {
                const vec g = lanes.load(from + i), x = lanes.load(branch + i);
                vec value, density;
                normal(x, value, density);
                lanes.store(to + i, g * lanes.load(factor + i) * (value + x * density));
                lanes.store(total + i, lanes.load(total + i) + g * (x * value));
            });
        }
    });
    std::fill(grad_scale, grad_scale + (scale_stride == 0 ? 1 : kept) * channels, 0.0f);
    for (int64_t k = 0; k < kept; ++k)
        add_parts(sums.data() + k * parts.count * channels, parts.count, channels,
                  grad_scale + k * scale_stride);
}

// y = gain * (x - mean(x)) + shift, where shift is one row (stride 0) or a map.
void center(const float *x, const float *gain, const float *shift, int64_t shift_stride, float *y,
            int64_t rows, int64_t channels, int64_t threads) {
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, rows, [&](int64_t row) {
        const float *from = x + row * channels, *add = shift + row * shift_stride;
        float *to = y + row * channels;
        vec total = {};
        each(channels, [&](int64_t i, auto lanes) { total += lanes.load(from + i); });
        const float mean = sum(total) / channels;
        each(channels, [=](int64_t i, auto lanes) {
            lanes.store(to + i, (lanes.load(from + i) - mean) * lanes.load(gain + i) +
                                    lanes.load(add + i));
        });
    });
}

// grad_x = c - mean(c) of c = gain * grad; the sums of grad * (y - bias) and of grad over the rows.
void center_gradients(const float *grad, const float *y, const float *gain, const float *bias,
                      float *grad_x, float *grad_offset, float *grad_bias, int64_t rows,
                      int64_t channels, int64_t threads) {
    const Parts parts(rows);
    std::vector<float> offsets(parts.count * channels), biases(parts.count * channels);
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, parts.count, [&](int64_t part) {
        float *offset_sum = offsets.data() + part * channels;
        float *bias_sum = biases.data() + part * channels;
        for (int64_t row = parts.begin(part); row < parts.begin(part + 1); ++row) {
            const float *from = grad + row * channels, *output = y + row * channels;
            float *to = grad_x + row * channels;
            vec total = {};
            each(channels, [&](int64_t i, auto lanes) {
                const vec g = lanes.load(from + i);
                total += g * lanes.load(gain + i);
                const vec offset = lanes.load(output + i) - lanes.load(bias + i);
                lanes.store(offset_sum + i, lanes.load(offset_sum + i) + g * offset);
                lanes.store(bias_sum + i, lanes.load(bias_sum + i) + g);
            });
            const float mean = sum(total) / channels;
            each(channels, [=](int64_t i, auto lanes) {
                lanes.store(to + i, lanes.load(from + i) * lanes.load(gain + i) - mean);
            });
        }
    });
    std::fill(grad_offset, grad_offset + channels, 0.0f);
    std::fill(grad_bias, grad_bias + channels, 0.0f);
    add_parts(offsets.data(), parts.count, channels, grad_offset);
    add_parts(biases.data(), parts.count, channels, grad_bias);
}

// The sum of the rows.
void row_sum(const float *x, float *total, int64_t rows, int64_t channels, int64_t threads) {
    const Parts parts(rows);
    std::vector<float> sums(parts.count * channels);
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, parts.count, [&](int64_t part) {
        float *sum = sums.data() + part * channels;
        for (int64_t row = parts.begin(part); row < parts.begin(part + 1); ++row)
            each(channels, [=](int64_t i, auto lanes) {
                lanes.store(sum + i, lanes.load(sum + i) + lanes.load(x + row * channels + i));
            });
    });
    std::fill(total, total + channels, 0.0f);
    add_parts(sums.data(), parts.count, channels, total);
}

}  // extern "C"
