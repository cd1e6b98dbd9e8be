// What a linear layer needs besides products: GELU's gradient, sums of rows, and weights that are
// multiplied by a scale per row.
#include "rows.h"

namespace {

// activated = GELU(z), grad *= GELU'(z).
template <class Value>
void gelu_gradient(const Value *z, Value *grad, Value *activated, int64_t n, int64_t threads) {
    if (n < ALONE) threads = 1;
    parallel_for(threads, (n + BLOCK - 1) / BLOCK, [=](int64_t block) {
        const int64_t start = block * BLOCK;
        each(std::min(BLOCK, n - start), [=](int64_t i, auto lanes) {
            Value *g = grad + start + i;
            // Both are loaded before one is stored: maps often lie whole pages apart, and the
            // processor lets a load wait for a store to the same place of another page.
            const vec x = lanes.load(z + start + i), upstream = lanes.load(g);
            vec value, density;
            normal(x, value, density);
            lanes.store(activated + start + i, x * value);
            lanes.store(g, upstream * (value + x * density));
        });
    });
}

// The sum of the rows.
template <class Value>
void row_sum(const Value *x, float *total, int64_t rows, int64_t channels, int64_t threads) {
    const Parts parts(rows);
    std::vector<float> sums(parts.count * channels);
    float *const totals = sums.data();
    if (rows * channels < ALONE) threads = 1;
    parallel_for(threads, parts.count, [=](int64_t part) {
        float *sum = totals + part * channels;
        for (int64_t row = parts.begin(part); row < parts.begin(part + 1); ++row)
            each(channels, [=](int64_t i, auto lanes) {
                lanes.store(sum + i, lanes.load(sum + i) + lanes.load(x + row * channels + i));
            });
    });
    std::fill(total, total + channels, 0.0f);
    add_parts(sums.data(), parts.count, channels, total);
}

// scaled = scale * weight, row by row.
template <class Value>
void scale_weight(const float *weight, const float *scale, Value *scaled, int64_t rows,
                  int64_t columns, int64_t threads) {
    if (rows * columns < ALONE) threads = 1;
    parallel_for(threads, rows, [=](int64_t row) {
        const float *from = weight + row * columns, factor = scale[row];
        Value *to = scaled + row * columns;
        each(columns, [=](int64_t i, auto lanes) {
            lanes.store(to + i, lanes.load(from + i) * factor);
        });
    });
}

// From the gradient of the scaled weight: grad_weight = scale * grad; grad_scale sums grad * weight.
template <class Value>
void scale_weight_gradients(const Value *grad, const float *weight, const float *scale,
                            float *grad_weight, float *grad_scale, int64_t rows, int64_t columns,
                            int64_t threads) {
    if (rows * columns < ALONE) threads = 1;
    parallel_for(threads, rows, [=](int64_t row) {
        const float *unscaled = weight + row * columns, factor = scale[row];
        const Value *from = grad + row * columns;
        float *to = grad_weight + row * columns;
        vec total = {};
        each(columns, [&](int64_t i, auto lanes) {
            const vec g = lanes.load(from + i);
            total += g * lanes.load(unscaled + i);
            lanes.store(to + i, g * factor);
        });
        grad_scale[row] = sum(total);
    });
}

}  // namespace

EXPORT(gelu_gradient)
EXPORT(row_sum)
EXPORT(scale_weight)
EXPORT(scale_weight_gradients)
